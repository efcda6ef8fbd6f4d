"""Root mean square norm, done at once or left to the product that reads it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / sqrt(mean(x^2) + eps) * scale over as many last axes as scale has, in f32 and in x's dtype again (Zhang & Sennrich 2019,
    arXiv 1910.07467)."""
    wide = x.astype(jnp.float32)
    mean = jnp.mean(wide * wide, axis=tuple(range(-scale.ndim, 0)), keepdims=True)
    return (wide * jax.lax.rsqrt(mean + eps) * scale).astype(x.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Normed:
    """`rms_norm(x, scale, eps)`, not done yet: products that norm what they read take it as it is.

    Attributes:
      x: [..., D].
      scale: f32 [D].
    """

    x: Any
    scale: Any
    eps: float = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape

    @property
    def dtype(self) -> jnp.dtype:
        return self.x.dtype


def plain(x: jax.Array | Normed) -> jax.Array:
    """The values."""
    return rms_norm(x.x, x.scale, x.eps) if isinstance(x, Normed) else x
