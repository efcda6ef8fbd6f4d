"""Packed weights as published checkpoints store them, taken apart in numpy.

Every layout comes down to the same three arrays and one formula:

    codes   [..., out, in]  what is stored of each weight: integers, or float8 / float4 values
    scales  [..., R, C]     one for each block of weights, R = ceil(out / rows of a block), C = ceil(in / columns of a block)
    zeros   [..., R, C]     the code that stands for 0; a number if it is the same for all, None if that is 0

    weight = (code - zero) * scale

so a weight per row has blocks of (1, in), groups of 128 have (1, 128), DeepSeek's squares (128, 128).
"""

import math
from typing import NamedTuple

import ml_dtypes
import numpy as np

# AutoAWQ's "gemm" layout: of eight neighbours, number i lies in nibble AWQ_NIBBLES[i] of their word (its nibbles hold 0 2 4 6 1 3 5 7).
AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
AWQ_GROUP = 8  # neighbours that share a word


class Packed(NamedTuple):
    """A weight's codes, scales and zeros, as the head of this file defines them; scales and zeros are of the file's own dtype."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | int | None = None


def unpack_bits(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Unsigned numbers of `bits` bits each from a stream of 32-bit words, lowest bits first; a number may straddle two words.

    Args:
        words: int32 [..., W], W = ceil(count * bits / 32).
        bits: 1 to 8.
        count: numbers per row.

    Returns:
        uint8 [..., count].
    """
    octets = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    if 8 % bits == 0:
        numbers = octets[..., None] >> np.arange(0, 8, bits, dtype=np.uint8)
        numbers &= np.uint8(2**bits - 1)
        return numbers.reshape(*octets.shape[:-1], octets.shape[-1] * 8 // bits)[..., :count]
    stream = np.unpackbits(octets, axis=-1, count=count * bits, bitorder="little")
    return np.packbits(stream.reshape(*octets.shape[:-1], count, bits), axis=-1, bitorder="little")[..., 0]


def unpack_gptq(qweight: np.ndarray, qzeros: np.ndarray, scales: np.ndarray, *, bits: int, width: int, zeros_less_one: bool) -> Packed:
    """GPTQ as AutoGPTQ and GPTQModel store it: codes packed along in, zeros along out.

    Args:
        qweight: int32 [ceil(in * bits / 32), out].
        qzeros: int32 [groups, ceil(out * bits / 32)].
        scales: [groups, out].
        bits: 2, 3, 4 or 8.
        width: in.
        zeros_less_one: format "gptq" stores each zero minus 1 (0 as the highest code), "gptq_v2" stores the zero itself.

    Returns:
        codes uint8 [out, in], scales and zeros [out, groups].
    """
    zeros = unpack_bits(qzeros, bits, scales.shape[1])
    if zeros_less_one:
        zeros = (zeros + np.uint8(1)) & np.uint8(2**bits - 1)
    return Packed(unpack_bits(qweight.T, bits, width), scales.T, zeros.T)


def unpack_awq(qweight: np.ndarray, qzeros: np.ndarray, scales: np.ndarray) -> Packed:
    """AWQ, version "gemm", 4 bits: codes and zeros packed along out, in the order of `AWQ_NIBBLES`.

    Args:
        qweight: int32 [in, out / 8].
        qzeros: int32 [groups, out / 8].
        scales: [groups, out].

    Returns:
        codes uint8 [out, in], scales and zeros [out, groups].
    """

    def numbers(words: np.ndarray) -> np.ndarray:
        nibbles = unpack_bits(words, 4, AWQ_GROUP * words.shape[1]).reshape(*words.shape, AWQ_GROUP)
        return nibbles[..., AWQ_NIBBLES].reshape(len(words), AWQ_GROUP * words.shape[1]).T  # [out, in | groups]

    return Packed(numbers(qweight), scales.T, numbers(qzeros))


def unpack_int32(packed: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, *, bits: int, width: int) -> Packed:
    """compressed-tensors' "pack-quantized": signed codes, each plus 2^(bits - 1), packed along in.

    Args:
        packed: int32 [out, ceil(in * bits / 32)].
        scales: [R, C].
        zeros: signed, [R, C]; None if symmetric.
        bits: 2, 4 or 8.
        width: in.

    Returns:
        codes uint8 [out, in], scales and zeros [R, C], the offset of the codes in the zeros.
    """
    offset = 2 ** (bits - 1)
    return Packed(unpack_bits(packed, bits, width), scales, offset if zeros is None else zeros.astype(np.int16) + offset)


def unpack_zeros(packed: np.ndarray, *, bits: int, rows: int) -> np.ndarray:
    """The zeros of "pack-quantized", packed along out: int32 [ceil(R * bits / 32), C] -> int8 [R, C], signed."""
    return (unpack_bits(packed.T, bits, rows).T.astype(np.int16) - 2 ** (bits - 1)).astype(np.int8)


def unpack_fp4(octets: np.ndarray) -> np.ndarray:
    """Two E2M1 values per byte, the first in the low nibble: uint8 or int8 [..., in / 2] -> float4_e2m1fn [..., in] (OCP MX 1.0)."""
    octets = octets.view(np.uint8)
    nibbles = np.stack([octets & np.uint8(0xF), octets >> np.uint8(4)], axis=-1)
    return nibbles.reshape(*octets.shape[:-1], 2 * octets.shape[-1]).view(ml_dtypes.float4_e2m1fn)


def unpack_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> Packed:
    """gpt-oss: E2M1 values in blocks of 32 along in, with a power of two each.

    Args:
        blocks: uint8 [..., out, in / 32, 16].
        scales: uint8 [..., out, in / 32].

    Returns:
        codes float4_e2m1fn [..., out, in], scales [..., out, in / 32].
    """
    return Packed(unpack_fp4(blocks.reshape(*blocks.shape[:-2], math.prod(blocks.shape[-2:]))), exponents(scales))


def exponents(scales: np.ndarray) -> np.ndarray:
    """E8M0 scales, stored as such or as uint8: float8_e8m0fnu, 2^(exponent - 127); 255 is nan (OCP MX 1.0)."""
    return scales.view(ml_dtypes.float8_e8m0fnu)


def grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """The shape of the scales of a weight of `shape` in blocks of `block` = (rows, columns); the last ones may be cut short."""
    *lead, rows, columns = shape
    return (*lead, math.ceil(rows / block[0]), math.ceil(columns / block[1]))


def dequantize(packed: Packed, block: tuple[int, int], *, groups: np.ndarray | None = None, first_row: int = 0) -> np.ndarray:
    """`(code - zero) * scale` in float32, [..., out, in].

    Args:
        packed: the weight, or rows of it.
        block: (rows, columns) of weights that share a scale.
        groups: int [in], the column of `scales` that each input takes; then the columns of `block` don't count.
        first_row: the row that `codes` begin with, where `scales` and `zeros` are those of the whole weight.
    """
    values = packed.codes.astype(np.float32, order="C")
    *lead, rows, columns = values.shape

    def spread(per_block: np.ndarray) -> np.ndarray:  # [..., R, C] -> [..., out, C | in]
        by_row = np.repeat(per_block.astype(np.float32), min(block[0], first_row + rows), axis=-2)[..., first_row : first_row + rows, :]
        return by_row if groups is None else by_row[..., groups]

    scales = spread(packed.scales)
    if isinstance(packed.zeros, int):
        values -= packed.zeros
    zeros = spread(packed.zeros) if isinstance(packed.zeros, np.ndarray) else None
    width = 1 if groups is not None else min(block[1], columns)
    whole = columns // width  # whole blocks; what is left of the row shares the last scale
    parts = [(values[..., : whole * width].reshape(*lead, rows, whole, width), slice(0, whole))]
    if whole * width < columns:
        parts.append((values[..., None, whole * width :], slice(whole, None)))
    for part, at in parts:  # views of `values`
        if zeros is not None:
            part -= zeros[..., at, None]
        part *= scales[..., at, None]
    return values
