"""Page tables of a cache whose rows and pages are split over a mesh: a pager for each part."""

import dataclasses
from collections.abc import Hashable, Sequence

import numpy as np

from kv.cache import Cache, HasCacheLayers
from kv.format import Format
from kv.pager import Pager, PoolUse
from kv.prefix import Counters


class SplitPager:
    """`Pager` for `parts` devices (or groups of them), each with its own rows, its own part of each pool and its own prefix tree: a row
    has pages of its own part only, so that no device reads another's. Takes and gives numbers of all rows.

    Attributes:
      page_size: C.
    """

    def __init__(self, config: HasCacheLayers, batch: int, capacity: int, format: Format, pages: Sequence[int], parts: int):
        """Args: as of `Pager`; `parts` divides the batch and every pool."""
        own = [size // parts for size in pages]
        self._pagers = [Pager(config, batch // parts, capacity, format, own, part=part) for part in range(parts)]
        self._rows = batch // parts
        self.page_size = format.page_size

    def _of(self, row: int) -> tuple[Pager, int]:
        return self._pagers[row // self._rows], row % self._rows

    def start(self, row: int, tokens: Sequence[int], namespace: Hashable = None) -> int:
        """As of `Pager`; it finds prefixes of prompts that rows of the same part had."""
        pager, row = self._of(row)
        return pager.start(row, tokens, namespace)

    def reserve(self, row: int, start: int, end: int) -> int:
        """As of `Pager`."""
        pager, row = self._of(row)
        return pager.reserve(row, start, end)

    def forget(self, row: int, length: int) -> None:
        """As of `Pager`."""
        pager, row = self._of(row)
        pager.forget(row, length)

    def keep(self, row: int, length: int) -> None:
        """As of `Pager`."""
        pager, row = self._of(row)
        pager.keep(row, length)

    def release(self, row: int) -> None:
        """As of `Pager`."""
        self.keep(row, 0)

    def commit(self, row: int, tokens: Sequence[int], namespace: Hashable = None) -> None:
        """As of `Pager`."""
        pager, row = self._of(row)
        pager.commit(row, tokens, namespace)

    def apply(self, cache: Cache) -> Cache:
        """As of `Pager`."""
        for pager in self._pagers:
            cache = pager.move(cache)
        if any(pager.changed for pager in self._pagers):
            groups = range(len(self._pagers[0].groups))
            cache = cache.with_tables(
                [np.concatenate([pager.table(number, len(self._pagers)) for pager in self._pagers]) for number in groups]
            )
            for pager in self._pagers:
                pager.changed = False
        return cache

    def pools(self) -> list[PoolUse]:
        """How full each group's pool is, over all parts."""
        return [_sum(uses) for uses in zip(*(pager.pools() for pager in self._pagers), strict=True)]

    def counters(self) -> Counters:
        """What the prefix trees counted, over all parts."""
        return _sum([pager.counters() for pager in self._pagers])


def _sum(parts):  # of numbers; what is no number is alike in all
    fields = [field.name for field in dataclasses.fields(parts[0])]
    summed = {name: sum(getattr(part, name) for part in parts) for name in fields if name != "window"}
    return dataclasses.replace(parts[0], **summed)
