"""`Cache`: the value that connects prefill and decode."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import struct

from kv.dense import Dense, group
from kv.fresh import Fresh
from kv.types import Format, LayerSpec
from runtime import UserError
from sharding import axes


class HasCacheLayers(Protocol):
    """What `init` needs of a model's config."""

    @property
    def cache_layers(self) -> tuple[LayerSpec, ...]: ...


class Cache(struct.PyTreeNode):
    """Every layer's cache and how much each row holds. A value: methods return a new one."""

    stores: tuple[Any, ...]  # one per group of equal layers
    lengths: jax.Array  # int32 [B], tokens held
    places: tuple[tuple[int, int], ...] = struct.field(pytree_node=False)  # layer -> (store, index in its stack)
    capacity: int | None = struct.field(pytree_node=False)  # tokens a row can hold; None: unbounded

    @property
    def batch(self) -> int:
        return self.lengths.shape[0]

    def layer(self, number: int) -> Any:
        """The view that layer `number` attends with."""
        store, index = self.places[number]
        return self.stores[store].replace(layer=index)

    def with_layer(self, number: int, view: Any) -> "Cache":
        """The cache with what layer `number`'s `attend` returned."""
        store, _ = self.places[number]
        stores = (*self.stores[:store], view.replace(layer=None), *self.stores[store + 1 :])
        return self.replace(stores=stores)

    def rewind(self, lengths: jax.Array) -> "Cache":
        """The cache as it was when row b held `lengths[b]` tokens (int32 [B], at most what it holds now).

        Only the lengths change: what a query sees depends on them alone, so 0 frees a row.
        """
        return self.replace(lengths=jnp.minimum(self.lengths, jnp.asarray(lengths, jnp.int32)))

    def logical_axes(self) -> "Cache":
        """The same tree with the names of each array's axes in its place."""
        return self.replace(stores=tuple(store.logical_axes() for store in self.stores), lengths=(axes.BATCH,))


def init(config: HasCacheLayers, batch: int, capacity: int, format: Format) -> Cache:
    """An empty cache.

    Args:
      config: a model's config.
      batch: B, rows.
      capacity: tokens a row can hold.
      format: number format and memory order.

    Raises:
      UserError: batch or capacity below 1.
    """
    for name, value in (("batch", batch), ("capacity", capacity)):
        if value < 1:
            raise UserError(f"cache {name} {value} is below 1: give at least 1")
    groups = group(config.cache_layers)
    places = {number: (store, index) for store, numbers in enumerate(groups.values()) for index, number in enumerate(numbers)}
    return Cache(
        stores=tuple(Dense.init(spec, len(numbers), batch, capacity, format) for spec, numbers in groups.items()),
        lengths=jnp.zeros((batch,), jnp.int32),
        places=tuple(places[number] for number in range(len(places))),
        capacity=capacity,
    )


def fresh(config: HasCacheLayers, batch: int) -> Cache:
    """A cache that stores nothing: `prefill` over it is the full forward."""
    layers = len(config.cache_layers)
    return Cache(stores=(Fresh(),), lengths=jnp.zeros((batch,), jnp.int32), places=tuple((0, i) for i in range(layers)), capacity=None)


def bytes_per_token(config: HasCacheLayers, format: Format) -> int:
    """Bytes that one more token of one row takes, over all layers."""
    width = sum(spec.num_kv_heads * (spec.key_dim + spec.value_dim) + spec.index_dim for spec in config.cache_layers)
    return width * jnp.dtype(format.dtype).itemsize


def nbytes(config: HasCacheLayers, batch: int, capacity: int, format: Format) -> int:
    """Bytes of the arrays that `init` with the same arguments allocates, lengths included."""
    return bytes_per_token(config, format) * batch * capacity + 4 * batch
