"""The dense cache: one slot per token and layer, all rows with the same capacity."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from kernels import append, blockwise_attention, blockwise_index_scores, top_slots
from kv.types import AttentionSpec, Format, KeyValue, LayerSpec, Query, Step
from sharding import axes

_BLOCK = 256  # slots read at a time: long enough to amortise a loop step, short enough to stay in the second-level cache


class Dense(struct.PyTreeNode):
    """Keys and values of the `L` layers of one group, or (with `layer` set) the view of one of them."""

    k: jax.Array  # [L, B, ...], the rest in key_order
    v: jax.Array  # [L, B, ...], the rest in value_order
    index_k: jax.Array | None = None  # [L, B, ...], the rest in key_order with K = 1: an indexer's keys
    layer: jax.Array | int | None = None
    key_order: str = struct.field(pytree_node=False, default=Format.key_order)
    value_order: str = struct.field(pytree_node=False, default=Format.value_order)
    dtype: np.dtype = struct.field(pytree_node=False, default=Format.dtype)  # of keys and values; the arrays may hold its bits

    @classmethod
    def init(cls, spec: LayerSpec, layers: int, batch: int, capacity: int, format: Format) -> "Dense":
        """All zeros. Traceable: under `jax.eval_shape` it only counts."""

        def zeros(width: int, order: str, heads: int = spec.num_kv_heads) -> jax.Array:
            size = {"S": capacity, "K": heads, "H": width}
            dtype = jnp.uint16 if format.as_bits else format.dtype
            return jnp.zeros((layers, batch, *(size[axis] for axis in order)), dtype)

        k, v = zeros(spec.key_dim, format.key_order), zeros(spec.value_dim, format.value_order)
        index_k = zeros(spec.index_dim, format.key_order, heads=1) if spec.index_dim else None
        return cls(k=k, v=v, index_k=index_k, key_order=format.key_order, value_order=format.value_order, dtype=format.dtype)

    @property
    def capacity(self) -> int:
        return self.k.shape[2 + self.key_order.index("S")]

    def logical_axes(self) -> "Dense":
        """The same tree with the names of each array's axes in its place."""
        name = {"S": axes.SLOTS, "K": axes.KV_HEADS, "H": axes.HEAD_DIM}
        k, v = ((axes.LAYERS, axes.BATCH, *(name[axis] for axis in order)) for order in (self.key_order, self.value_order))
        index_k = None if self.index_k is None else tuple(axes.ONE if axis == axes.KV_HEADS else axis for axis in k)
        return self.replace(k=k, v=v, index_k=index_k)

    def attend(
        self, query: Query, new: KeyValue | None, step: Step, spec: AttentionSpec, sinks: jax.Array | None = None
    ) -> tuple[jax.Array, "Dense"]:
        """Writes the new tokens' rows, then answers their queries from the slots held.

        Args:
          query: q [B', T, N, H], and an indexer's where `spec.top_k` is set.
          new: k [B', T, K, H] and v [B', T, K, Hv] (and index_k), or None to read only.
          step: which cache rows and positions the tokens are; slots at or past the capacity are dropped.
          spec: static.
          sinks: [N], see `kernels.Scoring`.

        Returns:
          [B', T, N, Hv], zero for padded queries, and the new view.
        """
        if new is not None:
            self = self._with(new, step)
        block = min(_BLOCK, self.capacity)

        def slots(index):
            first = jnp.minimum(index * block, self.capacity - block)
            return first, first + jnp.arange(block, dtype=jnp.int32)

        def read(index):
            first, where = slots(index)
            k = self._block(self.k, self.key_order, "KHS", step.rows, first, block)
            v = self._block(self.v, self.value_order, "KSH", step.rows, first, block)
            return k, v, where

        def read_index(index):
            first, where = slots(index)
            return self._block(self.index_k, self.key_order, "KSH", step.rows, first, block)[:, 0], where

        limit, allowed = step.limit(query.q.shape[1]), None
        if spec.top_k is not None:
            scores = blockwise_index_scores(query.index_q, query.index_w, read_index, block, limit, self.capacity)
            allowed = top_slots(scores, limit, spec.top_k)
        return blockwise_attention(query.q, read, block, limit, spec.scoring(sinks, allowed)), self

    def _with(self, new: KeyValue, step: Step) -> "Dense":
        def written(buffer: jax.Array, rows: jax.Array, order: str) -> jax.Array:
            rows = rows.astype(self.dtype)
            if buffer.dtype != self.dtype:
                rows = jax.lax.bitcast_convert_type(rows, buffer.dtype)
            return append(buffer, rows, self.layer, step.rows, step.start, step.count, order)

        return self.replace(
            k=written(self.k, new.k, self.key_order),
            v=written(self.v, new.v, self.value_order),
            index_k=None if self.index_k is None else written(self.index_k, new.index_k, self.key_order),
        )

    def _block(self, buffer: jax.Array, order: str, wanted: str, rows: jax.Array | None, first: jax.Array, block: int) -> jax.Array:
        """Slots first..first+block of the given rows: [B', ...], the rest in the wanted order."""
        slot_axis = 2 + order.index("S")

        def slice_rows(row: jax.Array | int, count: int) -> jax.Array:
            corner = [self.layer, row, 0, 0, 0]
            corner[slot_axis] = first
            size = [1, count, *buffer.shape[2:]]
            size[slot_axis] = block
            return jax.lax.dynamic_slice(buffer, corner, size)[0]

        if rows is None:
            part = slice_rows(0, buffer.shape[1])
        elif rows.shape[0] == 1:
            part = slice_rows(rows[0], 1)
        else:
            part = jax.vmap(lambda row: slice_rows(row, 1)[0])(rows)
        if part.dtype != self.dtype:
            part = jax.lax.bitcast_convert_type(part, self.dtype)
        return part.transpose(0, *(1 + order.index(axis) for axis in wanted))


def group(specs: Sequence[LayerSpec]) -> dict[LayerSpec, list[int]]:
    """Layer numbers by spec, in order of first appearance: each group becomes one stack."""
    groups: dict[LayerSpec, list[int]] = {}
    for number, spec in enumerate(specs):
        groups.setdefault(spec, []).append(number)
    return groups
