"""`native_matmul(x, w)`, `native_grouped_matmul(x, w, sizes)`: products with tiled weights, in C++ (`kernels/cpu/matmul.inc`)."""

import math

import jax
import jax.numpy as jnp

from kernels import cpu
from kernels.norm import Normed, plain
from kernels.tiled_array import CODES, ROWS, SIGN, TiledArray

GATES = {None: 0, "silu": 1, "gelu_tanh": 2}
FLOAT4_ZERO = 12  # as `kernels/cpu/matmul.inc` stores what stands for 0


def can_gate(w: TiledArray, activation: str | None) -> bool:
    """Whether `native_matmul` takes this gate."""
    return activation is not None and activation in GATES and w.outs[-1] % ROWS == 0


def native_matmul(x: jax.Array | Normed, w: TiledArray, residual: jax.Array | None = None, gate: str | None = None) -> jax.Array:
    """x times w over the last axis of both.

    Args:
      x: activations [..., I], any float dtype, computed with in f32; `Normed` ones are normed first.
      w: [O..., I].
      residual: [..., O...], added to the products.
      gate: a key of `GATES`: w is [2, F, I], and the result [..., F] of its first half is activated and multiplied with that of its second.

    Returns:
      [..., O...] in x's dtype.
    """
    out = _call(x, w, residual, gate)
    return out.reshape(*x.shape[:-1], *out.shape[1:]).astype(x.dtype)


def native_grouped_matmul(x: jax.Array, w: TiledArray, sizes: jax.Array, gate: str | None = None) -> jax.Array:
    """The first sizes[0] rows of x times w[0] over the last axis of both, the next sizes[1] times w[1] and so on. Matrices without rows are
    not read.

    Args:
      x: activations [M, I], as of `native_matmul`.
      w: [E, O..., I].
      sizes: int32 [E], of which the sum is at most M.
      gate: as of `native_matmul`, w being [E, 2, F, I].

    Returns:
      f32 [M, O...], or [M, F]; rows past the last matrix's are 0.
    """
    return _call(x, w, gate=gate, sizes=sizes)


def _call(
    x: jax.Array | Normed,
    w: TiledArray,
    residual: jax.Array | None = None,
    gate: str | None = None,
    sizes: jax.Array | None = None,
) -> jax.Array:
    """f32 [rows, O...], of all rows of x."""
    norm, eps = None, 0.0
    if isinstance(x, Normed) and (w.input_scales is not None or w.order is not None):
        x = plain(x)
    if isinstance(x, Normed):
        x, norm, eps = x.x, x.scale, x.eps
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).astype(jnp.float32)
    if w.input_scales is not None:
        rows = rows * w.input_scales.astype(jnp.float32)
    if w.order is not None:
        rows = jnp.take(rows, w.order, axis=-1)
    outs = w.outs if gate is None else w.outs[1:]
    if residual is not None:
        residual = residual.reshape(len(rows), math.prod(outs)).astype(jnp.float32)
    more = (w.zeros, w.offsets, w.super_scales, w.super_offsets, norm, residual, sizes)
    out = cpu.call(
        "diptych_matmul",
        jax.ShapeDtypeStruct((len(rows), math.prod(outs)), jnp.float32),
        rows,
        *w.planes,
        w.scales,
        *(array for array in more if array is not None),
        code=CODES[w.code],
        zero={"int8": SIGN + w.zero, "float4": FLOAT4_ZERO}.get(w.code, w.zero),
        present=sum(1 << bit for bit, array in enumerate(more) if array is not None),
        bits=w.rounds,
        gate=GATES[gate],
        eps=float(eps),
    )
    return out.reshape(len(rows), *outs)
