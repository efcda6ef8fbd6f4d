"""`matmul(x, w)`: the product behind every projection, lowered for the platform that it is compiled for.

Weights stand as checkpoints store them, [out, in]: nothing is transposed at loading, and the CPU backend is fastest with such a weight as
the left operand.
"""

import jax
import jax.numpy as jnp


def matmul(x: jax.Array, w: jax.Array, axes: int = 1) -> jax.Array:
    """x times w over the last `axes` axes of both, accumulated in f32.

    Args:
      x: activations [..., I] (or [..., I1, I2] with axes=2), any float dtype.
      w: weights [O..., I]; may be stored in another float dtype than x, and is rounded to x's.

    Returns:
      [..., O...] in x's dtype.
    """
    return jax.lax.platform_dependent(x, w, cpu=lambda x, w: _cpu(x, w, axes), default=lambda x, w: _xla(x, w, axes))


def _contract(x, w, axes):
    return tuple(range(x.ndim - axes, x.ndim)), tuple(range(w.ndim - axes, w.ndim))


def _xla(x, w, axes):
    """Operands in x's dtype (a bf16 dot reads bf16 on every accelerator), partial sums in f32."""
    dims = _contract(x, w, axes), ((), ())
    return jax.lax.dot_general(x, w.astype(x.dtype), dims, preferred_element_type=jnp.float32).astype(x.dtype)


def _cpu(x, w, axes):
    """XLA's CPU backend has a fast dot for f32 only: a bf16 one falls into a naive loop at 1 GB/s, so widen first. The values are the
    same as `_xla`'s: f32 holds every bf16 product exactly.

    Its dot packs the right operand anew in each call. With a few rows that would be most of the work, were it the weight; with the weight
    left, 8 rows times [8192, 2048] read 28 GB/s instead of 11 to 15, and 128 rows take a third of the time.
    """
    wide = w.astype(x.dtype).astype(jnp.float32)
    contract = _contract(x, w, axes)[::-1]
    out = jax.lax.dot_general(wide, x.astype(jnp.float32), (contract, ((), ())))  # [O..., ...]
    outs = w.ndim - axes
    out = jax.lax.optimization_barrier(out)  # else the transpose is folded into the dot, which swaps its operands back
    return out.transpose(*range(outs, out.ndim), *range(outs)).astype(x.dtype)
