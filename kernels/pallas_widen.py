"""What Pallas kernels widen packed weights with: plain arithmetic on 32-bit numbers, which TPUs and GPUs have alike.

The formula and its order are `QuantArray.widen`'s, so that a kernel's weights are the same numbers, before they are rounded to the
activations' dtype. Small numbers are made of integers: a TPU flushes f32's subnormals, which f16's and e4m3's own would pass through.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from kernels.quant_array import EXPONENTS, float4_values
from kernels.transposed_array import GROUPED, TransposedArray

Spread = Callable[[str], jax.Array | None]  # the name of an array in GROUPED -> its numbers, f32, to be broadcast to codes


def scales_sums(w: TransposedArray) -> bool:
    """Whether a scale per output multiplies the sums, and not the weights."""
    return w.groups == 1 and w.offsets is None


def widen_codes(codes: jax.Array, code: str) -> jax.Array:
    """f32 of codes, int32: as they are, or the bits of floats."""
    if code == "float4":
        return float4_values(codes)
    return _small_float(codes, exponent=4, mantissa=3) if code == "float8" else codes.astype(jnp.float32)


def widen_numbers(array: jax.Array, kind: str) -> jax.Array:
    """f32 of what `TransposedArray` keeps of scales, zeros and offsets; `kind` is their own dtype's name."""
    if kind == "float16":
        return _small_float(array.astype(jnp.int32) & 0xFFFF, exponent=5, mantissa=10)
    if kind == EXPONENTS.name:
        exponents = array.astype(jnp.int32)
        return jax.lax.bitcast_convert_type(jnp.where(exponents == 0, 1 << 22, exponents << 23), jnp.float32)
    if array.dtype.itemsize == 1:
        array = array.astype(jnp.int32)
    return array.astype(jnp.float32)


def widen_weights(codes: jax.Array, w: TransposedArray, spread: Spread) -> jax.Array:
    """f32 weights of codes, int32 of one shape; scales that multiply the sums are left out."""
    wide = widen_codes(codes, w.code)
    if w.zeros is not None:
        wide = wide - spread("zeros")
    if w.zero:
        wide = wide - w.zero
    if not scales_sums(w):
        scales = spread("scales")
        wide = wide * (scales if w.super_scales is None else scales * spread("super_scales"))
    if w.offsets is not None:
        offsets = spread("offsets")
        wide = wide + offsets if w.super_offsets is None else wide - offsets * spread("super_offsets")
    return wide


def grouped_arrays(w: TransposedArray) -> dict[str, jax.Array]:
    """Those of `GROUPED` that there are."""
    return {name: array for name in GROUPED if (array := getattr(w, name)) is not None}


def _small_float(bits: jax.Array, exponent: int, mantissa: int) -> jax.Array:
    """f32 of the bits of a float with a sign and so many bits, int32; infinities and NaN aside."""
    bias = 2 ** (exponent - 1) - 1
    magnitude = bits & (2 ** (exponent + mantissa) - 1)
    normal = jax.lax.bitcast_convert_type((magnitude << (23 - mantissa)) + ((127 - bias) << 23), jnp.float32)
    small = magnitude.astype(jnp.float32) * 2.0 ** (1 - bias - mantissa)
    wide = jnp.where(magnitude < 2**mantissa, small, normal)
    return jnp.where(bits & (2 ** (exponent + mantissa)) != 0, -wide, wide)
