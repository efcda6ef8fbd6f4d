"""How modules read weights, and the one abstract description that everything else about weights derives from."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

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
