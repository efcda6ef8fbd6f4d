"""How modules read weights, and the one abstract description that everything else about weights derives from."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from kernels import JoinedArray, QuantArray
from sharding import axes

Initializer = Callable[[jax.Array, Sequence[int], Any], jax.Array]


def scaled_normal(count: int) -> Initializer:
    """Normal values with variance 1 / fan-in, the fan-in being the last `count` axes."""

    def init(key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
        return _normal(key, tuple(shape), jnp.dtype(dtype)) * math.prod(shape[len(shape) - count :]) ** -0.5

    return init


_normal = jax.jit(jax.random.normal, static_argnums=(1, 2))  # layers of one shape share an executable


def weight(module: nn.Module, name: str, shape: Sequence[int], names: Sequence[str], init: Initializer) -> Any:
    """The module's weight `name`: declared (shape, logical axes, initializer) at init, read as it is afterwards.

    `self.param` would check what it reads against the initializer's shape, and a packed weight has another.

    Returns:
      What the parameter tree holds: an array of `shape` in its storage dtype, or a packed value that `kernels.matmul` takes.
    """
    if module.is_initializing():
        return module.param(name, nn.with_partitioning(init, tuple(names)), tuple(shape), jnp.float32)
    return module.get_variable("params", name)


def is_matrix(names: Sequence[str]) -> bool:
    """Whether a weight with these logical axes multiplies activations, as opposed to scaling them or being added."""
    return len(names) > 1 and bool({axes.EMBED, axes.LATENT} & set(names))


PLAIN = frozenset(  # matrices that are never packed
    {
        "w_router",  # choices hang on small differences
        "index_weights",
        "w_shared_gate",
        "w_uk",  # summed over one axis in one form of attention, and over another in the other
        "w_uv",
    }
)


def keeps_packed(place: Sequence[str], names: Sequence[str]) -> bool:
    """Whether the weight at a place of the tree may be a `kernels.QuantArray`."""
    return is_matrix(names) and place[-1] not in PLAIN


def num_inputs(names: Sequence[str]) -> int:
    """How many of a matrix's last axes its product sums over: [D, K, G, H] maps heads to the stream, all else is [O..., I]."""
    return len(names) - 1 if names[0] == axes.EMBED else 1


def packed_names(w: Any, names: Sequence[str]) -> Any:
    """The logical axes of a weight's arrays, in a tree like it.

    Args:
      w: an array, `kernels.QuantArray` or `JoinedArray`, of arrays or `jax.ShapeDtypeStruct`s.
      names: the weight's own. Its inputs are one axis of packed arrays, which is split as their first one; what all inputs share is whole.
    """
    if isinstance(w, JoinedArray):
        return dataclasses.replace(w, parts=tuple(packed_names(part, names) for part in w.parts))
    if not isinstance(w, QuantArray):
        return tuple(names)
    rows, inputs = tuple(names[: w.ndim - 1]), names[w.ndim - 1]
    stack = tuple(name for name in rows if name == axes.LAYERS)
    named = w.map_rows(lambda array: (*rows, inputs if array.shape[-1] > 1 else None))
    return named.replace(
        order=None if w.order is None else (*stack, None), input_scales=None if w.input_scales is None else (*stack, inputs)
    )


def tree_names(params: Any, boxes: Any) -> Any:
    """The logical axes of all arrays of a parameter tree, in a tree like it; `boxes` as of `abstract_params`."""
    return jax.tree.map(lambda box, w: packed_names(w, box.names), boxes, params, is_leaf=lambda leaf: isinstance(leaf, nn.Partitioned))
