"""Reads a Hugging Face model folder: config.json and *.safetensors (format: huggingface/safetensors, README, "Format").

The `safetensors` package hands bfloat16 and float8 to torch only, so the header (a length and JSON) is read here, every offset checked
against the file's size. Nothing of a tensor is read until it is asked for, and its pages are given back with the array.
"""

import dataclasses
import json
import math
import os
import re
import struct
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from checkpoint import quant_methods
from checkpoint.mapped import listed, looks_like, map_bytes, part_name, strerror
from checkpoint.pieces import Coded, Refused, Stored, Weight
from checkpoint.quant_arrays import columns, packing, quant_array
from checkpoint.source import Box, Packing
from kernels import QuantArray
from runtime import UserError

DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER = 100_000_000  # bytes; the limit of the format's own implementation
PART = re.compile(r"(?P<stem>.*)-\d{5}-of-(?P<count>\d{5})\.safetensors")
DOWNLOAD_AGAIN = "download it again"
OTHER_WEIGHTS = {  # what else a folder may hold, and what to do then
    (".bin", ".pth", ".pt", ".ckpt"): "convert them to safetensors (transformers: save_pretrained)",
    (".gguf",): "give the path of the .gguf file itself",
    (".msgpack", ".h5", ".npz", ".onnx"): "download the model's *.safetensors as well",
}


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a stored tensor lies."""

    path: Path
    stored: Stored
    offset: int  # bytes from the start of the file
    num_bytes: int


@dataclasses.dataclass(frozen=True, eq=False)
class SafetensorsFolder:
    """A `checkpoint.source.Source`: weights that are stored packed have one name, and are dequantized to float32 when they are read."""

    path: Path
    config: dict[str, Any] = dataclasses.field(repr=False)  # config.json
    weights: dict[str, Weight] = dataclasses.field(repr=False)
    _places: dict[str, _Place] = dataclasses.field(repr=False)

    def names(self) -> set[str]:
        """The names of all logical tensors."""
        return set(self.weights)

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape, row-major: a weight matrix is (out, in).

        The fused experts of an MXFP4 model are (experts, in, out), as in the bfloat16 files of the same model.

        Raises:
            UserError: no such tensor.
        """
        return self._weight(name).shape

    def stored(self, name: str) -> str:
        """How the tensor is stored, for messages: "BF16", "F8_E4M3 block 128", "GPTQ int4 g128".

        Raises:
            UserError: no such tensor.
        """
        return self._weight(name).stored

    def read(self, name: str, box: Box = ()) -> np.ndarray:
        """The tensor, or a box of it: float32, float16 and bfloat16 (and integers) as a read-only view of the file; all else dequantized to
        float32.

        Raises:
            UserError: no such tensor, or its file is gone.
        """
        shape = self.shape(name)
        start, stop, _ = box[0].indices(shape[0]) if box else (0, shape[0] if shape else 0, 1)
        rows = self.read_rows(name, start, stop)
        return rows[(slice(None), *box[1:])] if len(box) > 1 else rows

    def packing(self, name: str) -> Packing | None:
        """As of `checkpoint.source.Source`."""
        weight = self._weight(name)
        return None if weight.codes is None else packing(self._codes(name, 0, 1))

    def packed(self, name: str, box: Box = ()) -> QuantArray:
        """As of `checkpoint.source.Source`; of the fused experts of an MXFP4 model (experts, out, in).

        Raises:
            UserError: no such tensor, its file is gone, or the box parts inputs that share bytes or a scale.
        """
        weight = self._weight(name)
        shape = (*weight.shape[:-2], *weight.shape[:-3:-1]) if weight.turned else weight.shape
        bounds = [part.indices(size)[:2] for part, size in zip(box, shape, strict=False)]
        bounds += [(0, size) for size in shape[len(bounds) :]]
        found, unit = quant_array(self._codes(name, *bounds[0])), self.packing(name).unit
        if len(shape) > 2:
            found = found.map_rows(lambda array: array[(slice(None), *(slice(*part) for part in bounds[1:-1]))])
        if bounds[-1] != (0, shape[-1]) and any(bound % unit for bound in bounds[-1]):
            raise UserError(
                f"{self.path}: {name!r} is stored as {weight.stored}, of which a device can't have inputs {bounds[-1][0]} to "
                f"{bounds[-1][1]} (they go together by {unit}): use a smaller mesh, or --weights=bf16"
            )
        return columns(found, *bounds[-1])

    def _codes(self, name: str, start: int, stop: int) -> Coded:
        try:
            return self._weight(name).codes(self._raw, start, stop)
        except Refused as error:
            raise UserError(f"{self.path}: {error}") from error

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """`read(name)[start:stop]`; other rows are neither read nor dequantized.

        Raises:
            UserError: no such tensor or rows, or its file is gone.
        """
        weight = self._weight(name)
        size = weight.shape[0] if weight.shape else 0
        if not 0 <= start <= stop <= size:
            raise UserError(f"{self.path}: rows {start} to {stop} of {name!r} were asked for, but it has {size}: ask for rows it has")
        try:
            return weight.rows(self._raw, start, stop)
        except Refused as error:
            raise UserError(f"{self.path}: {error}") from error

    def _weight(self, name: str) -> Weight:
        try:
            return self.weights[name]
        except KeyError:
            raise UserError(
                f"{self.path} has no tensor {name!r} among its {len(self.weights)}: it is no complete model of its architecture; "
                "download all its files"
            ) from None

    def _raw(self, name: str) -> np.ndarray:
        return _values(self._places[name])


def open_folder(path: str | os.PathLike[str]) -> SafetensorsFolder:
    """Opens a model folder, and checks that all that its files promise is there and goes together.

    The shards are those of model.safetensors.index.json; without it model.safetensors, or all *.safetensors.

    Raises:
        UserError: no such folder, no config.json, no weights; a damaged, incomplete or missing file; an unsupported quantization.
    """
    path = Path(path)
    try:
        return _open(path)
    except OSError as error:
        raise UserError(f"{error.filename or path} can't be read: {strerror(error)}; check its permissions") from error


def _open(path: Path) -> SafetensorsFolder:
    if not path.exists():
        raise UserError(f"{path} does not exist: check the path")
    if not path.is_dir():
        raise UserError(f"{path} is a file, but a model's folder (config.json and *.safetensors) is expected: give the folder's path")
    if not (path / "config.json").exists():
        inside = "; give one of the folders in its snapshots/" if (path / "snapshots").is_dir() else ""
        raise UserError(f"{path} holds no config.json: it is no Hugging Face model folder, or not all of one; download all files{inside}")
    config = _json(path / "config.json")
    places: dict[str, _Place] = {}
    promised = _shards(path)
    for shard in promised:
        for name, place in _open_shard(path / shard).items():
            if name in places:
                raise UserError(
                    f"{path}: tensor {name!r} is in both {places[name].path.name} and {shard}: the files are of different models, "
                    "or are there twice; keep one of the two"
                )
            places[name] = place
    for shard, names in promised.items():
        if missing := names - places.keys():
            raise UserError(
                f"{path / INDEX} promises tensor {min(missing)!r} in {shard}, which is not there: the files are of different models; "
                "download all of them again"
            )
    try:
        entries = {name: place.stored for name, place in places.items()}
        weights = quant_methods.weights(entries, _quantization(path, config), lambda name: _values(places[name]))
    except Refused as error:
        raise UserError(f"{path}: {error}") from error
    return SafetensorsFolder(path=path, config=config, weights=weights, _places=places)


def _json(path: Path) -> dict[str, Any]:
    content = path.read_bytes()
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        what = f"it looks like {looks_like(content[:64])}" if content else "it is empty"
        raise UserError(f"{path} is no JSON ({error}); {what}: {DOWNLOAD_AGAIN}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object, but {type(value).__name__}: {DOWNLOAD_AGAIN}")
    return value


def _quantization(path: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """How the weights are quantized: of config.json, of its part for the text model, or of the file that AutoGPTQ writes beside it."""
    text = config.get("text_config")
    for holder in (config, text if isinstance(text, dict) else {}):
        for key in ("quantization_config", "compression_config"):
            if holder.get(key) is not None:
                if not isinstance(holder[key], dict):
                    raise UserError(f"{path / 'config.json'}: its {key} is {holder[key]!r}, but should be an object: {DOWNLOAD_AGAIN}")
                return holder[key]
    if (path / "quantize_config.json").exists():
        return {"quant_method": "gptq", **_json(path / "quantize_config.json")}
    return None


def _shards(path: Path) -> dict[str, set[str]]:
    """The names of the weights files, each with the tensors that the index promises in it."""
    if (path / INDEX).exists():
        return _indexed(path)
    there = sorted(file.name for file in path.iterdir())
    files = [name for name in there if name.endswith(".safetensors")]
    if SINGLE in files:
        files = [SINGLE]
    if not files:
        for suffixes, remedy in OTHER_WEIGHTS.items():
            if others := [name for name in there if name.endswith(suffixes)]:
                raise UserError(f"{path} holds no *.safetensors, only {listed(others)}: {remedy}")
        raise UserError(f"{path} holds no *.safetensors, only {listed(there)}: download the model's weights")
    parts = {(match["stem"], int(match["count"])) for name in files if (match := PART.fullmatch(name))}
    expected = [part_name(stem, number, count, ".safetensors") for stem, count in parts for number in range(1, count + 1)]
    _all_there(path, expected, "file names")
    return {name: set() for name in files}


def _indexed(path: Path) -> dict[str, set[str]]:
    table = _json(path / INDEX).get("weight_map")
    if not isinstance(table, dict) or not table or not all(isinstance(shard, str) for shard in table.values()):
        raise UserError(f"{path / INDEX} has no weight_map from tensors to files: {DOWNLOAD_AGAIN}")
    shards: dict[str, set[str]] = {}
    for name, shard in table.items():
        shards.setdefault(shard, set()).add(name)
    for shard in shards:
        if Path(shard).name != shard or "\\" in shard:
            raise UserError(f"{path / INDEX} names {shard!r}, which is no file of the folder: {DOWNLOAD_AGAIN}")
    _all_there(path, sorted(shards), INDEX)
    return shards


def _all_there(path: Path, names: list[str], promise: str) -> None:
    if missing := [name for name in names if not (path / name).exists()]:
        raise UserError(f"{path}: {len(missing)} of {len(names)} files that its {promise} promise are missing: download {listed(missing)}")


def _values(place: _Place) -> np.ndarray:
    """The stored tensor: a read-only view of the file, aligned (a copy where the file has it at an odd place)."""
    try:
        data = map_bytes(place.path, place.offset, place.num_bytes)
    except (OSError, ValueError) as error:
        raise UserError(f"{place.path} could be opened, but can't be read any more: {strerror(error)}; put it back") from error
    dtype = np.dtype(DTYPES[place.stored.dtype]).newbyteorder("<")
    return np.require(data.view(dtype).reshape(place.stored.shape), requirements="A")


def _open_shard(path: Path) -> dict[str, _Place]:
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(64)
        length = struct.unpack("<Q", head[:8])[0] if len(head) >= 8 else 0
        file.seek(8)
        header = file.read(length) if length <= min(size, MAX_HEADER) else b""
    if not size:
        raise UserError(f"{path} is empty (0 bytes): {DOWNLOAD_AGAIN}")
    if head.startswith(b"version https://git-lfs"):
        raise UserError(f"{path} is a Git LFS pointer, not the file it points to: run `git lfs pull` in {path.parent}")
    if head[8:9] != b"{":
        raise UserError(f"{path} is no safetensors file: it looks like {looks_like(head)}; {DOWNLOAD_AGAIN}")
    if length > MAX_HEADER:
        raise UserError(f"{path} is damaged: its header is said to have {length} bytes ({MAX_HEADER} are possible): {DOWNLOAD_AGAIN}")
    if 8 + length > size:
        raise UserError(f"{path} is incomplete: it has {size} bytes, of which its header alone needs {8 + length}: {DOWNLOAD_AGAIN}")
    try:
        described = json.loads(header, object_pairs_hook=_unique)
        places = {name: _place(path, name, value, 8 + length) for name, value in described.items() if name != "__metadata__"}
        _check_layout(places.values(), 8 + length, size)
    except (ValueError, RecursionError) as error:
        reason = error if isinstance(error, _Damaged) else f"its header is no JSON ({error})"
        raise UserError(f"{path} is damaged: {reason}: {DOWNLOAD_AGAIN}") from error
    except _Incomplete as error:
        raise UserError(f"{path} is incomplete: {error}: {DOWNLOAD_AGAIN}") from error
    return places


class _Damaged(ValueError):
    """What is wrong with a header."""


class _Incomplete(Exception):
    """What is missing."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise _Damaged(f"it has {twice[0]!r} twice")
    return dict(pairs)


def _place(path: Path, name: str, described: Any, base: int) -> _Place:
    try:
        dtype, shape, (start, stop) = described["dtype"], described["shape"], described["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise _Damaged(f"its header describes tensor {name!r} without dtype, shape and two data_offsets") from error
    if not isinstance(shape, list) or not all(type(number) is int and number >= 0 for number in (*shape, start, stop)):
        raise _Damaged(f"tensor {name!r} has shape {shape!r} and data_offsets {[start, stop]!r}")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise UserError(
            f"{path} holds tensor {name!r} of dtype {dtype!r}, which is not supported: use a conversion to one of {', '.join(DTYPES)}"
        )
    need = math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
    if stop - start != need:
        raise _Damaged(f"tensor {name!r}, {dtype} {tuple(shape)}, needs {need} bytes, but data_offsets {[start, stop]} are {stop - start}")
    return _Place(path, Stored(dtype, tuple(shape)), base + start, need)


def _check_layout(places: Iterable[_Place], base: int, size: int) -> None:
    """The tensors must follow one another without gaps or overlaps, to the end of the file: the format's own rule."""
    end = base
    for place in sorted(places, key=lambda place: (place.offset, place.num_bytes)):
        if place.offset != end:
            how = "overlaps the one" if place.offset < end else "leaves a gap after the one"
            raise _Damaged(f"the tensor at byte {place.offset} {how} before")
        end += place.num_bytes
    if end > size:
        raise _Incomplete(f"it has {size} bytes, of which its tensors need {end}")
    if end < size:
        raise _Damaged(f"it has {size} bytes, but its tensors end at {end}")
