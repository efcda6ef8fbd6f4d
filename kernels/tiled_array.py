"""`TiledArray`: a packed matrix as the native kernels of `kernels.cpu` read it, 16 rows at a time.

A tile is 16 rows of outputs. Of 32 inputs it takes 8 vectors of 64 bytes, each with the codes of 4 inputs for all 16 rows:

    vector c, byte 4 r + i  =  code of row r, input 4 c + i

Codes of 4 bits are two vectors in one: 2 j in the low halves of bytes, 2 j + 1 in the high ones; planes of 2 bits and of 1 bit are four
and eight in one likewise. What belongs to groups stands by tile and group, a number for each of the 16 rows.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.quant_array import PLANES, Packed, QuantArray, pack, unpack

ROWS = 16
BLOCK = 32
CHUNK = 4
CODES = {"uint4": 4, "int8": 8, "uint5": 41, "uint6": 42, "float4": 40}  # as `kernels/cpu/matmul.h` names them
SIGN = 0x80  # int8 codes are stored with it turned: as unsigned ones, 128 standing for 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TiledArray(Packed):
    """[E..., O..., I], as the `QuantArray` that it was made of says. E... are axes that a product takes one matrix of, such as experts;
    each matrix has tiles of its own.

    Attributes:
      planes: uint8 [E..., tiles, I / 32, bytes], a matrix's last tile filled up with zeros.
      scales, zeros, offsets: [E..., tiles, groups, 16]; super_scales, super_offsets: [E..., tiles, supers, 16].
      input_scales, order: [I].
      outs: O...; static, as what follows.
      code, zero, activations: as of `QuantArray`.
      rounds: bits to which products round their activations, with a scale for every 32 of them: 8 (15 where these hold an outlier), 15, or
        0 if they don't.
    """

    planes: tuple[Any, ...]
    scales: Any
    zeros: Any = None
    offsets: Any = None
    super_scales: Any = None
    super_offsets: Any = None
    input_scales: Any = None
    order: Any = None
    outs: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})
    code: str = dataclasses.field(default="uint4", metadata={"static": True})
    zero: int = dataclasses.field(default=0, metadata={"static": True})
    activations: str | None = dataclasses.field(default=None, metadata={"static": True})
    rounds: int = dataclasses.field(default=0, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.planes[0].shape[:-3], *self.outs, self.planes[0].shape[-2] * BLOCK)

    def replace(self, **changes: Any) -> "TiledArray":
        return dataclasses.replace(self, **changes)

    def untiled(self) -> QuantArray:
        """The `QuantArray` that it was made of."""
        if self.planes[0].ndim > 3:
            return _each_matrix(TiledArray.untiled, self)
        codes = _codes_of_tiles(self.planes, self.code)  # uint8 [tiles, 16, I]
        rows = math.prod(self.outs)
        codes = codes.reshape(-1, codes.shape[-1])[:rows].reshape(self.shape)
        return self._quant_array(codes, lambda array: array.swapaxes(-1, -2).reshape(-1, array.shape[-2])[:rows].reshape(*self.outs, -1))

    def take_rows(self, indices: jax.Array) -> QuantArray:
        """Rows of [O, I]: [*indices.shape, I]; those past the end are the last."""
        (rows,) = self.outs
        index = jnp.clip(indices, 0, rows - 1)
        tile, row = index // ROWS, index % ROWS

        def plane(array: jax.Array) -> jax.Array:  # [..., I / 32, vectors, 4]
            return array.reshape(*array.shape[:-1], -1, ROWS, CHUNK)[tile, :, :, row]

        return self._quant_array(_codes(tuple(map(plane, self.planes)), self.code), lambda array: array[tile, :, row])

    def _quant_array(self, codes: jax.Array, grouped: Callable[[jax.Array], jax.Array]) -> QuantArray:
        """Of codes uint8 [..., I] as they are stored, and what becomes of the arrays [tiles, groups, 16]."""
        if self.code == "int8":
            codes = jax.lax.bitcast_convert_type(codes ^ np.uint8(SIGN), jnp.int8)
        values = {name: None if (array := getattr(self, name)) is None else grouped(array) for name in GROUPED}
        kept = {name: getattr(self, name) for name in ("input_scales", "order", "code", "zero", "activations")}
        return QuantArray(pack(codes, self.code), **values, **kept)

    def widen(self, dtype: jnp.dtype = jnp.float32) -> jax.Array:
        return self.untiled().widen(dtype)


GROUPED = ("scales", "zeros", "offsets", "super_scales", "super_offsets")


def can_tile(w: QuantArray) -> bool:
    """Whether the kernels read its codes, groups and scales."""
    width, groups = w.shape[-1], w.scales.shape[-1]
    span = width // groups
    return w.code in CODES and width % BLOCK == 0 and (span % BLOCK == 0 or span == BLOCK // 2) and not w.spread


def tile(w: QuantArray, rounds: int = 0, lead: int = 0) -> TiledArray:
    """`w` for the native kernels, bit for bit.

    Args:
      w: see `can_tile`.
      rounds: as of `TiledArray`; 8 in any case where the weights say that activations are rounded.
      lead: how many first axes count matrices.
    """
    if lead:
        return _each_matrix(functools.partial(tile, rounds=rounds, lead=lead - 1), w)
    outs, width = w.shape[:-1], w.shape[-1]
    rows = math.prod(outs)
    pad = -rows % ROWS
    codes = w.planes[0].reshape(rows, width) if w.code == "int8" else unpack(w.planes, w.code).reshape(rows, width)
    if w.code == "int8":
        codes = jax.lax.bitcast_convert_type(codes, jnp.uint8) ^ np.uint8(SIGN)
    codes = jnp.pad(codes, ((0, pad), (0, 0))).reshape(-1, ROWS, width // BLOCK, BLOCK // CHUNK, CHUNK).transpose(0, 2, 3, 1, 4)

    def tiled(array: Any) -> Any:
        if array is None:
            return None
        return jnp.pad(array.reshape(rows, -1), ((0, pad), (0, 0))).reshape(-1, ROWS, array.shape[-1]).swapaxes(1, 2)

    return TiledArray(
        _planes(codes, w.code),
        **{name: tiled(getattr(w, name)) for name in GROUPED},
        input_scales=w.input_scales,
        order=w.order,
        outs=outs,
        code=w.code,
        zero=w.zero,
        activations=w.activations,
        rounds=8 if w.activations is not None else rounds,
    )


def _each_matrix(change: Callable[[Any], Any], w: Any) -> Any:
    """`change` of every w[e], one after another, so that codes of a byte each stand in memory for one of them only."""
    return jax.lax.map(change, w.replace(order=None, input_scales=None)).replace(order=w.order, input_scales=w.input_scales)


def _planes(codes: jax.Array, code: str) -> tuple[jax.Array, ...]:
    """uint8 [tiles, blocks, 8 vectors, 16, 4] as planes [tiles, blocks, bytes]."""
    planes, below = [], 0
    for bits in PLANES[code]:
        many, mask = 8 // bits, np.uint8(2**bits - 1)
        parts = ((codes >> np.uint8(below)) & mask).reshape(*codes.shape[:2], -1, many, ROWS * CHUNK)
        shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(many, 1)
        joined = jnp.sum(parts << shifts, axis=-2, dtype=jnp.uint8)  # bits apart: a sum is an or
        planes.append(joined.reshape(*codes.shape[:2], -1))
        below += bits
    return tuple(planes)


def _codes(planes: tuple[jax.Array, ...], code: str) -> jax.Array:
    """uint8 [..., I] of planes [..., I / 32, vectors, 4] of a row."""
    whole, below = None, 0
    for bits, plane in zip(PLANES[code], planes, strict=True):
        shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(-1, 1)
        parts = (plane[..., None, :] >> shifts) & np.uint8(2**bits - 1)  # [..., blocks, vectors, many, 4]
        parts = parts.reshape(*plane.shape[:-3], -1)
        whole = parts if whole is None else whole | (parts << np.uint8(below))
        below += bits
    return whole


def _codes_of_tiles(planes: tuple[jax.Array, ...], code: str) -> jax.Array:
    """uint8 [tiles, 16, I]."""
    rows = (plane.reshape(*plane.shape[:2], -1, ROWS, CHUNK).transpose(0, 3, 1, 2, 4) for plane in planes)
    return _codes(tuple(rows), code)
