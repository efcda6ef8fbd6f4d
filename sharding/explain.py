"""Where the arrays of a tree lie, as a table."""

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

import jax

from sharding.placement import Names, Placement, is_names


@dataclasses.dataclass(frozen=True)
class PlacedArray:
    """Arrays of one kind, such as a weight of all layers.

    Attributes:
      name: with `*` for the layer's number.
      shape: of one of them; dtype: its number format's name.
      names: logical axes.
      count: how many there are.
      per_device: bytes of all of them that each device holds.
      replicated: bytes that all devices together hold beyond one copy.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    names: Names
    count: int
    per_device: int
    replicated: int


def placed_arrays(tree: Any, names: Any, placement: Placement) -> list[PlacedArray]:
    """Of a tree of arrays (or of `jax.ShapeDtypeStruct`s), with their logical axes in a tree like it."""
    devices, found = placement.mesh.size, {}
    axes = jax.tree.leaves(names, is_leaf=is_names)
    for (path, leaf), own in zip(jax.tree_util.tree_leaves_with_path(tree), axes, strict=True):
        name = re.sub(r"layer_\d+", "layer_*", jax.tree_util.keystr(path, simple=True, separator="."))
        each = _bytes(placement.sharding(own).shard_shape(leaf.shape), leaf.dtype)
        key = name, tuple(leaf.shape), str(leaf.dtype), tuple(own)
        count, total = found.get(key, (0, 0))
        found[key] = count + 1, total + each
    return [
        PlacedArray(name, shape, dtype, own, count, total, total * devices - count * _bytes(shape, dtype))
        for (name, shape, dtype, own), (count, total) in found.items()
    ]


def placement_table(arrays: Iterable[PlacedArray], placement: Placement) -> str:
    """A line per kind of array, and the sums."""
    arrays = list(arrays)

    def axes(array: PlacedArray) -> str:
        parts = []
        for name, size in zip(array.names, array.shape, strict=True):
            split = placement.mesh_axes(name)
            parts.append(f"{name or '-'} {size}" + (f" / {'*'.join(split)}" if split else ""))
        return ", ".join(parts)

    rows = [(f"{array.name}{f' x{array.count}' if array.count > 1 else ''}", array.dtype, axes(array), array) for array in arrays]
    name_width, axes_width = (max((len(row[i]) for row in rows), default=0) for i in (0, 2))
    lines = [
        f"{'array':{name_width}}  {'dtype':8}  {'axes (/ mesh axis that splits them)':{axes_width}}  {'per device':>14}  {'replicated':>14}"
    ]
    for name, dtype, text, array in rows:
        lines.append(f"{name:{name_width}}  {dtype:8}  {text:{axes_width}}  {array.per_device:14,}  {array.replicated:14,}")
    totals = sum(array.per_device for array in arrays), sum(array.replicated for array in arrays)
    lines.append(f"{'all':{name_width}}  {'':8}  {'':{axes_width}}  {totals[0]:14,}  {totals[1]:14,}")
    return "\n".join(lines)


def _bytes(shape: tuple[int, ...], dtype: Any) -> int:
    size = jax.numpy.dtype(dtype).itemsize
    for length in shape:
        size *= length
    return size
