"""`TransposedArray`: a packed matrix as the Pallas kernels read it: outputs along the last axis, inputs in blocks.

A kernel widens a block in place, number by number. With outputs in the lanes of a TPU (neighbouring threads of a GPU), the scale of a group
is a row that is repeated for rows below it, which costs nothing; along the lanes every repetition would be a shuffle. Codes that share a
byte are apart by whole rows of a register, so that unpacking moves none. A chunk is 128 inputs; of a plane of b bits it takes 16 b rows:

    row j, bits p b and up  =  the bits of input 16 b p + j

                    4 bits                     2 bits                                  1 bit
    row 0:     inputs 0, 64          inputs 0, 32, 64, 96             inputs 0, 16, 32, 48, 64, 80, 96, 112
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels.quant_array import EXPONENTS, PLANES, RUN, WHOLE, Packed, QuantArray, pack, unpack

CHUNK = 128  # inputs
MOST_INPUTS = 1024  # of a block
GROUPED = ("scales", "zeros", "offsets", "super_scales", "super_offsets")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TransposedArray(Packed):
    """[E..., O..., I], E... being axes that a product takes one matrix of, such as experts. What is padded is 0.

    Attributes:
      planes: uint8 (int8 of int8 codes) [E..., blocks, span * bits / 8, O].
      scales, zeros, offsets, super_scales, super_offsets: as of `QuantArray`, [E..., blocks, groups of one, O], or with a row for several
        blocks; f16 as its bits, int16, and powers of two as theirs, uint8, since a TPU's vectors hold neither.
      input_scales, order: [I].
      outs: O...; static, as what follows.
      inputs: I.
      groups, supers: of a row, without what is padded; supers are 0 where there are none.
      floats: what the arrays' numbers are, of each in `GROUPED`; "" where there is none.
      code, zero: as of `QuantArray`.
      interpret: kernels run in Pallas's interpreter, on any platform.
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
    inputs: int = dataclasses.field(default=0, metadata={"static": True})
    groups: int = dataclasses.field(default=1, metadata={"static": True})
    supers: int = dataclasses.field(default=0, metadata={"static": True})
    floats: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})
    code: str = dataclasses.field(default="uint4", metadata={"static": True})
    zero: int = dataclasses.field(default=0, metadata={"static": True})
    interpret: bool = dataclasses.field(default=False, metadata={"static": True})

    activations = None  # products round none

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.planes[0].shape[:-3], *self.outs, self.inputs)

    @property
    def blocks(self) -> int:
        return self.planes[0].shape[-3]

    @property
    def span(self) -> int:
        """Inputs of a block."""
        return self.planes[0].shape[-2] * 8 // PLANES[self.code][0]

    def inputs_of(self, name: str) -> int:
        """Inputs that share a number of an array in `GROUPED`, or all with what is padded."""
        count = self.supers if name.startswith("super") else self.groups
        return self.blocks * self.span if count == 1 else self.inputs // count

    def replace(self, **changes: Any) -> "TransposedArray":
        return dataclasses.replace(self, **changes)

    def untransposed(self) -> QuantArray:
        """The `QuantArray` that it was made of."""
        lead, outs = self.planes[0].shape[:-3], math.prod(self.outs)

        def rows(array: jax.Array, keep: int) -> jax.Array:
            """[E..., blocks, rows, O] -> [E..., O..., keep]."""
            return array.reshape(*lead, -1, outs)[..., :keep, :].swapaxes(-1, -2).reshape(*lead, *self.outs, keep)

        def grouped(name: str, kind: str) -> Any:
            array = getattr(self, name)
            if array is None:
                return None
            if kind in ("float16", EXPONENTS.name):
                array = jax.lax.bitcast_convert_type(array, jnp.dtype(kind))
            return rows(array, self.supers if name.startswith("super") else self.groups)

        codes = rows(_codes(self.planes, self.code), self.inputs)
        values = {name: grouped(name, kind) for name, kind in zip(GROUPED, self.floats, strict=True)}
        more = {"input_scales": self.input_scales, "order": self.order, "code": self.code, "zero": self.zero}
        return QuantArray(pack(codes, self.code), **values, **more)

    def widen(self, dtype: jnp.dtype = jnp.float32) -> jax.Array:
        return self.untransposed().widen(dtype)


def can_transpose(w: QuantArray) -> bool:
    """Whether the kernels read its codes and groups. Products of integers (`activations`) are XLA's own, which reads them packed, and so
    are those with weights on several devices, which a kernel would need whole."""
    return w.activations is None and not w.spread and w.planes[0].size > 0 and _span(w) is not None


def transpose(w: QuantArray, lead: int = 0, interpret: bool = False) -> TransposedArray:
    """`w` for the Pallas kernels, bit for bit.

    Args:
      w: see `can_transpose`.
      lead: how many of its first axes are E...
      interpret: as of `TransposedArray`.
    """
    first, outs, width = w.shape[:lead], w.shape[lead:-1], w.shape[-1]
    span = _span(w)
    blocks = -(-width // span)
    groups, supers = w.scales.shape[-1], 0 if w.super_scales is None else w.super_scales.shape[-1]

    def turned(array: jax.Array, rows: int, inputs: int) -> jax.Array:
        """[E..., O..., n], a number for `inputs` each, -> [E..., blocks, rows, O], or with fewer blocks."""
        array = array.reshape(*first, math.prod(outs), array.shape[-1])
        padded = -(-blocks * span // inputs)
        array = jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, padded - array.shape[-1])])
        return array.swapaxes(-1, -2).reshape(*first, -1, rows, array.shape[-2])

    def grouped(name: str) -> Any:
        if (array := getattr(w, name)) is None:
            return None
        inputs = blocks * span if array.shape[-1] == 1 else width // array.shape[-1]
        if array.dtype in (jnp.float16, EXPONENTS):
            array = jax.lax.bitcast_convert_type(array, jnp.int16 if array.dtype == jnp.float16 else jnp.uint8)
        return turned(array, max(1, span // inputs), inputs)

    codes = w.planes[0] if w.code in WHOLE else unpack(w.planes, w.code)
    return TransposedArray(
        _planes(turned(codes, span, 1), w.code),
        **{name: grouped(name) for name in GROUPED},
        input_scales=w.input_scales,
        order=w.order,
        outs=outs,
        inputs=width,
        groups=groups,
        supers=supers,
        floats=tuple("" if (array := getattr(w, name)) is None else array.dtype.name for name in GROUPED),
        code=w.code,
        zero=w.zero,
        interpret=interpret,
    )


def _span(w: QuantArray) -> int | None:
    """Inputs of a block: whole groups, or a whole part of one; None where that can't be."""
    width = w.shape[-1]
    counts = [w.scales.shape[-1], *(() if w.super_scales is None else (w.super_scales.shape[-1],))]
    shared = [width // count for count in counts if count > 1]
    unit = max([CHUNK, *shared])
    span = MOST_INPUTS if unit > MOST_INPUTS else -(-width // -(-width // MOST_INPUTS) // unit) * unit
    whole = lambda size, of: size % of == 0 or of % size == 0  # noqa: E731
    return span if all(size % (RUN // 2) == 0 and whole(size, CHUNK) and whole(size, span) for size in shared) else None


def _planes(codes: jax.Array, code: str) -> tuple[jax.Array, ...]:
    """[..., span, O] -> planes [..., span * bits / 8, O]."""
    if code in WHOLE:
        return (codes,)
    planes, below = [], 0
    for bits in PLANES[code]:
        many = 8 // bits
        parts = (codes >> np.uint8(below)) & np.uint8(2**bits - 1)
        parts = parts.reshape(*codes.shape[:-2], -1, many, CHUNK // many, codes.shape[-1])
        shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(many, 1, 1)
        joined = jnp.sum(parts << shifts, axis=-3, dtype=jnp.uint8)  # bits apart: a sum is an or
        planes.append(joined.reshape(*codes.shape[:-2], -1, codes.shape[-1]))
        below += bits
    return tuple(planes)


def _codes(planes: tuple[jax.Array, ...], code: str) -> jax.Array:
    """[..., span, O], what `_planes` was given."""
    if code in WHOLE:
        return planes[0]
    whole, below = None, 0
    for bits, plane in zip(PLANES[code], planes, strict=True):
        many = 8 // bits
        parts = plane.reshape(*plane.shape[:-2], -1, 1, CHUNK // many, plane.shape[-1])
        shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(many, 1, 1)
        parts = ((parts >> shifts) & np.uint8(2**bits - 1)).reshape(*plane.shape[:-2], -1, plane.shape[-1])
        whole = parts if whole is None else whole | (parts << np.uint8(below))
        below += bits
    return whole
