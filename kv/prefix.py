"""The prefix tree: which pages hold the keys and values of which token sequences, for prompts that begin alike."""

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from kv.eviction import victims
from kv.radix import TOKEN, Node, Tokens, encode, flatten, walk
from kv.residency import PageGroup, Parked, Residency


@dataclasses.dataclass(eq=False)
class Match:
    """A prefix that was found; its path stays in the tree until `PrefixTree.release`.

    Attributes:
      num_pages: of the prefix.
      num_tokens: of the prefix; the next query's position.
      pages: [groups][num_pages] page ids; None where the group doesn't need the page, `Parked` where it must be brought back.
      node: where the prefix ends, the root if it is empty; None once released.
    """

    num_pages: int
    num_tokens: int
    pages: list[list[int | Parked | None]]
    node: Node | None = dataclasses.field(repr=False)

    @property
    def parked(self) -> list[list[Parked]]:
        """Of each group, what has to be brought back, in the order of the pages."""
        return [[page for page in pages if isinstance(page, Parked)] for pages in self.pages]


@dataclasses.dataclass
class Counters:
    """What happened since the tree was made, summed over namespaces and page groups."""

    lookups: int = 0
    hit_tokens: int = 0
    missed_tokens: int = 0  # of the prompts looked up, those not hit
    hit_pages: int = 0  # handed out, parked ones included
    inserted_pages: int = 0  # that `insert` took a reference to
    parked_pages: int = 0  # moved off the device
    restored_pages: int = 0  # moved back by `restore`
    evicted_pages: int = 0  # on the device, that `evict` gave up, parked ones included


class PrefixTree:
    """A radix tree over token ids at the granularity of pages, across page groups.

    A prefix of n pages is usable if every group can serve the query that follows it: a group without window holds pages 0..n-1, a group
    with window w holds every page that overlaps positions [n*C - w + 1, n*C). A row that starts from a match can't rewind below it.

    The tree holds one reference to each page that it stores, so that nobody may write to it. Token ids say all about a page's content:
    what else it depends on (the model, an adapter, an image behind placeholder ids) belongs into the namespace.

    Namespaces: a match finds only what was inserted under an equal namespace, and makes nothing of others more recent. Not hidden from
    other tenants: pools and the order of eviction are shared, so the load of one evicts prefixes of another; counters are sums; a hit is
    faster than a miss.

    Recency is an order of uses, without a clock: equal calls evict equally. A use (`match`, `insert`, `restore`) makes the pages that its
    prefix needs the most recent, the first page of all most so, as the last has to go first.

    Cost, for n pages looked up: one comparison of bytes; O(n) references and recency moves in a group without window, O(window) in one
    with; a few milliseconds for 100k tokens in pages of 16. Where gaps in several window groups shorten a match over and over, O(n *
    window) steps. Not thread-safe.
    """

    def __init__(
        self,
        page_size: int,
        groups: Sequence[PageGroup],
        on_evict: Callable[[int, list[int]], Sequence[Any | None]] | None = None,
    ):
        """An empty tree.

        Args:
          page_size: C, tokens per page, a power of two.
          groups: at least one.
          on_evict: called as (group, pages) before evicted pages are released, once per `evict`; gives for each a handle to its content
            elsewhere, or None to drop it. It must not call the tree; make room for handles with `evict_parked` before. What is behind a
            handle is to be freed when the object is collected: the tree and matches refer to it as long as it may be brought back.

        Raises:
          ValueError: a page size that is no power of two, no groups, or a window below 1.
        """
        if page_size < 1 or page_size & (page_size - 1):
            raise ValueError(f"page size {page_size} is no power of two: give 1, 2, 4, ...")
        if not groups:
            raise ValueError("0 page groups: give at least 1")
        for group in groups:
            if group.window is not None and group.window < 1:
                raise ValueError(f"window {group.window} is below 1: a query sees itself at least")
        self.page_size = page_size
        self.groups = tuple(groups)
        self.counters = Counters()
        self._on_evict = on_evict
        self._page_bytes = page_size * TOKEN.itemsize
        self._held = Residency(groups, page_size, self._page_bytes)

    def num_resident(self, group: int) -> int:
        """Pages of a group that the tree holds on the device."""
        return len(self._held.resident[group])

    def num_parked(self, group: int) -> int:
        """Pages of a group that the tree holds elsewhere."""
        return len(self._held.parked[group])

    def match(self, namespace: Hashable, tokens: Tokens, limit: int | None = None, grid: int = 1) -> Match:
        """The longest usable prefix. The caller gets a reference to every page id in it, to release like those that it allocated.

        Args:
          namespace: see the class.
          tokens: [T] ids.
          limit: tokens that the prefix may have at most; T - 1 leaves one to compute logits from.
          grid: the prefix is a multiple of so many pages.

        Raises:
          ValueError: tokens that are no int32s, a negative limit, a grid below 1.
        """
        data = encode(tokens)
        length = len(data) // TOKEN.itemsize
        limit = length if limit is None else min(limit, length)
        if limit < 0 or grid < 1:
            raise ValueError(f"limit {limit}, grid {grid}: give at least 0 tokens and 1 page")
        path, known = walk(self._held.root, namespace, data[: limit // self.page_size * self._page_bytes], self._page_bytes)
        held = [flatten(path, number, known) for number in range(len(self.groups))]
        count = self._longest(held, known, grid)
        node = self._held.cut_at(path, count)
        path, pages = node.path(), []
        for group, slots in zip(self.groups, held, strict=True):
            first = group.first_needed(count, self.page_size)
            pages.append([None] * first + slots[first:count])
            for page in pages[-1]:
                if type(page) is int:
                    group.allocator.share(page)
            self.counters.hit_pages += count - first
        for pinned in path:
            pinned.pins += 1
        self._held.use(path, count)
        self.counters.lookups += 1
        self.counters.hit_tokens += count * self.page_size
        self.counters.missed_tokens += length - count * self.page_size
        return Match(count, count * self.page_size, pages, node)

    def release(self, match: Match) -> None:
        """Lets the match's path be evicted again; the references to its pages stay the caller's, to release with its row.

        Release as soon as parked pages are back: a reference keeps a page, a pin also keeps pages of the path that nobody needs.

        Raises:
          ValueError: the match was released before.
        """
        node = _pinned(match)
        for pinned in node.path():
            pinned.pins -= 1
        match.node = None
        self._held.trim(node)

    def restore(self, match: Match, pages: Sequence[Sequence[int]]) -> None:
        """Says that the parked pages of a match are on the device again, and fills them into `match.pages`.

        The tree takes a reference of its own, except where another match or `insert` brought the page back meanwhile.

        Args:
          match: not released.
          pages: for each group, for each of `match.parked` in order, the page that has its content; the caller's reference is its row's.

        Raises:
          ValueError: a released match, a wrong number of pages, a page that is free or in the tree; nothing is changed then.
        """
        path, wanted = _pinned(match).path(), [len(parked) for parked in match.parked]
        given = [sum(page is not None for page in row) for row in pages]
        if given != wanted or given != [len(row) for row in pages]:
            raise ValueError(f"{given} pages for a match with {wanted} parked ones: give one for each")
        fresh = [iter(self._held.checked(number, row, ())) for number, row in enumerate(pages)]
        match.pages = [
            [next(new) if isinstance(page, Parked) else page for page in row] for row, new in zip(match.pages, fresh, strict=True)
        ]
        self.counters.restored_pages += self._held.fill(path, match.pages)
        self._held.use(path, match.num_pages)

    def insert(self, namespace: Hashable, tokens: Tokens, pages: Sequence[Sequence[int | None]]) -> int:
        """Stores the whole pages of a sequence. What the tree holds on the device already stays; gaps and parked pages are filled.

        Args:
          namespace: see the class.
          tokens: [T] ids.
          pages: [groups][T // C] page ids; None where a group with window has given the page back.

        Returns:
          How many pages the tree took a reference to; the rest are duplicates, which stay the caller's alone.

        Raises:
          ValueError: tokens that are no int32s, a wrong number of pages, None in a group without window, a page that is free or that
            the tree holds for another prefix; nothing is changed then.
        """
        data = encode(tokens)
        count = len(data) // self._page_bytes
        if [len(row) for row in pages] != [count] * len(self.groups):
            raise ValueError(f"{[len(row) for row in pages]} pages for {count} whole pages of tokens in each of {len(self.groups)} groups")
        for number, group in enumerate(self.groups):
            if group.window is None and any(page is None for page in pages[number]):
                raise ValueError(f"None among the pages of group {number}, which has no window: give every page")
        # What no group holds at the end can't be matched.
        count = max((index + 1 for row in pages for index, page in enumerate(row) if page is not None), default=0)
        data = data[: count * self._page_bytes]
        path, known = walk(self._held.root, namespace, data, self._page_bytes)
        rows = [self._held.checked(number, row, flatten(path, number, known)) for number, row in enumerate(pages)]
        if known < count:
            parent, rest = self._held.cut_at(path, known), data[known * self._page_bytes :]
            first = rest[: self._page_bytes]
            node = Node(parent, first if known else (namespace, first), rest, known, [[None] * (count - known) for _ in self.groups])
            node.attach()
            path = node.path()
        stored = self._held.fill(path, rows)
        self._held.use(path, count)
        self.counters.inserted_pages += stored
        return stored

    def evict(self, group: int, count: int) -> int:
        """Frees at least `count` pages of a group if that many can be freed, least recently used first; see `kv.eviction.victims`.

        Without window, the last pages of sequences go, and with a page that is dropped all that any group holds of it and after it, as
        nothing can match there any more. With window, a page goes wherever it stands. A pinned path keeps all its pages; a page that a
        row holds too stays, unless it has to go with one that is freed. O(count + pages passed over because they are held or pinned).

        Returns:
          How many pages of the group were freed.
        """
        held = self._held
        pages = victims(held.resident[group], self.groups[group].allocator, self.groups[group].window is None, count)
        if not pages:
            return 0
        handles = [None] * len(pages) if self._on_evict is None else self._on_evict(group, pages)
        if len(handles) != len(pages):
            raise ValueError(f"on_evict gave {len(handles)} handles for {len(pages)} pages: give one, or None, for each")
        before = [len(resident) for resident in held.resident]
        freed = held.give_up(group, pages, handles)
        self.counters.parked_pages += sum(handle is not None for handle in handles)
        self.counters.evicted_pages += sum(old - len(resident) for old, resident in zip(before, held.resident, strict=True))
        return freed

    def evict_parked(self, group: int, count: int) -> int:
        """Drops `count` parked pages of a group if there are that many on paths without pins, least recently used first.

        Returns:
          How many of the group were dropped.
        """
        loose = (page for page, (node, _) in self._held.parked[group].items() if not node.pins)
        pages = list(itertools.islice(loose, max(count, 0)))
        for page in pages:
            self._held.discard(group, page)
        return len(pages)

    def clear(self, namespace: Hashable) -> None:
        """Drops everything of a namespace: what changed (weights, an adapter) makes its pages useless.

        Raises:
          ValueError: a match of the namespace is not released yet; nothing is changed then.
        """
        nodes = [node for key, node in self._held.root.children.items() if key[0] == namespace]
        pins = sum(node.pins for node in nodes)
        if pins:
            raise ValueError(f"{pins} matches of namespace {namespace!r} are not released, 0 may be: release them first")
        for node in nodes:
            self._held.drop(node)

    def _longest(self, held: list[list[Any]], known: int, grid: int) -> int:
        """The longest prefix, of `known` pages at most, that every group can serve.

        A shorter prefix reaches further back: a page that a group lacks for one length is lacking for all shorter ones that include it, so
        the next candidate ends before it.
        """
        count: int | None = None
        gap: int | None = known
        while gap is not None:
            count = gap - gap % grid
            gap = next(
                (
                    index
                    for group, slots in zip(self.groups, held, strict=True)
                    if group.window is not None
                    for index in range(count - 1, group.first_needed(count, self.page_size) - 1, -1)
                    if slots[index] is None
                ),
                None,
            )
        return count


def _pinned(match: Match) -> Node:
    if match.node is None:
        raise ValueError(f"a match of {match.num_pages} pages was released already: it can be used and released once")
    return match.node
