"""The exported form of a cache row: arrays by position, whatever the layout and memory order, and a manifest that says what they are.

    arrays    "0.k.values" [L, tokens, K, numbers per token and head] for the first group of equal layers, its keys, their values;
              "0.k.scales" likewise in a quantized format. As unsigned integers where the format is a float of 8 or 16 bits.
    manifest  {"version": 1, "namespace": "", "length": 37, "format": {"dtype": "int8", "group": 32, "scale": "float16"},
               "order": ["layer", "token", "head", "number"],
               "groups": [{"spec": {"kind": "LayerSpec", "window": 16, ...}, "layers": [0, 2], "first": 21}],
               "arrays": {"0.k.values": {"shape": [2, 16, 4, 64], "dtype": "|i1", "crc32": 907060870}, ...}, "crc32": 3421780262}

`first` is the position of the first token that a group's arrays hold: of layers with a window, only those that a later query may see.

The checksums are CRC-32: they are to find damage, which they miss once in 2^32 times, at 2 to 5 times the speed of SHA-256 or BLAKE2. Those
would keep out forgers only if the manifest came another way than the arrays: where that is needed, sign the whole.
"""

import dataclasses
import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flax import struct

from kv.cache import Cache
from kv.codec import SCALE, Quantized
from runtime import UserError
from runtime.files import replacing

VERSION = 1  # of the exported form
PARTS = ("values", "scales")  # of a codec
ORDER = ["layer", "token", "head", "number"]


class Export(struct.PyTreeNode):
    """What `export_row` makes: a tree of arrays."""

    arrays: dict[str, np.ndarray]
    manifest: dict[str, Any] = struct.field(pytree_node=False)  # JSON: the same after json.loads(json.dumps(manifest))


def array_names(cache: Cache, group: int) -> dict[str, list[str]]:
    """Of each tensor of a group of layers, the names of its arrays."""
    return {
        name: [f"{group}.{name}.{part}" for part, _ in zip(PARTS, tensor.parts, strict=False)]
        for name, tensor in cache.stores[group].tensors.items()
    }


def describe(cache: Cache, length: int, firsts: Sequence[int], arrays: Mapping[str, np.ndarray], namespace: str) -> dict[str, Any]:
    """The manifest of a row of `cache` that holds `length` tokens, of which `arrays` have those from `firsts` on."""
    manifest = {
        "version": VERSION,
        "namespace": namespace,
        "length": length,
        "format": _format(cache),
        "order": [*ORDER],
        "groups": [group | {"first": first} for group, first in zip(_groups(cache), firsts, strict=True)],
        "arrays": {name: _described(array) for name, array in arrays.items()},
    }
    return manifest | {"crc32": _checksum(manifest)}


def verify(cache: Cache, export: Export, namespace: str) -> None:
    """Checks that an export is whole, and that a row of `cache` can take it.

    Raises:
      UserError: another version or namespace, another number format or other layers, more tokens than a row can hold; a missing array, one
        too many, one of another shape or dtype, damage anywhere.
    """
    manifest = export.manifest
    version = manifest.get("version") if isinstance(manifest, Mapping) else None
    if version != VERSION:
        raise UserError(f"the export is of layout version {version}, this program reads {VERSION}: export with a program that writes it")
    if manifest.get("crc32") != (found := _checksum(manifest)):
        raise UserError(f"the export's manifest is damaged, CRC-32 {found} instead of {manifest.get('crc32')}: transfer or export it again")
    if manifest["namespace"] != namespace:
        raise UserError(f"the export is of namespace {manifest['namespace']!r}, the row of {namespace!r}: import what the same model made")
    if manifest["format"] != (mine := _format(cache)):
        raise UserError(f"the export holds {_named(manifest['format'])}, the cache {_named(mine)}: use one number format on both sides")
    theirs = [{key: value for key, value in group.items() if key != "first"} for group in manifest["groups"]]
    if theirs != (mine := _groups(cache)):
        given, wanted = _first_difference(theirs, mine)
        raise UserError(f"the export has {given} where the cache has {wanted}: import what the same model made")
    if manifest["length"] > cache.capacity:
        raise UserError(
            f"the export holds {manifest['length']} tokens, a row {cache.capacity}: make the cache with --capacity of that at least"
        )
    _verify_arrays(export)


def save_export(export: Export, path: str) -> None:
    """Writes an export as a NumPy .npz file, whole or not at all. UserError: it can't be written."""
    text = np.frombuffer(json.dumps(export.manifest).encode(), np.uint8)
    with replacing(path) as file:
        np.savez(file.buffer, manifest=text, **export.arrays)


def load_export(path: str) -> Export:
    """What `save_export` wrote; `import_row` checks it.

    Raises:
      UserError: no such file, or no such export in it.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file.items())
        return Export(arrays, json.loads(arrays.pop("manifest").tobytes()))
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror or error}): give a file that save_export wrote") from error
    except (AttributeError, EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path} is no export, or a damaged one ({error}): give a file that save_export wrote") from error


def _verify_arrays(export: Export) -> None:
    described, arrays = export.manifest["arrays"], export.arrays
    for names, what in ((described.keys() - arrays.keys(), "missing"), (arrays.keys() - described.keys(), "none of the manifest's")):
        if names:
            raise UserError(f"array {min(names)} of the export is {what}, {len(described)} are named: transfer or export it again")
    for name, wanted in described.items():
        array = np.asarray(arrays[name])
        if [*array.shape] != wanted["shape"] or array.dtype.str != wanted["dtype"]:
            given = f"{array.dtype.str}{[*array.shape]}"
            raise UserError(f"array {name} of the export is {given} instead of {wanted['dtype']}{wanted['shape']}: export it again")
        found = _described(array)["crc32"]
        if found != wanted["crc32"]:
            raise UserError(
                f"array {name} of the export is damaged, CRC-32 {found} instead of {wanted['crc32']}: transfer or export it again"
            )


def _described(array: np.ndarray) -> dict[str, Any]:
    return {"shape": [*array.shape], "dtype": array.dtype.str, "crc32": zlib.crc32(np.ascontiguousarray(array))}


def _checksum(manifest: Mapping[str, Any]) -> int:
    """Of all of a manifest but the checksum itself."""
    return zlib.crc32(json.dumps({key: value for key, value in manifest.items() if key != "crc32"}, sort_keys=True).encode())


def _format(cache: Cache) -> dict[str, Any]:
    codec = next(iter(cache.stores[0].tensors.values())).codec
    quantized = isinstance(codec, Quantized)
    return {"dtype": codec.dtype.name, "group": codec.group if quantized else None, "scale": SCALE.name if quantized else None}


def _named(format: Mapping[str, Any]) -> str:
    return format["dtype"] + (f" in groups of {format['group']} with {format['scale']} scales" if format["group"] else "")


def _groups(cache: Cache) -> list[dict[str, Any]]:
    """Which layers keep what."""
    layers: list[list[int]] = [[] for _ in cache.stores]
    for layer, (store, _) in enumerate(cache.places):
        layers[store].append(layer)
    specs = [{"kind": type(spec).__name__} | dataclasses.asdict(spec) for spec in cache.specs]
    return [{"spec": spec, "layers": numbers} for spec, numbers in zip(specs, layers, strict=True)]


def _first_difference(theirs: list[dict[str, Any]], mine: list[dict[str, Any]]) -> tuple[str, str]:
    def named(groups: list[dict[str, Any]], index: int) -> str:
        return f"layers {groups[index]['layers']} of {groups[index]['spec']}" if index < len(groups) else "no more layers"

    index = next(index for index in range(len(theirs) + 1) if theirs[index : index + 1] != mine[index : index + 1])
    return named(theirs, index), named(mine, index)
