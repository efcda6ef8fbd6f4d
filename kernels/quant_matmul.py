"""`quant_matmul(x, w)`: the product with packed weights, which are read packed.

Each lowering widens a part of the weight as it multiplies it: an accelerator's compiler fuses that into the product's operand, or a Pallas
kernel does it for a `TransposedArray`; the CPU goes through blocks of rows, small enough to stay in its cache.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from kernels.grouped_matmul import grouped_matmul
from kernels.operands import cpu_operands
from kernels.parted_matmul import parted_matmul
from kernels.quant_array import QuantArray
from kernels.transposed_array import TransposedArray

_BLOCK = 2**20  # weights that the CPU widens at once: 4 MiB
_LEAST_ROWS = 4  # of int8 products: with fewer, XLA's CPU dot takes a naive loop
BARE = 127.0  # the largest code of an activation


def quant_matmul(x: jax.Array, w: QuantArray | TransposedArray) -> jax.Array:
    """x times w over the last axis of both.

    Args:
      x: activations [..., I], any float dtype.
      w: [O..., I].

    Returns:
      [..., O...] in x's dtype. Sums are f32 (int32 of int8 products).
    """
    lead, outs = x.shape[:-1], w.shape[:-1]
    if w.input_scales is not None:
        x = (x.astype(jnp.float32) * w.input_scales.astype(jnp.float32)).astype(x.dtype)
    if w.order is not None:
        x = jnp.take(x, w.order, axis=-1)
    w = w.replace(input_scales=None, order=None)
    rows = x.reshape(math.prod(lead), x.shape[-1])
    if isinstance(w, TransposedArray):
        one = jax.tree.map(lambda array: array[None], w)
        out = grouped_matmul(rows, one, jnp.full(1, len(rows), jnp.int32))
    elif w.activations:
        out = _int8(rows, w)
    else:
        out = jax.lax.platform_dependent(rows, w, cpu=_widened_cpu, default=parted_matmul)
    return out.reshape(*lead, *outs).astype(x.dtype)


def _widened_cpu(x: jax.Array, w: QuantArray) -> jax.Array:
    """f32 [R, O...]; the operands are in x's dtype, the weight is on the left, as in `kernels.matmul`."""
    if len(x) == 1 and x.dtype == jnp.bfloat16:
        x = x.astype(jnp.float32)  # one row of bf16 would take a naive loop; f32 holds every product exactly

    def multiply(part: QuantArray) -> jax.Array:
        left, right = cpu_operands(part.widen(x.dtype), x)
        out = jax.lax.dot_general(left, right, (((part.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        return jax.lax.optimization_barrier(out)

    out = multiply(w) if w.spread else _in_blocks(multiply, w)  # [O..., R]
    return jnp.moveaxis(out, -1, 0)


def _in_blocks(multiply: Callable[[QuantArray], jax.Array], w: QuantArray) -> jax.Array:
    """`multiply(w)`, [O..., R], for some rows at a time, so that their wide form stays in the cache.

    At least two blocks: outside of a loop nothing would keep XLA from widening the weights of all layers ahead of the first product.
    """
    outs = math.prod(w.shape[:-1])
    flat = w.map_rows(lambda array: array.reshape(outs, array.shape[-1]))
    least = max(2, -(-outs * w.shape[-1] // _BLOCK))
    count = next((count for count in range(least, 2 * least + 1) if outs % count == 0), least)
    block = outs // count
    whole = flat.map_rows(lambda array: array[: count * block].reshape(count, block, array.shape[-1]))
    out = jax.lax.map(multiply, whole)  # [count, block, R]
    out = out.reshape(count * block, out.shape[-1])
    if count * block < outs:
        out = jnp.concatenate([out, multiply(flat[count * block :])])
    return out.reshape(*w.shape[:-1], out.shape[-1])


def round_activations(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int8 [R, I] and f32 scales [R, 1]: x = codes * scale, a scale for every token."""
    wide = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(wide), axis=-1, keepdims=True) / BARE
    return jnp.round(wide / jnp.where(scales > 0, scales, 1)).astype(jnp.int8), scales


def _int8(x: jax.Array, w: QuantArray) -> jax.Array:
    """f32 [R, O...]: integers times integers. Weights have a scale per row, and no more (`Scheme`'s w8a8)."""
    codes, scales = round_activations(x)
    out = jax.lax.platform_dependent(codes, w.planes[0], cpu=_int8_cpu, default=_int8_dot)  # int32 [R, O...]
    per_token = scales.reshape(-1, *(1,) * (w.ndim - 1))
    return out.astype(jnp.float32) * per_token * w.scales[..., 0].astype(jnp.float32)


def _int8_dot(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.lax.dot_general(x, w, (((1,), (w.ndim - 1,)), ((), ())), preferred_element_type=jnp.int32)


def _int8_cpu(x: jax.Array, w: jax.Array) -> jax.Array:
    padded = jnp.pad(x, ((0, max(0, _LEAST_ROWS - len(x))), (0, 0)))
    out = jax.lax.dot_general(w, padded, (((w.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
    return jnp.moveaxis(jax.lax.optimization_barrier(out), -1, 0)[: len(x)]
