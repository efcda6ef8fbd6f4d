"""Rows that write, share, park and give back pages, each step compared with `PrefixModel`.

A page holds, in place of keys and values, the prefix that those depend on: a page that ends up where it doesn't belong is seen.
"""

import dataclasses
import weakref
from typing import Any

from kv import OutOfPages, PageAllocator, PageGroup, PrefixTree
from kv.prefix import Match
from kv.residency import Parked
from tests.kv.prefix_model import PrefixModel


@dataclasses.dataclass(eq=False)
class Handle:
    """A page's content in host memory."""

    number: int  # negative
    content: Any


@dataclasses.dataclass(eq=False)
class Row:
    namespace: Any
    tokens: list[int]
    tables: list[list[int | None]]
    match: Match | None
    arriving: list[list[int]] | None  # pages for what is parked, until it is back


class Rows:
    """The tree, the model and the rows between them."""

    def __init__(self, page_size, windows, num_pages, parks):
        self.page_size, self.windows = page_size, windows
        self.pools = [PageAllocator(num_pages) for _ in windows]
        self.content = [[None] * num_pages for _ in windows]
        groups = [PageGroup(pool, window) for pool, window in zip(self.pools, windows, strict=True)]
        self.tree = PrefixTree(page_size, groups, self._on_evict if parks else None)
        self.model = PrefixModel(page_size, windows)
        self.rows: list[Row] = []
        self.handles: weakref.WeakSet[Handle] = weakref.WeakSet()
        self.num_handles = 0
        self.keep = [True]  # which of the pages evicted together are parked, over and over
        self._evicted: tuple | None = None

    def start(self, namespace, tokens, limit, grid):
        """Matches, compares, allocates; the row computes the rest, unless some of the match is parked or there is no room."""
        expected = self.model.match(namespace, tokens, len(tokens) if limit is None else limit, grid)
        match = self.tree.match(namespace, tokens, limit, grid)
        assert (match.num_pages, match.num_tokens) == (expected, expected * self.page_size)
        self.model.pin(namespace, tokens, expected, 1)
        self.model.use(namespace, tokens, expected)
        for group, window in enumerate(self.windows):
            needed = self.model.needed(window, expected)
            for index, page in enumerate(match.pages[group]):
                if index in needed:
                    content = page.handle.content if isinstance(page, Parked) else self.content[group][page]
                    assert content == (namespace, tuple(tokens[: (index + 1) * self.page_size]))
                else:
                    assert page is None
        held = [[None if isinstance(page, Parked) else page for page in pages] for pages in match.pages]
        row = Row(namespace, tokens, held, match, [[] for _ in self.windows])
        self.rows.append(row)
        for group, parked in enumerate(match.parked):
            pages = self._alloc(group, len(parked))
            if pages is None:
                return self.finish(row)
            row.arriving[group] = pages
        if not any(row.arriving):
            row.arriving = None
            self.grow(row, tokens)
        return row

    def restore(self, row):
        for group, parked in enumerate(row.match.parked):
            for page, source in zip(row.arriving[group], parked, strict=True):
                self.content[group][page] = source.handle.content
        self.tree.restore(row.match, row.arriving)
        assert not any(row.match.parked)
        row.tables, row.arriving = [list(table) for table in row.match.pages], None
        self.model.fill(row.namespace, row.tokens, row.tables)
        self.model.use(row.namespace, row.tokens, row.match.num_pages)
        self.grow(row, row.tokens)

    def grow(self, row, tokens):
        """Computes the whole pages of `tokens` that the row doesn't have; without room the row ends."""
        row.tokens = tokens
        for group, table in enumerate(row.tables):
            first = len(table)
            new = self._alloc(group, len(tokens) // self.page_size - first)
            if new is None:
                return self.finish(row)
            for index, page in enumerate(new, first):
                self.content[group][page] = row.namespace, tuple(tokens[: (index + 1) * self.page_size])
            table += new

    def give_back(self, row, margin):
        """What neither the window nor the margin needs."""
        for group, window in enumerate(self.windows):
            needed = self.model.needed(window and window + margin, len(row.tables[group]))
            for index, page in enumerate(row.tables[group]):
                if index not in needed and page is not None:
                    self.pools[group].release(page)
                    row.tables[group][index] = None

    def insert(self, row):
        stored = self.model.fill(row.namespace, row.tokens, row.tables)
        assert self.tree.insert(row.namespace, row.tokens, row.tables) == stored
        pages = max((index + 1 for table in row.tables for index, page in enumerate(table) if page is not None), default=0)
        self.model.use(row.namespace, row.tokens, pages)

    def release(self, row):
        """The path, not the pages."""
        if row.match:
            self.tree.release(row.match)
            self.model.pin(row.namespace, row.tokens, row.match.num_pages, -1)
            row.match = None

    def finish(self, row):
        self.rows.remove(row)
        self.release(row)
        for group, pages in enumerate(row.tables):
            for page in [*pages, *(row.arriving[group] if row.arriving else [])]:
                if page is not None:
                    self.pools[group].release(page)

    def evict(self, group, count):
        keys, freed = self.model.victims(group, count, self.pools[group].count)
        expected = [self.model.entries[key][group] for key in keys]
        self._evicted, free = None, self.pools[group].num_free
        assert self.tree.evict(group, count) == freed == self.pools[group].num_free - free
        handles = [None] * len(keys)
        if self._evicted:
            number, pages, handles = self._evicted
            assert number == group and sorted(pages) == sorted(expected)
            if len(keys) == freed:  # no page goes only because it follows another: the order is that of use
                assert pages == expected
            keys = [keys[expected.index(page)] for page in pages]
        self.model.give_up(group, keys, handles)
        return freed

    def match_everything(self):
        """Every sequence that is stored matches as the model says."""
        for namespace, tokens in list(self.model.entries):
            match = self.tree.match(namespace, tokens)
            assert match.num_pages == self.model.match(namespace, tokens, len(tokens), 1)
            self.tree.release(match)
            for pool, pages in zip(self.pools, match.pages, strict=True):
                for page in pages:
                    if isinstance(page, int):
                        pool.release(page)

    def _alloc(self, group, count):
        """Pages to write to, evicting what has to be; None if even that is not enough."""
        try:
            pages = self.pools[group].alloc(count)
        except OutOfPages as error:
            if self.evict(group, error.requested - error.free) < error.requested - error.free:
                return None
            pages = self.pools[group].alloc(count)
        assert all(self.pools[group].writable(page) for page in pages)
        return pages

    def _on_evict(self, group, pages):
        made = []
        for index, page in enumerate(pages):
            self.num_handles += 1
            made.append(Handle(-self.num_handles, self.content[group][page]) if self.keep[index % len(self.keep)] else None)
        self.handles.update(handle for handle in made if handle)
        self._evicted = (group, pages, [handle and handle.number for handle in made])
        return made
