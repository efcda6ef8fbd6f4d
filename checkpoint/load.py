"""From a model's files to its parameters."""

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from checkpoint import families, gguf_names, orbax_folder, tensors
from checkpoint.download import Progress
from checkpoint.gguf_file import open_gguf
from checkpoint.safetensors_folder import open_folder
from checkpoint.source import Source
from model import ModelConfig, abstract_params
from runtime import UserError

_SHOWN = 8  # tensors that an error lists in full


@dataclasses.dataclass(frozen=True, eq=False)
class Checkpoint:
    """What a model's files hold."""

    path: Path
    config: ModelConfig
    params: Any = dataclasses.field(repr=False)  # the tree of `model.abstract_params(config, dtype)`
    kind: str  # "gguf", "folder" (Hugging Face's) or "orbax"
    metadata: Mapping[str, Any] = dataclasses.field(repr=False)  # of a GGUF file: its tokenizer is in it; else of no use to a model
    notices: tuple[str, ...] = ()  # what the files hold and this model has no use for


def load(path: str | os.PathLike[str], dtype: jnp.dtype = jnp.float32, progress: Progress | None = None) -> Checkpoint:
    """Reads a model's weights, one at a time: the host holds the result and what makes one weight more.

    Args:
      path: of a GGUF file, of a folder with `config.json` and safetensors files, or of one that `convert` wrote.
      dtype: the storage format of matrices, float32 or bfloat16. Vectors (scales of norms, biases, sinks) stay float32.
      progress: shows on a terminal how many bytes are there.

    Raises:
      UserError: the files are damaged, of a family that is not supported, or not the model that their description promises.
    """
    path = Path(path)
    if orbax_folder.is_checkpoint(path):
        config, params = orbax_folder.load(path, dtype)
        return Checkpoint(path, config, params, "orbax", orbax_folder.describe(path).metadata)
    if path.is_dir():
        folder = open_folder(path)
        config = families.model_config(folder.config, path / "config.json")
        kind = folder.config["model_type"]
        source, table, metadata = folder, tensors.NAMES.get(kind, tensors.Names()), {}
        further = folder.config.get("num_nextn_predict_layers") or 0
    else:
        file = open_gguf(path)
        source = gguf_names.GGUFSource(file)
        config = families.model_config(gguf_names.config_keys(file), path)
        table, metadata = source.table, file.metadata
        further = gguf_names.further_layers(file)
    chosen = _Chosen(source, config, further)
    params = _params(chosen, config, list(tensors.weights(config, table, chosen)), jnp.dtype(dtype), progress)
    return Checkpoint(path, config, params, "folder" if path.is_dir() else "gguf", metadata, chosen.notices())


class _Chosen:
    """A source without what its model has no use for, and with the text model's tensors named as if it stood alone."""

    TEXT = (("language_model.model.", "model."), ("model.language_model.", "model."), ("language_model.lm_head.", "lm_head."))
    UNUSED = (
        (r"(model\.)?(vision_tower|multi_modal_projector)\..*", "tensors of the half that sees"),
        (r".*\.rotary_emb\.inv_freq", "rotary frequencies, which the config gives"),
    )

    def __init__(self, source: Source, config: ModelConfig, further_layers: int):
        self.source, self.config = source, config
        self.further = range(len(config.layers), len(config.layers) + further_layers)
        self.path = source.path
        self.unused: dict[str, int] = {}
        self._names: dict[str, str] = {}
        for name in source.names():
            if why := self._why_unused(name):
                self.unused[why] = self.unused.get(why, 0) + 1
            else:
                self._names[self._renamed(name)] = name

    def _renamed(self, name: str) -> str:
        return next((new + name.removeprefix(old) for old, new in self.TEXT if name.startswith(old)), name)

    def _why_unused(self, name: str) -> str:
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        if layer and int(layer[1]) in self.further:
            return "tensors of layers that predict further tokens"
        if self.config.tie_embeddings and self._renamed(name) == "lm_head.weight":
            return "head that is tied to the embedding"
        return next((why for pattern, why in self.UNUSED if re.fullmatch(pattern, name)), "")

    def notices(self) -> tuple[str, ...]:
        return tuple(f"{self.path}: not used: {count} {why}" for why, count in sorted(self.unused.items()))

    def names(self) -> set[str]:
        return set(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.source.shape(self._names[name])

    def read(self, name: str) -> np.ndarray:
        return self.source.read(self._names[name])


class _Parts(Sequence):
    """The tensors that make a weight, each read when it is asked for."""

    def __init__(self, source: Source, names: Sequence[str]):
        self._source, self._names = source, names

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, index: int) -> np.ndarray:
        return self._source.read(self._names[index])


def _params(source: Source, config: ModelConfig, weights: list[tensors.Weight], dtype: jnp.dtype, progress: Progress | None) -> Any:
    promised = flax.traverse_util.flatten_dict(abstract_params(config, dtype), is_leaf=lambda _, value: hasattr(value, "names"))
    _check(source, weights)
    total = sum(box.value.size * box.value.dtype.itemsize for box in promised.values())
    tree, done = {}, 0
    for weight in weights:
        wanted = promised[weight.place].value
        value = weight.make(_Parts(source, [name for name, _ in weight.parts]))
        if value.shape != wanted.shape:
            raise ValueError(f"weight {'.'.join(weight.place)} was made with shape {value.shape}, not {wanted.shape}")
        tree[weight.place] = jax.device_put(np.ascontiguousarray(value).astype(wanted.dtype, copy=False))
        done += tree[weight.place].nbytes
        if progress is not None and progress.on_terminal:
            progress.advance(f"Reading {source.path.name}", done, total)
    if absent := promised.keys() - tree.keys():
        raise ValueError(f"no tensors are named for the weights {sorted('.'.join(place) for place in absent)}")
    return flax.traverse_util.unflatten_dict(tree)


def _check(source: Source, weights: list[tensors.Weight]) -> None:
    """Every tensor that is needed is there in its shape, and none is left over."""
    needed = {name: shape for weight in weights for name, shape in weight.parts}
    there = source.names()
    missing, unknown = sorted(needed.keys() - there), sorted(there - needed.keys())
    wrong = [
        f"{name} has shape {source.shape(name)} instead of {needed[name]}"
        for name in sorted(needed.keys() & there)
        if tuple(source.shape(name)) != needed[name]
    ]
    problems = [
        *_listed("tensors are missing", [f"{name} {needed[name]}" for name in missing]),
        *_listed("tensors have another shape than the config promises", wrong),
        *_listed("tensors have no place in the model", [f"{name} {tuple(source.shape(name))}" for name in unknown]),
    ]
    if problems:
        raise UserError(
            f"{source.path}: {'; '.join(problems)}. The files are incomplete or of a variant that is not supported: check the download"
        )


def _listed(what: str, items: list[str]) -> Iterator[str]:
    if items:
        more = f" and {len(items) - _SHOWN} more, up to {items[-1]}" if len(items) > _SHOWN else ""
        yield f"{len(items)} {what}: {', '.join(items[:_SHOWN])}{more}"
