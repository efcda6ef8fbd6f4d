"""Number formats of what a cache holds: rows of H numbers per token and head, as the arrays that store them, and back.

A plain format stores each number. A quantized one stores, per group of channels of a token's head, small values and one scale:
x = value * scale. Nothing else of a token, and no other token, has a part in it, so a row's bits do not depend on how a prompt is cut.
"""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from runtime import UserError

INT8, INT4, FP8 = np.dtype(np.int8), np.dtype(ml_dtypes.int4), np.dtype(ml_dtypes.float8_e4m3fn)
QUANTIZED = {INT8: 127.0, INT4: 7.0, FP8: 448.0}  # the largest value that each is made to hold
SCALE = np.dtype(np.float16)  # 11 bits of precision; a scale below 6e-8 is 0, one above 65504 the largest
_BITS = {1: np.dtype(np.uint8), 2: np.dtype(np.uint16)}


@dataclasses.dataclass(frozen=True)
class Plain:
    """Numbers of one dtype.

    Attributes:
      dtype: theirs.
      as_bits: keep them as unsigned integers of the same size, bit for bit. The CPU backend widens an array of bf16 whole when it writes
        to it.
    """

    dtype: np.dtype
    as_bits: bool = False

    def parts(self, width: int) -> tuple[tuple[int, np.dtype], ...]:
        """Of each array that stores rows of `width` numbers: its numbers per row, and their dtype."""
        return ((width, _stored(self.dtype, self.as_bits)),)

    def encode(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """[..., H] -> the rows of each array, [..., numbers per row]."""
        return (_to_bits(x.astype(self.dtype), self.as_bits),)

    def decode(self, parts: tuple[jax.Array, ...], axis: int) -> jax.Array:
        """The numbers, from arrays with a row's numbers along `axis`."""
        return _from_bits(parts[0], self.dtype)


@dataclasses.dataclass(frozen=True)
class Quantized:
    """Values of 8 or 4 bits, and an f16 scale per group of channels.

    Attributes:
      dtype: int8, int4 (two per byte: channel i and channel i + group / 2 of a group share one) or float8_e4m3fn.
      group: channels that share a scale.
      as_bits: as of `Plain`.
    """

    dtype: np.dtype
    group: int
    as_bits: bool = False

    def parts(self, width: int) -> tuple[tuple[int, np.dtype], ...]:
        """As of `Plain`: values, then scales.

        Raises:
          UserError: `width` can't be split into groups.
        """
        if width % self.group:
            fitting = max(size for size in (16, 8, 4, 2) if width % size == 0) if width % 2 == 0 else None
            remedy = f"give a group of {fitting} (--kv_group={fitting}) or " if fitting and fitting < self.group else "use "
            raise UserError(
                f"heads of {width} channels can't be split into the groups of {self.group} that share a scale in a {self.dtype.name} "
                f"cache: {remedy}--kv=bf16"
            )
        values = (width // 2, np.dtype(np.uint8)) if self.dtype == INT4 else (width, _stored(self.dtype, self.as_bits))
        return values, (width // self.group, _stored(SCALE, self.as_bits))

    def encode(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """[..., H] -> values and scales, [..., numbers per row] each."""
        grouped = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, self.group)
        largest = QUANTIZED[self.dtype]
        amax = jnp.abs(grouped).max(-1, keepdims=True)
        scale = jnp.minimum(amax / largest, jnp.finfo(SCALE).max).astype(SCALE)
        wide = scale.astype(jnp.float32)
        values = jnp.clip(grouped / jnp.where(wide > 0, wide, 1.0), -largest, largest)
        if self.dtype == FP8:
            stored = _to_bits(values.astype(self.dtype), self.as_bits).reshape(x.shape)
        elif self.dtype == INT8:
            stored = jnp.round(values).astype(jnp.int8).reshape(x.shape)
        else:
            nibbles = (jnp.round(values) + 8).astype(jnp.uint8)
            low, high = jnp.split(nibbles, 2, axis=-1)
            stored = (low | (high << 4)).reshape(*x.shape[:-1], -1)
        return stored, _to_bits(scale[..., 0], self.as_bits)

    def decode(self, parts: tuple[jax.Array, ...], axis: int) -> jax.Array:
        """f32, from values and scales with a row's numbers along `axis`."""
        values, scales = parts
        axis %= values.ndim
        groups = scales.shape[axis]
        before, after = values.shape[:axis], values.shape[axis + 1 :]
        if self.dtype == INT4:
            shifts = jnp.asarray([0, 4], jnp.uint8).reshape(2, 1, *(1,) * len(after))
            nibbles = (values.reshape(*before, groups, 1, -1, *after) >> shifts) & 15  # a broadcast, since joining costs branches
            wide = nibbles.astype(jnp.int8).astype(jnp.float32) - 8
        elif values.dtype == jnp.uint8:
            wide = _widen_fp8(values)
        else:
            wide = values.astype(jnp.float32)
        wide = wide.reshape(*before, groups, -1, *after)
        scale = jnp.expand_dims(_from_bits(scales, SCALE).astype(jnp.float32), axis + 1)
        return (wide * scale).reshape(*before, -1, *after)


Codec = Plain | Quantized


def _widen_fp8(bits: jax.Array) -> jax.Array:
    """The f32 of e4m3's bits: placed as f16's, whose exponent is biased by 8 more. The CPU backend's own conversion takes many steps."""
    wide = bits.astype(jnp.uint16)
    half = jax.lax.bitcast_convert_type((wide & 0x80) << 8 | (wide & 0x7F) << 7, jnp.float16)
    return half.astype(jnp.float32) * 256.0


def _stored(dtype: np.dtype, as_bits: bool) -> np.dtype:
    is_float = jnp.issubdtype(dtype, jnp.floating)
    return _BITS[dtype.itemsize] if as_bits and is_float and dtype.itemsize in _BITS else dtype


def _to_bits(x: jax.Array, as_bits: bool) -> jax.Array:
    wanted = _stored(np.dtype(x.dtype), as_bits)
    return x if x.dtype == wanted else jax.lax.bitcast_convert_type(x, wanted)


def _from_bits(x: jax.Array, dtype: np.dtype) -> jax.Array:
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)
