"""Packed weights in the layouts that kernels read them in, and back."""

from collections.abc import Callable
from typing import Any

import jax

from kernels import QuantArray, TiledArray, TransposedArray, can_tile, can_transpose, tile, transpose
from model.config import ModelConfig
from model.transformer import abstract_params
from sharding import axes


def tiled(params: Any, config: ModelConfig, activation_bits: int) -> Any:
    """An unrolled parameter tree with its packed matrices, experts too, as `kernels.TiledArray`s, where the native kernels can read them;
    else as they are.

    Args:
      activation_bits: to which products round activations, with a scale for each 32, where weights don't say so themselves: 8
        (15 where these hold an outlier), 15, or 0.
    """

    def one(place: str, names: tuple[str, ...], w: QuantArray) -> Any:
        return _tile(w, rounds=activation_bits, lead=int(names[0] == axes.EXPERTS)) if can_tile(w) else w

    return _each(params, config, one)


def transposed(params: Any, config: ModelConfig, *, free: bool = False, interpret: bool = False) -> Any:
    """An unrolled parameter tree with its packed matrices, experts too, as `kernels.TransposedArray`s, where the Pallas kernels can read
    them; else as they are, and so is the table of embeddings, whose rows are looked up.

    Args:
      free: delete what stands in the tree and is transposed, one after another, so that only one of them is there twice.
      interpret: as of `kernels.TransposedArray`.
    """

    def one(place: str, names: tuple[str, ...], w: QuantArray) -> Any:
        if place == "embedding" or not can_transpose(w):
            return w
        out = _transpose(w, lead=int(names[0] == axes.EXPERTS), interpret=interpret)
        if free:
            jax.block_until_ready(out)
            kept = {id(array) for array in (w.input_scales, w.order)}  # which a jitted function may hand through
            jax.tree.map(lambda array: None if id(array) in kept else array.delete(), w)
        return out

    return _each(params, config, one)


def untiled(params: Any) -> Any:
    """The tree that `tiled` or `transposed` was given."""

    def one(w: Any) -> Any:
        return _untile(w) if isinstance(w, TiledArray) else _untranspose(w) if isinstance(w, TransposedArray) else w

    return jax.tree.map(one, params, is_leaf=_is_packed_once)


def _each(params: Any, config: ModelConfig, change: Callable[[str, tuple[str, ...], QuantArray], Any]) -> Any:
    """With `change` made of every packed matrix, by the last part of its name and its logical axes."""

    def one(path: Any, box: Any, weight: Any) -> Any:
        place = str(path[-1].key)
        return jax.tree.map(lambda w: change(place, box.names, w) if isinstance(w, QuantArray) else w, weight, is_leaf=_is_packed_once)

    boxes = abstract_params(config)
    return jax.tree_util.tree_map_with_path(one, boxes, params, is_leaf=lambda leaf: hasattr(leaf, "names"))


def is_tiled(params: Any) -> bool:
    """Whether any weight is in that layout."""
    return any(isinstance(leaf, TiledArray) for leaf in jax.tree.leaves(params, is_leaf=_is_packed_once))


def _is_packed_once(w: Any) -> bool:
    """Those of a `JoinedArray` are its parts."""
    return isinstance(w, QuantArray | TiledArray | TransposedArray)


_tile = jax.jit(tile, static_argnames=("rounds", "lead"))
_untile = jax.jit(TiledArray.untiled)
_transpose = jax.jit(transpose, static_argnames=("lead", "interpret"))
_untranspose = jax.jit(TransposedArray.untransposed)
