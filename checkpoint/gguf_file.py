"""Reads GGUF files (format: ggml's docs/gguf.md, versions 2 and 3).

The `gguf` package knows the block formats and dequantizes them. Its reader keeps a numpy view per string, which makes 2 s of the
98,000 strings of a 49k-token vocabulary (0.1 s here), and on a damaged file it fails in a dozen ways; so the header is read here, every
length checked against the file's size before it is used.

A model may be split into files `NAME-00001-of-0000N.gguf`, each a GGUF file with some of the tensors; the first holds the metadata.
"""

import dataclasses
import math
import os
import re
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from checkpoint.gguf_blocks import blocks
from checkpoint.mapped import listed, looks_like, map_bytes, part_name, strerror
from kernels import QuantArray
from runtime import UserError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32  # bytes
MAX_DIMENSIONS = 4
DOWNLOAD_AGAIN = "download it again"
PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
SCALARS = {  # struct codes; numpy reads the same ones
    gguf.GGUFValueType.UINT8: "B",
    gguf.GGUFValueType.INT8: "b",
    gguf.GGUFValueType.UINT16: "H",
    gguf.GGUFValueType.INT16: "h",
    gguf.GGUFValueType.UINT32: "I",
    gguf.GGUFValueType.INT32: "i",
    gguf.GGUFValueType.FLOAT32: "f",
    gguf.GGUFValueType.UINT64: "Q",
    gguf.GGUFValueType.INT64: "q",
    gguf.GGUFValueType.FLOAT64: "d",
    gguf.GGUFValueType.BOOL: "?",
}


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies and what it is."""

    name: str
    path: Path  # of the file that holds it: a split model has several
    shape: tuple[int, ...]  # row-major, numpy's order: a weight matrix is (out, in)
    type: gguf.GGMLQuantizationType
    offset: int  # bytes from the start of the file
    num_bytes: int


@dataclasses.dataclass(frozen=True, eq=False)
class GGUFFile:
    """A GGUF file, or all files of a split model: tensor data is read when it is asked for, and mapped while it is used."""

    path: Path
    metadata: dict[str, Any] = dataclasses.field(repr=False)  # int, float, bool, str, or a list of one of these
    tensors: dict[str, TensorInfo] = dataclasses.field(repr=False)

    def require(self, key: str) -> Any:
        """The metadata under `key`.

        Raises:
            UserError: the file has no such key.
        """
        try:
            return self.metadata[key]
        except KeyError:
            raise UserError(f"{self.path} has no metadata {key!r}: convert the model again with a newer converter") from None

    def tensor(self, name: str) -> TensorInfo:
        """The description of tensor `name`.

        Raises:
            UserError: the file has no such tensor.
        """
        try:
            return self.tensors[name]
        except KeyError:
            raise UserError(
                f"{self.path} has no tensor {name!r} among its {len(self.tensors)}: it is no complete model of its architecture; "
                f"{DOWNLOAD_AGAIN}"
            ) from None

    def raw(self, name: str) -> np.ndarray:
        """The tensor's bytes as stored: uint8 [..., bytes per row], a read-only view of the file.

        Raises:
            UserError: no such tensor, or the file is gone.
        """
        info = self.tensor(name)
        try:
            data = map_bytes(info.path, info.offset, info.num_bytes)
        except (OSError, ValueError) as error:
            raise UserError(f"{info.path} could be opened, but can't be read any more: {strerror(error)}; put it back") from error
        return data.reshape(*info.shape[:-1], -1)

    def dequantize(self, name: str, box: tuple[int | slice, ...] = ()) -> np.ndarray:
        """The tensor, or a box of it (start and stop along its axes, from the first on, or a number, which drops the axis), in float32,
        row-major. If it is stored so, a read-only view of the file. Rows are cut by whole blocks, so that little else is read.

        Raises:
            UserError: no such tensor, or its type has no dequantizer.
        """
        info = self.tensor(name)
        try:
            if len(box) < len(info.shape):
                return gguf.quants.dequantize(self.raw(name)[box], info.type)
            block, block_bytes = gguf.GGML_QUANT_SIZES[info.type]
            start, stop, _ = box[-1].indices(info.shape[-1])
            first, last = start // block, -(-stop // block)
            raw = self.raw(name)[(*box[:-1], slice(first * block_bytes, last * block_bytes))]
            return gguf.quants.dequantize(np.ascontiguousarray(raw), info.type)[..., start - first * block : stop - first * block]
        except NotImplementedError as error:
            raise UserError(
                f"{self.path}: tensor {name!r} is stored as {info.type.name}, which can't be converted to float32: "
                "use a file in another format, such as F16, Q8_0 or Q4_K_M"
            ) from error

    def packed(self, name: str, box: tuple[int | slice, ...] = ()) -> QuantArray:
        """The tensor, or a box of it (as of `dequantize`), as it is stored. Its type must be one of `checkpoint.gguf_blocks.BLOCKS`.

        Raises:
            UserError: no such tensor, or columns that part a block.
        """
        info, raw = self.tensor(name), self.raw(name)
        if len(box) == len(info.shape):
            block, block_bytes = gguf.GGML_QUANT_SIZES[info.type]
            start, stop, _ = box[-1].indices(info.shape[-1])
            if start % block or stop % block:
                raise UserError(
                    f"{self.path}: tensor {name!r} is stored as {info.type.name}, in blocks of {block} inputs, which a device can't have a "
                    "part of: use a smaller mesh, or --weights=bf16"
                )
            box = (*box[:-1], slice(start // block * block_bytes, stop // block * block_bytes))
        return blocks(raw[box], info.type)


def open_gguf(path: str | os.PathLike[str]) -> GGUFFile:
    """Opens a GGUF file, of a split model any part, and checks that all it promises is there.

    Raises:
        UserError: not a GGUF file, damaged, incomplete, unreadable, of an unknown version or byte order; parts of a split model are
            missing or belong to another one.
    """
    path = Path(path)
    metadata, tensors = _open_part(path)
    if _number(path, metadata, "split.count", 1) > 1:
        metadata, tensors = _join(path, metadata, tensors)
    return GGUFFile(path=path, metadata=metadata, tensors=tensors)


def _open_part(path: Path) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    try:
        size = path.stat().st_size
        data = map_bytes(path) if size and not path.is_dir() else np.empty(0, np.uint8)
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist: check the path") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} can't be read: {strerror(error)}; check its permissions") from error
    if path.is_dir():
        raise UserError(f"{path} is a folder, but a .gguf file is expected: give the path of the file itself")
    if not size:
        raise UserError(f"{path} is empty (0 bytes): {DOWNLOAD_AGAIN}")
    head = data[:64].tobytes()
    if not head.startswith(MAGIC[: len(head)]):
        raise UserError(f"{path} is not a GGUF file: it looks like {looks_like(head)}; give the path of a .gguf file")
    try:
        return _read_header(_Cursor(memoryview(data)), path)
    except _Damaged as error:
        raise UserError(f"{path} ({size} bytes) {error}") from error


def _join(path: Path, metadata: dict[str, Any], tensors: dict[str, TensorInfo]) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """The metadata of the first part and the tensors of all parts, given those of the part at `path`."""
    count, number = _number(path, metadata, "split.count", 1), _number(path, metadata, "split.no", 0) + 1
    name = PART.fullmatch(path.name)
    if name is None or (int(name["number"]), int(name["count"])) != (number, count):
        right = part_name(name["stem"] if name else "NAME", number, count, ".gguf")
        raise UserError(f"{path} is part {number} of a model of {count} parts, which its name does not say: rename it to {right}")
    paths = [path.with_name(part_name(name["stem"], index, count, ".gguf")) for index in range(1, count + 1)]
    if missing := [part.name for part in paths if not part.exists()]:
        raise UserError(
            f"{path} is one of {count} parts, of which {len(missing)} are not beside it: download {listed(missing)} into {path.parent}"
        )
    promised = _number(path, metadata, "split.tensors.count", -1)
    first, joined = metadata, {}
    for index, part in enumerate(paths):
        own, held = (metadata, tensors) if part == path else _open_part(part)
        says = tuple(_number(part, own, f"split.{key}", -1) for key in ("no", "count", "tensors.count"))
        if says != (index, count, promised):
            raise UserError(
                f"{part} says that it is part {says[0] + 1} of {says[1]} of a model of {says[2]} tensors, but beside {path.name} it should "
                f"be part {index + 1} of {count} of {promised}: it belongs to another model; {DOWNLOAD_AGAIN}"
            )
        if twice := joined.keys() & held.keys():
            raise UserError(f"{part} holds tensor {min(twice)!r}, which another part holds as well: the parts belong to different models")
        joined |= held
        if index == 0:
            first = own
    if len(joined) != promised:
        raise UserError(f"{path}: all {count} parts hold {len(joined)} tensors, but they promise {promised}: {DOWNLOAD_AGAIN}")
    return first, joined


def _number(path: Path, metadata: dict[str, Any], key: str, default: int) -> int:
    value = metadata.get(key, default)
    if not isinstance(value, int):
        raise UserError(f"{path} is damaged: its {key} is {value!r}: {DOWNLOAD_AGAIN}")
    return value


class _Damaged(Exception):
    """What is wrong with the file, continuing the sentence `PATH (N bytes) ...`."""

    def __init__(self, what: str, remedy: str = DOWNLOAD_AGAIN):
        super().__init__(f"{what}: {remedy}")


class _Cursor:
    """Reads little-endian values one after the other, never beyond the end."""

    def __init__(self, data: memoryview):
        self.data = data
        self.position = 0

    def take(self, count: int) -> memoryview:
        start, self.position = self.position, self.position + count
        if self.position > len(self.data):
            raise _Damaged(f"is incomplete: its header goes on beyond the end (byte {start} needs {count} more)")
        return self.data[start : self.position]

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.strings(1)[0]

    def strings(self, count: int) -> list[str]:
        """`count` strings, each a uint64 length and UTF-8 text. This loop is what opening a file waits for, so it is kept tight."""
        if count * 8 > len(self.data) - self.position:  # before anything of that length is allocated
            raise _Damaged(f"is incomplete: its header promises {count} strings beyond byte {self.position}")
        data, end, limit, unpack, texts = self.data, self.position, len(self.data), struct.Struct("<Q").unpack_from, []
        try:
            for _ in range(count):
                start = end + 8
                end = start + unpack(data, end)[0]
                if end > limit:
                    raise _Damaged(f"is incomplete: a string of its header goes from byte {start} beyond the end")
                texts.append(str(data[start:end], "utf-8"))
        except struct.error as error:
            raise _Damaged(f"is incomplete: its header goes on beyond the end (byte {end} needs 8 more)") from error
        except UnicodeDecodeError as error:
            raise _Damaged(f"is damaged: the string at byte {start} is not UTF-8") from error
        self.position = end
        return texts

    def value(self, kind: int) -> Any:
        if kind == gguf.GGUFValueType.STRING:
            return self.string()
        if kind == gguf.GGUFValueType.ARRAY:
            item, count = self.scalar("I"), self.scalar("Q")
            if item == gguf.GGUFValueType.STRING:
                return self.strings(count)
            dtype = np.dtype("<" + _scalar_code(item))
            return np.frombuffer(self.take(count * dtype.itemsize), dtype).tolist()
        return self.scalar(_scalar_code(kind))


def _scalar_code(kind: int) -> str:
    if kind not in SCALARS:
        raise _Damaged(f"is damaged: metadata of type {kind} is unknown (or an array of arrays, which no model uses)")
    return SCALARS[kind]


def _read_header(cursor: _Cursor, path: Path) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    cursor.take(len(MAGIC))
    version = cursor.scalar("I")
    if version and version & 0xFFFF == 0:
        raise _Damaged("is a big-endian GGUF file", "get the little-endian one, or convert it with `gguf-convert-endian FILE little`")
    if version not in VERSIONS:
        raise _Damaged(f"has GGUF version {version}; versions {VERSIONS} are supported", "convert the model again, or update Diptych")
    num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        key = cursor.string()
        if key in metadata:
            raise _Damaged(f"is damaged: it has metadata {key!r} twice")
        metadata[key] = cursor.value(cursor.scalar("I"))
    described = []
    for _ in range(num_tensors):
        name, dimensions = cursor.string(), cursor.scalar("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise _Damaged(f"is damaged: tensor {name!r} has {dimensions} dimensions (1 to {MAX_DIMENSIONS} are possible)")
        shape = tuple(cursor.scalar("Q") for _ in range(dimensions))[::-1]  # stored innermost first
        described.append((name, shape, cursor.scalar("I"), cursor.scalar("Q")))
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise _Damaged(f"is damaged: its alignment is {alignment!r}")
    base = -(-cursor.position // alignment) * alignment  # tensor offsets count from the end of the header, aligned
    tensors = {}
    for name, shape, kind, offset in described:
        if name in tensors:
            raise _Damaged(f"is damaged: it has tensor {name!r} twice")
        tensors[name] = info = _tensor_info(name, path, shape, kind, base + offset)
        if info.offset + info.num_bytes > len(cursor.data):
            raise _Damaged(f"is incomplete: tensor {name!r} ends at byte {info.offset + info.num_bytes}")
    return metadata, tensors


def _tensor_info(name: str, path: Path, shape: tuple[int, ...], kind: int, offset: int) -> TensorInfo:
    if kind not in gguf.GGML_QUANT_SIZES:
        raise _Damaged(f"holds tensor {name!r} in format {kind}, which this version of the gguf package does not know", "update it")
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if not all(shape):
        raise _Damaged(f"is damaged: tensor {name!r} has shape {shape}")
    if shape[-1] % block:
        raise _Damaged(f"is damaged: rows of tensor {name!r} have {shape[-1]} values, no multiple of the {block} of a block")
    return TensorInfo(name, path, shape, gguf.GGMLQuantizationType(kind), offset, math.prod(shape) // block * block_bytes)
