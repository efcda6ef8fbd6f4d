"""`matmul(x, w)`: the product behind every projection, lowered for the platform that it is compiled for."""

import math

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


def matmul_rows(x: jax.Array, w: jax.Array) -> jax.Array:
    """x times the rows of w: what a tied head does with the embedding.

    Args:
      x: [..., D], any float dtype.
      w: [V, D]; may be stored in another float dtype than x, and is rounded to x's.

    Returns:
      [..., V] in x's dtype, accumulated in f32.
    """
    dims = (x.ndim - 1,), (1,)
    return jax.lax.platform_dependent(x, w, cpu=_rows_cpu, default=lambda x, w: _xla(x, w, dims))


def _rows_cpu(x, w):
    """A few rows of x are slow against one tall w (8 rows, 49,152 x 576: 17 ms); against w in a dozen pieces, each the left operand of a
    product of its own, they are not (6 ms)."""
    rows = math.prod(x.shape[:-1])
    pieces = next(count for count in (12, 8, 6, 4, 3, 2, 1) if w.shape[0] % count == 0)
    if rows == 1 or rows > 64 or pieces == 1:
        return _cpu(x, w, ((x.ndim - 1,), (1,)))
    wide = jnp.broadcast_to(x.reshape(rows, -1).astype(jnp.float32), (pieces, rows, x.shape[-1]))
    tall = w.reshape(pieces, -1, w.shape[1]).astype(x.dtype).astype(jnp.float32)
    out = jax.lax.dot_general(tall, wide, (((2,), (2,)), ((0,), (0,))))  # [pieces, V / pieces, rows]
    return out.transpose(2, 0, 1).reshape(*x.shape[:-1], w.shape[0]).astype(x.dtype)


def _xla(x, w, dims):
    """Operands in x's dtype (a bf16 dot reads bf16 on every accelerator), partial sums in f32."""
    return jax.lax.dot_general(x, w.astype(x.dtype), (dims, ((), ())), preferred_element_type=jnp.float32).astype(x.dtype)


def _cpu(x, w, dims):
    """XLA's CPU backend has a fast dot for f32 only: a bf16 one falls into a naive loop at 1 GB/s, so widen first.

    The values are the same as `_xla`'s: f32 holds every bf16 product exactly.
    """
    x_wide, w_wide = x.astype(jnp.float32), w.astype(x.dtype).astype(jnp.float32)
    return jax.lax.dot_general(x_wide, w_wide, (dims, ((), ())), preferred_element_type=jnp.float32).astype(x.dtype)
