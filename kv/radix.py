"""The nodes of a radix tree over token ids whose edges are cut at page boundaries only.

A node stands for the edge that leads to it. With pages of C = 2 tokens, after `1 2 3 4 5 6` and `1 2 3 4 7 8`:

    root -- [1 2 | 3 4] -+- [5 6]
                         +- [7 8]

Children are found by their first page, so two edges that leave a node differ within that page. Those that leave the root are
found by namespace and first page: one root serves all namespaces, and nothing remains of a namespace that holds nothing.
"""

import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import numpy as np

TOKEN = np.dtype(np.int32)
Tokens = Sequence[int] | np.ndarray


@dataclasses.dataclass(eq=False, repr=False, slots=True)
class Node:
    """A run of whole pages, and what each page group holds of them.

    Attributes:
      parent: None for the root and for a node that was taken out of the tree.
      key: where the parent's children have this node.
      tokens: the run's token ids, int32, as bytes.
      start: index of the run's first page, counted from the sequence's beginning.
      slots: [groups][pages of the run]; None where a group holds nothing.
      pins: how many matches end at this node or below.
    """

    parent: "Node | None"
    key: Any
    tokens: bytes
    start: int
    slots: list[list[Any]]
    pins: int = 0
    children: dict[Any, "Node"] = dataclasses.field(default_factory=dict)

    @property
    def num_pages(self) -> int:
        return len(self.slots[0])

    @property
    def end(self) -> int:
        """Index of the page after the run's last."""
        return self.start + len(self.slots[0])

    def path(self) -> list["Node"]:
        """From below the root to this node."""
        path, node = [], self
        while node.parent is not None:
            path.append(node)
            node = node.parent
        return path[::-1]

    def below(self) -> list["Node"]:
        """All nodes below this one, each before its parent."""
        found, at = list(self.children.values()), 0
        while at < len(found):
            found.extend(found[at].children.values())
            at += 1
        return found[::-1]

    def attach(self) -> None:
        self.parent.children[self.key] = self

    def detach(self) -> None:
        del self.parent.children[self.key]
        self.parent = None

    def split(self, pages: int, page_bytes: int) -> "Node":
        """Gives the run's first `pages` pages to a new parent, which is returned. This node stays the deeper part: who points at
        the end of the run still does."""
        cut = pages * page_bytes
        upper = Node(self.parent, self.key, self.tokens[:cut], self.start, [slots[:pages] for slots in self.slots], self.pins)
        upper.attach()
        self.parent, self.key = upper, self.tokens[cut : cut + page_bytes]
        self.tokens, self.start = self.tokens[cut:], self.start + pages
        self.slots = [slots[pages:] for slots in self.slots]
        self.attach()
        return upper

    def shorten(self, pages: int, page_bytes: int) -> None:
        """Keeps the run's first `pages` pages, at least 1."""
        self.tokens = self.tokens[: pages * page_bytes]
        for slots in self.slots:
            del slots[pages:]

    def num_held(self) -> int:
        """Pages of the run up to the last one that some group holds."""
        return next((count for count in range(self.num_pages, 0, -1) if any(slots[count - 1] is not None for slots in self.slots)), 0)


def encode(tokens: Tokens) -> bytes:
    """Token ids as the bytes that the tree compares. ValueError: no sequence of int32s; a wider id is not cut, it would match another."""
    array = np.asarray(tokens)
    if not array.size:
        array = array.astype(TOKEN)
    limits = np.iinfo(TOKEN)
    if array.ndim != 1 or array.dtype.kind not in "iu" or (array.size and not limits.min <= array.min() <= array.max() <= limits.max):
        raise ValueError(f"tokens of shape {array.shape} and type {array.dtype}: give a sequence of ids that are {TOKEN}")
    return array.astype(TOKEN).tobytes()


def walk(root: Node, namespace: Hashable, data: bytes, page_bytes: int) -> tuple[list[Node], int]:
    """Follows whole pages of token ids (int32, as bytes) down from the root.

    Returns:
      The nodes that were entered, and how many pages agree; the last node may agree in its first pages only.
    """
    path, node, at, key = [], root, 0, (namespace, data[:page_bytes])
    while at < len(data) and (node := node.children.get(key)) is not None:
        path.append(node)
        part = data[at : at + len(node.tokens)]
        if part != node.tokens:
            return path, (at + _common(part, node.tokens)) // page_bytes
        at += len(part)
        key = data[at : at + page_bytes]
    return path, at // page_bytes


def flatten(path: list[Node], group: int, pages: int) -> list[Any]:
    """What a group holds of the first `pages` pages of a path."""
    return [slot for node in path for slot in node.slots[group]][:pages]


def places(path: list[Node], pages: int) -> Iterator[tuple[Node, int]]:
    """The node and the index of each of the first `pages` pages of a path."""
    return ((node, index) for node in path for index in range(node.start, min(node.end, pages)))


def _common(a: bytes, b: bytes) -> int:
    """Bytes of the token ids in which a and b agree from the start."""
    size = min(len(a), len(b))
    differ = np.flatnonzero(np.frombuffer(a[:size], TOKEN) != np.frombuffer(b[:size], TOKEN))
    return int(differ[0]) * TOKEN.itemsize if differ.size else size
