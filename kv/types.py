"""What a model hands to a cache, and what it must say about itself."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from kernels import Scoring


class Query(NamedTuple):
    """Queries of the new tokens."""

    q: jax.Array  # [B, T, N, H]
    index_q: jax.Array | None = None  # [B, T, Hi, Di], of an indexer
    index_w: jax.Array | None = None  # [B, T, Hi], the weight of each of its heads


class KeyValue(NamedTuple):
    """Keys and values of the new tokens."""

    k: jax.Array  # [B, T, K, H]
    v: jax.Array  # [B, T, K, Hv]
    index_k: jax.Array | None = None  # [B, T, 1, Di], of an indexer


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """How a layer attends; static. Attention is causal: a query sees its own slot and all before it."""

    scale: float  # multiplies q . k
    window: int | None = None  # slots that a query sees, its own included
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    top_k: int | None = None  # slots that a query sees at most, the best by its indexer

    def scoring(self, sinks: jax.Array | None, allowed: jax.Array | None) -> Scoring:
        """What `kernels.attention` wants to know."""
        return Scoring(scale=self.scale, window=self.window, softcap=self.softcap, sinks=sinks, allowed=allowed)


@dataclasses.dataclass(frozen=True)
class LayerSpec:
    """What one layer keeps per token; layers with equal specs share a stack."""

    num_kv_heads: int  # K
    key_dim: int  # H
    value_dim: int  # Hv
    index_dim: int = 0  # Di: of an indexer's key; 0: there is none


@dataclasses.dataclass(frozen=True)
class Format:
    """How a cache is stored.

    Attributes:
      dtype: of keys and values.
      key_order: of a row's axes in memory: S slots, K heads, H elements of a head.
      value_order: likewise. On CPU keys are "KHS" and values "KSH": both products of attention then read their right operand
        as it lies (several times faster for a few queries than "KSH" keys). On TPU, whose tiles are the last two axes, "SKH"
        appends without a temporary of the cache's size.
      as_bits: store bf16 as uint16, bit for bit. The CPU backend widens a bf16 array whole when it writes to it.
    """

    dtype: np.dtype = np.dtype(np.float32)  # noqa: RUF009 - immutable
    key_order: str = "KHS"
    value_order: str = "KSH"
    as_bits: bool = False

    def __post_init__(self):
        for name in ("key_order", "value_order"):
            if sorted(value := getattr(self, name)) != ["H", "K", "S"]:
                raise ValueError(f"{name}={value!r} is not an order of the axes S, K and H")

    @classmethod
    def for_platform(cls, platform: str, dtype: np.dtype) -> "Format":
        """The memory order that suits `cpu`, `gpu` or `tpu`."""
        if platform == "cpu":
            return cls(np.dtype(dtype), as_bits=dtype == jnp.bfloat16)
        return cls(np.dtype(dtype), "SKH", "SKH")


class Step(struct.PyTreeNode):
    """Which tokens one call adds, built once and shared by all layers.

    A row's new tokens are the first `count` of the T given; the rest is padding. With `last_only`, queries come from each row's last
    new token alone, while all of them are written: what the last layer of a prefill needs.
    """

    rows: jax.Array | None  # int32 [B'], the cache rows that the tokens go to; None: row b is row b
    start: jax.Array  # int32 [B'], tokens held before
    count: jax.Array  # int32 [B'], new tokens
    last_only: bool = struct.field(pytree_node=False, default=False)

    def queried(self, x: jax.Array) -> jax.Array:
        """What the queries come from: [B', T, ...] -> the same, or [B', 1, ...]."""
        if not self.last_only:
            return x
        last = jnp.maximum(self.count - 1, 0)
        return jnp.take_along_axis(x, last.reshape(-1, *(1,) * (x.ndim - 1)), axis=1)

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
