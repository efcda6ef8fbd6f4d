"""The host's side of a paged cache: which pages each row holds, and which prompts' pages later prompts can begin with."""

import dataclasses
from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from kv.account import page_bytes
from kv.cache import Cache, HasCacheLayers, default_pages, page_groups
from kv.format import Format
from kv.host_store import Handle, HostStore
from kv.offload import HostPages, copy_pages, read_pages, write_pages
from kv.pages import OutOfPages, PageAllocator
from kv.prefix import Counters, Match, PrefixTree
from kv.residency import PageGroup
from runtime import UserError


@dataclasses.dataclass(frozen=True)
class PoolUse:
    """Pages of one group's pool."""

    window: int | None
    total: int
    used: int  # held by a row or by the tree
    shared: int  # of these, held more than once
    cached: int  # of these, held by the tree


@dataclasses.dataclass(eq=False)
class Move:
    """A cached page on its way to host memory, or there: `handle` is set once `apply` has moved it."""

    page: int
    handle: Handle | None = None


class Pager:
    """Page tables of `batch` rows over one pool per page group, with a prefix tree over the same pages.

    A row may write to a page that nobody else holds. `reserve` makes that true for a range of positions: it takes pages, copies those that
    are shared (copy-on-write), and evicts cached prefixes where pages run out: to host memory, if there is a store with room. What it
    decided reaches the device with `apply`.

    Attributes:
      tree: the prefix tree; give rows their tokens' pages back to it with `commit`.
      page_size: C.
      changed: whether a table changed since the last `apply`.
    """

    def __init__(
        self,
        config: HasCacheLayers,
        batch: int,
        capacity: int,
        format: Format,
        pages: Sequence[int] | None = None,
        host: HostStore | None = None,
        part: int = 0,
    ):
        """Args: as of `kv.init`, whose cache this is for; `format.page_size` must be set. `host` keeps what the tree gives up; None drops
        it. `part`: of a cache that is split over a mesh, whose rows and pages these are (see `SplitPager`); here they count from 0."""
        if format.page_size is None:
            raise ValueError("a format without page_size has no pages: give one, or use no pager")
        sizes = default_pages(config, batch, capacity, format) if pages is None else pages
        windows = page_groups(config, capacity, format)
        self.page_size, self._margin, self._capacity = format.page_size, format.margin, capacity
        self._part, self._batch = part, batch
        self.groups = tuple(PageGroup(PageAllocator(size), window) for size, window in zip(sizes, windows, strict=True))
        self.tree = PrefixTree(self.page_size, self.groups, None if host is None else self._park)
        self._host, self._page_bytes = host, [page_bytes(config, window, capacity, format) for window in windows]
        self._parking: list[list[Move]] = [[] for _ in self.groups]  # to be read before anything else is written
        self._restoring: list[dict[int, Move]] = [{} for _ in self.groups]  # page -> what it is to have
        width = -(-capacity // self.page_size)
        self._tables = [np.full((batch, width), group.allocator.num_pages, np.int32) for group in self.groups]
        self._copies: list[dict[int, int]] = [{} for _ in self.groups]  # page -> the one whose content it is to have
        self._lengths: dict[int, int] = {}  # of rows that start with a prefix
        self.changed = True

    def start(self, row: int, tokens: Sequence[int], namespace: Hashable = None) -> int:
        """Empties a row, and gives it the pages of the longest cached prefix of `tokens` that leaves at least one token to read.

        Returns:
          Tokens that the row holds then.
        """
        self.release(row)
        match = self.tree.match(namespace, tokens, limit=len(tokens) - 1)
        if any(match.parked) and not self._restore(match):
            self._give_back(match)
            return 0
        for table, pages, group in zip(self._tables, match.pages, self.groups, strict=True):
            table[row, : len(pages)] = [group.allocator.num_pages if page is None else page for page in pages]
        self.tree.release(match)  # the row's own references keep the pages
        self._lengths[row] = match.num_tokens
        self.changed = True
        return match.num_tokens

    def reserve(self, row: int, start: int, end: int) -> int:
        """Sees to it that the row may write positions start..end-1.

        Returns:
          The position that it may write up to: `end`, or less if the pools are used up.
        """
        end = min(end, self._capacity)
        for index in range(start // self.page_size, -(-end // self.page_size)):
            try:
                for number, group in enumerate(self.groups):
                    self._own(number, group.allocator, row, index)
            except OutOfPages:
                return max(start, index * self.page_size)
        return end

    def forget(self, row: int, length: int) -> None:
        """Gives back pages that no query of a row which holds `length` tokens, or up to the margin less, will see."""
        for number, group in enumerate(self.groups):
            if group.window is not None:
                first = max(0, length - self._margin - group.window + 1) // self.page_size
                self._drop(number, row, range(first))

    def keep(self, row: int, length: int) -> None:
        """Gives back pages past the first `length` tokens: the row was rewound."""
        first = -(-length // self.page_size)
        for number, table in enumerate(self._tables):
            self._drop(number, row, range(first, table.shape[1]))

    def release(self, row: int) -> None:
        """Gives back all pages of a row."""
        self.keep(row, 0)

    def fork(self, source: int, target: int, length: int) -> None:
        """Lets row `target` hold the first `length` tokens of row `source`, in the same pages until one of the two writes."""
        self.release(target)
        count = -(-length // self.page_size)
        for table, group in zip(self._tables, self.groups, strict=True):
            for page in table[source, :count].tolist():
                if page < group.allocator.num_pages:
                    group.allocator.share(page)
            table[target, :count] = table[source, :count]
        self._lengths[target] = length
        self.changed = True

    def commit(self, row: int, tokens: Sequence[int], namespace: Hashable = None) -> None:
        """Caches the whole pages of `tokens`, which the row holds, for prompts that begin alike."""
        count = len(tokens) // self.page_size
        rows = [
            [page if page < group.allocator.num_pages else None for page in table[row, :count].tolist()]
            for table, group in zip(self._tables, self.groups, strict=True)
        ]
        self.tree.insert(namespace, tokens[: count * self.page_size], rows)

    def apply(self, cache: Cache) -> Cache:
        """The cache (donated) with what was decided since the last time: pages moved and copied, tables and lengths set."""
        cache = self.move(cache)
        if self.changed:
            cache = cache.with_tables([self.table(number, 1) for number in range(len(self.groups))])
            self.changed = False
        return cache

    def table(self, number: int, parts: int) -> np.ndarray:
        """A group's page table int32 [batch, M], in numbers of the whole pool, of which this is one of `parts`."""
        table, pages = self._tables[number], self.groups[number].allocator.num_pages
        return np.where(table < pages, table + self._part * pages, parts * pages)

    def move(self, cache: Cache) -> Cache:
        """`apply`, but for the tables."""

        def whole(number: int, pages: Iterable[int]) -> list[int]:
            return [page + self._part * self.groups[number].allocator.num_pages for page in pages]

        for number, moves in enumerate(self._parking):
            if moves:
                contents = read_pages(cache, number, whole(number, [move.page for move in moves])).split()
                for move, content in zip(moves, contents, strict=True):
                    move.handle = self._host.put(content)
                moves.clear()
        for number, copies in enumerate(self._copies):
            if copies:
                cache = copy_pages(cache, number, whole(number, copies.values()), whole(number, copies))
                copies.clear()
        for number, moves in enumerate(self._restoring):
            if moves:
                contents = HostPages.join([self._host.get(move.handle) for move in moves.values()])
                cache = write_pages(cache, number, whole(number, moves), contents)
                moves.clear()
        if self._lengths:
            rows, lengths = (np.asarray(list(each), np.int32) for each in (self._lengths.keys(), self._lengths.values()))
            cache = cache.replace(lengths=cache.lengths.at[rows + self._part * self._batch].set(lengths))
            self._lengths.clear()
        return cache

    def counters(self) -> Counters:
        """What the prefix tree counted."""
        return self.tree.counters

    def pools(self) -> list[PoolUse]:
        """How full each pool is."""
        return [
            PoolUse(group.window, allocator.num_pages, allocator.num_used, allocator.num_shared, self.tree.num_resident(number))
            for number, group in enumerate(self.groups)
            for allocator in (group.allocator,)
        ]

    def _own(self, number: int, allocator: PageAllocator, row: int, index: int) -> None:
        """Makes entry `index` of the row's table a page that only this row holds. Raises OutOfPages."""
        table, none = self._tables[number], allocator.num_pages
        old = int(table[row, index])
        if old != none and allocator.writable(old):
            return
        page = self._take(number)
        if old != none:
            if old in self._restoring[number]:
                self._restoring[number][page] = self._restoring[number][old]
            else:
                self._copies[number][page] = self._copies[number].get(old, old)
            self._release(number, old)
        table[row, index] = page
        self.changed = True

    def _drop(self, number: int, row: int, indices: range) -> None:
        held, none = self._tables[number][row, indices.start : indices.stop], self.groups[number].allocator.num_pages
        for page in held[held != none].tolist():
            self._release(number, page)
            self.changed = True
        held[:] = none

    def _take(self, number: int) -> int:
        """A page of a group, which has one reference. Raises OutOfPages."""
        allocator = self.groups[number].allocator
        if not allocator.num_free:
            while self._host is not None and not self._fits(number) and self.tree.evict_parked(number, 1):
                pass  # what was parked longest makes room for what is parked now
            self.tree.evict(number, 1)
        return allocator.alloc(1)[0]

    def _release(self, number: int, page: int) -> None:
        if self.groups[number].allocator.release(page):
            self._copies[number].pop(page, None)
            self._restoring[number].pop(page, None)

    def _fits(self, number: int) -> bool:
        """Whether the host store has room for one more page of a group, besides those on their way."""
        coming = sum(len(moves) * size for moves, size in zip(self._parking, self._page_bytes, strict=True))
        return self._host.free_bytes - coming >= self._page_bytes[number]

    def _park(self, number: int, pages: list[int]) -> list[Move | None]:
        """What the tree keeps in place of pages that it gives up."""
        moves: list[Move | None] = []
        for page in pages:
            moves.append(Move(page) if self._fits(number) else None)
            self._parking[number] += moves[-1:] if moves[-1] is not None else []
        return moves

    def _restore(self, match: Match) -> bool:
        """Takes pages for what of a match is parked, if there are enough and the store still has it all."""
        wanted = [[parked.handle for parked in row] for row in match.parked]
        coming = {id(move) for moves in self._parking for move in moves}
        taken: list[list[int]] = [[] for _ in wanted]
        try:
            for number, moves in enumerate(wanted):
                for move in moves:
                    if id(move) not in coming and (move.handle is None or self._host.get(move.handle) is None):
                        raise OutOfPages(1, 0, self.groups[number].allocator.num_pages)  # lost: as good as a page that can't be had
                    taken[number].append(self._take(number))
        except OutOfPages:
            for number, pages in enumerate(taken):
                for page in pages:
                    self._release(number, page)
            return False
        self.tree.restore(match, taken)
        for number, moves in enumerate(wanted):
            self._restoring[number].update(zip(taken[number], moves, strict=True))
        return True

    def _give_back(self, match: Match) -> None:
        for number, pages in enumerate(match.pages):
            for page in pages:
                if isinstance(page, int):
                    self._release(number, page)
        self.tree.release(match)


def pool_sizes(config: HasCacheLayers, batch: int, capacity: int, format: Format, pages: int | None) -> tuple[int, ...]:
    """Pages of each group's pool, where the one of layers that see all shall have `pages` of them.

    Raises:
      UserError: that is below 1.
    """
    sizes, windows = default_pages(config, batch, capacity, format), page_groups(config, capacity, format)
    if pages is not None and pages < 1:
        raise UserError(f"a pool of {pages} pages is below 1: give at least 1")
    return tuple(size if pages is None or window is not None else pages for size, window in zip(sizes, windows, strict=True))
