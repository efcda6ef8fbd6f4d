"""The dense cache: one slot per token and layer, all rows with the same capacity."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import struct

from kernels import append, blockwise_attention
from kv.types import AttentionSpec, Format, KeyValue, LayerSpec, Query, Step
from sharding import axes

_BLOCK = 256  # slots read at a time: long enough to amortise a loop step, short enough to stay in the second-level cache


class Dense(struct.PyTreeNode):
    """Keys and values of the `L` layers of one group, or (with `layer` set) the view of one of them."""

    k: jax.Array  # [L, B, K, S, H] or [L, B, S, K, H]
    v: jax.Array  # [L, B, K, S, Hv] or [L, B, S, K, Hv]
    layer: jax.Array | int | None = None
    slot_axis: int = struct.field(pytree_node=False, default=3)

    @classmethod
    def init(cls, spec: LayerSpec, layers: int, batch: int, capacity: int, format: Format) -> "Dense":
        """All zeros. Traceable: under `jax.eval_shape` it only counts."""

        def zeros(width: int) -> jax.Array:
            middle = (spec.num_kv_heads, capacity) if format.slot_axis == 3 else (capacity, spec.num_kv_heads)
            return jnp.zeros((layers, batch, *middle, width), format.dtype)

        return cls(k=zeros(spec.key_dim), v=zeros(spec.value_dim), slot_axis=format.slot_axis)

    def logical_axes(self) -> "Dense":
        """The same tree with the names of each array's axes in its place."""
        middle = (axes.KV_HEADS, axes.SLOTS) if self.slot_axis == 3 else (axes.SLOTS, axes.KV_HEADS)
        names = (axes.LAYERS, axes.BATCH, *middle, axes.HEAD_DIM)
        return self.replace(k=names, v=names)

    def attend(self, query: Query, new: KeyValue | None, step: Step, spec: AttentionSpec) -> tuple[jax.Array, "Dense"]:
        """Writes the new tokens' rows, then answers their queries from the slots held.

        Args:
          query: q [B', T, N, H].
          new: k [B', T, K, H] and v [B', T, K, Hv], or None to read only.
          step: which cache rows and positions the tokens are; slots at or past the capacity are dropped.
          spec: static.

        Returns:
          [B', T, N, Hv], zero for padded queries, and the new view.
        """
        if new is not None:
            write = (self.layer, step.rows, step.start, step.count, self.slot_axis)
            self = self.replace(k=append(self.k, new.k, *write), v=append(self.v, new.v, *write))
        block = min(_BLOCK, self.k.shape[self.slot_axis])

        def read(index):
            first = jnp.minimum(index * block, self.k.shape[self.slot_axis] - block)
            k, v = self._block(self.k, step.rows, first, block), self._block(self.v, step.rows, first, block)
            return k, v, first + jnp.arange(block, dtype=jnp.int32)

        limit = step.limit(query.q.shape[1])
        return blockwise_attention(query.q, read, block, limit, spec.scale), self

    def _block(self, buffer: jax.Array, rows: jax.Array | None, first: jax.Array, block: int) -> jax.Array:
        """Slots first..first+block of the given rows: [B', K, block, H]."""

        def slice_rows(row: jax.Array | int, count: int) -> jax.Array:
            corner = [self.layer, row, 0, 0, 0]
            corner[self.slot_axis] = first
            size = [1, count, *buffer.shape[2:]]
            size[self.slot_axis] = block
            return jax.lax.dynamic_slice(buffer, corner, size)[0]

        if rows is None:
            part = slice_rows(0, buffer.shape[1])
        elif rows.shape[0] == 1:
            part = slice_rows(rows[0], 1)
        else:
            part = jax.vmap(lambda row: slice_rows(row, 1)[0])(rows)
        return part if self.slot_axis == 3 else part.swapaxes(1, 2)


def group(specs: Sequence[LayerSpec]) -> dict[LayerSpec, list[int]]:
    """Layer numbers by spec, in order of first appearance: each group becomes one stack."""
    groups: dict[LayerSpec, list[int]] = {}
    for number, spec in enumerate(specs):
        groups.setdefault(spec, []).append(number)
    return groups
