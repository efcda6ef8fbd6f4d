"""Floor 1: logical axis names (`sharding.axes`), meshes, the rules that place arrays on them, and runs of several processes."""

import importlib
from typing import Any

from sharding import axes
from sharding.mesh import MESH_AXES, format_mesh, make_mesh, parse_mesh

_MODULES = {
    "Placement": "sharding.placement",
    "Processes": "sharding.processes",
    "STRATEGIES": "sharding.rules",
    "Collective": "sharding.communication",
    "collectives": "sharding.communication",
    "collectives_table": "sharding.communication",
    "connect": "sharding.processes",
    "is_names": "sharding.placement",
    "placed_arrays": "sharding.explain",
    "placement_table": "sharding.explain",
    "rules_for": "sharding.rules",
}

__all__ = ["MESH_AXES", "axes", "format_mesh", "make_mesh", "parse_mesh", *_MODULES]


def __getattr__(name: str) -> Any:
    """Imports JAX only when something that needs it is asked for: a mesh must be read before JAX counts its devices."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
