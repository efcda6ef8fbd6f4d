"""Meshes: what a user writes (`data=2,model=4`), checked, and the `jax.sharding.Mesh` of it."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from runtime.errors import UserError

if TYPE_CHECKING:
    from jax.sharding import Mesh

# Outermost first: neighbours on the last axis are neighbours in the machine, and `model` talks twice a layer.
MESH_AXES = {
    "data": "rows of the batch and of the cache; weights are copied",
    "fsdp": "rows of the batch, and the width of each weight, which is gathered where it is used",
    "expert": "experts of a mixture",
    "seq": "tokens of a prefill and slots of the cache: long contexts",
    "model": "heads, hidden units and the vocabulary: tensor parallelism",
}


def parse_mesh(text: str) -> dict[str, int]:
    """The sizes that `text` names, in the order of `MESH_AXES`: "model=4,data=2" -> {"data": 2, "model": 4}. Needs no JAX.

    Raises:
      UserError: no NAME=SIZE, an unknown axis, one that is named twice, a size below 1.
    """
    sizes: dict[str, int] = {}
    for entry in text.split(","):
        name, _, size = (part.strip() for part in entry.partition("="))
        if not name or not size.isascii() or not size.isdigit():
            raise UserError(f"--mesh={text}: {entry!r} is not AXIS=SIZE: write for example --mesh=data=2,model=4")
        if name not in MESH_AXES:
            raise UserError(f"--mesh={text}: axis {name!r} is not known: use {', '.join(MESH_AXES)}")
        if name in sizes:
            raise UserError(f"--mesh={text}: axis {name!r} is named twice: name it once, as {name}={sizes[name] * int(size)}")
        if int(size) < 1:
            raise UserError(f"--mesh={text}: {name}={size} is below 1: give at least 1, or leave the axis out")
        sizes[name] = int(size)
    return {name: sizes[name] for name in MESH_AXES if name in sizes}


def format_mesh(sizes: Mapping[str, int]) -> str:
    """As `parse_mesh` reads it."""
    return ",".join(f"{name}={size}" for name, size in sizes.items())


def make_mesh(sizes: Mapping[str, int], devices: Sequence[Any] | None = None) -> "Mesh":
    """A mesh with axes of type Auto, its devices ordered by the machine's topology.

    Args:
      sizes: by axis, outermost first, as `parse_mesh` gives them.
      devices: as many as the product of the sizes; None takes all of this run's (of all its processes).

    Raises:
      UserError: another number of devices.
    """
    import jax
    from jax.sharding import AxisType

    devices = jax.devices() if devices is None else list(devices)
    product = math.prod(sizes.values())
    if product != len(devices):
        raise UserError(
            f"--mesh={format_mesh(sizes)} is of {product} devices, but there are {len(devices)}: {_fitting(sizes, len(devices))}"
        )
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes), devices=devices)


def _fitting(sizes: Mapping[str, int], count: int) -> str:
    """A mesh of `count` devices that is near to what was asked for."""
    for name in ("data", *reversed(sizes)):
        rest = math.prod(size for other, size in sizes.items() if other != name)
        if count % rest == 0 and count // rest >= 1:
            changed = dict(sizes) | {name: count // rest}
            return f"give --mesh={format_mesh({axis: changed[axis] for axis in MESH_AXES if axis in changed})}"
    return f"give --mesh=model={count}, or sizes with that product"
