"""A layer's cache in parts: every device of a mesh attends with its own rows, heads and slots.

    rows    each data shard holds some rows, or the pages of some rows. A call for all rows gives each shard its own; a call for a few rows
            gives them to all, and those that are not a shard's own have no tokens there
    heads   each shard of heads is a working attention of its own
    slots   shard i of n keeps the tokens at positions i, i + n, ...: shards hold alike however long a row is, and work alike however a
            prompt is cut. All shards answer all queries from what they keep; the answers are merged by their log-sum-exp (as the passing
            of queries in Yang et al. 2024, arXiv 2411.01783, which moves less than the passing of keys once more is held than is new)

It is one `jax.shard_map`: what is communicated is what is written here and no choice of the compiler's, and nothing is while blocks are
read.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from kv.types import AttentionSpec, Step
from sharding import Placement, axes, is_names

if TYPE_CHECKING:
    from kv.layer import Layer


def attend_in_parts(layer: "Layer", query: Any, new: Any, step: Step, spec: AttentionSpec, weights: Any) -> tuple[jax.Array, "Layer"]:
    """`Layer.attend` over the mesh of its placement; queries are split by heads and, in a call for all rows, by rows."""
    placement, paged = layer.placement, bool(step.tables)
    whole = layer.layout.reads_back(jax.tree.leaves(query)[0].shape[1])
    all_rows = step.rows is None

    def spec_of(names: Any) -> Any:
        names = tuple(None if name == axes.BATCH and not all_rows else name for name in names)
        return placement.spec(names)

    def specs(names: Any, given: Any) -> Any:
        """Of those arrays that are given."""
        if given is None or is_names(names):
            return None if given is None else spec_of(names)
        return type(names)(*(specs(each, value) for each, value in zip(names, given, strict=True)))

    arrays = layer.logical_axes(paged)
    kept = jax.tree.map(placement.spec, arrays.replace(layer=None), is_leaf=is_names).replace(layer=placement.spec(()))
    names = layer.NAMES
    row = spec_of((axes.BATCH,))
    steps = jax.tree.map(lambda _: row, step) if all_rows else jax.tree.map(lambda _: placement.spec(()), step)

    def body(layer: "Layer", query: Any, new: Any, step: Step, weights: Any) -> tuple[jax.Array, "Layer"]:
        out, own = own_part(layer).attend_here(query, new, own_step(placement, step, layer), spec, weights, whole)
        if not all_rows and (spread := placement.mesh_axes(axes.BATCH)):
            out = jax.lax.psum(out, spread)  # 0 but in the shard whose rows they are
        return out, layer.replace(tensors={name: layer.tensors[name].replace(parts=own.tensors[name].parts) for name in layer.tensors})

    return placement.shard_map(
        body,
        in_specs=(kept, specs(names[0], query), specs(names[1], new), steps, specs(names[2], weights)),
        out_specs=(spec_of((axes.BATCH, None, axes.HEADS, None)), kept),
    )(layer, query, new, step, weights)


def own_part(layer: "Layer") -> "Layer":
    """Inside `shard_map`: the layer whose arrays are this device's, as a layer by itself."""
    placement = layer.placement

    def own(tensor: Any) -> Any:
        shards = placement.shards(tensor.axis)
        packings = tuple(packing and dataclasses.replace(packing, heads=packing.heads // shards) for packing in tensor.packings)
        return tensor.replace(packings=packings)

    return layer.replace(
        tensors={name: own(tensor) for name, tensor in layer.tensors.items()},
        layout=layer.layout.striped(placement.shards(axes.SLOTS)),
        placement=None,
    )


def own_step(placement: Placement, step: Step, layer: "Layer") -> Step:
    """Inside `shard_map`: the step in numbers of this device's rows, pages and slots."""
    if stripes := placement.mesh_axes(axes.SLOTS):
        step = step.replace(stripe=placement.index(axes.SLOTS), stripes=placement.shards(axes.SLOTS), spread=stripes)
    shards, index = placement.shards(axes.BATCH), placement.index(axes.BATCH)
    if shards == 1:
        return step
    if step.tables:
        step = step.replace(tables=tuple(map(lambda table: _own_pages(table, layer.num_pages, index), step.tables)))
    if step.rows is None:
        return step
    rows = step.rows - index * (step.batch // shards)
    own = (rows >= 0) & (rows < step.batch // shards)
    return step.replace(rows=jnp.clip(rows, 0, step.batch // shards - 1), count=jnp.where(own, step.count, 0))


def _own_pages(table: jax.Array, pages: int, index: jax.Array) -> jax.Array:
    """Numbers in the shard's part of the pool; `pages` for those of others."""
    own = table - index * pages
    return jnp.where((own >= 0) & (own < pages), own, pages)
