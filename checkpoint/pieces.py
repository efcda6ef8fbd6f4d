"""Stored tensors that together make one logical weight: what describes them, and the checks that all formats share."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from checkpoint import packed

Raw = Callable[[str], np.ndarray]  # name of a stored tensor -> its values as stored, mapped: only what is touched is read
SCALES = ("F32", "F16", "BF16")
POWERS = ("F8_E8M0", "U8")  # scales that are powers of two


class Stored(NamedTuple):
    """A tensor as the file describes it."""

    dtype: str  # safetensors' word
    shape: tuple[int, ...]


class Coded(NamedTuple):
    """Packed rows, with what places their scales: `values()` are the weights.

    Attributes:
        packed: codes, scales and zeros.
        block: (rows, columns) that share a scale.
        bits: of an integer code; None: codes are floats.
        groups: int [in], the group of each input; None: in order.
        first_row: the row that the codes begin with, where scales and zeros are those of the whole weight.
    """

    packed: packed.Packed
    block: tuple[int, int]
    bits: int | None = None
    groups: np.ndarray | None = None
    first_row: int = 0

    def values(self) -> np.ndarray:
        """float32 [..., rows, in]."""
        return packed.dequantize(self.packed, self.block, groups=self.groups, first_row=self.first_row)


def coded(shape: tuple[int, ...], stored: str, names: tuple[str, ...], codes: Callable[[Raw, int, int], Coded]) -> "Weight":
    """A packed weight."""
    return Weight(shape, stored, names, lambda raw, start, stop: codes(raw, start, stop).values(), codes)


@dataclasses.dataclass(frozen=True)
class Weight:
    """One logical tensor.

    Attributes:
        shape: of its values.
        stored: how it is stored, in words.
        pieces: names of the stored tensors that make it.
        rows: raw, start, stop -> values [stop - start, ...].
        codes: likewise what is stored of them; None: it is not packed.
        turned: codes are [..., out, in] of a tensor that counts as [..., in, out].
    """

    shape: tuple[int, ...]
    stored: str
    pieces: tuple[str, ...]
    rows: Callable[[Raw, int, int], np.ndarray] = dataclasses.field(repr=False)
    codes: Callable[[Raw, int, int], Coded] | None = dataclasses.field(default=None, repr=False)
    turned: bool = False


class Refused(Exception):
    """What is wrong and what to do about it, continuing the sentence `PATH: ...`."""


Entries = Mapping[str, Stored]
Found = dict[str, Weight]
Settings = Mapping[str, Any]  # `quantization_config` of config.json


def require(entries: Entries, name: str, dtypes: tuple[str, ...], weight: str) -> Stored:
    """The piece `name` of `weight`, which must be stored in one of `dtypes`."""
    if name not in entries:
        raise Refused(f"{weight} has no {name}: download all files of the model again")
    if entries[name].dtype not in dtypes:
        raise Refused(
            f"{name} is stored as {entries[name].dtype}, but {' or '.join(dtypes)} is expected: use another conversion of the model"
        )
    return entries[name]


def fit(entries: Entries, name: str, shapes: list[tuple[int, ...]], weight: str) -> None:
    """Piece `name` must have one of `shapes`."""
    if entries[name].shape not in shapes:
        raise Refused(
            f"{name} has shape {entries[name].shape}, but {' or '.join(map(str, shapes))} goes with {weight} {entries[weight].shape}: "
            "the files are damaged, or config.json belongs to another model; download them again"
        )


def integer(settings: Settings, names: tuple[str, ...], allowed: Callable[[int], bool], limit: str, default: Any = None) -> int:
    """The first of `names` that the settings have: formats spell them differently."""
    value = next((settings[name] for name in names if settings.get(name) is not None), default)
    if isinstance(value, bool) or not isinstance(value, int) or not allowed(value):
        raise Refused(f"{names[0]} of quantization_config in config.json is {value!r}, but {limit} is supported: use another conversion")
    return value


def group_size(settings: Settings, names: tuple[str, ...], width: int) -> int:
    size = integer(settings, names, lambda value: value == -1 or value > 0, "a positive number or -1")
    return width if size == -1 else size


def pair(value: Any, what: str) -> tuple[int, int]:
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(isinstance(side, int) and side > 0 for side in value):
        raise Refused(
            f"{what} of quantization_config in config.json is {value!r}, but two positive numbers are expected, such as [128, 128]"
        )
    return tuple(value)


def read_scales(raw: Raw, name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """Of `shape`, as stored."""
    values = raw(name)
    return (packed.exponents(values) if dtype in POWERS else values).reshape(shape)


def bases(entries: Entries, suffix: str) -> Iterator[str]:
    """What stands before `suffix`, the dot included."""
    return (name.removesuffix(suffix) for name in entries if name.endswith(f".{suffix}"))


def matches(pattern: str, name: str) -> bool:
    try:
        return re.match(pattern, name) is not None
    except re.error as error:
        raise Refused(f"{pattern!r} in quantization_config of config.json is no regular expression ({error}): correct it") from error


def matrix(entries: Entries, name: str) -> tuple[int, int]:
    """The shape of packed matrix `name`."""
    shape = require(entries, name, ("I32",), name).shape
    if len(shape) != 2 or not all(shape):
        raise Refused(f"{name} has shape {shape}, but a packed weight has 2 dimensions: use another conversion of the model")
    return shape


def group_order(g_idx: np.ndarray, name: str, size: int, groups: int) -> np.ndarray | None:
    """The group of each input, int [in]; None where they are in order."""
    if g_idx.min() < 0 or g_idx.max() >= groups:
        raise Refused(
            f"{name} names groups {g_idx.min()} to {g_idx.max()}, but there are {groups}: the files are damaged; download them again"
        )
    return None if np.array_equal(g_idx, np.arange(len(g_idx)) // size) else g_idx


def rows_of(
    codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, block: tuple[int, int], start: int, stop: int, bits: int | None
) -> Coded:
    """Rows [start, stop) of axis 0, `codes`; `scales` and `zeros` are whole."""
    if codes.ndim == 2:
        return Coded(packed.Packed(codes, scales, zeros), block, bits, first_row=start)
    return Coded(packed.Packed(codes, scales[start:stop], None if zeros is None else zeros[start:stop]), block, bits)


def sides(block: tuple[int, int]) -> str:
    return str(block[0]) if block[0] == block[1] else f"{block[0]}x{block[1]}"
