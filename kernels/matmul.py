"""`matmul(x, w)`: the product behind every projection, lowered for the platform that it is compiled for."""

import jax
import jax.numpy as jnp


def matmul(x: jax.Array, w: jax.Array, axes: int = 1) -> jax.Array:
    """x times w over the last `axes` axes of x and the first `axes` of w, accumulated in f32.

    Args:
      x: activations [..., I] (or [..., I1, I2] with axes=2), any float dtype.
      w: weights [I, O...]; may be stored in another float dtype than x, and is rounded to x's.

    Returns:
      [..., O...] in x's dtype.
    """
    dims = tuple(range(x.ndim - axes, x.ndim)), tuple(range(axes))
    return jax.lax.platform_dependent(x, w, cpu=lambda x, w: _cpu(x, w, dims), default=lambda x, w: _xla(x, w, dims))


def _xla(x, w, dims):
    """Operands in x's dtype (a bf16 dot reads bf16 on every accelerator), partial sums in f32."""
    return jax.lax.dot_general(x, w.astype(x.dtype), (dims, ((), ())), preferred_element_type=jnp.float32).astype(x.dtype)


def _cpu(x, w, dims):
    """XLA's CPU backend has a fast dot for f32 only: a bf16 one falls into a naive loop at 1 GB/s, so widen first.

    The values are the same as `_xla`'s: f32 holds every bf16 product exactly.
    """
    x_wide, w_wide = x.astype(jnp.float32), w.astype(x.dtype).astype(jnp.float32)
    return jax.lax.dot_general(x_wide, w_wide, (dims, ((), ())), preferred_element_type=jnp.float32).astype(x.dtype)
