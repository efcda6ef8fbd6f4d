"""From a weights file to a model with its parameters."""

import dataclasses
import os
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from checkpoint import llama
from checkpoint.gguf_file import GGUFFile, open_gguf
from model import ModelConfig, abstract_params
from runtime import UserError

ARCHITECTURES: dict[str, types.ModuleType] = {"llama": llama}


@dataclasses.dataclass(frozen=True, eq=False)
class Checkpoint:
    """What a weights file holds."""

    path: Path
    config: ModelConfig
    params: Any = dataclasses.field(repr=False)  # the tree of `model.abstract_params(config)`, in the dtype asked for
    metadata: Mapping[str, Any] = dataclasses.field(repr=False)  # the tokenizer is built from it


def load(path: str | os.PathLike[str], dtype: jnp.dtype = jnp.float32) -> Checkpoint:
    """Reads a GGUF file's weights, one tensor at a time: the host holds the result and one weight more.

    Args:
        path: of the file.
        dtype: the storage format of all weights, float32 or bfloat16.

    Raises:
        UserError: the file is damaged, of an architecture that is not supported, or not the model its metadata say.
    """
    file = open_gguf(path)
    architecture = file.require("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UserError(f"{path} holds architecture {architecture!r}; supported: {', '.join(ARCHITECTURES)}. Use another model")
    module = ARCHITECTURES[architecture]
    config = module.config(file)
    return Checkpoint(path=file.path, config=config, params=_params(file, module, config, jnp.dtype(dtype)), metadata=file.metadata)


def _params(file: GGUFFile, module: types.ModuleType, config: ModelConfig, dtype: jnp.dtype) -> Any:
    unread = set(file.tensors)

    def read(name: str) -> np.ndarray:
        unread.discard(name)
        return file.dequantize(name)

    promised = flax.traverse_util.flatten_dict(abstract_params(config), is_leaf=lambda _, value: hasattr(value, "names"))
    tree = {}
    for place, make in flax.traverse_util.flatten_dict(module.params(config, read)).items():
        shape = promised[place].value.shape
        try:
            value = make()
        except ValueError as error:  # a reshape that does not come out even
            raise _misfit(file, place, shape, str(error)) from error
        if value.shape != shape:
            raise _misfit(file, place, shape, f"it has {value.shape}")
        tree[place] = jax.device_put(np.ascontiguousarray(value).astype(dtype, copy=False))
    if unread:
        raise UserError(
            f"{file.path} holds {len(unread)} tensors that its architecture has no use for, such as {min(unread)!r}: "
            "the model is a variant that is not supported; use another one"
        )
    return flax.traverse_util.unflatten_dict(tree)


def _misfit(file: GGUFFile, place: tuple[str, ...], shape: tuple[int, ...], what: str) -> UserError:
    return UserError(f"{file.path}: weight {'.'.join(place)} should have shape {shape}, but {what}: the file is damaged; download it again")
