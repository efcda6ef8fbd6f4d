"""Small caches of every kind full of random bits, and by NumPy alone where the token at a position lies."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import kv

BATCH, CAPACITY, WINDOW = 3, 42, 5


@dataclasses.dataclass(frozen=True)
class Layers:
    cache_layers: tuple[Any, ...]


LOCAL, GLOBAL = kv.LayerSpec(num_kv_heads=2, key_dim=8, value_dim=6, window=WINDOW), kv.LayerSpec(num_kv_heads=2, key_dim=8, value_dim=6)
WINDOWED = Layers((LOCAL, GLOBAL, LOCAL))
LATENT = Layers((kv.LatentSpec(latent_dim=8, rope_dim=4, index_dim=6),) * 2)
LAYOUTS = {
    "dense": {"margin": 64},
    "ring": {"margin": 3},
    "ring, wide, as on TPU": {"margin": 11, "key_order": "SKH", "value_order": "SKH"},
    "pages of 4": {"margin": 3, "page_size": 4},
    "pages of 16, as on TPU": {"margin": 11, "page_size": 16, "key_order": "SKH", "value_order": "SKH"},
    "ring, packed as on TPU": {"margin": 11, "key_order": "SKH", "value_order": "SKH", "lanes": 32},
    "pages of 16, packed as on TPU": {"margin": 11, "page_size": 16, "key_order": "SKH", "value_order": "SKH", "lanes": 32},
}
CODECS = {
    "f32": {"dtype": np.dtype(np.float32)},
    "bf16": {"dtype": np.dtype(jnp.bfloat16)},
    "int8": {"dtype": np.dtype(np.int8), "group": 2},
    "int4": {"dtype": np.dtype(ml_dtypes.int4), "group": 2},
    "fp8": {"dtype": np.dtype(ml_dtypes.float8_e4m3fn), "group": 2},
}


def format_of(layout: str, codec: str) -> kv.Format:
    """Floats are kept as bits where the memory order is that of CPUs."""
    return kv.Format(**LAYOUTS[layout], **CODECS[codec], as_bits="TPU" not in layout)


def filled(layers: Layers, format: kv.Format, seed: int = 0, lengths=(CAPACITY,) * BATCH, capacity: int = CAPACITY) -> kv.Cache:
    """Every bit random, as far as numbers allow; rows have all pages that they can have, in random order, and there are more."""
    rng = np.random.default_rng(seed)
    width = 0 if format.page_size is None else -(-capacity // format.page_size)
    pools = [BATCH * width + 2 for _ in kv.page_groups(layers, capacity, format)]
    cache = jax.eval_shape(lambda: kv.init(layers, BATCH, capacity, format, pools or None))  # compiles nothing

    def noise(tensor: Any, array: jax.ShapeDtypeStruct) -> jax.Array:
        is_float = jnp.issubdtype(array.dtype, jnp.floating) or array.dtype == np.uint16 or tensor.codec.dtype == CODECS["fp8"]["dtype"]
        size = array.dtype.itemsize
        bits = rng.integers(0, 256, array.size * size, np.uint8).view(f"u{size}")
        if is_float:  # no nan, whose bits the CPU may change where it widens floats, and nothing too small to be normal
            bits = bits & bits.dtype.type((1 << 8 * size) - 1 - (1 << 8 * size - 2)) | bits.dtype.type(1 << 8 * size - 3)
        return jnp.asarray(bits.view(array.dtype).reshape(array.shape))

    def noisy(store: Any) -> Any:
        tensors = {
            name: tensor.replace(parts=tuple(noise(tensor, part) for part in tensor.parts)) for name, tensor in store.tensors.items()
        }
        return store.replace(tensors=tensors)

    tables = tuple(jnp.asarray(rng.permutation(pool)[: BATCH * width].reshape(BATCH, width), jnp.int32) for pool in pools)
    return cache.replace(stores=tuple(map(noisy, cache.stores)), tables=tables, lengths=jnp.asarray(lengths, jnp.int32))


def stored(cache: kv.Cache) -> list[dict[str, list[np.ndarray]]]:
    """Of each store and tensor the arrays [L, B or P, S, K, numbers], as copies of their bytes."""

    def by_slot(array: jax.Array, order: str, packing: Any) -> np.ndarray:
        bits = np.array(array)
        bits = bits.view(f"u{bits.dtype.itemsize}")
        if packing is not None:
            return np.array(packing.unpack(jnp.asarray(bits)))
        return bits.transpose(0, 1, *(2 + order.index(axis) for axis in "SKH"))

    return [
        {
            name: [by_slot(part, tensor.order, packing) for part, packing in zip(tensor.parts, tensor.packings, strict=True)]
            for name, tensor in store.tensors.items()
        }
        for store in cache.stores
    ]


def where(cache: kv.Cache, group: int, row: int, positions: range) -> tuple[list[int], list[int]]:
    """Of each position the row or page, and the slot."""
    layout = cache.stores[group].layout
    if layout.kind == "paged":
        table = np.asarray(cache.tables[layout.group])[row]
        return [int(table[p // layout.page_size]) for p in positions], [p % layout.page_size for p in positions]
    return [row] * len(positions), [p % layout.slots if layout.kind == "ring" else p for p in positions]


def first_kept(window: int | None, length: int, margin: int) -> int:
    """The first position that is seen after a rewind by the margin: the query at `length - margin` sees `window` positions, its own too."""
    return 0 if window is None else min(length, max(0, length - margin - window + 1))


def same_bits(given: Any, wanted: Any) -> None:
    """Trees of arrays are equal to the last bit."""
    assert jax.tree.structure(given) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(given), jax.tree.leaves(wanted), strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def addresses(cache: kv.Cache) -> list[int]:
    """Where the stores' arrays lie."""
    return [array.unsafe_buffer_pointer() for array in jax.tree.leaves(cache.stores)]


def page_bytes(cache: kv.Cache, group: int) -> int:
    """Of one page of a page group."""
    arrays = [array for store in cache.stores if store.layout.group == group for array in jax.tree.leaves(store)]
    return sum(array.nbytes // array.shape[1] for array in arrays)
