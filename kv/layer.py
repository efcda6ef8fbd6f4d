"""The caches of layers: what is kept per token (keys and values here, a latent row in `kv.latent`), in any layout and number format."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from kernels import Blocks, Heads, Held, Packing, attend_cache, blockwise_attention, pallas_attention, pallas_fits
from kv.codec import Codec
from kv.format import Format
from kv.layout import Layout, Reader, new_rows
from kv.parts import attend_in_parts
from kv.types import AttentionSpec, KeyValue, Query, Step, TensorSpec
from sharding import Placement, axes


class Tensor(struct.PyTreeNode):
    """One thing that L layers keep per token and head, such as the keys: the arrays of its number format."""

    parts: tuple[jax.Array, ...]  # [L, B or P, ...], the rest in `order`: see `kv.codec`
    order: str = struct.field(pytree_node=False)
    codec: Codec = struct.field(pytree_node=False)
    packings: tuple[Packing | None, ...] = struct.field(pytree_node=False)  # of each part: how slots share rows, [L, B or P, *shape]
    axis: str = struct.field(pytree_node=False)  # the logical axis of its heads

    @classmethod
    def init(cls, spec: TensorSpec, lead: tuple[int, int], slots: int, format: Format, placement: Placement | None = None) -> "Tensor":
        """All zeros, for `slots` slots, which `slots_per_row` must divide."""
        order, codec, packings = format.key_order if spec.key else format.value_order, format.codec, format.packings(spec, placement)

        def zeros(width: int, dtype: Any, packing: Packing | None) -> jax.Array:
            if packing is not None:
                return jnp.zeros((*lead, *packing.shape(slots)), dtype)
            size = {"S": slots, "K": spec.heads, "H": width}
            return jnp.zeros((*lead, *(size[axis] for axis in order)), dtype)

        parts = (zeros(*part, packing) for part, packing in zip(codec.parts(spec.width), packings, strict=True))
        return cls(tuple(parts), order, codec, packings, spec.axis)

    def write(self, new: jax.Array, layer: jax.Array | int, step: Step, layout: Layout) -> "Tensor":
        """With the rows new [B', T, K, H] written."""
        encoded = self.codec.encode(new)
        return self.replace(
            parts=tuple(
                layout.write(part, rows, layer, step, self.order, packing)
                for part, rows, packing in zip(self.parts, encoded, self.packings, strict=True)
            )
        )

    def block(self, reader: Reader, layer: jax.Array | int, index: jax.Array, wanted: str) -> jax.Array:
        """One block of slots: [B', ...], the rest in the `wanted` order."""
        # Where one block is all that a row has, `index` chooses nothing, and XLA reads ahead of the loop over blocks. On CPU it would then
        # write the new rows once for whoever reads and once to keep, from a copy of the whole array; a TPU copies what is behind a barrier.
        held, index = jax.lax.platform_dependent(
            self.parts, index, cpu=lambda *both: jax.lax.optimization_barrier(both), default=lambda *both: both
        )

        def take(part: jax.Array, packing: Packing | None) -> jax.Array:
            if packing is None:
                return reader.take(part, index, layer, self.order)
            return packing.unpack(reader.take(part, index, layer, packing.order, packing.span))

        parts = tuple(map(take, held, self.packings))
        return self.codec.decode(parts, 1 + self.order.index("H")).transpose(0, *(1 + self.order.index(axis) for axis in wanted))

    def gather(self, layer: jax.Array | int, layout: Layout, step: Step, positions: jax.Array) -> jax.Array:
        """What is held of the one head of the tokens at `positions` int32 [B', J]: [B', J, numbers]."""
        parts = tuple(
            layout.gather(part, layer, self.order, step, positions, packing)
            for part, packing in zip(self.parts, self.packings, strict=True)
        )
        return self.codec.decode(parts, -1)

    def as_stored(self, rows: jax.Array) -> jax.Array:
        """Rows [..., H] as they would be read back."""
        return self.codec.decode(self.codec.encode(rows), -1)


class Layer(struct.PyTreeNode):
    """What the L layers of one group keep, or (with `layer` set) the view of one of them."""

    NAMES: ClassVar[tuple[Any, Any, Any]]  # logical axes of query, new rows and weights

    tensors: Mapping[str, Tensor]
    layout: Layout = struct.field(pytree_node=False)
    layer: jax.Array | int | None = None
    placement: Placement | None = struct.field(pytree_node=False, default=None)  # how its arrays are split over a mesh

    @property
    def num_pages(self) -> int:
        """P, of a pool."""
        return jax.tree.leaves(self.tensors)[0].shape[1]

    def logical_axes(self, shared: bool) -> "Layer":
        """The same tree with the names of each array's axes in its place; `shared`: of pages instead of rows."""

        def names(tensor: Tensor) -> Tensor:
            name_of = {"S": axes.PAGE_SLOTS if shared else axes.SLOTS, "K": tensor.axis, "H": axes.HEAD_DIM}
            lead = axes.LAYERS, axes.PAGES if shared else axes.BATCH
            each = (*lead, *(name_of[axis] for axis in tensor.order))
            lanes = axes.HEAD_DIM if tensor.axis == axes.ONE else tensor.axis
            packed = {"S": name_of["S"], "K": axes.ONE, "H": lanes}
            return tensor.replace(
                parts=tuple(each if packing is None else (*lead, *(packed[axis] for axis in packing.order)) for packing in tensor.packings)
            )

        return self.replace(tensors={name: names(tensor) for name, tensor in self.tensors.items()})

    def constrained(self) -> "Layer":
        """Inside jit: the layers where they belong, whatever the compiler thinks of it."""
        if self.placement is None:
            return self
        return self.placement.constrain_tree(self, self.logical_axes(self.layout.kind == "paged"))

    def written(self, rows: Mapping[str, jax.Array], step: Step) -> "Layer":
        """With a step's rows [B', T, K, H], by tensor, written."""
        kept = step.kept
        tensors = {name: tensor.write(step.kept_rows(rows[name]), self.layer, kept, self.layout) for name, tensor in self.tensors.items()}
        return self.replace(tensors=tensors)

    def attend(self, query: Query, new: KeyValue | None, step: Step, spec: AttentionSpec, weights: Any = None) -> tuple[jax.Array, "Layer"]:
        """Writes the new tokens' rows, and answers their queries from what is held.

        Args:
          query: of the kind's rows.
          new: likewise, or None to read only.
          step: which cache rows and positions the tokens are; those at or past the capacity are dropped.
          spec: static.
          weights: the layer's own that the kind needs.

        Returns:
          [B', T, N, Hv], zero for padded queries, and the new view.
        """
        if self.placement is not None:
            return attend_in_parts(self, query, new, step, spec, weights)
        return self.attend_here(query, new, step, spec, weights, self.layout.reads_back(jax.tree.leaves(query)[0].shape[1]))

    def attend_here(self, query: Any, new: Any, step: Step, spec: AttentionSpec, weights: Any, whole: bool) -> tuple[jax.Array, "Layer"]:
        """`attend` on one device; `whole`: all that the queries see is there once the new rows are written."""
        if new is None:
            if not whole:
                length = jax.tree.leaves(query)[0].shape[1]
                raise ValueError(f"{length} queries see more than {self.layout} keeps: read with fewer, or with the call that writes")
            return self._answered(query, None, step, spec, weights), self
        rows = {name: each for name, each in new._asdict().items() if each is not None}
        if whole:
            self = self.written(rows, step)
            return self._answered(query, None, step, spec, weights), self
        out = self._answered(query, rows, step, spec, weights)
        out, rows = jax.lax.optimization_barrier((out, rows))  # what is overwritten has been read
        return out, self.written(rows, step.replace(start=_once_known(out, step.start)))

    def _answered(self, query, new, step, spec, weights):
        """`answer`, row by row where the layout wants it."""
        B = step.start.shape[0]
        if not self.layout.row_by_row or B == 1:
            return self.answer(query, new, step, spec, weights)

        def one(index):
            own = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, index, 1), (query, new))
            return self.answer(*own, step.row(index), spec, weights)[0]

        return jax.lax.map(one, jnp.arange(B, dtype=jnp.int32))

    def answer(self, query: Any, new: Mapping[str, jax.Array] | None, step: Step, spec: AttentionSpec, weights: Any) -> jax.Array:
        """What the queries see of what is held, and of the rows `new` if they are not written yet: [B', T, N, Hv]."""
        raise NotImplementedError

    def sources(self, read: Any, new: Mapping[str, jax.Array] | None, step: Step) -> list[Blocks]:
        """Blocks of what is held, and of the rows `new` if there are any.

        Args:
          read: (tensor's name, wanted order) -> a block [B', ...]; positions -> what a block gives.
        """
        reader = self.layout.reader(step.kept, after=new is None).of(step)

        def held(index):
            return read(lambda name, order: self.tensors[name].block(reader, self.layer, index, order), reader.positions(index))

        sources = [Blocks(held, reader.span)]
        if new is not None:
            stored = {name: self.tensors[name].as_stored(step.kept_rows(rows)) for name, rows in new.items()}
            unwritten = new_rows(step.kept, next(iter(stored.values())).shape[1]).of(step)

            def given(index):
                def block(name, order):
                    return unwritten.take(stored[name], index).transpose(0, *(1 + "SKH".index(axis) for axis in order))

                return read(block, unwritten.positions(index))

            sources.append(Blocks(given, unwritten.span))
        return sources


def _once_known(out: jax.Array, x: jax.Array) -> jax.Array:
    """The integers x, which depend on `out`. The CPU backend takes barriers away before it orders reads and writes: rows written by x would
    go to a copy of the whole array that `out` is read from."""

    def depending(out: jax.Array, x: jax.Array) -> jax.Array:
        return x + (out[(0,) * out.ndim] > jnp.inf).astype(x.dtype)  # + 0, which the compiler does not see

    return jax.lax.platform_dependent(out, x, cpu=depending, default=lambda out, x: x)


class KeyValueLayer(Layer):
    """Keys and values of every head: queries are `Query`, new rows `KeyValue`, weights the sinks [K, G] or None (see `kernels.Scoring`)."""

    kernels: str = struct.field(pytree_node=False, default="xla")  # as of `Format.kernels_of`
    interpret: bool = struct.field(pytree_node=False, default=False)  # as of `Format`
    round_queries: bool = struct.field(pytree_node=False, default=False)  # likewise

    NAMES = (
        Query(q=(axes.BATCH, None, axes.HEADS, None)),
        KeyValue(k=(axes.BATCH, None, axes.KV_HEADS, None), v=(axes.BATCH, None, axes.KV_HEADS, None)),
        (axes.KV_HEADS, axes.Q_PER_KV),
    )

    def attend_here(self, query, new, step, spec, weights, whole):
        if self.kernels != "native":
            return super().attend_here(query, new, step, spec, weights, whole)
        return self.attend_native(query.q, new, step, spec, weights, whole)

    def takes(self, heads: Heads, step: Step) -> bool:
        """Whether its kernel splits, norms and rotates them: in f32, normed head by head, all queried, all read back from the cache."""
        simple = heads.qkv.dtype == jnp.float32 and all(scale is None or scale.ndim == 1 for scale in (heads.q_norm, heads.k_norm))
        return self.kernels == "native" and simple and not step.last_only and self.layout.reads_back(heads.qkv.shape[1])

    def attend_native(self, q: jax.Array | Heads, new, step, spec, weights, whole):
        """`attend_here` by the native kernel; `Heads` bring the new rows with them."""
        keys, values = self.tensors["k"], self.tensors["v"]
        out, held_keys, held_values = attend_cache(
            q,
            new,
            keys.parts,
            values.parts,
            self.layer,
            step.rows,
            step.tables[self.layout.group] if self.layout.kind == "paged" else None,
            step.start,
            step.count,
            step.limit(jax.tree.leaves(q)[0].shape[1]),
            spec.scoring(weights),
            self.layout.kind,
            after=whole,
            rounded=self.round_queries,
        )
        tensors = {"k": keys.replace(parts=held_keys), "v": values.replace(parts=held_values)}
        return out, self.replace(tensors=tensors)

    def _answered(self, query, new, step, spec, weights):
        sources = self._held(new, step) if self.kernels == "pallas" else []
        if not sources or not all(pallas_fits(query.q.shape, held) for held in sources):
            return super()._answered(query, new, step, spec, weights)
        first, queries = step.start, step.count
        if step.last_only:
            first, queries = jnp.maximum(first + queries - 1, 0), jnp.minimum(queries, 1)
        scoring = spec.scoring(weights, spread=step.spread)
        return pallas_attention(query.q, sources, first, queries, scoring, self.interpret)

    def _held(self, new: Mapping[str, jax.Array] | None, step: Step) -> list[Held]:
        """What is held, and the rows `new` as if they were a cache."""
        keys, values = self.tensors["k"], self.tensors["v"]
        both, kept, B = (keys.packings[0], values.packings[0]), step.kept, step.start.shape[0]
        rows = jnp.arange(B, dtype=jnp.int32)
        more = {"packings": None if None in both else both, "stripe": 0 if step.stripe is None else step.stripe, "stripes": step.stripes}
        held = Held(
            keys=keys.parts[0],
            values=values.parts[0],
            layer=self.layer,
            rows=rows if step.rows is None else step.rows,
            base=jnp.zeros_like(kept.start),
            end=kept.start if new is not None else kept.start + kept.count,
            ring=self.layout.kind == "ring",
            table=step.tables[self.layout.group] if self.layout.kind == "paged" else None,
            **more,
        )
        if new is None:
            return [held]

        def stored(tensor, rows):
            (rows,), packing = tensor.codec.encode(step.kept_rows(rows)), tensor.packings[0]
            if packing is None:
                return rows[None]
            return packing.pack(jnp.pad(rows, ((0, 0), (0, -rows.shape[1] % packing.span), (0, 0), (0, 0))))[None]

        made = (stored(self.tensors[name], new[name]) for name in ("k", "v"))
        return [held, Held(*made, layer=0, rows=rows, base=kept.start, end=kept.start + kept.count, **more)]

    def answer(self, query, new, step, spec, weights):
        def read(block, where):
            return block("k", "KHS"), block("v", "KSH"), where

        limit = step.limit(query.q.shape[1])
        return blockwise_attention(query.q, self.sources(read, new, step), limit, spec.scoring(weights, spread=step.spread))


def attend_heads(layer: Any, heads: Heads, step: Step, spec: AttentionSpec, weights: Any = None) -> tuple[jax.Array, Any]:
    """`layer.attend` of the queries, keys and values of one product, which are not split yet, nor normed and rotated."""
    if isinstance(layer, KeyValueLayer) and layer.takes(heads, step):
        return layer.attend_native(heads, None, step, spec, weights, whole=True)
    q, k, v = heads.split()
    return layer.attend(Query(step.queried(q)), KeyValue(k, v), step, spec, weights)
