"""From a model's files to its parameters."""

import dataclasses
import functools
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from checkpoint import families, gguf_names, orbax_folder, tensors
from checkpoint.download import Progress
from checkpoint.gguf_file import open_gguf
from checkpoint.placed import AUTO, How, Storage, placed
from checkpoint.safetensors_folder import open_folder
from checkpoint.source import Box, Packing, Source
from checkpoint.weight import Place, Weight
from kernels import QuantArray
from model import Loop, ModelConfig, abstract_params, fit, loop_of, packed_names
from runtime import UserError
from sharding import Placement, axes, is_names

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


def load(
    path: str | os.PathLike[str],
    dtype: jnp.dtype = jnp.float32,
    progress: Progress | None = None,
    placement: Placement | None = None,
    layer_loop: str = "unrolled",
    layers: How = AUTO,
    head: How = AUTO,
) -> Checkpoint:
    """Reads a model's weights, one at a time: the host holds the result and what makes one weight more.

    Args:
      path: of a GGUF file, of a folder with `config.json` and safetensors files, or of one that `convert` wrote.
      dtype: the storage format of matrices that are not packed, float32 or bfloat16. Vectors (scales of norms, biases, sinks) stay float32.
      progress: shows on a terminal how many bytes are there.
      placement: splits the weights over a mesh. Each process reads what its own devices hold, and the config is what `model.fit` makes of
        the files'.
      layer_loop: as of `model.Transformer`: how the tree is built.
      layers: what the layers' matrices become: packed by a `quantization.Scheme`; "native": as the files store them, where a
        `kernels.QuantArray` holds just that, else of `dtype`; "auto": of `dtype`, but packed where Diptych saved them so; a dtype.
      head: embedding and head, likewise.

    Raises:
      UserError: the model can't be split over that mesh, or the files are damaged, of a family that is not supported, or not the model
        that their description promises.
    """
    path, storage = Path(path), Storage(jnp.dtype(dtype), layers, head)
    if orbax_folder.is_checkpoint(path):
        config, params = orbax_folder.load_placed(path, storage, placement, layer_loop)
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
    config = config if placement is None else fit(config, placement)
    weights = list(tensors.weights(config, table, chosen))
    params = _params(chosen, config, weights, storage, progress, placement, loop_of(config, layer_loop))
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

    def read(self, name: str, box: Box = ()) -> np.ndarray:
        return self.source.read(self._names[name], box)

    def packing(self, name: str) -> Packing | None:
        return self.source.packing(self._names[name])

    def packed(self, name: str, box: Box = ()) -> QuantArray:
        return self.source.packed(self._names[name], box)


def _params(
    source: Source,
    config: ModelConfig,
    weights: list[Weight],
    storage: Storage,
    progress: Progress | None,
    placement: Placement | None,
    loop: Loop | None,
) -> Any:
    promised = flax.traverse_util.flatten_dict(abstract_params(config, storage.dtype), is_leaf=lambda _, value: hasattr(value, "names"))
    _check(source, weights)
    total = sum(box.value.size * box.value.dtype.itemsize for box in promised.values())
    tree: dict[Place, jax.Array] = {}
    made: set[Place] = set()
    done = 0
    for weight in weights:
        box = promised[weight.place]
        if weight.shape != box.value.shape:
            raise ValueError(f"weight {'.'.join(weight.place)} was made with shape {weight.shape}, not {box.value.shape}")
        value = placed(source, weight, box, placement, storage.of(weight.place, box.names))
        place, turn = (weight.place, None) if loop is None else loop.place(weight.place)
        if turn is not None:
            value = _in_stack(tree.get(place), value, turn, loop.times, weight, box, placement)
        tree[place] = jax.block_until_ready(value)  # copies run beside this thread, and hold what they copy from
        made.add(weight.place)
        done += box.value.size * box.value.dtype.itemsize
        if progress is not None and progress.on_terminal:
            progress.advance(f"Reading {source.path.name}", done, total)
    if absent := promised.keys() - made:
        raise ValueError(f"no tensors are named for the weights {sorted('.'.join(place) for place in absent)}")
    return flax.traverse_util.unflatten_dict(tree)


def _in_stack(stack: Any, value: Any, turn: int, times: int, weight: Weight, box: Any, placement: Placement | None) -> Any:
    """The stack of `times` weights (made now, if there is none) with one more in its place, on the devices.

    Raises:
      UserError: it is packed in another way than those before it.
    """
    if stack is None:
        empty = jax.tree.map(lambda array: jax.ShapeDtypeStruct((times, *array.shape), array.dtype), value)
        names = packed_names(empty, (axes.LAYERS, *box.names))

        def zeros(own: Any, array: jax.ShapeDtypeStruct) -> jax.Array:
            return jnp.zeros(array.shape, array.dtype, device=placement and placement.sharding(own))

        stack = jax.tree.map(zeros, names, empty, is_leaf=is_names)
    if not _alike(stack, value):
        raise UserError(
            f"{'.'.join(weight.place)} is packed in another way than in the layers before it, and can't be in one stack with them: use "
            "--layer_loop=unrolled, or --weights=bf16"
        )
    return _set_turn(stack, value, turn)


def _alike(stack: Any, value: Any) -> bool:
    if jax.tree.structure(stack) != jax.tree.structure(value):
        return False
    pairs = zip(jax.tree.leaves(stack), jax.tree.leaves(value), strict=True)
    return all(all_.shape[1:] == one.shape and all_.dtype == one.dtype for all_, one in pairs)


@functools.partial(jax.jit, donate_argnums=0)
def _set_turn(stack: Any, value: Any, turn: jax.Array) -> Any:
    return jax.tree.map(lambda stack, value: jax.lax.dynamic_update_index_in_dim(stack, value, turn, 0), stack, value)


def _check(source: Source, weights: list[Weight]) -> None:
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
