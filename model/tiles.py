"""Packed weights in the layout of the native kernels, and back."""

from typing import Any

import flax.traverse_util
import jax

from kernels import JoinedArray, QuantArray, TiledArray, can_tile, tile
from model.config import ModelConfig
from model.transformer import abstract_params
from sharding import axes


def tiled(params: Any, config: ModelConfig, activation_bits: int) -> Any:
    """An unrolled parameter tree with its packed matrices as `kernels.TiledArray`s, where the kernels can read them; else as they are, and
    so are experts.

    Args:
      activation_bits: to which products round activations, with a scale for each 32, where weights don't say so themselves: 8, 15, or 0.
    """

    def one(box: Any, w: Any) -> Any:
        if axes.EXPERTS in box.names:
            return w
        if isinstance(w, JoinedArray):
            return JoinedArray(tuple(one(box, part) for part in w.parts), w.axis)
        if not isinstance(w, QuantArray) or not can_tile(w):
            return w
        return _tile(w, rounds=activation_bits)

    return _each(params, config, one)


def untiled(params: Any, config: ModelConfig) -> Any:
    """The tree that `tiled` was given."""

    def one(_: Any, w: Any) -> Any:
        if isinstance(w, JoinedArray):
            return JoinedArray(tuple(one(_, part) for part in w.parts), w.axis)
        return _untile(w) if isinstance(w, TiledArray) else w

    return _each(params, config, one)


def _each(params: Any, config: ModelConfig, change: Any) -> Any:
    """Weight after weight, of which each is given up before the next is made."""
    boxes = flax.traverse_util.flatten_dict(abstract_params(config), is_leaf=lambda _, leaf: hasattr(leaf, "names"))
    weights = flax.traverse_util.flatten_dict(params)
    for place in list(weights):
        weights[place] = change(boxes[place], weights[place])
    return flax.traverse_util.unflatten_dict(weights)


_tile = jax.jit(tile, static_argnames=("rounds",))
_untile = jax.jit(TiledArray.untiled)
