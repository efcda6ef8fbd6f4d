"""A model as a folder: its weights as an Orbax checkpoint, which restores straight into any mesh's shardings, and what it is as JSON.

folder/
    diptych.json    format version, config, shape and number format of each weight, the caller's metadata, size and CRC-32 of the files
    params/         the parameter tree, written by Orbax (OCDBT, in chunks of at most 16 MiB, so that a shard reads little more than itself)
    ...             what the caller added, such as a tokenizer's files
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import math
import os
import tempfile
import warnings
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
from flax import linen as nn

from checkpoint import packed_tree
from checkpoint.placed import Storage, stored_as
from kernels import is_packed
from model import ModelConfig, abstract_params, copied, fit, serialize, stacked, tree_names
from runtime import UserError
from sharding import Placement, is_names

MANIFEST = "diptych.json"
PARAMS = "params"
VERSION = 2  # of the format; 1 has no packed weights, and is written where there are none
CHUNK_BYTES = 16 << 20
AGAIN = "convert the model again"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What `diptych.json` says."""

    config: ModelConfig
    weights: Mapping[str, jax.ShapeDtypeStruct] = dataclasses.field(repr=False)  # arrays by place, such as `layer_0.mlp.w_down`
    packed: Mapping[str, Any] = dataclasses.field(repr=False)  # form of each packed weight (`checkpoint.packed_tree`), by place
    metadata: Mapping[str, Any]  # what `save` was given
    files: Mapping[str, tuple[int, int]] = dataclasses.field(repr=False)  # size in bytes and CRC-32, by path in the folder


def is_checkpoint(folder: str | os.PathLike[str]) -> bool:
    """Whether the folder is one that `save` wrote."""
    return (Path(folder) / MANIFEST).is_file()


def save(
    folder: str | os.PathLike[str],
    config: ModelConfig,
    params: Any,
    *,
    metadata: Mapping[str, Any],
    add_files: Callable[[Path], None] | None = None,
) -> None:
    """Writes a checkpoint, whole or not at all: it takes its name when it is complete.

    A process that is killed meanwhile leaves `FOLDER.partial-...` behind, which is no checkpoint and may be deleted.

    Args:
        folder: a new one, or an empty one.
        config: what the model is.
        params: the tree of `model.abstract_params(config)`, in any dtypes, placed and sharded in any way; matrices may be packed.
        metadata: what else to remember, such as {"source": "smollm2-135m-instruct"}; anything that JSON can hold.
        add_files: called with the unfinished folder; files that it writes there become part of the checkpoint.

    Raises:
        UserError: the folder is in use or can't be written, the parameters are not the config's, or there are several processes.
        TypeError: the config or the metadata can't be stored as JSON.
    """
    if jax.process_count() > 1:
        raise UserError(f"a checkpoint is saved by one process, but this is one of {jax.process_count()}: {AGAIN} in a single process")
    target = Path(os.path.realpath(os.path.expanduser(folder)))
    forms = packed_tree.forms(params)
    _check_weights("the parameter tree", params, _promised(config))
    params = packed_tree.as_dicts(params)
    stored = {
        "format_version": VERSION if forms else 1,
        "config": serialize.to_dict(config),
        "weights": {place: {"shape": leaf.shape, "dtype": str(leaf.dtype)} for place, leaf in _by_place(params).items()},
        "metadata": dict(metadata),
    } | ({"packed": forms} if forms else {})
    json.dumps(stored, allow_nan=False)  # finds what JSON can't hold before the weights are written
    try:
        if target.exists() and not (target.is_dir() and not any(target.iterdir())):
            raise UserError(f"{target} exists and is {'not empty' if target.is_dir() else 'a file'}: give a new folder, or delete it first")
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{target.name}.partial-", dir=target.parent, ignore_cleanup_errors=True) as scratch:
            partial = Path(scratch) / target.name  # a folder in it, because the temporary one itself is closed to other users
            partial.mkdir()
            _save_params(partial / PARAMS, params, target)
            if add_files is not None:
                add_files(partial)
            _write_manifest(partial, stored)
            with contextlib.suppress(FileNotFoundError):
                target.rmdir()
            partial.rename(target)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(
            f"checkpoint {target} can't be written ({reason}): give a folder on a disk with space that you may write to"
        ) from error


def load(
    folder: str | os.PathLike[str], dtype: jnp.dtype | None = None, shardings: Any = None, *, verify: bool = True
) -> tuple[ModelConfig, Any]:
    """Reads a checkpoint that `save` wrote. Each weight goes straight to the devices that its sharding names.

    Args:
        folder: of the checkpoint.
        dtype: the storage format of matrices that are not packed, vectors being f32 (as `model.abstract_params` says); by default all as
            they were saved.
        shardings: a `jax.sharding.Sharding` per array, in the tree that is returned or a prefix of it (one for all); by default everything
            is on the first device.
        verify: read every file once more and compare its CRC-32 (4 GB/s). Sizes are compared in any case.

    Returns:
        The config, and the parameter tree.

    Raises:
        UserError: there is no such checkpoint, it is of a newer format, its weights are not the config's, or it is damaged; or a weight
            can't be sharded as asked.
    """
    folder = Path(os.path.expanduser(folder)).absolute()
    manifest = describe(folder)
    abstract, promised = saved_params(manifest, folder), _by_place(_promised(manifest.config, jnp.float32 if dtype is None else dtype))
    _check_weights(str(folder / MANIFEST), abstract, _promised(manifest.config))
    _check_files(folder, manifest, verify)
    shardings = jax.sharding.SingleDeviceSharding(jax.local_devices()[0]) if shardings is None else shardings

    def wanted(path: Any, leaf: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        given = dtype is not None and _place(path) in promised and jnp.issubdtype(leaf.dtype, jnp.floating)
        try:
            sharding.shard_shape(leaf.shape)
        except ValueError as error:
            raise UserError(f"weight {_place(path)} can't be sharded like that: {error}; use another mesh") from error
        return jax.ShapeDtypeStruct(leaf.shape, promised[_place(path)].dtype if given else leaf.dtype, sharding=sharding)

    target = jax.tree_util.tree_map_with_path(wanted, abstract, jax.tree.broadcast(shardings, abstract))
    params = _load_params(folder / PARAMS, packed_tree.as_dicts(target))
    return manifest.config, packed_tree.from_dicts(params, manifest.packed, str(folder))


def saved_params(manifest: Manifest, folder: Path) -> Any:
    """The parameter tree as it was saved, with a `jax.ShapeDtypeStruct` for every array."""
    flat = {tuple(place.split(".")): leaf for place, leaf in manifest.weights.items()}
    return packed_tree.from_dicts(flax.traverse_util.unflatten_dict(flat), manifest.packed, str(folder / MANIFEST))


def load_placed(folder: str | os.PathLike[str], storage: Storage, placement: Placement | None, layer_loop: str) -> tuple[ModelConfig, Any]:
    """`load`, as `checkpoint.load` wants it: split over a mesh, and with repeating layers stacked or not, however it was saved.

    What was saved for another number of devices is restored as it was, split as far as that goes, and changed on the devices. Weights that
    were saved packed stay so where `storage` says "native".
    """
    manifest = describe(folder)
    saved = manifest.config
    wanted = saved if placement is None else fit(saved, placement)
    shardings = None
    if placement is not None:
        shapes = saved_params(manifest, Path(folder))
        names = tree_names(shapes, abstract_params(saved))
        shardings = jax.tree.map(lambda each, leaf: placement.dividing(each, leaf.shape), names, shapes, is_leaf=is_names)
    _, params = load(folder, storage.dtype, shardings)
    boxes = flax.traverse_util.flatten_dict(abstract_params(saved), is_leaf=lambda _, leaf: hasattr(leaf, "names"))

    def change(params: Any) -> Any:
        flat = {place: stored_as(place, w, boxes[place], storage) for place, w in flax.traverse_util.flatten_dict(params).items()}
        return stacked(wanted, copied(saved, wanted, flax.traverse_util.unflatten_dict(flat)), layer_loop)

    changed = jax.eval_shape(change, params)
    if jax.tree.structure(changed) != jax.tree.structure(params) or wanted != saved:
        target = None
        if placement is not None:
            names = tree_names(changed, abstract_params(wanted, layer_loop=layer_loop))
            target = jax.tree.map(lambda each, leaf: placement.dividing(each, leaf.shape), names, changed, is_leaf=is_names)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Some donated buffers")  # of weights that change their shape
            params = jax.jit(change, out_shardings=target, donate_argnums=0)(params)
    return wanted, packed_tree.spread(params, placement is not None and placement.mesh.size > 1)


def describe(folder: str | os.PathLike[str]) -> Manifest:
    """What a checkpoint holds, without its weights.

    Raises:
        UserError: there is no checkpoint, or its `diptych.json` is of a newer format or damaged.
    """
    folder = Path(os.path.expanduser(folder))
    path = folder / MANIFEST
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(_no_checkpoint(folder)) from None
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}; check its permissions") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged: it is not JSON ({error}); {AGAIN}") from error
    version = stored.get("format_version") if isinstance(stored, dict) else None
    if type(version) is not int or version < 1:
        raise UserError(f"{path} is damaged: its format version is {version!r}; {AGAIN}")
    if version > VERSION:
        raise UserError(f"{path} has format version {version}, and this version of Diptych reads up to {VERSION}: update Diptych")
    try:
        weights = {place: jax.ShapeDtypeStruct(tuple(each["shape"]), each["dtype"]) for place, each in stored["weights"].items()}
        files = {name: (int(size), int(checksum)) for name, (size, checksum) in stored["files"].items()}
        config, metadata, packed = stored["config"], dict(stored["metadata"]), dict(stored.get("packed", {}))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged: {type(error).__name__} {error}; {AGAIN}") from error
    return Manifest(config=serialize.from_dict(config, str(path)), weights=weights, packed=packed, metadata=metadata, files=files)


def _no_checkpoint(folder: Path) -> str:
    if not folder.is_dir():
        kind = "is a file" if folder.exists() else "does not exist"
        return f"checkpoint {folder} {kind}: give the folder of a checkpoint that Diptych wrote"
    if (folder / "_METADATA").exists() or (folder / "_CHECKPOINT_METADATA").exists():
        return f"{folder} is an Orbax checkpoint but has no {MANIFEST}, which says what model it is: give a folder that Diptych wrote"
    return f"{folder} is no checkpoint of Diptych, as it has no {MANIFEST}: give a folder that Diptych wrote"


def _place(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _by_place(params: Any) -> dict[str, Any]:
    return {_place(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def _promised(config: ModelConfig, dtype: jnp.dtype = jnp.float32) -> Any:
    """The parameter tree with a `jax.ShapeDtypeStruct` in each weight's place."""
    return nn.meta.unbox(abstract_params(config, jnp.dtype(dtype)))


def _check_weights(source: str, params: Any, abstract: Any) -> None:
    """That the weights are those of the config, and no others, in their shapes. The inputs of packed ones are one axis."""
    promised, weights = flax.traverse_util.flatten_dict(abstract, sep="."), flax.traverse_util.flatten_dict(params, sep=".")
    missing, extra = sorted(promised.keys() - weights.keys()), sorted(weights.keys() - promised.keys())
    for what, places in (("lacks", missing), ("holds, which the config has no use for,", extra)):
        if places:
            more = f" and {len(places) - 1} more" * (len(places) > 1)
            raise UserError(f"{source} {what} weight {places[0]}{more}: it is not the model that its config describes; {AGAIN}")
    for place, leaf in weights.items():
        shape, whole = tuple(leaf.shape), promised[place].shape
        if is_packed(leaf):
            whole = (*whole[: len(shape) - 1], math.prod(whole[len(shape) - 1 :]))
        if shape != whole:
            raise UserError(f"{source}: weight {place} has shape {leaf.shape}, but the config says {whole}; {AGAIN}")


def _write_manifest(folder: Path, stored: dict[str, Any]) -> None:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    entries = {path.relative_to(folder).as_posix(): (path.stat().st_size, _crc32(path)) for path in files}
    with (folder / MANIFEST).open("w", encoding="utf-8") as file:
        json.dump(stored | {"files": entries}, file, indent=1, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())


def _check_files(folder: Path, manifest: Manifest, verify: bool) -> None:
    """That all files are there, have their sizes, and hold what was written."""
    for name, (size, _) in manifest.files.items():
        try:
            found = (folder / name).stat().st_size
        except OSError as error:
            raise UserError(f"{folder / name} is missing ({error.strerror}): the checkpoint is incomplete; {AGAIN}") from error
        if found != size:
            raise UserError(f"{folder / name} is damaged: it has {found} bytes, and {size} were written; {AGAIN}")
    if verify:
        with concurrent.futures.ThreadPoolExecutor() as pool:
            for name, found in zip(manifest.files, pool.map(lambda name: _crc32(folder / name), manifest.files), strict=True):
                if found != manifest.files[name][1]:
                    raise UserError(f"{folder / name} is damaged: it is not what was written (by its CRC-32); {AGAIN}")


def _crc32(path: Path) -> int:
    checksum = 0
    try:
        with path.open("rb") as file:
            while block := file.read(CHUNK_BYTES):
                checksum = zlib.crc32(block, checksum)
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}; check its permissions and the disk") from error
    return checksum


def _save_params(path: Path, params: Any, target: Path) -> None:
    import orbax.checkpoint as ocp  # takes a second, and finding a mistake does not need it

    options = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), params)
    try:
        # Not compressed: weights shrink by a few per cent unless they were widened, and restoring would take twice the time.
        with ocp.PyTreeCheckpointer(use_ocdbt=True, use_compression=False) as checkpointer:
            checkpointer.save(path, params, save_args=options)
    except Exception as error:  # TensorStore's errors have no class of their own
        raise UserError(f"checkpoint {target} can't be written ({_first_line(error)}): free some space, or give another folder") from error


def _load_params(path: Path, target: Any) -> Any:
    import orbax.checkpoint as ocp

    try:
        with ocp.PyTreeCheckpointer(use_ocdbt=True) as checkpointer:
            return checkpointer.restore(path, target, restore_args=ocp.checkpoint_utils.construct_restore_args(target))
    except Exception as error:  # as above
        raise UserError(f"{path} can't be restored ({_first_line(error)}): it is damaged, or of another model; {AGAIN}") from error


def _first_line(error: Exception) -> str:
    text = str(error).partition("[tensorstore_spec")[0].strip() or type(error).__name__
    return text.splitlines()[0][:300]
