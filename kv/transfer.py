"""Rows of a cache out of it and into another, whatever the layout and memory order of either: what disaggregated prefill moves."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels import Packing
from kv.cache import Cache
from kv.export import Export, array_names, describe, verify
from kv.layer import Layer
from kv.types import Step
from runtime import UserError, program
from sharding import axes

SMALLEST, LARGEST = 16, 1024  # tokens of a call: powers of two between, so that few programs are compiled


def export_row(cache: Cache, row: int, namespace: str = "") -> Export:
    """Copies to the host what a row holds. Waits for the device.

    Args:
      cache: stays as it is.
      row: which one.
      namespace: what the content depends on besides the tokens: weights, an adapter. An import must give the same.

    Returns:
      See `kv.export`. Of layers with a window it has the tokens that a query may see after a rewind by the margin; where pages were given
      back it has fewer, and the row can be rewound by so much less.

    Raises:
      UserError: a cache that stores nothing or whose slots are split over a mesh, or a row without the pages that its next query sees.
      ValueError: no such row.
    """
    _check(cache, row)
    length = int(np.asarray(cache.lengths)[row])
    firsts = [_first_held(cache, group, row, length) for group in range(len(cache.stores))]
    arrays = {}
    for group, (store, first) in enumerate(zip(cache.stores, firsts, strict=True)):
        names = array_names(cache, group)
        pieces: dict[str, list[np.ndarray]] = {each: [] for name in names for each in names[name]}
        for start, count, size in _calls(cache, group, first, length):
            at = min(start, cache.capacity - size)
            found = fetch_tokens(store, cache.tables, np.int32(row), np.int32(at), size)
            for name in names:
                for each, part in zip(names[name], found[name], strict=True):
                    pieces[each].append(np.asarray(part).view(_as_bits(part.dtype))[:, start - at : start - at + count])
        arrays |= {each: np.concatenate(parts, axis=1) for each, parts in pieces.items()}
    return Export(arrays, describe(cache, length, firsts, arrays, namespace))


def import_row(cache: Cache, row: int, export: Export, namespace: str = "") -> Cache:
    """Makes a row what the exported one was: it continues as that one would, and can be rewound as far, within this cache's margin.

    Other rows keep their bits.

    Args:
      cache: donated. Its layout, memory order and margin are free; number format and layers are the exporter's.
      row: which one; whatever it holds is overwritten. In a paged cache it must have pages for all tokens that a query may see after a
        rewind by the margin, which stand in no other row's table; whether anything else holds them (a prefix tree) is the caller's to know.
      export: what `export_row` made; verified before anything is written.
      namespace: as of `export_row`.

    Raises:
      UserError: what `kv.export.verify` finds, a cache that stores nothing, a page that is missing, or that another row has too.
      ValueError: no such row.
    """
    _check(cache, row)
    verify(cache, export, namespace)
    length = export.manifest["length"]
    firsts = [described["first"] for described in export.manifest["groups"]]
    begins = [max(first, _first_seen(cache, group, length, cache.margin)) for group, first in enumerate(firsts)]
    for group, begin in enumerate(begins):
        _check_pages(cache, group, row, begin, length)
    stores = list(cache.stores)
    for group, (first, begin) in enumerate(zip(firsts, begins, strict=True)):
        given = {
            name: tuple(
                np.asarray(export.arrays[each]).view(part.dtype)
                for each, part in zip(names, stores[group].tensors[name].parts, strict=True)
            )
            for name, names in array_names(cache, group).items()
        }
        for start, count, size in _calls(cache, group, begin, length):
            rows = jax.tree.map(lambda array, at=start - first, count=count, size=size: _padded(array[:, at : at + count], size), given)
            stores[group] = store_tokens(stores[group], cache.tables, rows, np.int32(row), np.int32(start), np.int32(count))
    return cache.replace(stores=tuple(stores), lengths=set_length(cache.lengths, np.int32(row), np.int32(length)))


@program(static=("size",))
def fetch_tokens(
    store: Layer, tables: tuple[jax.Array, ...], row: jax.Array, start: jax.Array, size: int
) -> dict[str, tuple[jax.Array, ...]]:
    """The `size` tokens of a row from position `start` on: of each tensor its arrays [L, size, K, numbers]; anything where none is held."""
    step = _step(tables, row, start, size)

    def fetched(part: jax.Array, packing: Packing | None, order: str) -> jax.Array:
        if packing is None:
            return store.layout.read(part, step, size, order).transpose(0, *(1 + order.index(axis) for axis in "SKH"))
        n = packing.span
        first, steps = store.layout.steps_for(step.start, size, n)
        rows = store.layout.in_steps_of(n).read(part, step.replace(start=first), steps, packing.order)
        rows = packing.unpack(rows)  # [L, steps * n, K, numbers]
        rows = jnp.concatenate([rows, rows[:, :n]], axis=1)  # a ring goes on where it began; elsewhere nothing is held there
        return jax.lax.dynamic_slice_in_dim(rows, step.start[0] - first[0] * n, size, axis=1)

    return {
        name: tuple(fetched(part, packing, tensor.order) for part, packing in zip(tensor.parts, tensor.packings, strict=True))
        for name, tensor in store.tensors.items()
    }


@program(donated=("store",))
def store_tokens(
    store: Layer,
    tables: tuple[jax.Array, ...],
    rows: Mapping[str, tuple[jax.Array, ...]],
    row: jax.Array,
    start: jax.Array,
    count: jax.Array,
) -> Layer:
    """The store (donated) with the first `count` tokens of `rows`, as of `fetch_tokens`, written to a row from position `start` on."""
    step = _step(tables, row, start, count)

    def stored(part: jax.Array, new: jax.Array, order: str, packing: Packing | None) -> jax.Array:
        def write(layer: jax.Array, part: jax.Array) -> jax.Array:
            return store.layout.write(part, new[layer][None], layer, step, order, packing)

        return jax.lax.fori_loop(0, part.shape[0], write, part)

    tensors = {
        name: tensor.replace(
            parts=tuple(
                stored(part, new, tensor.order, packing)
                for part, new, packing in zip(tensor.parts, rows[name], tensor.packings, strict=True)
            )
        )
        for name, tensor in store.tensors.items()
    }
    return store.replace(tensors=tensors).constrained()


@program(donated=("lengths",))
def set_length(lengths: jax.Array, row: jax.Array, length: jax.Array) -> jax.Array:
    """int32 [B] (donated) with one of them set."""
    return lengths.at[row].set(length)


def _step(tables: tuple[jax.Array, ...], row: jax.Array, start: jax.Array, count: jax.Array | int) -> Step:
    """The step of one row."""

    def one(x: Any) -> jax.Array:
        return jnp.reshape(x, 1)

    return Step(rows=one(row), start=one(start), count=one(count), tables=tuple(table[one(row)] for table in tables))


def _check(cache: Cache, row: int) -> None:
    if cache.capacity is None:
        raise UserError("a cache that stores nothing (kv.fresh) has no rows to move: use one of kv.init")
    if cache.placement is not None and (stripes := cache.placement.shards(axes.SLOTS)) > 1:
        raise UserError(f"slots that lie in turns on {stripes} devices (the mesh axis seq) can't be moved by row: use a mesh without seq")
    if not 0 <= row < cache.batch:
        raise ValueError(f"row {row} is outside the cache's 0..{cache.batch - 1}")


def _first_seen(cache: Cache, group: int, length: int, back: int) -> int:
    """The first position that a query sees after `length` tokens, or up to `back` tokens earlier."""
    window = cache.specs[group].window
    return 0 if window is None else min(length, max(0, length - back - window + 1))


def _first_held(cache: Cache, group: int, row: int, length: int) -> int:
    """The first position from which on a row holds all of its tokens, of those that may be seen."""
    first = _first_seen(cache, group, length, cache.margin)
    missing = _missing(cache, group, row, first, length)
    if not missing:
        return first
    held = min(length, (missing[-1] + 1) * cache.stores[group].layout.page_size)
    if held > (seen := _first_seen(cache, group, length, 0)):
        raise UserError(
            f"row {row} holds {length} tokens, but pages from position {held} on only, and its next query sees {seen} and later ones: "
            "export a row before its pages are given back"
        )
    return held


def _missing(cache: Cache, group: int, row: int, first: int, length: int) -> list[int]:
    """Which entries of a row's table have no page, of those for positions first..length-1."""
    store = cache.stores[group]
    if store.layout.kind != "paged":
        return []
    size, table = store.layout.page_size, np.asarray(cache.tables[store.layout.group])[row]
    return [index for index in range(first // size, -(-length // size)) if table[index] >= store.num_pages]


def _check_pages(cache: Cache, group: int, row: int, first: int, length: int) -> None:
    """Sees to it that the row may be written from `first` on. Raises UserError."""
    layout = cache.stores[group].layout
    if layout.kind != "paged" or first == length:
        return
    missing = _missing(cache, group, row, first, length)
    if missing:
        raise UserError(
            f"row {row} has no page for positions from {missing[0] * layout.page_size} on, the import is of {first}..{length - 1}: "
            "reserve pages for them first"
        )
    table = np.asarray(cache.tables[layout.group])
    own = table[row, first // layout.page_size : -(-length // layout.page_size)]
    pages, times = np.unique(table[np.isin(table, own)], return_counts=True)
    for page, count in zip(pages[times > 1], times[times > 1], strict=True):
        raise UserError(
            f"page {page} of row {row} stands {count} times in the page tables, a page that an import writes to may stand there once: "
            "give the row pages of its own"
        )


def _calls(cache: Cache, group: int, first: int, length: int) -> Iterator[tuple[int, int, int]]:
    """Cuts positions first..length-1 into calls: where each starts, its tokens, and the tokens of its compiled shape. At least one."""
    window = cache.specs[group].window
    largest = min(LARGEST, cache.capacity if window is None else min(cache.capacity, window + cache.margin))
    for start in range(first, max(length, first + 1), largest):
        count = min(length - start, largest)
        yield start, count, min(largest, max(SMALLEST, 1 << (count - 1).bit_length()))


def _padded(rows: np.ndarray, size: int) -> np.ndarray:
    """[L, tokens, ...] -> [L, size, ...]."""
    return np.pad(rows, ((0, 0), (0, size - rows.shape[1]), (0, 0), (0, 0))) if rows.shape[1] < size else rows


def _as_bits(dtype: np.dtype) -> np.dtype:
    """Unsigned integers for floats that not all programs know."""
    return np.dtype(f"u{dtype.itemsize}") if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 else dtype
