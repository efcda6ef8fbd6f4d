"""Packed weights at random, of every kind that the native kernels read, and what they are as numbers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from kernels import QuantArray
from kernels.quant_array import EXPONENTS, PLANES, pack, widen_codes

SUPERS = 8  # groups that share a super scale


F16, U8, I8 = np.dtype(np.float16), np.dtype(np.uint8), np.dtype(np.int8)


@dataclasses.dataclass(frozen=True)
class Kind:
    """As of `QuantArray`; `group`: weights that share a scale, `has`: which arrays there are besides `planes` and `scales`."""

    code: str
    outs: tuple[int, ...]
    inputs: int
    group: int
    zero: int = 0
    has: tuple[str, ...] = ()
    scales: np.dtype = F16

    def __str__(self) -> str:
        return "-".join((self.code, "x".join(map(str, self.outs)), str(self.group), self.scales.name, *self.has))


SUPER = ("offsets", "super_scales", "super_offsets")
KINDS = [
    Kind("uint4", (48,), 96, 32, zero=8),  # GGUF's Q4_0
    Kind("uint4", (50,), 160, 32, has=("offsets",)),  # Q4_1
    Kind("uint4", (33,), 192, 64, has=("zeros",)),  # GPTQ, AWQ
    Kind("uint4", (64,), 512, 32, has=SUPER, scales=U8),  # Q4_K
    Kind("uint4", (3, 5, 7), 96, 96, zero=8, scales=np.dtype(ml_dtypes.bfloat16)),  # per channel
    Kind("uint5", (1,), 64, 32, zero=16),  # Q5_0
    Kind("uint5", (40,), 256, 32, has=SUPER, scales=U8),  # Q5_K
    Kind("uint6", (31,), 256, 16, zero=32, has=("super_scales",), scales=I8),  # Q6_K
    Kind("uint4", (17,), 64, 16, has=("zeros", "offsets")),
    Kind("int8", (100,), 96, 32),  # Q8_0
    Kind("int8", (3, 11), 160, 160, scales=np.dtype(np.float32)),  # w8a8
    Kind("int8", (16,), 128, 64, has=("zeros",)),
    Kind("float4", (47,), 96, 32, scales=EXPONENTS),  # MXFP4
]


def random_weights(kind: Kind, seed: int = 0) -> QuantArray:
    """Codes over their whole range, and every scale within a few powers of two of 1."""
    rng, groups = np.random.default_rng(seed), kind.inputs // kind.group

    def small(dtype: np.dtype, many: int) -> np.ndarray:
        shape = (*kind.outs, many)
        if dtype.kind in "iu":
            return rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, shape, endpoint=True).astype(dtype)
        if dtype == EXPONENTS:
            return rng.integers(120, 135, shape).astype(np.uint8).view(EXPONENTS)
        return rng.normal(size=shape).astype(dtype)

    if kind.code == "int8":
        codes = rng.integers(-128, 128, (*kind.outs, kind.inputs)).astype(np.int8)
    else:
        codes = rng.integers(0, 2 ** sum(PLANES[kind.code]), (*kind.outs, kind.inputs)).astype(np.uint8)
    supers = groups // SUPERS
    arrays = {
        "zeros": small(I8, groups) if kind.code == "int8" else small(U8, groups) % np.uint8(16),
        "offsets": small(U8 if "super_offsets" in kind.has else F16, groups),
        "super_scales": small(F16, supers),
        "super_offsets": small(F16, supers),
    }
    arrays = {name: array for name, array in arrays.items() if name in kind.has}
    w = QuantArray(pack(codes, kind.code), small(kind.scales, groups), **arrays, code=kind.code, zero=kind.zero)
    return jax.tree.map(jnp.asarray, w)


@functools.cache
def numbers(kind: Kind, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """f64 [O, I]: the weights by the formula of `kernels.quant_array`, and the same sum of the absolute values of its terms, by which
    roundings on the way there are measured."""
    w = random_weights(kind, seed)

    def spread(array: jax.Array | None) -> np.ndarray:
        """Each group's number for all of its weights."""
        flat = np.asarray(array.astype(jnp.float32), np.float64).reshape(-1, array.shape[-1])
        return np.repeat(flat, kind.inputs // flat.shape[-1], axis=-1)

    codes = np.asarray(widen_codes(w.planes, w.code), np.float64).reshape(-1, kind.inputs)
    zeros = kind.zero if w.zeros is None else spread(w.zeros)
    scales = spread(w.scales) * (1 if w.super_scales is None else spread(w.super_scales))
    offsets = 0 if w.offsets is None else spread(w.offsets) * (1 if w.super_offsets is None else -spread(w.super_offsets))
    return (codes - zeros) * scales + offsets, (np.abs(codes) + np.abs(zeros)) * np.abs(scales) + np.abs(offsets)
