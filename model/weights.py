"""How modules read weights, and the one abstract description that everything else about weights derives from."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

Initializer = Callable[[jax.Array, Sequence[int], Any], jax.Array]


def scaled_normal(axes: int) -> Initializer:
    """Normal values with variance 1 / fan-in, the fan-in being the first `axes` axes."""

    def init(key: jax.Array, shape: Sequence[int], dtype: Any) -> jax.Array:
        fan_in = 1
        for size in shape[:axes]:
            fan_in *= size
        return jax.random.normal(key, shape, dtype) * fan_in**-0.5

    return init


def weight(module: nn.Module, name: str, shape: Sequence[int], axes: Sequence[str], init: Initializer) -> Any:
    """The module's weight `name`: declared (shape, logical axes, initializer) at init, read as it is afterwards.

    `self.param` would check what it reads against the initializer's shape, and a packed weight has another.

    Returns:
      What the parameter tree holds: an array of `shape` in its storage dtype, or a packed value that `kernels.matmul` takes.
    """
    if module.is_initializing():
        return module.param(name, nn.with_partitioning(init, tuple(axes)), tuple(shape), jnp.float32)
    return module.get_variable("params", name)
