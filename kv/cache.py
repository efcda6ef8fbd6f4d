"""`Cache`: the value that connects prefill and decode."""

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from kv.format import Format
from kv.fresh import Fresh
from kv.latent import LatentLayer
from kv.layer import KeyValueLayer, Layer, Tensor
from kv.layout import Dense, Layout, Paged, Ring
from kv.types import LatentSpec, LayerSpec
from runtime import UserError
from sharding import Placement, axes, is_names

Spec = LayerSpec | LatentSpec


class HasCacheLayers(Protocol):
    """What `init` needs of a model's config."""

    @property
    def cache_layers(self) -> tuple[Spec, ...]: ...


class Cache(struct.PyTreeNode):
    """Every layer's cache and how much each row holds. A value: methods return a new one."""

    stores: tuple[Any, ...]  # one per group of equal layers
    lengths: jax.Array  # int32 [B], tokens held
    places: tuple[tuple[int, int], ...] = struct.field(pytree_node=False)  # layer -> (store, index in its stack)
    capacity: int | None = struct.field(pytree_node=False)  # tokens a row can hold; None: unbounded
    tables: tuple[jax.Array, ...] = ()  # int32 [B, M] per page group: the page of each C positions of a row, P where it has none
    specs: tuple[Spec, ...] = struct.field(pytree_node=False, default=())  # of each store: what its layers keep
    margin: int = struct.field(pytree_node=False, default=0)  # as of `Format`

    @property
    def batch(self) -> int:
        return self.lengths.shape[0]

    @property
    def room(self) -> jax.Array | int | None:
        """Tokens that rows can hold now: the capacity, or int32 [B] what their pages reach to; None: unbounded."""
        if not self.tables:
            return self.capacity
        reach = jnp.full((self.batch,), self.capacity, jnp.int32)
        for store in self.stores:
            table = self.tables[store.layout.group]
            pages = jnp.where(table < store.num_pages, jnp.arange(1, table.shape[1] + 1), 0)
            reach = jnp.minimum(reach, pages.max(1) * store.layout.page_size)
        return reach

    def layer(self, number: int, turn: jax.Array | None = None, period: int = 0) -> Any:
        """The view that layer `number` attends with; in a loop over layers, that of layer `number + turn * period`."""
        store, index = self.places[number]
        if turn is not None:
            index = index + turn * (self.places[number + period][1] - index)
        return self.stores[store].replace(layer=index)

    def with_layer(self, number: int, view: Any) -> "Cache":
        """The cache with what layer `number`'s `attend` returned."""
        store, _ = self.places[number]
        stores = (*self.stores[:store], view.replace(layer=None), *self.stores[store + 1 :])
        return self.replace(stores=stores)

    @property
    def placement(self) -> Placement | None:
        """How the cache is split over a mesh."""
        return getattr(self.stores[0], "placement", None) if self.stores else None

    def with_tables(self, tables: Sequence[np.ndarray]) -> "Cache":
        """The cache with the host's page tables, int32 [B, M] per page group."""
        put = jnp.asarray if self.placement is None else self.placement.put
        return self.replace(tables=tuple(put(table.astype(np.int32)) for table in tables))

    def constrained(self) -> "Cache":
        """Inside jit: the cache where it belongs, whatever the compiler thinks of it."""
        return self if self.placement is None else self.placement.constrain_tree(self, self.logical_axes())

    def rewind(self, lengths: jax.Array) -> "Cache":
        """The cache as it was when row b held `lengths[b]` tokens (int32 [B], at most what it holds now).

        Only the lengths change: what a query sees depends on them alone, so 0 frees a row. Layers with a window keep the tokens of the
        window and `Format.margin` more: a row may go back by that many from the most that it has held, or to 0.
        """
        return self.replace(lengths=jnp.minimum(self.lengths, jnp.asarray(lengths, jnp.int32)))

    def logical_axes(self) -> "Cache":
        """The same tree with the names of each array's axes in its place. Lengths and tables are small, and whole on every device."""
        stores = tuple(store.logical_axes(bool(self.tables)) for store in self.stores)
        return self.replace(stores=stores, lengths=(None,), tables=((None, None),) * len(self.tables))


def init(
    config: HasCacheLayers,
    batch: int,
    capacity: int,
    format: Format,
    pages: Sequence[int] | None = None,
    placement: Placement | None = None,
) -> Cache:
    """An empty cache. Traceable: under `jax.eval_shape` it only counts.

    Args:
      config: a model's config.
      batch: B, rows.
      capacity: tokens a row can hold.
      format: number format, memory order and layout.
      pages: with `format.page_size`, P of each page group's pool (`page_groups` lists the groups); None: what `default_pages` says.
      placement: splits it over a mesh: rows and pages, heads, and slots in turns. None: one device.

    Raises:
      UserError: batch or capacity below 1, heads that the number format can't group, or what can't be split evenly.
    """
    if placement is not None:
        return _placed(config, batch, capacity, format, pages, placement)
    return _empty(config, batch, capacity, format, pages, None)


def _placed(config, batch, capacity, format, pages, placement):
    shapes = jax.eval_shape(lambda: _empty(config, batch, capacity, format, pages, placement))

    def zeros(names: tuple[str, ...], leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.zeros(leaf.shape, leaf.dtype, device=placement.sharding(names))

    cache = jax.tree.map(zeros, shapes.logical_axes(), shapes, is_leaf=is_names)
    return cache.replace(tables=tuple(table + pool for table, pool in zip(cache.tables, _pools(cache), strict=True)))


def _pools(cache: Cache) -> list[int]:
    """P of each page group."""
    return [next(store.num_pages for store in cache.stores if store.layout.group == group) for group in range(len(cache.tables))]


def _empty(config, batch, capacity, format, pages, placement):
    _check(batch=batch, capacity=capacity)
    groups = group(config.cache_layers)
    places = {number: (store, index) for store, numbers in enumerate(groups.values()) for index, number in enumerate(numbers)}
    windows = page_groups(config, capacity, format)
    pools = default_pages(config, batch, capacity, format) if pages is None else tuple(pages)
    if len(pools) != len(windows):
        raise ValueError(f"{len(pools)} page pools are given, but there are {len(windows)} page groups: give one size for each")
    _check(**{f"page pool {number}": size for number, size in enumerate(pools)})
    if placement is not None:
        _check_split(config, batch, format, pools, placement)

    def store(spec: Spec, layers: int) -> Layer:
        layout = layout_of(spec, capacity, format, windows, placement)
        rows, slots = layout.shape(batch, pools[layout.group] if isinstance(layout, Paged) else None)
        tensors = {name: Tensor.init(tensor, (layers, rows), slots, format, placement) for name, tensor in spec.tensors.items()}
        if isinstance(spec, LatentSpec):
            return LatentLayer(tensors=tensors, layout=layout, placement=placement)
        kernels, _ = format.kernels_of(spec, placement)
        more = {"kernels": kernels, "interpret": format.interpret, "round_queries": format.round_queries}
        return KeyValueLayer(tensors=tensors, layout=layout, placement=placement, **more)

    width = -(-capacity // format.page_size) if windows else 0
    return Cache(
        stores=tuple(store(spec, len(numbers)) for spec, numbers in groups.items()),
        lengths=jnp.zeros((batch,), jnp.int32),
        places=tuple(places[number] for number in range(len(places))),
        capacity=capacity,
        tables=tuple(jnp.full((batch, width), size, jnp.int32) for size in pools),
        specs=tuple(groups),
        margin=format.margin,
    )


def fresh(config: HasCacheLayers, batch: int) -> Cache:
    """A cache that stores nothing: `prefill` over it is the full forward."""
    layers = len(config.cache_layers)
    return Cache(
        stores=(Fresh(),),
        lengths=jnp.zeros((batch,), jnp.int32),
        places=tuple((0, i) for i in range(layers)),
        capacity=None,
    )


def group(specs: Sequence[Spec]) -> dict[Spec, list[int]]:
    """Layer numbers by spec, in order of first appearance: each group becomes one stack."""
    groups: dict[Spec, list[int]] = {}
    for number, spec in enumerate(specs):
        groups.setdefault(spec, []).append(number)
    return groups


def page_groups(config: HasCacheLayers, capacity: int, format: Format) -> tuple[int | None, ...]:
    """The window of each page group's layers, None for those that see all; () without pages. Layers of a group share page tables."""
    if format.page_size is None:
        return ()
    windows = {effective_window(spec, capacity, format) for spec in config.cache_layers}
    return tuple(sorted(windows, key=lambda window: (window is not None, window)))


def rewind_margin(config: HasCacheLayers, capacity: int, format: Format) -> int | None:
    """Tokens that a row may be rewound by from the most that it has held; None: any."""
    return None if all(effective_window(spec, capacity, format) is None for spec in config.cache_layers) else format.margin


def layout_of(spec: Spec, capacity: int, format: Format, windows: Sequence[int | None], placement: Placement | None = None) -> Layout:
    """Where a layer's tokens lie."""
    window = effective_window(spec, capacity, format)
    if format.page_size is not None:
        return Paged(format.page_size, windows.index(window))
    packings = [packing for tensor in spec.tensors.values() for packing in format.packings(tensor, placement) if packing is not None]
    unit = max((packing.span for packing in packings), default=1) * (1 if placement is None else placement.shards(axes.SLOTS))
    slots = -(-(capacity if window is None else window + format.margin) // unit) * unit
    return Dense(slots, unit) if window is None else Ring(slots, window, unit)


def default_pages(config: HasCacheLayers, batch: int, capacity: int, format: Format, chunk: int = 512) -> tuple[int, ...]:
    """Pages per group with which no row ever lacks one: for all of its capacity, or for a window, its margin and a chunk of a prefill.

    Args:
      chunk: tokens of a prefill call; only one row at a time is prefilled by more than the margin.
    """

    def pages(tokens: int) -> int:
        return -(-min(tokens, capacity) // format.page_size)

    def pool(window: int | None) -> int:
        if window is None:
            return batch * pages(capacity)
        ragged = 1  # the first page of a window is not held whole
        held = min(pages(window + format.margin) + ragged, pages(capacity))
        return min(batch * held + pages(chunk), batch * pages(capacity))

    return tuple(pool(window) for window in page_groups(config, capacity, format))


def effective_window(spec: Spec, capacity: int, format: Format) -> int | None:
    """The window that a layer's cache keeps to; None if it would save nothing."""
    return spec.window if spec.window is not None and spec.window + format.margin < capacity else None


def _check_split(config: HasCacheLayers, batch: int, format: Format, pools: Sequence[int], placement: Placement) -> None:
    rows, stripes = placement.shards(axes.BATCH), placement.shards(axes.SLOTS)
    if batch % rows:
        raise UserError(f"{batch} cache rows can't be split evenly into {rows} parts: give {-(-batch // rows) * rows}")
    for pool in pools:
        if pool % rows:
            raise UserError(f"a pool of {pool} pages can't be split evenly into {rows} parts: give {-(-pool // rows) * rows}")
    if format.page_size is not None and format.page_size % stripes:
        remedy = f"give --page_size={stripes}" if stripes & (stripes - 1) == 0 else "use a mesh whose axis seq is a power of two"
        raise UserError(f"pages of {format.page_size} tokens can't be split evenly into {stripes} parts: {remedy}")
    for spec in config.cache_layers:
        for tensor in spec.tensors.values():
            if tensor.heads % (shards := placement.shards(tensor.axis)):
                raise UserError(
                    f"{tensor.heads} heads of the cache can't be split evenly into {shards} parts: use the config that `model.fit` gives"
                )


def _check(**sizes: int) -> None:
    for name, value in sizes.items():
        if value < 1:
            raise UserError(f"cache {name} {value} is below 1: give at least 1")
