"""`native_matmul(x, w)`: the product with tiled weights, in C++ (`kernels/cpu/matmul.inc`)."""

import math

import jax
import jax.numpy as jnp

from kernels import cpu
from kernels.norm import Normed, plain
from kernels.tiled_array import CODES, ROWS, SIGN, TiledArray

GATES = {None: 0, "silu": 1, "gelu_tanh": 2}
FLOAT4_ZERO = 12  # as `kernels/cpu/matmul.inc` stores what stands for 0


def can_gate(w: TiledArray, activation: str) -> bool:
    """Whether `native_matmul` takes this gate."""
    return activation in GATES and w.outs[-1] % ROWS == 0


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
    lead, outs, norm, eps, dtype = x.shape[:-1], w.outs, None, 0.0, x.dtype
    if isinstance(x, Normed) and (w.input_scales is not None or w.order is not None):
        x = plain(x)
    if isinstance(x, Normed):
        x, norm, eps = x.x, x.scale, x.eps
    rows = x.reshape(math.prod(lead), x.shape[-1]).astype(jnp.float32)
    if w.input_scales is not None:
        rows = rows * w.input_scales.astype(jnp.float32)
    if w.order is not None:
        rows = jnp.take(rows, w.order, axis=-1)
    outs = outs if gate is None else outs[1:]
    if residual is not None:
        residual = residual.reshape(len(rows), math.prod(outs)).astype(jnp.float32)
    more = (w.zeros, w.offsets, w.super_scales, w.super_offsets, norm, residual)
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
    return out.reshape(*lead, *outs).astype(dtype)
