"""`native_matmul(x, w)`: the product with tiled weights, in C++ (`kernels/cpu/matmul.inc`)."""

import math

import jax
import jax.numpy as jnp

from kernels import cpu
from kernels.tiled_array import CODES, SIGN, TiledArray

ACTIVATIONS = {None: 0, "blocks": 1, "int8": 2}


def native_matmul(x: jax.Array, w: TiledArray) -> jax.Array:
    """x times w over the last axis of both; args and result as of `kernels.quant_matmul`."""
    lead, outs = x.shape[:-1], w.outs
    rows = x.reshape(math.prod(lead), x.shape[-1]).astype(jnp.float32)
    if w.input_scales is not None:
        rows = rows * w.input_scales.astype(jnp.float32)
    if w.order is not None:
        rows = jnp.take(rows, w.order, axis=-1)
    more = (w.zeros, w.offsets, w.super_scales, w.super_offsets)
    present = sum(1 << bit for bit, array in enumerate(more) if array is not None)
    zero = {"int8": SIGN + w.zero, "float4": 12}.get(w.code, w.zero)
    out = cpu.call(
        "diptych_matmul",
        jax.ShapeDtypeStruct((len(rows), math.prod(outs)), jnp.float32),
        rows,
        *w.planes,
        w.scales,
        *(array for array in more if array is not None),
        code=CODES[w.code],
        zero=zero,
        present=present,
        activations=ACTIVATIONS[w.activations],
    )
    return out.reshape(*lead, *outs).astype(x.dtype)
