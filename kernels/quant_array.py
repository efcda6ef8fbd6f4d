"""`QuantArray`: a matrix of weights in few bits, as the arrays that store it, and back.

    w = (code - zero) * scale + offset

holds for each weight of a row's group of neighbours along I, the axis that products sum over. Every known format is this formula with
some of its terms: per channel (one group), GPTQ and AWQ (integer zeros), GGUF's Q4_0 (a fixed zero) and Q4_1 (offsets), its Q4_K and
Q6_K (scales that are small integers times a scale of their own), fp8 and MXFP4 (codes that are floats).
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

RUN = 32  # codes that share bytes: every group is made of whole runs, or of halves of one
PLANES = {
    "int8": (8,),
    "uint2": (2,),
    "uint3": (2, 1),
    "uint4": (4,),
    "uint5": (4, 1),
    "uint6": (4, 2),
    "float8": (8,),
    "float4": (4,),
}  # bits, low first
WHOLE = ("int8", "float8")  # codes that are a byte each
FLOAT4 = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)  # the 16 values of E2M1, by code
FLOAT8 = np.dtype(ml_dtypes.float8_e4m3fn)
EXPONENTS = np.dtype(ml_dtypes.float8_e8m0fnu)  # MXFP4's scales


class Packed:
    """What all kinds of packed weights tell as an array would; `shape` is their own."""

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self))

    def __len__(self) -> int:
        return self.shape[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantArray(Packed):
    """[O..., I]. Arrays have the axes O..., and in place of I:

    Attributes:
      planes: the codes' bits, [..., I * bits / 8] each: those of `PLANES[code]`, several codes to a byte (`pack`). Codes of a byte are
        int8, or the bits of a float8_e4m3fn, uint8: the CPU backend widens an array of such floats whole when it takes parts of it.
      scales: [..., groups]: floats in the dtype of the file they came from; small integers where there are `super_scales`.
      zeros: [..., groups], integers: the code that stands for 0, where groups differ in it. uint8, or int8 with int8 codes.
      offsets: [..., groups], added: floats, or small integers where there are `super_offsets`, which are subtracted.
      super_scales: [..., groups / n], floats: multiply n groups' scales.
      super_offsets: [..., groups / n], floats, which multiply the offsets.
      input_scales: [I], floats: multiply all weights of an input (AWQ). Products multiply their activations with them.
      order: int32 [I]: the input that each stored column belongs to (GPTQ's act-order); None: as they are.
      code: what a code is; a key of `PLANES`. Static, as what follows.
      zero: the code that stands for 0 in all groups.
      activations: "int8": products round their activations to 8 bits, with a scale per token; None: they don't.
      spread: the arrays are split over devices, so that no product may go through their rows in turns.
    """

    planes: tuple[Any, ...]
    scales: Any
    zeros: Any = None
    offsets: Any = None
    super_scales: Any = None
    super_offsets: Any = None
    input_scales: Any = None
    order: Any = None
    code: str = dataclasses.field(default="int8", metadata={"static": True})
    zero: int = dataclasses.field(default=0, metadata={"static": True})
    activations: str | None = dataclasses.field(default=None, metadata={"static": True})
    spread: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.planes[0].shape[:-1], self.planes[0].shape[-1] * 8 // PLANES[self.code][0])

    def replace(self, **changes: Any) -> "QuantArray":
        return dataclasses.replace(self, **changes)

    def map_rows(self, change: Callable[[Any], Any]) -> "QuantArray":
        """With `change` made of every array that has the axes O...; it must leave the last axis alone."""
        rows = jax.tree.map(change, self.replace(order=None, input_scales=None))
        return rows.replace(order=self.order, input_scales=self.input_scales)

    def widen(self, dtype: jnp.dtype = jnp.float32) -> jax.Array:
        """The weights [O..., I], computed in f32 and rounded once."""
        wide = widen_codes(self.planes, self.code)
        grouped = wide.reshape(*wide.shape[:-1], self.scales.shape[-1], -1)  # [..., groups, weights of one]
        if self.zeros is not None:
            grouped -= self.zeros[..., None].astype(jnp.float32)
        if self.zero:
            grouped -= self.zero
        grouped *= scaled(self.scales, self.super_scales)[..., None]
        if self.offsets is not None:
            offsets = scaled(self.offsets, self.super_offsets)[..., None]
            grouped = grouped + offsets if self.super_offsets is None else grouped - offsets
        wide = grouped.reshape(wide.shape)
        if self.order is not None:
            wide = jnp.zeros_like(wide).at[..., self.order].set(wide)
        return (wide if self.input_scales is None else wide * self.input_scales.astype(jnp.float32)).astype(dtype)

    def take_rows(self, indices: jax.Array) -> "QuantArray":
        """Of [V, ...]: [*indices.shape, ...]; those past its end are the last."""
        return self.map_rows(lambda array: jnp.take(array, indices, axis=0, mode="clip"))

    def __getitem__(self, index: Any) -> "QuantArray":
        """Rows: an index of the axes O..."""
        return self.map_rows(lambda array: array[index])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class JoinedArray(Packed):
    """Weights of one matrix that are stored in different formats, such as a query's, a key's and a value's.

    Attributes:
      parts: arrays or `QuantArray`s, which follow one another along `axis`.
      axis: one of O..., counted from the front; static.
    """

    parts: tuple[Any, ...]
    axis: int = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        whole = list(self.parts[0].shape)
        whole[self.axis] = sum(part.shape[self.axis] for part in self.parts)
        return tuple(whole)

    def widen(self, dtype: jnp.dtype = jnp.float32) -> jax.Array:
        """As of `QuantArray`."""
        return jnp.concatenate([widen(part, dtype) for part in self.parts], self.axis)


Weight = jax.Array | QuantArray | JoinedArray


def is_packed(w: Any) -> bool:
    return isinstance(w, Packed)


def widen(w: Weight, dtype: jnp.dtype) -> jax.Array:
    """The weights as an array of `dtype`."""
    return w.widen(dtype) if is_packed(w) else w.astype(dtype)


def take_rows(w: Weight, indices: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Entries of w [V, ...], those past its end being the last: [*indices.shape, ...] in `dtype`. Only they are read."""
    if isinstance(w, Packed) and not isinstance(w, JoinedArray):
        return w.take_rows(indices).widen(dtype)
    if isinstance(w, JoinedArray):
        if not w.axis:
            raise ValueError("rows of parts that follow one another are not looked up")
        return JoinedArray(tuple(take_rows(part, indices, dtype) for part in w.parts), w.axis - 1 + indices.ndim).widen(dtype)
    return jnp.take(w, indices, axis=0, mode="clip").astype(dtype)


def pack(codes: Any, code: str) -> tuple[Any, ...]:
    """Unsigned codes as planes of bits. For planes of 4 bits, byte j of a run of 32 codes holds codes j (low) and j + 16; of 2 bits, byte j
    holds codes j, j + 8, j + 16 and j + 24; of 1 bit likewise.

    Args:
      codes: numpy or JAX, uint8 [..., I], I a multiple of 32; int8 or float8_e4m3fn (or its bits) where `code` says so.
      code: a key of `PLANES`.

    Returns:
      [..., I * bits / 8] per plane.
    """
    if code == "float8" and codes.dtype == FLOAT8:
        codes = codes.view(np.uint8)
    if code in WHOLE:
        return (codes,)
    planes, below = [], 0
    for bits in PLANES[code]:
        many, mask = 8 // bits, np.uint8(2**bits - 1)
        runs = ((codes >> np.uint8(below)) & mask).reshape(*codes.shape[:-1], -1, many, RUN // many)
        joined = runs[..., 0, :]
        for place in range(1, many):
            joined = joined | (runs[..., place, :] << np.uint8(place * bits))
        planes.append(joined.reshape(*codes.shape[:-1], -1))
        below += bits
    return tuple(planes)


def unpack(planes: tuple[jax.Array, ...], code: str) -> jax.Array:
    """uint8 [..., I], what `pack` was given."""
    whole, below = None, 0
    for bits, plane in zip(PLANES[code], planes, strict=True):
        many = 8 // bits
        runs = plane.reshape(*plane.shape[:-1], -1, 1, RUN // many)
        # A broadcast along a new axis: XLA's CPU backend makes vectors of it, and branches of a concatenation.
        shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(many, 1)
        codes = ((runs >> shifts) & np.uint8(2**bits - 1)).reshape(*plane.shape[:-1], -1)
        whole = codes if whole is None else whole | (codes << np.uint8(below))
        below += bits
    return whole


def widen_codes(planes: tuple[jax.Array, ...], code: str) -> jax.Array:
    """f32 [..., I]: the codes as numbers."""
    if code == "float8":
        return widen_float8(planes[0])
    if code == "int8":
        return planes[0].astype(jnp.float32)
    codes = unpack(planes, code)
    return jnp.asarray(FLOAT4)[codes] if code == "float4" else codes.astype(jnp.float32)


def widen_float8(x: jax.Array) -> jax.Array:
    """f32 of e4m3, or of its bits as uint8: placed as f16's, whose exponent is biased by 8 more. The CPU backend's own conversion takes
    many steps."""
    bits = x if x.dtype == jnp.uint8 else jax.lax.bitcast_convert_type(x, jnp.uint8)
    wide = bits.astype(jnp.uint16)
    half = jax.lax.bitcast_convert_type((wide & 0x80) << 8 | (wide & 0x7F) << 7, jnp.float16)
    return half.astype(jnp.float32) * 256.0


def float4_values(codes: jax.Array) -> jax.Array:
    """f32 of E2M1's bits, computed: a table look-up per weight is fused into no product."""
    exponent, mantissa = (codes >> 1) & 3, codes & 1
    doubled = jnp.where(exponent == 0, mantissa, (2 + mantissa) << (jnp.maximum(exponent, 1) - 1)).astype(jnp.float32)
    return jnp.where(codes & 8 != 0, -0.5, 0.5) * doubled


def scaled(values: jax.Array, supers: jax.Array | None) -> jax.Array:
    """f32 [..., groups]: each group's values, times what several groups share."""
    wide = values.astype(jnp.float32)
    if supers is None:
        return wide
    many = supers.astype(jnp.float32)[..., None]
    return (wide.reshape(*many.shape[:-1], -1) * many).reshape(wide.shape)
