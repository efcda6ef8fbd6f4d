"""`Placement`: a mesh and its rules, which turn the logical axes of an array into its `NamedSharding`."""

import dataclasses
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from runtime.errors import UserError
from sharding.rules import Rules, rules_for

Names = Sequence[str | None]  # an array's logical axes; None is whole


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where arrays lie. Hashable, so that a model and a cache can carry it as a static part.

    Attributes:
      mesh: the user's, or of `make_mesh`. Its axes must be of type Auto: what is written here is propagated by the compiler.
      rules: logical axis -> mesh axes; by default the tables of the mesh's axes (see `sharding.rules`).
    """

    mesh: Mesh
    rules: Rules

    @classmethod
    def on(cls, mesh: Mesh, rules: Rules | None = None) -> "Placement":
        """On a mesh, by the tables of its axes. Raises: UserError, if an axis is not of type Auto."""
        if wrong := [name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Auto]:
            raise UserError(
                f"mesh axis {wrong[0]!r} is of type Explicit or Manual, with which each operation must say where its result lies: make the "
                "mesh with axis_types=(jax.sharding.AxisType.Auto,) * n, or with sharding.make_mesh"
            )
        return cls(mesh, rules_for(mesh.axis_names) if rules is None else rules)

    @property
    def platform(self) -> str:
        """`cpu`, `gpu` or `tpu`."""
        name = self.mesh.devices.flat[0].platform
        return "gpu" if name in ("cuda", "rocm") else name

    @property
    def awaited(self) -> bool:
        """Whether each program must be waited for before the next is sent. Devices of one CPU share a pool of threads, as many as there are
        cores; programs in flight that wait for each other's collectives can fill it, and then none goes on (JAX before 0.12)."""
        several = self.mesh.local_mesh.size > 1 and self.platform == "cpu"
        return several and jax.__version_info__ < (0, 12) and int(os.environ.get("NPROC", "0")) < 4 * self.mesh.local_mesh.size

    def mesh_axes(self, logical: str | None) -> tuple[str, ...]:
        """The mesh axes that shard a logical axis: outermost first, () if it is whole."""
        return dict(self.rules).get(logical, ())

    def shards(self, logical: str) -> int:
        """Into how many parts a logical axis is split."""
        return math.prod(self.mesh.shape[name] for name in self.mesh_axes(logical))

    def index(self, logical: str) -> jax.Array:
        """Inside `shard_map`: which part of the logical axis this device has, int32."""
        return jax.lax.axis_index(self.mesh_axes(logical)) if self.mesh_axes(logical) else jax.numpy.int32(0)

    def spec(self, names: Names) -> PartitionSpec:
        """Of an array with these logical axes. A mesh axis shards the first that asks for it."""
        used: set[str] = set()
        parts: list[Any] = []
        for name in names:
            wanted = tuple(axis for axis in self.mesh_axes(name) if axis not in used)
            used |= set(wanted)
            parts.append(wanted[0] if len(wanted) == 1 else wanted or None)
        while parts and parts[-1] is None:  # one spelling of each: programs are found by it
            parts.pop()
        return PartitionSpec(*parts)

    def sharding(self, names: Names = ()) -> NamedSharding:
        """Of an array with these logical axes; () is whole on every device."""
        return NamedSharding(self.mesh, self.spec(names))

    def dividing(self, names: Names, shape: Sequence[int]) -> NamedSharding:
        """`sharding`, but with those axes whole that can't be split evenly."""
        return self.sharding(tuple(name if size % self.shards(name) == 0 else None for name, size in zip(names, shape, strict=False)))

    def constrain(self, x: jax.Array, *names: str | None) -> jax.Array:
        """x, with its axes placed so, inside jit."""
        return jax.lax.with_sharding_constraint(x, self.sharding(names))

    def constrain_dividing(self, x: jax.Array, *names: str | None) -> jax.Array:
        """`constrain`, but with those axes whole that can't be split evenly."""
        return jax.lax.with_sharding_constraint(x, self.dividing(names, x.shape))

    def constrain_tree(self, tree: Any, names: Any) -> Any:
        """Arrays, with tuples of names in the places of their leaves."""
        return jax.tree.map(lambda each, array: self.constrain(array, *each), names, tree, is_leaf=is_names)

    def put(self, tree: Any, names: Any = None) -> Any:
        """Host arrays as arrays of the mesh: whole on every device, or as a tree of `names` says. All processes give the same."""

        def one(array: Any, each: Names) -> jax.Array:
            sharding = self.sharding(each)
            if sharding.is_fully_addressable:
                return jax.device_put(array, sharding)
            array = np.asarray(array)  # JAX would compare the processes' values in each call
            return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

        if names is None:
            return jax.tree.map(lambda array: one(array, ()), tree)
        return jax.tree.map(lambda each, array: one(array, each), names, tree, is_leaf=is_names)

    def shard_map(self, function: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """`jax.shard_map` over the whole mesh: the function sees each device's parts, and says itself what is communicated."""
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def is_names(leaf: Any) -> bool:
    """Whether a leaf of a tree of logical axes: a plain tuple of names, not an empty one."""
    return type(leaf) is tuple and len(leaf) > 0 and all(name is None or isinstance(name, str) for name in leaf)
