"""Finished layers of a quantization in a folder, a file each, so that a run that was stopped goes on where it was."""

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels import QuantArray
from runtime import UserError

SAMPLES = 1024  # numbers of each weight that tell models apart
_STATIC = tuple(field.name for field in dataclasses.fields(QuantArray) if field.metadata.get("static"))
_ARRAYS = tuple(field.name for field in dataclasses.fields(QuantArray) if not field.metadata.get("static"))


def fingerprint(options: Mapping[str, Any], tokens: np.ndarray, model: str, params: Any) -> str:
    """A hash of all that a run's layers depend on; of each weight, the shape, the dtype and about 1,024 numbers spread over it."""
    found = hashlib.sha256(json.dumps(options, sort_keys=True).encode())
    found.update(np.ascontiguousarray(tokens, np.int32).tobytes() + model.encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        found.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype}".encode())
        found.update(np.asarray(leaf.reshape(-1)[:: max(1, leaf.size // SAMPLES)]).tobytes())
    return found.hexdigest()


@dataclasses.dataclass(frozen=True)
class LayerStore:
    """
    Attributes:
      folder: made at the first write.
      fingerprint: of the run; every file holds it.
    """

    folder: Path
    fingerprint: str

    def path(self, number: int) -> Path:
        return self.folder / f"layer_{number:03d}.npz"

    def read(self, number: int) -> dict[str, QuantArray] | None:
        """The layer's packed weights by path, bit for bit as they were written; None: it isn't there.

        Raises:
          UserError: another run wrote it, or it can't be read.
        """
        path = self.path(number)
        if not path.exists():
            return None
        try:
            with np.load(path, allow_pickle=False) as file:
                manifest = json.loads(str(file["manifest"]))
                if manifest["fingerprint"] != self.fingerprint:
                    raise UserError(
                        f"{path} is of another model, text, method or scheme than this run's: give another folder, or delete this one"
                    )
                return {name: _join(name, parts, file) for name, parts in manifest["weights"].items()}
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise UserError(f"{path} can't be read ({error}): delete it, and the layer is made again") from error

    def write(self, number: int, weights: Mapping[str, QuantArray]) -> None:
        """Whole or not at all.

        Raises:
          UserError: the folder can't be written to.
        """
        arrays: dict[str, np.ndarray] = {}
        manifest = {"fingerprint": self.fingerprint, "weights": {name: _split(name, array, arrays) for name, array in weights.items()}}
        arrays["manifest"] = np.asarray(json.dumps(manifest))
        temporary = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.folder, prefix=".layer-", suffix=".partial")
            with open(handle, "wb") as file:
                np.savez(file, **arrays)
            os.replace(temporary, self.path(number))
        except OSError as error:
            raise UserError(f"{self.folder} can't be written ({error.strerror or error}): give a folder that you may write to") from error
        finally:
            if temporary is not None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary)


def _split(name: str, array: QuantArray, arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Puts its arrays into `arrays` as bytes, since numpy has no names for some dtypes; returns what makes it whole again."""
    found: dict[str, Any] = {field: getattr(array, field) for field in _STATIC}
    for field in _ARRAYS:
        value = getattr(array, field)
        parts = () if value is None else value if isinstance(value, tuple) else (value,)
        found[field] = []
        for number, part in enumerate(parts):
            part = np.ascontiguousarray(part)
            arrays[f"{name}/{field}/{number}"] = part.reshape(-1).view(np.uint8)
            found[field].append([part.dtype.name, list(part.shape)])
    return found


def _join(name: str, found: Mapping[str, Any], file: Mapping[str, np.ndarray]) -> QuantArray:
    values: dict[str, Any] = {field: found[field] for field in _STATIC}
    for field in _ARRAYS:
        parts = tuple(
            jnp.asarray(file[f"{name}/{field}/{number}"].view(jnp.dtype(dtype)).reshape(shape))
            for number, (dtype, shape) in enumerate(found[field])
        )
        values[field] = parts if field == "planes" else (parts[0] if parts else None)
    return QuantArray(**values)
