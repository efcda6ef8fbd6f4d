"""A weight on its devices: as an array, or packed: as its file stores it or rounded here."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from checkpoint.quant_arrays import columns
from checkpoint.source import Source
from checkpoint.weight import Index, Place, Weight
from kernels import JoinedArray, QuantArray, is_packed, widen
from model import ModelConfig, abstract_params, is_matrix, keeps_packed, num_inputs, packed_names
from quantization import Scheme, quantize
from runtime import UserError
from sharding import Placement, is_names

NATIVE, AUTO = "native", "auto"
HEAD = (("embedding",), ("head",))  # places in the tree
How = Scheme | str | jnp.dtype


@dataclasses.dataclass(frozen=True)
class Storage:
    """In which formats matrices are kept.

    Attributes:
      dtype: of those that are not packed.
      layers: of the layers' matrices: a `Scheme`; "native", as the file stores them where a `QuantArray` holds just that; "auto", likewise
        if Diptych wrote it, and else not packed; a dtype: not packed, in that dtype.
      head: of embedding and head, likewise.
    """

    dtype: jnp.dtype
    layers: How = AUTO
    head: How = AUTO

    def of(self, place: Place, names: tuple[str, ...]) -> How:
        if not is_matrix(names):
            return jnp.dtype(jnp.float32)
        if not keeps_packed(place, names):
            return self.dtype
        return self.head if place in HEAD else self.layers


def stored_as(place: Place, w: Any, box: Any, storage: Storage) -> Any:
    """A weight of an (unrolled) parameter tree in the format that `storage` asks for; inside jit. `box`: what the tree promises there.

    Raises:
      UserError: the scheme doesn't suit it.
    """
    how, shape = storage.of(place, box.names), box.value.shape
    if isinstance(how, Scheme):
        rows = len(shape) - num_inputs(box.names)
        how.check(math.prod(shape[rows:]), ".".join(place))
        return quantize(widen(w, jnp.float32).reshape(*shape[:rows], -1), how)
    if isinstance(how, str):
        return w
    return widen(w, how).reshape(shape)


def weight_bytes(config: ModelConfig, storage: Storage) -> dict[str, int]:
    """Bytes of a model's weights by what they are, without making any: `layers`' matrices, `head` (with the embedding), `other` (vectors,
    and matrices that are never packed) and `scales` (what of `layers` and `head` is no code, but says what codes stand for).

    Exactly what the arrays take that `checkpoint.load` makes of a file whose weights are not packed. "native" counts as not packed.

    Raises:
      UserError: a scheme doesn't suit the model.
    """
    boxes = flax.traverse_util.flatten_dict(abstract_params(config, storage.dtype), is_leaf=lambda _, leaf: hasattr(leaf, "names"))
    found = dict.fromkeys(("layers", "head", "other", "scales"), 0)
    for place, box in boxes.items():
        stored = jax.eval_shape(lambda place=place, box=box: stored_as(place, jnp.zeros(box.value.shape, box.value.dtype), box, storage))
        bytes_of = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(stored)]
        part = "head" if place in HEAD else "layers" if keeps_packed(place, box.names) else "other"
        found[part] += sum(bytes_of)
        if is_packed(stored):
            found["scales"] += sum(bytes_of) - sum(plane.size * plane.dtype.itemsize for plane in stored.planes)
    return found


def placed(source: Source, weight: Weight, box: Any, placement: Placement | None, how: How) -> Any:
    """A weight on its devices; of each part that several of this process hold, the tensors are read once.

    Args:
      box: what the tree promises: its `value` has shape and dtype, its `names` are the logical axes.
      how: as of `Storage`.

    Raises:
      UserError: packed weights can't be split as the mesh asks.
    """
    shape, names = weight.shape, tuple(box.names)
    if how == NATIVE:
        if (packing := weight.packing(source)) is not None:
            return _assemble(shape, names, placement, lambda index: weight.cut_packed(source, index), packing.group)
        if weight.side_by_side is not None:
            axis, parts = weight.side_by_side
            if any(part.packing(source) is not None for part in parts):
                return JoinedArray(tuple(placed(source, part, box, placement, how) for part in parts), axis)
    if isinstance(how, Scheme):
        return _rounded(source, weight, names, placement, how)
    dtype = box.value.dtype if isinstance(how, str) else how

    def plain(index: Index) -> np.ndarray:
        return np.ascontiguousarray(weight.cut(source, index)).astype(dtype, copy=False)

    return _assemble(shape, names, placement, plain, None)


def _rounded(source: Source, weight: Weight, names: tuple[str, ...], placement: Placement | None, scheme: Scheme) -> QuantArray:
    rows, place = len(weight.shape) - weight.inputs, ".".join(weight.place)
    width = math.prod(weight.shape[rows:])
    scheme.check(width, place)
    shards = 1 if placement is None else weight.shape[rows] // placement.sharding(names).shard_shape(weight.shape)[rows]
    scheme = scheme.fitted(width // shards)
    if scheme.group is not None and (width // shards) % scheme.group:
        raise UserError(
            f"a group of {scheme.group} does not divide the {width // shards} inputs of {place} that each of {shards} devices has: use "
            "--weights=int8, or a smaller mesh"
        )

    def part(index: Index) -> QuantArray:
        """Whole rows are rounded, since they share scales, and then cut."""
        whole = (*index[:rows], *((0, size) for size in weight.shape[rows:]))
        values = weight.cut(source, whole)
        rounded = quantize(jnp.asarray(values.reshape(*values.shape[:rows], width)), scheme)
        return columns(rounded, *(bound * width // weight.shape[rows] for bound in index[rows]))

    return _assemble(weight.shape, names, placement, part, scheme.group)


def _assemble(
    shape: tuple[int, ...], names: tuple[str, ...], placement: Placement | None, part: Callable[[Index], Any], group: int | None
) -> Any:
    """The parts of a weight, as arrays over their devices; `group` as of `Packing`."""
    if placement is None:
        return jax.device_put(part(tuple((0, size) for size in shape)))
    sharding = placement.sharding(names)
    holders: dict[Index, list[jax.Device]] = {}
    for device, slices in sharding.addressable_devices_indices_map(shape).items():
        index = tuple(each.indices(size)[:2] for each, size in zip(slices, shape, strict=True))
        holders.setdefault(index, []).append(device)
    found: list[Any] = []
    for index, devices in holders.items():
        value = part(index)
        found += [jax.device_put(value, device) for device in devices]
    if not isinstance(found[0], QuantArray):
        return jax.make_array_from_single_device_arrays(shape, sharding, found)
    first, rows = found[0], found[0].ndim - 1
    shards = shape[rows] // sharding.shard_shape(shape)[rows]
    if shards > 1 and first.order is not None:
        raise UserError("weights whose inputs are in another order (GPTQ's act-order) can't be split by their inputs: use --weights=bf16")

    def whole(array: jax.Array, split: bool = group is not None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*shape[:rows], array.shape[-1] * (shards if split else 1)), array.dtype)

    abstract = first.map_rows(whole).replace(planes=tuple(whole(plane, True) for plane in first.planes))
    own_names = packed_names(abstract, names)

    def joined(each: tuple[str | None, ...], abstract: jax.ShapeDtypeStruct, *arrays: jax.Array) -> jax.Array:
        return jax.make_array_from_single_device_arrays(abstract.shape, placement.sharding(each), list(arrays))

    out = jax.tree.map(joined, own_names, abstract, *found, is_leaf=is_names)
    return out.replace(spread=placement.mesh.size > 1)
