"""GGUF's blocks of codes (ggml's block_q4_0 and the like, in ggml-common.h) as the arrays of a `QuantArray`, without loss."""

from collections.abc import Callable

import gguf
import ml_dtypes
import numpy as np

from checkpoint.source import Packing
from kernels import QuantArray
from kernels.quant_array import pack

Octets = np.ndarray  # uint8 [..., blocks, bytes of one]
Kind = gguf.GGMLQuantizationType


class Fields:
    """A block's bytes, taken from the front."""

    def __init__(self, blocks: Octets):
        self._rest = blocks

    def octets(self, count: int) -> np.ndarray:
        taken, self._rest = self._rest[..., :count], self._rest[..., count:]
        return taken

    def number(self) -> np.ndarray:
        """An f16, [..., blocks]."""
        return np.ascontiguousarray(self.octets(2)).view("<f2")[..., 0]


def blocks(raw: np.ndarray, kind: Kind) -> QuantArray:
    """The weights that a tensor's rows hold.

    Args:
      raw: uint8 [..., bytes of a row], whole blocks.
      kind: a key of `BLOCKS`.
    """
    size = gguf.GGML_QUANT_SIZES[kind][1]
    return BLOCKS[kind](Fields(raw.reshape(*raw.shape[:-1], -1, size)))


def _q8_0(block: Fields) -> QuantArray:
    scales = block.number()
    return QuantArray((_row(block.octets(32).view(np.int8)),), scales, code="int8")


def _q4_0(block: Fields) -> QuantArray:
    scales = block.number()
    return QuantArray((_row(block.octets(16)),), scales, code="uint4", zero=8)  # codes lie as a run of ours does


def _q4_1(block: Fields) -> QuantArray:
    scales, offsets = block.number(), block.number()
    return QuantArray((_row(block.octets(16)),), scales, offsets=offsets, code="uint4")


def _q5_0(block: Fields) -> QuantArray:
    scales, high = block.number(), _fifth_bits(block.octets(4))
    return QuantArray((_row(block.octets(16)), high), scales, code="uint5", zero=16)


def _q5_1(block: Fields) -> QuantArray:
    scales, offsets, high = block.number(), block.number(), _fifth_bits(block.octets(4))
    return QuantArray((_row(block.octets(16)), high), scales, offsets=offsets, code="uint5")


def _q4_k(block: Fields) -> QuantArray:
    supers, (scales, offsets) = (block.number(), block.number()), _six_bits(block.octets(12))
    codes = _nibbles(block.octets(128), 32)
    return QuantArray(pack(codes, "uint4"), scales, None, offsets, *supers, code="uint4")


def _q5_k(block: Fields) -> QuantArray:
    supers, (scales, offsets) = (block.number(), block.number()), _six_bits(block.octets(12))
    high = block.octets(32)[..., None, :] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # bit i of each byte: of the i-th 32 codes
    codes = _nibbles(block.octets(128), 32) | _row(high.reshape(*high.shape[:-2], 256)) << np.uint8(4)
    return QuantArray(pack(codes, "uint5"), scales, None, offsets, *supers, code="uint5")


def _q6_k(block: Fields) -> QuantArray:
    low = _nibbles(block.octets(128), 64)  # of each 128 codes, low nibbles hold the first half
    pairs = block.octets(64)
    high = pairs.reshape(*pairs.shape[:-1], 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    codes = low | _row(high.reshape(*high.shape[:-3], 256)) << np.uint8(4)
    scales = _row(block.octets(16).view(np.int8))
    return QuantArray(pack(codes, "uint6"), scales, super_scales=block.number(), code="uint6", zero=32)


def _mxfp4(block: Fields) -> QuantArray:
    scales = np.ascontiguousarray(block.octets(1)).view(ml_dtypes.float8_e8m0fnu)[..., 0]
    return QuantArray((_row(block.octets(16)),), scales, code="float4")


BLOCKS: dict[Kind, Callable[[Fields], QuantArray]] = {
    Kind.Q8_0: _q8_0,
    Kind.Q4_0: _q4_0,
    Kind.Q4_1: _q4_1,
    Kind.Q5_0: _q5_0,
    Kind.Q5_1: _q5_1,
    Kind.Q4_K: _q4_k,
    Kind.Q5_K: _q5_k,
    Kind.Q6_K: _q6_k,
    Kind.MXFP4: _mxfp4,
}


def _row(per_block: np.ndarray) -> np.ndarray:
    """[..., blocks, n] -> [..., blocks * n]."""
    return np.ascontiguousarray(per_block).reshape(*per_block.shape[:-2], -1)


def _nibbles(octets: np.ndarray, half: int) -> np.ndarray:
    """Codes [..., blocks * 2n] of n bytes per block: each `half` bytes hold as many codes in their low nibbles, then others in the high."""
    parts = octets.reshape(*octets.shape[:-1], -1, 1, half)
    codes = parts >> np.array([[0], [4]], np.uint8) & 0xF
    return _row(codes.reshape(*octets.shape[:-1], -1))


def _fifth_bits(octets: np.ndarray) -> np.ndarray:
    """Bit i of a block's 4 bytes is code i's highest: as a plane of single bits."""
    bits = np.unpackbits(octets, axis=-1, bitorder="little")
    return pack(_row(bits) << np.uint8(4), "uint5")[1]


def _six_bits(octets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The scales and the offsets of a block's eight groups, uint8 [..., blocks * 8]: 6 bits each in 12 bytes.

    Bytes 0..3 hold scales 0..3, bytes 4..7 offsets 0..3; bytes 8..11 the low nibbles of scales 4..7 and of offsets 4..7, whose high bits
    are those of bytes 0..3 and 4..7.
    """
    first, second, third = octets[..., :4], octets[..., 4:8], octets[..., 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=-1)
    offsets = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=-1)
    return _row(scales), _row(offsets)


def packing(kind: Kind) -> Packing | None:
    """None: a `QuantArray` can't hold it."""
    block = gguf.GGML_QUANT_SIZES[kind][0]
    return Packing(kind.name, block, block) if kind in BLOCKS else None
