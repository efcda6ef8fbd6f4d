"""The host's side of a paged cache: which pages each row holds, and which prompts' pages later prompts can begin with."""

import dataclasses
from collections.abc import Hashable, Sequence

import jax.numpy as jnp
import numpy as np

from kv.cache import Cache, HasCacheLayers, default_pages, page_groups
from kv.format import Format
from kv.offload import copy_pages
from kv.pages import OutOfPages, PageAllocator
from kv.prefix import PrefixTree
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


class Pager:
    """Page tables of `batch` rows over one pool per page group, with a prefix tree over the same pages.

    A row may write to a page that nobody else holds. `reserve` makes that true for a range of positions: it takes pages, copies those that
    are shared (copy-on-write), and evicts cached prefixes where pages run out. What it decided reaches the device with `apply`.

    Attributes:
      tree: the prefix tree; give rows their tokens' pages back to it with `commit`.
      page_size: C.
    """

    def __init__(self, config: HasCacheLayers, batch: int, capacity: int, format: Format, pages: Sequence[int] | None = None):
        """Args: as of `kv.init`, whose cache this is for; `format.page_size` must be set."""
        if format.page_size is None:
            raise ValueError("a format without page_size has no pages: give one, or use no pager")
        sizes = default_pages(config, batch, capacity, format) if pages is None else pages
        windows = page_groups(config, capacity, format)
        self.page_size, self._margin, self._capacity = format.page_size, format.margin, capacity
        self.groups = tuple(PageGroup(PageAllocator(size), window) for size, window in zip(sizes, windows, strict=True))
        self.tree = PrefixTree(self.page_size, self.groups)
        width = -(-capacity // self.page_size)
        self._tables = [np.full((batch, width), group.allocator.num_pages, np.int32) for group in self.groups]
        self._copies: list[dict[int, int]] = [{} for _ in self.groups]  # page -> the one whose content it is to have
        self._lengths: dict[int, int] = {}  # of rows that start with a prefix
        self._changed = True

    def start(self, row: int, tokens: Sequence[int], namespace: Hashable = None) -> int:
        """Empties a row, and gives it the pages of the longest cached prefix of `tokens` that leaves at least one token to read.

        Returns:
          Tokens that the row holds then.
        """
        self.release(row)
        match = self.tree.match(namespace, tokens, limit=len(tokens) - 1)
        if any(match.parked):
            raise ValueError("a prefix is parked off the device, and this pager has nothing to bring it back with")
        for table, pages, group in zip(self._tables, match.pages, self.groups, strict=True):
            table[row, : len(pages)] = [group.allocator.num_pages if page is None else page for page in pages]
        self.tree.release(match)  # the row's own references keep the pages
        self._lengths[row] = match.num_tokens
        self._changed = True
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
        self._changed = True

    def commit(self, row: int, tokens: Sequence[int], namespace: Hashable = None) -> None:
        """Caches the whole pages of `tokens`, which the row holds, for prompts that begin alike."""
        count = len(tokens) // self.page_size
        rows = [
            [page if page < group.allocator.num_pages else None for page in table[row, :count].tolist()]
            for table, group in zip(self._tables, self.groups, strict=True)
        ]
        self.tree.insert(namespace, tokens[: count * self.page_size], rows)

    def apply(self, cache: Cache) -> Cache:
        """The cache (donated) with what was decided since the last time: pages copied, tables and lengths set."""
        for number, copies in enumerate(self._copies):
            if copies:
                cache = copy_pages(cache, number, list(copies.values()), list(copies))
                copies.clear()
        if self._lengths:
            rows, lengths = (jnp.asarray(list(each), jnp.int32) for each in (self._lengths.keys(), self._lengths.values()))
            cache = cache.replace(lengths=cache.lengths.at[rows].set(lengths))
            self._lengths.clear()
        if self._changed:
            cache = cache.replace(tables=tuple(jnp.asarray(table.copy()) for table in self._tables))
            self._changed = False
        return cache

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
        if not allocator.num_free:
            self.tree.evict(number, 1)
            if old != none and allocator.writable(old):  # it was shared with the tree alone
                return
        (page,) = allocator.alloc(1)
        if old != none:
            self._copies[number][page] = self._copies[number].get(old, old)
            self._release(number, old)
        table[row, index] = page
        self._changed = True

    def _drop(self, number: int, row: int, indices: range) -> None:
        held, none = self._tables[number][row, indices.start : indices.stop], self.groups[number].allocator.num_pages
        for page in held[held != none].tolist():
            self._release(number, page)
            self._changed = True
        held[:] = none

    def _release(self, number: int, page: int) -> None:
        if self.groups[number].allocator.release(page):
            self._copies[number].pop(page, None)


def pool_sizes(config: HasCacheLayers, batch: int, capacity: int, format: Format, pages: int | None) -> tuple[int, ...]:
    """Pages of each group's pool, where the one of layers that see all shall have `pages` of them.

    Raises:
      UserError: that is below 1.
    """
    sizes, windows = default_pages(config, batch, capacity, format), page_groups(config, capacity, format)
    if pages is not None and pages < 1:
        raise UserError(f"a pool of {pages} pages is below 1: give at least 1")
    return tuple(size if pages is None or window is not None else pages for size, window in zip(sizes, windows, strict=True))
