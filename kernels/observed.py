"""A weight that is watched: what calibration puts in a weight's place, so that no module has to say what its products read."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Observed:
    """Stands in a parameter tree while a layer is traced. It is no pytree: made inside the trace, it does not leave it.

    Attributes:
      weight: what products use: an array or a packed value.
      see: called with each product's activations [..., I], while it is traced.
    """

    weight: Any
    see: Callable[[jax.Array], None]
