"""What a model hands to a cache, and what it must say about itself."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from kernels import Scoring
from sharding import Placement, axes


class Query(NamedTuple):
    """Queries of the new tokens."""

    q: jax.Array  # [B, T, N, H]


class KeyValue(NamedTuple):
    """Keys and values of the new tokens."""

    k: jax.Array  # [B, T, K, H]
    v: jax.Array  # [B, T, K, Hv]


class LatentQuery(NamedTuple):
    """Queries of the new tokens to latent rows."""

    nope: jax.Array  # [B, T, N, P], the part that is not rotated
    rope: jax.Array  # [B, T, N, R]
    index_q: jax.Array | None = None  # [B, T, Hi, Di], of an indexer
    index_w: jax.Array | None = None  # [B, T, Hi], the weight of each of its heads


class LatentRow(NamedTuple):
    """Latent rows of the new tokens."""

    latent: jax.Array  # [B, T, 1, C + R]: the latent, then the rotated part that all heads' keys share
    index_k: jax.Array | None = None  # [B, T, 1, Di], of an indexer


class LatentWeights(NamedTuple):
    """What makes keys and values of latents."""

    w_uk: jax.Array  # [N, P, C]
    w_uv: jax.Array  # [N, Hv, C]


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """How a layer attends; static. Attention is causal: a query sees its own slot and all before it."""

    scale: float  # multiplies q . k
    window: int | None = None  # slots that a query sees, its own included
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    top_k: int | None = None  # slots that a query sees at most, the best by its indexer

    def scoring(self, sinks: jax.Array | None = None, allowed: jax.Array | None = None, spread: tuple[str, ...] = ()) -> Scoring:
        """What `kernels.attention` wants to know."""
        return Scoring(scale=self.scale, window=self.window, softcap=self.softcap, sinks=sinks, allowed=allowed, spread=spread)


class TensorSpec(NamedTuple):
    """One of the things that a layer keeps per token."""

    heads: int
    width: int  # numbers per head
    key: bool  # stored in the keys' memory order, not the values'
    axis: str = axes.KV_HEADS  # the logical axis of its heads


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What one layer keeps per token; layers with equal specs share a stack."""

    num_kv_heads: int  # K
    key_dim: int  # H
    value_dim: int  # Hv
    window: int | None = None  # tokens that a query sees, its own included: older ones need not be kept

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        """What is stored, by name."""
        return {"k": TensorSpec(self.num_kv_heads, self.key_dim, key=True), "v": TensorSpec(self.num_kv_heads, self.value_dim, key=False)}


@dataclasses.dataclass(frozen=True)
class LatentSpec:
    """What a layer of latent attention (MLA) keeps per token: one row for all heads, of which keys and values are projections."""

    latent_dim: int  # C
    rope_dim: int  # R: the rotated part of a key, the same for all heads
    index_dim: int = 0  # Di: of an indexer's key; 0: there is none

    window = None

    @property
    def tensors(self) -> dict[str, TensorSpec]:
        """As of `LayerSpec`."""
        tensors = {"latent": TensorSpec(1, self.latent_dim + self.rope_dim, key=False, axis=axes.ONE)}
        return tensors | {"index_k": TensorSpec(1, self.index_dim, key=True, axis=axes.ONE)} if self.index_dim else tensors


class Step(struct.PyTreeNode):
    """Which tokens one call adds, built once and shared by all layers.

    A row's new tokens are the first `count` of the T given; the rest is padding. With `last_only`, queries come from each row's last
    new token alone, while all of them are written: what the last layer of a prefill needs.

    Where the slots of a cache are split over n devices (see `kv.parts`), each sees the same step with its own `stripe` i: it keeps the
    tokens at positions i, i + n, i + 2 n, ...
    """

    rows: jax.Array | None  # int32 [B'], the cache rows that the tokens go to; None: row b is row b
    start: jax.Array  # int32 [B'], tokens held before
    count: jax.Array  # int32 [B'], new tokens
    tables: tuple[jax.Array, ...] = ()  # int32 [B', M] per page group, the pages of these rows
    last_only: bool = struct.field(pytree_node=False, default=False)
    batch: int | None = struct.field(pytree_node=False, default=None)  # rows of the cache, if `rows` is given
    stripe: jax.Array | None = None  # int32 scalar, i
    stripes: int = struct.field(pytree_node=False, default=1)  # n
    spread: tuple[str, ...] = struct.field(pytree_node=False, default=())  # the mesh axes of the n devices

    @property
    def kept(self) -> "Step":
        """The step in numbers of the tokens that this stripe keeps: the first of them has position 0, the next 1."""
        if self.stripes == 1:
            return self
        start = self._kept_below(self.start)
        return self.replace(start=start, count=self._kept_below(self.start + self.count) - start)

    def _kept_below(self, position: jax.Array) -> jax.Array:
        """How many tokens before this position the stripe keeps."""
        return (position + self.stripes - 1 - self.stripe) // self.stripes

    def kept_limit(self, limit: jax.Array) -> jax.Array:
        """The last of the kept tokens at or before these positions; -1 for none."""
        return self._kept_below(limit + 1) - 1

    def kept_rows(self, rows: jax.Array) -> jax.Array:
        """Of rows [B', T, ...], those that the stripe keeps: [B', T / n rounded up, ...]."""
        if self.stripes == 1:
            return rows
        most = -(-rows.shape[1] // self.stripes)
        first = (self.stripe - self.start) % self.stripes  # [B']
        at = jnp.minimum(first[:, None] + self.stripes * jnp.arange(most), rows.shape[1] - 1)
        return jnp.take_along_axis(rows, at.reshape(*at.shape, *(1,) * (rows.ndim - 2)), axis=1)

    def axes(self, length: int, placement: Placement) -> tuple[str | None, str | None]:
        """The logical axes of rows and of `length` new tokens, for what is computed of them. A call for some rows has all of them on every
        device, and so have tokens that can't be split evenly."""
        return axes.BATCH if self.rows is None else None, axes.TOKENS if length % placement.shards(axes.TOKENS) == 0 else None

    def queried(self, x: jax.Array) -> jax.Array:
        """What the queries come from: [B', T, ...] -> the same, or [B', 1, ...]."""
        if not self.last_only:
            return x
        last = jnp.maximum(self.count - 1, 0)
        return jnp.take_along_axis(x, last.reshape(-1, *(1,) * (x.ndim - 1)), axis=1)

    def row(self, index: jax.Array) -> "Step":
        """The step of one of its rows."""

        def one(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, index, 1)

        rows = jnp.arange(self.start.shape[0], dtype=jnp.int32) if self.rows is None else self.rows
        return self.replace(rows=one(rows), start=one(self.start), count=one(self.count), tables=tuple(map(one, self.tables)))

    def positions(self, length: int) -> jax.Array:
        """Absolute position of each of `length` tokens: int32 [B', length]."""
        return self.start[:, None] + jnp.arange(length, dtype=jnp.int32)

    def real(self, length: int) -> jax.Array:
        """Which of `length` tokens are no padding: bool [B', length]."""
        return jnp.arange(length, dtype=jnp.int32) < self.count[:, None]

    def limit(self, length: int) -> jax.Array:
        """The last slot that each of `length` queries sees, its own; -1 for padding: int32 [B', length]."""
        if self.last_only:
            return jnp.where(self.count > 0, self.start + self.count - 1, -1)[:, None]
        return jnp.where(self.real(length), self.positions(length), -1)
