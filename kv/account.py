"""What a cache costs in bytes: from the config alone, exactly what the arrays will take."""

import dataclasses
import math

import jax
import numpy as np

from kv.cache import Cache, HasCacheLayers, Spec, init, page_groups
from kv.format import Format


def nbytes(config: HasCacheLayers, batch: int, capacity: int, format: Format, pages: tuple[int, ...] | None = None) -> int:
    """Bytes of the arrays that `init` with the same arguments allocates, lengths and page tables included."""
    shapes = jax.eval_shape(lambda: init(config, batch, capacity, format, pages))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes))


def bytes_per_token(config: HasCacheLayers, format: Format) -> int:
    """Bytes that one more token of one row takes, over all layers; those with a window give it back once it has left the window."""
    return sum(_row_bytes(spec, format) for spec in config.cache_layers)


def held_bytes(config: HasCacheLayers, tokens: float, format: Format) -> float:
    """Bytes that hold what the next query of a row of `tokens` tokens sees, over all layers: what a decode step must read."""
    return sum(_row_bytes(spec, format) * min(tokens, spec.window or math.inf) for spec in config.cache_layers)


def page_bytes(config: HasCacheLayers, window: int | None, capacity: int, format: Format) -> int:
    """Bytes of one page of the page group with this window, over its layers."""
    windows = page_groups(config, capacity, format)
    shapes = jax.eval_shape(lambda: init(config, 1, capacity, format, (1,) * len(windows)))
    stores = [store for store in shapes.stores if store.layout.group == windows.index(window)]
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(stores))


def _row_bytes(spec: Spec, format: Format) -> int:
    """Of one layer and token; where slots share rows, with their part of what pads these."""
    total = 0
    for tensor in spec.tensors.values():
        for (width, dtype), packing in zip(format.codec.parts(tensor.width), format.packings(tensor), strict=True):
            total += dtype.itemsize * (tensor.heads * width if packing is None else -(-packing.lanes // packing.slots))
    return total


@dataclasses.dataclass(frozen=True)
class StoreReport:
    """One group of equal layers.

    Attributes:
      kind: layout and what is kept, such as "ring, window 512: k, v".
      layers: how many.
      format: the number format's name.
      reserved: bytes of its arrays.
      used: of these, bytes of slots that hold a token that a query may still see.
    """

    kind: str
    layers: int
    format: str
    reserved: int
    used: int

    @property
    def waste(self) -> float:
        """The part of the reserved bytes that holds nothing: 0 to 1."""
        return 1 - self.used / self.reserved


def stores(cache: Cache) -> list[StoreReport]:
    """What each group of layers reserves and uses. Waits for the lengths (and tables) on the device."""
    lengths = np.asarray(cache.lengths)
    reports = []
    for store in cache.stores:
        layout, arrays = store.layout, [part for tensor in store.tensors.values() for part in tensor.parts]
        reserved = sum(array.nbytes for array in arrays)
        rows, slots = _leading(store)
        if layout.kind == "paged":
            table = np.asarray(cache.tables[layout.group])
            first = np.arange(table.shape[1]) * slots
            tokens = np.clip(lengths[:, None] - first, 0, slots) * (table < rows)
            held: dict[int, int] = {}  # a page that rows share holds its tokens once
            for page, count in zip(table.ravel().tolist(), tokens.ravel().tolist(), strict=True):
                if page < rows:
                    held[page] = max(held.get(page, 0), count)
            used_slots = sum(held.values())
        else:
            used_slots = int(np.minimum(lengths, slots).sum())
        window = "" if getattr(layout, "window", None) is None else f", window {layout.window}"
        tensor = next(iter(store.tensors.values()))
        reports.append(
            StoreReport(
                kind=f"{layout.kind}{window}: {', '.join(store.tensors)}",
                layers=arrays[0].shape[0],
                format=tensor.codec.dtype.name,
                reserved=reserved,
                used=reserved * used_slots // (rows * slots),
            )
        )
    return reports


def report(cache: Cache) -> str:
    """A table: per kind of layer, bytes reserved and used, and the part that is wasted."""
    rows = stores(cache)
    total = StoreReport("all", sum(row.layers for row in rows), "", sum(row.reserved for row in rows), sum(row.used for row in rows))
    width = max(len(row.kind) for row in [*rows, total])
    lines = [f"{'layers':>6}  {'kind':{width}}  {'format':13}  {'reserved':>12}  {'used':>12}  {'waste':>6}"]
    for row in [*rows, total]:
        reserved, used = (f"{size / 2**20:8.2f} MiB" for size in (row.reserved, row.used))
        lines.append(f"{row.layers:6}  {row.kind:{width}}  {row.format:13}  {reserved}  {used}  {row.waste:6.1%}")
    return "\n".join(lines)


def _leading(store) -> tuple[int, int]:
    """Rows (or pages) of a store's arrays, and slots of each."""
    rows = jax.tree.leaves(store.tensors)[0].shape[1]
    return rows, store.layout.shape(rows, rows)[1]
