"""What the prefix tree's nodes hold, group by group: on the device or parked elsewhere, and used how recently."""

import dataclasses
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

from kv.pages import PageAllocator
from kv.radix import Node, flatten, places


class PageGroup(NamedTuple):
    """Layers that keep the same tokens: they share a pool of pages and a page table per row."""

    allocator: PageAllocator
    window: int | None = None  # tokens that a query sees, its own included; None: all

    def first_needed(self, num_pages: int, page_size: int) -> int:
        """Index of the first page that the query after `num_pages` whole pages sees; `num_pages` if it sees none.

        With pages of 4 tokens and a window of 6, the query at position 12 sees 7..12: of pages 0, 1, 2 it needs 1 and 2.
        """
        return 0 if self.window is None else max(0, num_pages * page_size - self.window + 1) // page_size


@dataclasses.dataclass(frozen=True, eq=False)
class Parked:
    """A page whose content was moved off the device; `handle` is what `on_evict` gave for it."""

    handle: Any


class Residency:
    """The slots of all nodes below `root`: every change of what is held goes through here.

    Laws:
      1. The tree has one reference to each page id in a slot, and a page id stands in one slot of its group.
      2. A group without window holds something of every page of every node (a page that it drops takes all that follows it along), and
         what it holds on the device is preceded by pages on the device.
      3. `resident[g]` and `parked[g]` have what group g holds, least recently used first, and where: (node, index of the page). In a
         group without window each page comes before those that precede it in its sequence, so that the last page goes first.
      4. A node without children and pins ends with a page that some group holds.
    """

    def __init__(self, groups: Sequence[PageGroup], page_size: int, page_bytes: int):
        self.groups = tuple(groups)
        self.root = Node(None, None, b"", 0, [[] for _ in groups])
        self.resident: list[OrderedDict[int, tuple[Node, int]]] = [OrderedDict() for _ in groups]
        self.parked: list[OrderedDict[Parked, tuple[Node, int]]] = [OrderedDict() for _ in groups]
        self._page_size = page_size
        self._page_bytes = page_bytes

    def use(self, path: list[Node], num_pages: int) -> None:
        """Makes what a match of a path's first `num_pages` pages needs the most recent, the first page most of all."""
        for number, group in enumerate(self.groups):
            first = group.first_needed(num_pages, self._page_size)
            resident, parked = self.resident[number], self.parked[number]
            for slot in reversed(flatten(path, number, num_pages)[first:]):
                if type(slot) is int:
                    resident.move_to_end(slot)
                elif slot is not None:
                    parked.move_to_end(slot)

    def checked(self, number: int, pages: Sequence[int | None], held: Sequence[Any]) -> list[int | None]:
        """A group's pages, to be stored where it holds `held`. ValueError: a page that is free or stands in another slot."""
        pages = [None if page is None else int(page) for page in pages]
        resident, allocator = self.resident[number], self.groups[number].allocator
        seen = set()
        for index, page in enumerate(pages):
            if page is None:
                continue
            if not allocator.count(page):
                raise ValueError(f"page {page} of group {number} has 0 references: store it while its row holds it")
            known = page in resident and (index >= len(held) or held[index] != page)
            if known or page in seen:
                raise ValueError(f"page {page} of group {number} would stand for 2 prefixes: a page is stored once")
            seen.add(page)
        return pages

    def fill(self, path: list[Node], pages: Sequence[Sequence[Any]]) -> int:
        """Stores the page ids of each group along a path, with a reference to each, where no other is on the device; how many."""
        stored = 0
        for node, index in places(path, len(pages[0])):
            for number, slots in enumerate(node.slots):
                page, old = pages[number][index], slots[index - node.start]
                if type(page) is not int or type(old) is int:
                    continue
                if old is not None:
                    del self.parked[number][old]
                self.groups[number].allocator.share(page)
                slots[index - node.start] = page
                self.resident[number][page] = node, index
                stored += 1
        return stored

    def cut_at(self, path: list[Node], num_pages: int) -> Node:
        """The node of a path, or the root, that ends after `num_pages` pages, split off if it has to be."""
        node = next((node for node in path if node.end >= num_pages), self.root) if num_pages else self.root
        if node.end == num_pages:
            return node
        upper = node.split(num_pages - node.start, self._page_bytes)
        for number, slots in enumerate(upper.slots):
            for index, slot in enumerate(slots, upper.start):
                if type(slot) is int:
                    self.resident[number][slot] = upper, index
                elif slot is not None:
                    self.parked[number][slot] = upper, index
        return upper

    def give_up(self, number: int, pages: list[int], handles: Sequence[Any | None]) -> int:
        """Releases pages on the device, each parked or (handle None) dropped; how many are free now.

        In a group without window, each page comes before those that precede it in its sequence, so nodes before those above them.
        """
        freed, nodes = 0, {}
        for page, handle in zip(pages, handles, strict=True):
            node, index = self.resident[number].pop(page)
            parked = None if handle is None else Parked(handle)
            if parked is not None:
                self.parked[number][parked] = node, index
            node.slots[number][index - node.start] = parked
            freed += self.groups[number].allocator.release(page)
            nodes[node] = None
        for node in nodes:
            self._close(number, node)
        return freed

    def discard(self, number: int, parked: Parked) -> None:
        """Drops a parked page."""
        node, index = self.parked[number].pop(parked)
        node.slots[number][index - node.start] = None
        self._close(number, node)

    def drop(self, node: Node, keep: int = 0) -> None:
        """Drops all that any group holds after the first `keep` pages of a node, the nodes below it, and the node if keep is 0.

        Its parent must hold a page at its end, as all nodes do with a group without window, or be the root.
        """
        for below in node.below():
            self._forget(below, 0)
            below.detach()
        self._forget(node, keep)
        if keep:
            node.shorten(keep, self._page_bytes)
        else:
            node.detach()

    def trim(self, node: Node) -> None:
        """Removes the end of a node, and the nodes above, as far as nothing is held, below or pinned there."""
        while node.parent is not None and not node.children and not node.pins:
            held = node.num_held()
            if held:
                node.shorten(held, self._page_bytes)
                return
            parent = node.parent
            node.detach()
            node = parent

    def _close(self, number: int, node: Node) -> None:
        """Restores laws 2 and 4 after pages of a node were dropped."""
        slots = node.slots[number]
        if self.groups[number].window is None and None in slots:
            self.drop(node, slots.index(None))
        else:
            self.trim(node)

    def _forget(self, node: Node, keep: int) -> None:
        for number, slots in enumerate(node.slots):
            for slot in slots[keep:]:
                if type(slot) is int:
                    del self.resident[number][slot]
                    self.groups[number].allocator.release(slot)
                elif slot is not None:
                    del self.parked[number][slot]
