"""Number formats of what a cache holds: rows of H numbers per token and head, as the arrays that store them, and back.

A plain format stores each number. A quantized one stores, per group of channels of a token's head, small values and one scale:
x = value * scale, and for 4 bits, where keys that lie on one side of 0 would waste half of the 16 values, a minimum: x = value * scale +
minimum. Nothing else of a token, and no other token, has a part in it, so a row's bits do not depend on how a prompt is cut.
"""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from kernels import widen_float8
from runtime import UserError

INT8, INT4, FP8 = np.dtype(np.int8), np.dtype(ml_dtypes.int4), np.dtype(ml_dtypes.float8_e4m3fn)
QUANTIZED = {INT8: 127.0, INT4: 15.0, FP8: 448.0}  # the largest value that each is made to hold; the least is its negative, or 0 (int4)
SCALE = np.dtype(np.float16)  # of scales and minima: 11 bits of precision; below 6e-8 it is 0, above 65504 the largest
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
    """Values of 8 or 4 bits, and an f16 scale per group of channels; of 4 bits also an f16 minimum.

    Attributes:
      dtype: int8, int4 (two per byte: channel i and channel i + group / 2 of a group share one) or float8_e4m3fn.
      group: channels that share a scale.
      as_bits: as of `Plain`.
    """

    dtype: np.dtype
    group: int
    as_bits: bool = False

    def parts(self, width: int) -> tuple[tuple[int, np.dtype], ...]:
        """As of `Plain`: values, then scales (and after them, in the same array, minima).

        Raises:
          UserError: `width` can't be split into groups.
        """
        if width % self.group:
            fitting = max(size for size in (16, 8, 4, 2) if width % size == 0) if width % 2 == 0 else None
            remedy = f"give a group of {fitting} (--kv_group={fitting}) or " if fitting and fitting < self.group else "use "
            raise UserError(
                f"heads of {width} channels can't be split into the groups of {self.group} that share a scale in a cache of "
                f"{self.dtype.name}: {remedy}--kv=bf16"
            )
        scales = width // self.group, _stored(SCALE, self.as_bits)
        if self.dtype == INT4:
            return (width // 2, np.dtype(np.uint8)), (2 * scales[0], scales[1])
        return (width, _stored(self.dtype, self.as_bits)), scales

    def encode(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """[..., H] -> values and scales, [..., numbers per row] each."""
        grouped = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, self.group)
        if self.dtype == INT4:
            return self._encode_int4(grouped)
        largest = QUANTIZED[self.dtype]
        scale = _scale(jnp.abs(grouped).max(-1, keepdims=True) / largest)
        values = jnp.clip(grouped / _divisor(scale), -largest, largest)
        if self.dtype == INT8:
            values = jnp.round(values)
        return _to_bits(values.astype(self.dtype), self.as_bits).reshape(x.shape), _to_bits(scale[..., 0], self.as_bits)

    def _encode_int4(self, grouped: jax.Array) -> tuple[jax.Array, jax.Array]:
        largest, lead = QUANTIZED[INT4], grouped.shape[:-2]
        minimum = _scale(grouped.min(-1, keepdims=True))
        scale = _scale((grouped.max(-1, keepdims=True) - minimum.astype(jnp.float32)) / largest)
        values = jnp.round((grouped - minimum.astype(jnp.float32)) / _divisor(scale))
        low, high = jnp.split(jnp.clip(values, 0, largest).astype(jnp.uint8), 2, axis=-1)
        numbers = jnp.concatenate([scale[..., 0], minimum[..., 0]], axis=-1)
        return (low | (high << 4)).reshape(*lead, -1), _to_bits(numbers, self.as_bits)

    def decode(self, parts: tuple[jax.Array, ...], axis: int) -> jax.Array:
        """f32, from values and scales with a row's numbers along `axis`."""
        values, numbers = parts
        axis %= values.ndim
        before, after = values.shape[:axis], values.shape[axis + 1 :]
        numbers = _from_bits(numbers, SCALE).astype(jnp.float32)
        groups = numbers.shape[axis] // (2 if self.dtype == INT4 else 1)
        if self.dtype == INT4:
            shifts = jnp.asarray([0, 4], jnp.uint8).reshape(2, 1, *(1,) * len(after))
            nibbles = (values.reshape(*before, groups, 1, -1, *after) >> shifts) & 15  # a broadcast, since joining costs branches
            wide = nibbles.astype(jnp.float32)
        elif values.dtype == jnp.uint8:
            wide = widen_float8(values)
        else:
            wide = values.astype(jnp.float32)
        wide = wide.reshape(*before, groups, -1, *after)
        scaled = wide * jnp.expand_dims(jax.lax.slice_in_dim(numbers, 0, groups, axis=axis), axis + 1)
        if self.dtype == INT4:
            scaled += jnp.expand_dims(jax.lax.slice_in_dim(numbers, groups, 2 * groups, axis=axis), axis + 1)
        return scaled.reshape(*before, -1, *after)


Codec = Plain | Quantized


def _scale(x: jax.Array) -> jax.Array:
    """f16, within its range."""
    largest = float(jnp.finfo(SCALE).max)
    return jnp.clip(x, -largest, largest).astype(SCALE)


def _divisor(scale: jax.Array) -> jax.Array:
    """A scale to divide by: 1 for 0, where all values are next to nothing."""
    wide = scale.astype(jnp.float32)
    return jnp.where(wide > 0, wide, 1.0)


def _stored(dtype: np.dtype, as_bits: bool) -> np.dtype:
    is_float = jnp.issubdtype(dtype, jnp.floating)
    return _BITS[dtype.itemsize] if as_bits and is_float and dtype.itemsize in _BITS else dtype


def _to_bits(x: jax.Array, as_bits: bool) -> jax.Array:
    wanted = _stored(np.dtype(x.dtype), as_bits)
    return x if x.dtype == wanted else jax.lax.bitcast_convert_type(x, wanted)


def _from_bits(x: jax.Array, dtype: np.dtype) -> jax.Array:
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)
