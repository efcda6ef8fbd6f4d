"""Queries, keys and values of one product: split, normed and rotated at once, or by the attention that reads them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from kernels.norm import rms_norm


def apply_rope(x: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the first elements of every head of x [B, T, heads, H], as many as the table has, by its position's angles.

    Args:
      table: cos and sin, f32 [B, T, 1, dim]: every angle for both of its elements i and i + dim/2, the sines of the first half negative.
    """
    cos, sin = table
    dim = cos.shape[-1]
    wide = x[..., :dim].astype(jnp.float32)
    turned = (wide * cos + jnp.roll(wide, dim // 2, axis=-1) * sin).astype(x.dtype)
    return turned if dim == x.shape[-1] else jnp.concatenate([turned, x[..., dim:]], axis=-1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Heads:
    """Queries, keys and values, not split, normed and rotated yet: attention that does so with what it reads takes them as they are.

    Attributes:
      qkv: [B, T, K, G + 2, H], of each KV head its queries, its key and its value.
      q_norm: the scale of queries' `rms_norm`, [H] or [K, G, H]; None: there is no norm.
      k_norm: likewise of keys, [H] or [K, H].
      table: as of `apply_rope`, for queries and keys; None: there is no rotation.
      eps: of the norms.
    """

    qkv: Any
    q_norm: Any
    k_norm: Any
    table: Any
    eps: float = dataclasses.field(metadata={"static": True})

    def split(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [B, T, K * G, H], keys and values [B, T, K, H]."""
        B, T, K, rows, H = self.qkv.shape
        G = rows - 2
        q, k, v = self.qkv[..., :G, :], self.qkv[..., G, :], self.qkv[..., G + 1, :]
        if self.q_norm is not None:
            q = rms_norm(q, self.q_norm, self.eps)
        if self.k_norm is not None:
            k = rms_norm(k, self.k_norm, self.eps)
        q = q.reshape(B, T, K * G, H)
        return (q, k, v) if self.table is None else (apply_rope(q, self.table), apply_rope(k, self.table), v)
