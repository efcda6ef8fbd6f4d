"""`matmul(x, w)`: the product behind every projection, lowered for the platform that it is compiled for.

Weights stand as checkpoints store them, [out, in]: nothing is transposed at loading, and the CPU backend is fastest with such a weight as
the left operand.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from kernels.native_matmul import can_gate, native_matmul
from kernels.norm import Normed, plain
from kernels.observed import Observed
from kernels.operands import cpu_operands
from kernels.quant_array import JoinedArray, QuantArray, Weight
from kernels.quant_matmul import quant_matmul
from kernels.tiled_array import TiledArray
from kernels.transposed_array import TransposedArray


def matmul(x: jax.Array | Normed, w: Weight | Observed, axes: int = 1, residual: jax.Array | None = None) -> jax.Array:
    """x times w over the last `axes` axes of both, accumulated in f32.

    Args:
      x: activations [..., I] (or [..., I1, I2] with axes=2), any float dtype; `Normed` ones are normed first.
      w: weights [O..., I]; may be stored in another float dtype than x, and is rounded to x's. A packed one has its inputs in one axis,
        and is read packed; with `activations="int8"` each token of x is rounded to 8 bits.
      residual: [..., O...], added to the products.

    Returns:
      [..., O...] in x's dtype.
    """
    if isinstance(w, TiledArray):
        given = x if isinstance(x, Normed) else x.reshape(*x.shape[: x.ndim - axes], -1)
        return native_matmul(given, w, residual)
    x = plain(x)
    out = _matmul(x, w, axes)
    return out if residual is None else out + residual


def gated_matmul(x: jax.Array | Normed, w: Weight | Observed, activation: str, activate: Callable[..., jax.Array]) -> jax.Array:
    """What goes on into an MLP's down projection: `activate(gate, up)`, the two being x times the halves of w.

    Args:
      x: as of `matmul`.
      w: [2, F, I], gate and up.
      activation: the name of what `activate` does, for the kernels that do it themselves.
      activate: (gate, up), both [..., F] -> [..., F].

    Returns:
      [..., F] in x's dtype.
    """
    if isinstance(w, TiledArray) and can_gate(w, activation):
        return native_matmul(x, w, gate=activation)
    gate_up = matmul(x, w)
    return activate(gate_up[..., 0, :], gate_up[..., 1, :]).astype(x.dtype)


def _matmul(x: jax.Array, w: Weight | Observed, axes: int) -> jax.Array:
    if isinstance(w, Observed):
        w.see(x.reshape(*x.shape[: x.ndim - axes], -1))
        w = w.weight
    if isinstance(w, JoinedArray):
        return jnp.concatenate([matmul(x, part, axes) for part in w.parts], x.ndim - axes + w.axis)
    if isinstance(w, QuantArray | TransposedArray):
        return quant_matmul(x.reshape(*x.shape[: x.ndim - axes], -1), w)
    return jax.lax.platform_dependent(x, w, cpu=lambda x, w: _cpu(x, w, axes), default=lambda x, w: _xla(x, w, axes))


def _contract(x, w, axes):
    return tuple(range(x.ndim - axes, x.ndim)), tuple(range(w.ndim - axes, w.ndim))


def _xla(x, w, axes):
    """Operands in x's dtype (a bf16 dot reads bf16 on every accelerator), partial sums in f32."""
    dims = _contract(x, w, axes), ((), ())
    return jax.lax.dot_general(x, w.astype(x.dtype), dims, preferred_element_type=jnp.float32).astype(x.dtype)


def _cpu(x, w, axes):
    """The weight is the left operand: XLA's CPU dot packs the right one anew in each call, which with a few rows would be most of the work,
    were it the weight. With the weight left, 8 rows times [8192, 2048] read 28 GB/s instead of 11 to 15, and 128 rows take a third of the
    time."""
    left, right = cpu_operands(w.astype(x.dtype), x)
    outs, lead = w.ndim - axes, x.ndim - axes
    lone = left.dtype == jnp.bfloat16 and lead > 0 and math.prod(x.shape[:lead]) == 1
    if lone:
        right = jnp.concatenate([right, right])  # one row of bf16 would take a naive loop
    contract = _contract(x, w, axes)[::-1]
    out = jax.lax.dot_general(left, right, (contract, ((), ())), preferred_element_type=jnp.float32)  # [O..., ...]
    out = jax.lax.optimization_barrier(out)  # else the transpose is folded into the dot, which swaps its operands back
    out = out.transpose(*range(outs, out.ndim), *range(outs)).astype(x.dtype)
    return out[:1] if lone else out


def head_matmul(x: jax.Array, w: jax.Array, axis: int) -> jax.Array:
    """Every head's own product, accumulated in f32.

    Args:
      x: activations [B, T, N, I], any float dtype.
      w: a matrix per head, [N, I, O] with axis=1 or [N, O, I] with axis=2: `axis` is the one to sum over. Rounded to x's dtype.

    Returns:
      [B, T, N, O] in x's dtype.
    """

    def default(x, w):
        spec = {1: "btni,nio->btno", 2: "btni,noi->btno"}[axis]
        return jnp.einsum(spec, x, w.astype(x.dtype), preferred_element_type=jnp.float32).astype(x.dtype)

    def cpu(x, w):  # the weight on the side where it is read as it lies; f32, since the backend has bf16 products for some layouts only
        B, T, N, _ = x.shape
        rows, wide = x.reshape(B * T, N, -1).astype(jnp.float32), w.astype(x.dtype).astype(jnp.float32)
        left, right = (rows.swapaxes(0, 1), wide) if axis == 1 else (wide, rows.transpose(1, 2, 0))
        out = jax.lax.optimization_barrier(jnp.matmul(left, right))  # [N, B * T, O] or [N, O, B * T]
        out = out.swapaxes(0, 1) if axis == 1 else out.transpose(2, 0, 1)
        return out.reshape(B, T, N, -1).astype(x.dtype)

    return jax.lax.platform_dependent(x, w, cpu=cpu, default=default)
