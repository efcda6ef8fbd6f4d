"""Packed weights in the layout of the native kernels, and back."""

from typing import Any

import jax

from kernels import QuantArray, TiledArray, can_tile, tile
from model.config import ModelConfig
from model.transformer import abstract_params
from sharding import axes


def tiled(params: Any, config: ModelConfig, activation_bits: int) -> Any:
    """An unrolled parameter tree with its packed matrices as `kernels.TiledArray`s, where the kernels can read them; else as they are, and
    so are experts.

    Args:
      activation_bits: to which products round activations, with a scale for each 32, where weights don't say so themselves: 8, 15, or 0.
    """

    boxes = abstract_params(config)

    def one(box: Any, weight: Any) -> Any:
        if axes.EXPERTS in box.names:
            return weight
        return jax.tree.map(
            lambda w: _tile(w, rounds=activation_bits) if isinstance(w, QuantArray) and can_tile(w) else w, weight, is_leaf=_is_packed_once
        )

    return jax.tree.map(one, boxes, params, is_leaf=lambda leaf: hasattr(leaf, "names"))


def untiled(params: Any) -> Any:
    """The tree that `tiled` was given."""
    return jax.tree.map(lambda w: _untile(w) if isinstance(w, TiledArray) else w, params, is_leaf=_is_packed_once)


def is_tiled(params: Any) -> bool:
    """Whether any weight is in that layout."""
    return any(isinstance(leaf, TiledArray) for leaf in jax.tree.leaves(params, is_leaf=_is_packed_once))


def _is_packed_once(w: Any) -> bool:
    """Those of a `JoinedArray` are its parts."""
    return isinstance(w, QuantArray | TiledArray)


_tile = jax.jit(tile, static_argnames=("rounds",))
_untile = jax.jit(TiledArray.untiled)
