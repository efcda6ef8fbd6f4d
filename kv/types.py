"""What a model hands to a cache, and what it must say about itself."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct


class Query(NamedTuple):
    """Queries of the new tokens."""

    q: jax.Array  # [B, T, N, H]


class KeyValue(NamedTuple):
    """Keys and values of the new tokens."""

    k: jax.Array  # [B, T, K, H]
    v: jax.Array  # [B, T, K, Hv]


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """How a layer attends; static. Attention is causal: a query sees its own slot and all before it."""

    scale: float  # multiplies q . k


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What one layer keeps per token; layers with equal specs share a stack."""

    num_kv_heads: int  # K
    key_dim: int  # H
    value_dim: int  # Hv


@dataclasses.dataclass(frozen=True)
class Format:
    """How a cache is stored.

    Attributes:
      dtype: of keys and values.
      slot_axis: where the slots stand in memory, 3 for [L, B, K, S, H], 2 for [L, B, S, K, H]. On CPU the former reads 1.3 to
        1.7 times faster; on TPU, whose tiles are the last two axes, the latter appends without a temporary of the cache's size.
    """

    dtype: np.dtype = np.dtype(np.float32)  # noqa: RUF009 - immutable
    slot_axis: int = 3

    @classmethod
    def for_platform(cls, platform: str, dtype: np.dtype) -> "Format":
        """The memory order that suits `cpu`, `gpu` or `tpu`."""
        return cls(dtype=np.dtype(dtype), slot_axis=3 if platform == "cpu" else 2)


class Step(struct.PyTreeNode):
    """Which tokens one call adds, built once and shared by all layers.

    A row's new tokens are the first `count` of the T given; the rest is padding.
    """

    rows: jax.Array | None  # int32 [B'], the cache rows that the tokens go to; None: row b is row b
    start: jax.Array  # int32 [B'], tokens held before
    count: jax.Array  # int32 [B'], new tokens

    def positions(self, length: int) -> jax.Array:
        """Absolute position of each of `length` tokens: int32 [B', length]."""
        return self.start[:, None] + jnp.arange(length, dtype=jnp.int32)

    def limit(self, length: int) -> jax.Array:
        """The last slot that each token sees, its own; -1 for padding: int32 [B', length]."""
        real = jnp.arange(length, dtype=jnp.int32) < self.count[:, None]
        return jnp.where(real, self.positions(length), -1)
