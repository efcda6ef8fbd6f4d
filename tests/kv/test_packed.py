"""Caches whose slots share rows (`Format.lanes`, for TPU): the same numbers as with slots of their own."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import kv
import kv.layout
from model import Transformer, decode_step, prefill
from tests.model.hybrids import CONFIGS, random_params

B, CAPACITY, LENGTHS = 3, 48, np.asarray([38, 5, 20])
INT8, INT4 = np.dtype(np.int8), np.dtype(ml_dtypes.int4)
KINDS = {
    "f32": kv.Format(np.dtype(np.float32), "SKH", "SKH", lanes=128, margin=4),
    "int8": kv.Format(INT8, "SKH", "SKH", lanes=16, group=2, margin=4),
    "int4 pages": kv.Format(INT4, "SKH", "SKH", lanes=32, group=2, page_size=16, margin=4),
}


def made(config, format):
    pages = [B * CAPACITY // format.page_size] * len(kv.page_groups(config, CAPACITY, format)) if format.page_size else None
    cache = kv.init(config, B, CAPACITY, format, pages)
    rng = np.random.default_rng(0)
    tables = tuple(jnp.asarray(rng.permutation(table.size).reshape(table.shape), jnp.int32) for table in cache.tables)
    return cache.replace(tables=tables)


def logits(config, format):
    """Of a prefill, a second chunk of two of the rows, and a decode step."""
    model, params, cache = Transformer(config), random_params(config, 2), made(config, format)
    tokens = jax.random.randint(jax.random.key(7), (B, CAPACITY), 0, config.vocab_size)
    one, cache = prefill(model, params, cache, tokens[:, :38], jnp.asarray(LENGTHS))
    two, cache = prefill(model, params, cache, tokens[:2, 38:43], jnp.asarray([5, 3]), jnp.asarray([2, 0]))
    three, cache = decode_step(model, params, cache, tokens[:, 43])
    np.testing.assert_array_equal(cache.lengths, [42, 6, 26])
    return np.concatenate([one, two, three])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind"), [("gemma", "int8"), ("deepseek", "int4 pages"), ("deepseek", "f32")])
def test_packed_rows_give_the_logits_of_slots_of_their_own(monkeypatch, name, kind):
    monkeypatch.setattr(kv.layout, "BLOCK", 16)
    jax.clear_caches()
    config, packed = CONFIGS[name], KINDS[kind]
    apart = kv.Format(packed.dtype, "SKH", "SKH", group=packed.group, page_size=packed.page_size, margin=packed.margin)
    parts = [tensor.packings for store in made(config, packed).stores for tensor in store.tensors.values()]
    assert any(packing is not None and packing.slots > 1 for packings in parts for packing in packings)
    with jax.default_matmul_precision("highest"):
        got, want = logits(config, packed), logits(config, apart)
    # A sum in another order may take a quantized number to its neighbour.
    np.testing.assert_allclose(got, want, atol=(1e-5 if kind == "f32" else 1e-3) * np.abs(want).max())


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_those_of_the_arrays(kind):
    config, format = CONFIGS["gemma"], KINDS[kind]
    pages = [7] * len(kv.page_groups(config, CAPACITY, format)) if format.page_size else None
    cache = kv.init(config, B, CAPACITY, format, pages)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(cache)) == kv.nbytes(config, B, CAPACITY, format, pages)


def test_the_axes_of_packed_arrays_are_named():
    cache = kv.init(CONFIGS["gemma"], B, CAPACITY, KINDS["int8"])
    names = cache.logical_axes()
    for store, named in zip(cache.stores, names.stores, strict=True):
        for name, tensor in store.tensors.items():
            for array, each in zip(tensor.parts, named.tensors[name].parts, strict=True):
                assert len(each) == array.ndim
                assert array.shape[each.index("slots")] > 1
                assert array.shape[each.index("kv_heads")] > 1


def test_slots_of_rows_are_rounded_up_to_whole_rows_of_numbers():
    cache = kv.init(CONFIGS["gemma"], B, 45, KINDS["int8"])
    ring, dense = (store.layout for store in cache.stores)
    assert cache.capacity == 45
    assert (dense.capacity % dense.unit, ring.slots % ring.unit) == (0, 0)
    assert dense.unit > 1
    assert dense.capacity - 45 < dense.unit


def test_lanes_need_the_slots_first():
    with pytest.raises(ValueError, match="lanes=128 needs the orders 'SKH', not 'KHS'"):
        kv.Format(lanes=128)
