"""Packed weights of safetensors files as `QuantArray`s: their own codes, scales and zeros, laid out anew."""

import math
import zlib

import ml_dtypes
import numpy as np

from checkpoint.pieces import Coded
from checkpoint.source import Packing
from kernels import QuantArray
from kernels.quant_array import RUN, WHOLE, pack

_INTEGERS = {2: "uint2", 3: "uint3", 4: "uint4", 8: "int8"}
_FLOATS = {np.dtype(ml_dtypes.float8_e4m3fn): "float8", np.dtype(ml_dtypes.float4_e2m1fn): "float4"}


def packing(coded: Coded) -> Packing | None:
    """How rows are packed, given one of them; None if a `QuantArray` can't hold that."""
    codes, scales, zeros = coded.packed
    width, code = codes.shape[-1], _code(coded)
    group = min(coded.block[1], width)
    if code is None or width % group or (group % (RUN // 2) and group != width) or (code not in WHOLE and width % RUN):
        return None
    order = coded.groups
    if order is not None and (np.bincount(order, minlength=width // group) != group).any():
        return None  # groups of unequal sizes
    parts = code, group, scales.dtype, getattr(zeros, "dtype", zeros), order if order is None else zlib.crc32(order.tobytes())
    unit = width if order is not None else RUN if group == width else math.lcm(group, RUN)
    return Packing(" ".join(map(str, parts)), unit, None if group == width else group)


def quant_array(coded: Coded) -> QuantArray:
    """Rows that have a `packing`, whole."""
    codes, scales, zeros = coded.packed
    code, (*_, rows, width), group = _code(coded), codes.shape, min(coded.block[1], codes.shape[-1])

    def by_row(per_block: np.ndarray) -> np.ndarray:
        if coded.block[0] == 1:
            return per_block[..., coded.first_row : coded.first_row + rows, :]
        spread = np.repeat(per_block, min(coded.block[0], coded.first_row + rows), axis=-2)
        return spread[..., coded.first_row : coded.first_row + rows, :]

    order = None
    if coded.groups is not None:
        order = np.argsort(coded.groups, kind="stable").astype(np.int32)
        codes = codes[..., order]
    zero = zeros if isinstance(zeros, int) else 0
    own = None if zeros is None or isinstance(zeros, int) else by_row(zeros)
    if code == "int8" and codes.dtype == np.uint8:
        codes = (codes ^ np.uint8(128)).view(np.int8)
        own, zero = (own, zero - 128) if own is None else ((own.astype(np.int16) - 128).astype(np.int8), 0)
    elif code.startswith("uint") and own is not None:
        own = own.astype(np.uint8)
    elif code == "float4":
        codes = codes.view(np.uint8)
    if group == width and scales.shape[-1] != 1:
        raise ValueError(f"{scales.shape} scales for one group of {width}")
    return QuantArray(pack(codes, code), by_row(scales), own, order=order, code=code, zero=zero)


def columns(w: QuantArray, start: int, stop: int) -> QuantArray:
    """Some of the inputs, from unit to unit of its packing."""
    width = w.shape[-1]
    if (start, stop) == (0, width):
        return w

    def cut(array: np.ndarray) -> np.ndarray:
        count = array.shape[-1]
        return array if count == 1 else array[..., start * count // width : stop * count // width]

    return w.map_rows(cut)


def _code(coded: Coded) -> str | None:
    return _FLOATS.get(coded.packed.codes.dtype) if coded.bits is None else _INTEGERS.get(coded.bits)
