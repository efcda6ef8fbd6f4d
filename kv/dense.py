"""The dense cache: one slot per token and layer, all rows with the same capacity."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from kernels import append, blockwise_attention
from kv.types import AttentionSpec, Format, KeyValue, LayerSpec, Query, Step
from sharding import axes

_BLOCK = 256  # slots read at a time: long enough to amortise a loop step, short enough to stay in the second-level cache


class Dense(struct.PyTreeNode):
    """Keys and values of the `L` layers of one group, or (with `layer` set) the view of one of them."""

    k: jax.Array  # [L, B, ...], the rest in key_order
    v: jax.Array  # [L, B, ...], the rest in value_order
    layer: jax.Array | int | None = None
    key_order: str = struct.field(pytree_node=False, default=Format.key_order)
    value_order: str = struct.field(pytree_node=False, default=Format.value_order)
    dtype: np.dtype = struct.field(pytree_node=False, default=Format.dtype)  # of keys and values; the arrays may hold its bits

    @classmethod
    def init(cls, spec: LayerSpec, layers: int, batch: int, capacity: int, format: Format) -> "Dense":
        """All zeros. Traceable: under `jax.eval_shape` it only counts."""

        def zeros(width: int, order: str) -> jax.Array:
            size = {"S": capacity, "K": spec.num_kv_heads, "H": width}
            dtype = jnp.uint16 if format.as_bits else format.dtype
            return jnp.zeros((layers, batch, *(size[axis] for axis in order)), dtype)

        k, v = zeros(spec.key_dim, format.key_order), zeros(spec.value_dim, format.value_order)
        return cls(k=k, v=v, key_order=format.key_order, value_order=format.value_order, dtype=format.dtype)

    @property
    def capacity(self) -> int:
        return self.k.shape[2 + self.key_order.index("S")]

    def logical_axes(self) -> "Dense":
        """The same tree with the names of each array's axes in its place."""
        name = {"S": axes.SLOTS, "K": axes.KV_HEADS, "H": axes.HEAD_DIM}
        return self.replace(
            k=(axes.LAYERS, axes.BATCH, *(name[axis] for axis in self.key_order)),
            v=(axes.LAYERS, axes.BATCH, *(name[axis] for axis in self.value_order)),
        )

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
            write = (self.layer, step.rows, step.start, step.count)
            self = self.replace(
                k=append(self.k, self._stored(new.k), *write, self.key_order),
                v=append(self.v, self._stored(new.v), *write, self.value_order),
            )
        block = min(_BLOCK, self.capacity)

        def read(index):
            first = jnp.minimum(index * block, self.capacity - block)
            k = self._block(self.k, self.key_order, "KHS", step.rows, first, block)
            v = self._block(self.v, self.value_order, "KSH", step.rows, first, block)
            return k, v, first + jnp.arange(block, dtype=jnp.int32)

        limit = step.limit(query.q.shape[1])
        return blockwise_attention(query.q, read, block, limit, spec.scale), self

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

    def _stored(self, new: jax.Array) -> jax.Array:
        new = new.astype(self.dtype)
        return new if self.k.dtype == self.dtype else jax.lax.bitcast_convert_type(new, self.k.dtype)


def group(specs: Sequence[LayerSpec]) -> dict[LayerSpec, list[int]]:
    """Layer numbers by spec, in order of first appearance: each group becomes one stack."""
    groups: dict[LayerSpec, list[int]] = {}
    for number, spec in enumerate(specs):
        groups.setdefault(spec, []).append(number)
    return groups
