"""Pages between the device's pools and host memory, and within the pools; bit for bit, whatever they hold."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from kv.cache import Cache
from kv.layer import Layer
from runtime import UserError, program

PINNED = "pinned_host"  # the memory that a device copies to and from by itself
LARGEST = 16  # pages that one call moves: each is an array of its own, and every one adds to the program


@dataclasses.dataclass(frozen=True, eq=False)
class HostPages:
    """Contents of pages of one page group, on the host. Each page is memory of its own, so that one can be freed without the others.

    Attributes:
      pages: of each page its arrays, [L, ...] per store, tensor and part, in the pool's memory order: numpy, or JAX's in pinned memory.
      kind: what a page is made of, in words; equal for pages that may take each other's place.
    """

    pages: tuple[tuple[Any, ...], ...]
    kind: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.pages)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for page in self.pages for array in page)

    def split(self) -> "list[HostPages]":
        """The pages one by one; nothing is copied."""
        return [HostPages((page,), self.kind) for page in self.pages]

    @staticmethod
    def join(parts: "Sequence[HostPages]") -> "HostPages":
        """All pages of `parts`, in order; nothing is copied. ValueError: there are none, or they are of different kinds."""
        kinds = {part.kind for part in parts}
        if len(kinds) != 1:
            raise ValueError(f"pages of {len(kinds)} kinds can't be joined: give pages of one page group")
        return HostPages(tuple(page for part in parts for page in part.pages), kinds.pop())


def read_pages(cache: Cache, group: int, pages: Sequence[int], pinned: bool | None = None) -> HostPages:
    """Copies pages to host memory.

    Args:
      cache: stays as it is.
      group: of `page_groups`.
      pages: their numbers.
      pinned: whether to keep them as JAX arrays in pinned memory, else as numpy arrays; None: if the backend has such, and is no CPU. The
        copy to pinned memory goes on while the caller does.

    Raises:
      UserError: a cache without pages, or `pinned` where there is no such memory.
      ValueError: a group or page that does not exist.
    """
    stores = _stores(cache, group)
    _check(stores, pages)
    kind, pinned = _kind(cache, group), _pinned(stores, pinned)
    found: list[tuple[Any, ...]] = []
    for numbers in _batches(pages):
        contents = fetch_pages(stores, _padded(numbers))[: len(numbers)]
        if pinned:
            shardings = [tuple(array.sharding.with_memory_kind(PINNED) for array in page) for page in contents]
            contents = jax.device_put(contents, shardings)
        else:
            contents = [tuple(np.asarray(array) for array in page) for page in contents]
        found.extend(contents)
    return HostPages(tuple(found), kind)


def write_pages(cache: Cache, group: int, pages: Sequence[int], host: HostPages) -> Cache:
    """Gives pages the contents that `read_pages` read, of the same pages or of others of the group. All else keeps its bits.

    Args:
      cache: donated.
      group: of `page_groups`.
      pages: where to, no page twice; nobody else may be reading them (see `PageAllocator.writable`).
      host: one page for each.

    Raises:
      UserError: a cache without pages, or `host` is of another kind of pages: other layers, number format, page size or memory order.
      ValueError: a group or page that does not exist or stands there twice, a wrong number of pages.
    """
    stores = _stores(cache, group)
    _check(stores, pages, once=True)
    if len(pages) != len(host):
        raise ValueError(f"{len(host)} pages of contents are given for {len(pages)} pages: give one for each")
    if host.kind != (kind := _kind(cache, group)):
        given, wanted = next(pair for pair in itertools.zip_longest(host.kind, kind, fillvalue="no more") if pair[0] != pair[1])
        raise UserError(f"pages hold {given} where this group has {wanted}: write them to a cache like the one that they were read from")
    contents = iter(host.pages)
    for numbers in _batches(pages):
        given = [next(contents) for _ in numbers]
        if isinstance(given[0][0], jax.Array):
            given = _from_pinned(given, stores)
        numbers = _padded(numbers)
        given += given[-1:] * (len(numbers) - len(given))
        stores = store_pages(stores, numbers, given)
    return _with_stores(cache, group, stores)


def copy_pages(cache: Cache, group: int, source: Sequence[int], target: Sequence[int]) -> Cache:
    """Gives page `target[i]` the content of page `source[i]`: what copy-on-write needs. All at once: a source may be another's target.

    Args:
      cache: donated.
      group: of `page_groups`.
      source: numbers of pages; any times.
      target: as many, none twice.

    Raises:
      UserError: a cache without pages.
      ValueError: a group or page that does not exist, a target that stands there twice, a wrong number of them.
    """
    stores = _stores(cache, group)
    _check(stores, source)
    _check(stores, target, once=True)
    if len(source) != len(target):
        raise ValueError(f"{len(source)} pages can't be copied to {len(target)}: give a target for each")
    if set(source) & set(target):
        contents = [fetch_pages(stores, _padded(numbers)) for numbers in _batches(source)]
        for numbers, content in zip(_batches(target), contents, strict=True):
            stores = store_pages(stores, _padded(numbers), content)
    elif source:
        stores = duplicate_pages(stores, _padded(source), _padded(target))
    return _with_stores(cache, group, stores)


@program()
def fetch_pages(stores: tuple[Layer, ...], pages: jax.Array) -> list[tuple[jax.Array, ...]]:
    """Of each of the pages int32 [n] its arrays, [L, ...] each."""
    arrays = jax.tree.leaves(stores)
    return [
        tuple(jax.lax.dynamic_index_in_dim(array, pages[index], axis=1, keepdims=False) for array in arrays)
        for index in range(pages.shape[0])
    ]


@program(donated=("stores",))
def store_pages(stores: tuple[Layer, ...], pages: jax.Array, contents: Sequence[tuple[jax.Array, ...]]) -> tuple[Layer, ...]:
    """The stores (donated) with `contents`, as of `fetch_pages`, in the pages int32 [n]."""
    arrays, kind = jax.tree.flatten(stores)
    for index, content in enumerate(contents):
        arrays = [jax.lax.dynamic_update_index_in_dim(array, new, pages[index], axis=1) for array, new in zip(arrays, content, strict=True)]
    return tuple(store.constrained() for store in jax.tree.unflatten(kind, arrays))


@program(donated=("stores",))
def duplicate_pages(stores: tuple[Layer, ...], source: jax.Array, target: jax.Array) -> tuple[Layer, ...]:
    """The stores (donated) with the pages `source` int32 [n] copied to `target`, none of which is a source."""

    def copied(array: jax.Array) -> jax.Array:
        def copy(index, array):
            # Without the barrier the CPU copies number by number.
            content = jax.lax.optimization_barrier(jax.lax.dynamic_index_in_dim(array, source[index], axis=1))
            return jax.lax.dynamic_update_slice_in_dim(array, content, target[index], axis=1)

        return jax.lax.fori_loop(0, target.shape[0], copy, array)

    return tuple(store.constrained() for store in jax.tree.map(copied, stores))


def _numbers(cache: Cache, group: int) -> list[int]:
    """Which stores a page group's layers are."""
    if not cache.tables:
        raise UserError("this cache has no pages, which only a paged one has: make it with --cache=paged (Format.page_size)")
    if not 0 <= group < len(cache.tables):
        raise ValueError(f"page group {group} is outside 0..{len(cache.tables) - 1}")
    return [number for number, store in enumerate(cache.stores) if store.layout.group == group]


def _stores(cache: Cache, group: int) -> tuple[Layer, ...]:
    return tuple(cache.stores[number] for number in _numbers(cache, group))


def _with_stores(cache: Cache, group: int, stores: Iterable[Layer]) -> Cache:
    changed = dict(zip(_numbers(cache, group), stores, strict=True))
    return cache.replace(stores=tuple(changed.get(number, store) for number, store in enumerate(cache.stores)))


def _check(stores: tuple[Layer, ...], pages: Sequence[int], once: bool = False) -> None:
    for page in pages:
        if not 0 <= page < stores[0].num_pages:
            raise ValueError(f"page {page} is outside the pool's 0..{stores[0].num_pages - 1}")
    if once and len(set(pages)) != len(pages):
        raise ValueError(f"{len(pages) - len(set(pages))} of {len(pages)} pages to write stand there twice: give each once")


def _batches(pages: Sequence[int]) -> Iterator[Sequence[int]]:
    return (pages[first : first + LARGEST] for first in range(0, len(pages), LARGEST))


def _padded(pages: Sequence[int]) -> np.ndarray:
    """int32, a power of two of them so that few programs are compiled: the last one again and again, which changes nothing."""
    size = 1 << (len(pages) - 1).bit_length()
    return np.asarray([*pages, *[pages[-1]] * (size - len(pages))], np.int32)


def _kind(cache: Cache, group: int) -> tuple[str, ...]:
    """What a page is made of: of each tensor the layers, number format, memory order, and the dtypes and shapes of its arrays."""
    return tuple(
        f"{name} of {cache.specs[number]} as {tensor.codec.dtype.name} in {tensor.order}: "
        + " ".join(f"{part.dtype}{[part.shape[0], *part.shape[2:]]}" for part in tensor.parts)
        for number in _numbers(cache, group)
        for name, tensor in sorted(cache.stores[number].tensors.items())  # the order of JAX, which a new cache does not have yet
    )


def _from_pinned(contents: list[tuple[jax.Array, ...]], stores: tuple[Layer, ...]) -> list[tuple[Any, ...]]:
    """For `store_pages`. An array that was put somewhere is committed to that place and makes the cache so, which all programs that take it
    would have to be compiled anew for: a cache that is not gets NumPy's view of them."""
    pool = jax.tree.leaves(stores)[0]
    if not pool.committed:
        return jax.tree.map(np.asarray, contents)
    return jax.device_put(contents, jax.tree.map(lambda array: array.sharding.with_memory_kind(pool.sharding.memory_kind), contents))


def _pinned(stores: tuple[Layer, ...], wanted: bool | None) -> bool:
    device = next(iter(jax.tree.leaves(stores)[0].devices()))
    there = PINNED in {memory.kind for memory in device.addressable_memories()}
    if wanted and not there:
        raise UserError(f"a {device.platform} has no {PINNED} memory: leave `pinned` out")
    return there and device.platform != "cpu" if wanted is None else wanted
