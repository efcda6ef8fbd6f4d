"""kv: byte counts, grouping, axis names and errors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kv
from runtime import UserError
from sharding import axes


@dataclasses.dataclass(frozen=True)
class Layers:
    cache_layers: tuple[kv.LayerSpec, ...]


WIDE, NARROW = kv.LayerSpec(num_kv_heads=4, key_dim=8, value_dim=6), kv.LayerSpec(num_kv_heads=1, key_dim=8, value_dim=8)
HYBRID = Layers((WIDE, NARROW, WIDE, WIDE))
INDEXED = Layers((kv.LayerSpec(num_kv_heads=4, key_dim=8, value_dim=6, index_dim=3),) * 2)
ORDERS = [("SKH", "SKH"), ("KSH", "KSH"), ("KHS", "KSH")]
LLAMA2_13B = Layers((kv.LayerSpec(40, 128, 128),) * 40)
LLAMA3_8B = Layers((kv.LayerSpec(8, 128, 128),) * 32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("orders", ORDERS)
@pytest.mark.parametrize("layers", [HYBRID, INDEXED])
def test_the_byte_count_is_that_of_the_live_arrays(dtype, orders, layers):
    format = kv.Format(np.dtype(dtype), *orders, as_bits=dtype == jnp.bfloat16)
    cache = kv.init(layers, 3, 17, format)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(cache)) == kv.nbytes(layers, 3, 17, format)


def test_published_figures_come_out():
    half = kv.Format(dtype=np.dtype(jnp.bfloat16))
    assert kv.bytes_per_token(LLAMA2_13B, half) == 819_200  # 0.78 MiB
    assert kv.bytes_per_token(LLAMA3_8B, half) == 128 * 1024  # a quarter of what 32 KV heads would take


def test_equal_layers_share_a_stack_and_each_finds_its_place():
    cache = kv.init(HYBRID, 2, 5, kv.Format())
    assert cache.places == ((0, 0), (1, 0), (0, 1), (0, 2))
    assert [store.k.shape[0] for store in cache.stores] == [3, 1]
    assert cache.stores[0].v.shape == (3, 2, 4, 5, 6)


@pytest.mark.parametrize("orders", ORDERS)
def test_every_array_names_each_of_its_axes(orders):
    for layers in (HYBRID, INDEXED):
        cache = kv.init(layers, 2, 5, kv.Format(np.dtype(np.float32), *orders))
        names = jax.tree.leaves(cache.logical_axes(), is_leaf=lambda leaf: isinstance(leaf, tuple) and isinstance(leaf[0], str))
        for array, axis_names in zip(jax.tree.leaves(cache), names, strict=True):
            assert len(axis_names) == array.ndim
            assert set(axis_names) <= axes.AXES
            if array.ndim > 1:
                sizes = dict(zip(axis_names, array.shape, strict=True))
                assert sizes[axes.SLOTS] == 5
                one_head = axes.ONE in sizes  # an indexer's keys
                assert sizes[axes.ONE if one_head else axes.KV_HEADS] in ((1,) if one_head else (4, 1))
                assert sizes[axes.HEAD_DIM] in ((3,) if one_head else (8, 6))


def test_the_memory_order_follows_the_platform():
    assert kv.Format.for_platform("cpu", np.dtype(np.float32)) == kv.Format(np.dtype(np.float32), "KHS", "KSH")
    assert kv.Format.for_platform("tpu", np.dtype(jnp.bfloat16)) == kv.Format(np.dtype(jnp.bfloat16), "SKH", "SKH", lanes=128)

    assert kv.Format.for_platform("cpu", np.dtype(jnp.bfloat16)) == kv.Format(np.dtype(jnp.bfloat16), "KHS", "KSH", as_bits=True)


def test_bf16_kept_as_bits_is_bf16():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 5, heads, 8)), jnp.bfloat16) for heads in (4, 2, 2))
    step = kv.Step(rows=None, start=jnp.zeros(2, jnp.int32), count=jnp.asarray([5, 3]))
    outs = []
    for as_bits in (False, True):
        cache = kv.init(Layers((kv.LayerSpec(2, 8, 8),)), 2, 8, kv.Format(np.dtype(jnp.bfloat16), as_bits=as_bits))
        outs.append(cache.layer(0).attend(kv.Query(q), kv.KeyValue(k, v), step, kv.AttentionSpec(scale=0.3)))
    (plain, plain_view), (bits, bits_view) = outs
    assert bits_view.k.dtype == jnp.uint16
    np.testing.assert_array_equal(bits, plain)
    np.testing.assert_array_equal(bits_view.v, np.asarray(plain_view.v).view(np.uint16))


@pytest.mark.parametrize("order", ["SK", "SKV", "ksh", "SSKH"])
def test_an_order_that_is_none_is_refused(order):
    with pytest.raises(ValueError, match=f"key_order='{order}' is not an order"):
        kv.Format(key_order=order)


@pytest.mark.parametrize(("batch", "capacity", "message"), [(0, 5, "batch 0 is below 1"), (1, 0, "capacity 0 is below 1")])
def test_sizes_below_one_are_refused(batch, capacity, message):
    with pytest.raises(UserError, match=message):
        kv.init(HYBRID, batch, capacity, kv.Format())


def test_a_cache_is_a_value_and_its_views_do_not_change_it():
    cache = kv.init(HYBRID, 1, 4, kv.Format())
    step = kv.Step(rows=None, start=jnp.zeros(1, jnp.int32), count=jnp.ones(1, jnp.int32))
    ones = jnp.ones((1, 1, 4, 8))
    out, view = cache.layer(2).attend(kv.Query(ones), kv.KeyValue(ones, ones[..., :6]), step, kv.AttentionSpec(scale=1.0))
    assert float(cache.stores[0].k.sum()) == 0.0
    after = cache.with_layer(2, view)
    np.testing.assert_array_equal(np.flatnonzero(np.asarray(after.stores[0].k).sum((1, 2, 3, 4))), [1])
    np.testing.assert_array_equal(out, np.ones((1, 1, 4, 6)))  # one slot: its value


def test_reading_only_sees_what_is_held_without_writing():
    cache = kv.init(Layers((NARROW,)), 1, 4, kv.Format())
    step = kv.Step(rows=None, start=jnp.zeros(1, jnp.int32), count=jnp.ones(1, jnp.int32))
    ones = jnp.ones((1, 1, 1, 8))
    _, view = cache.layer(0).attend(kv.Query(ones), kv.KeyValue(ones, 3 * ones), step, kv.AttentionSpec(scale=1.0))
    out, again = view.attend(kv.Query(ones), None, step, kv.AttentionSpec(scale=1.0))
    np.testing.assert_array_equal(out, 3 * ones)
    np.testing.assert_array_equal(again.k, view.k)


SPECS = {
    "window": kv.AttentionSpec(scale=0.3, window=3),
    "softcap": kv.AttentionSpec(scale=0.3, softcap=2.0),
    "indexer": kv.AttentionSpec(scale=0.3, top_k=2),
}


@pytest.mark.parametrize(
    ("name", "orders", "as_bits"),
    [
        *(("indexer", orders, False) for orders in ORDERS),
        ("indexer", ORDERS[2], True),
        ("window", ORDERS[0], False),
        ("softcap", ORDERS[2], False),
    ],
)
def test_the_dense_kind_answers_as_the_one_that_stores_nothing_in_every_order(name, orders, as_bits):
    spec, rng = SPECS[name], np.random.default_rng(0)
    dtype = jnp.bfloat16 if as_bits else jnp.float32
    q, k, v, index_q, index_k = (jnp.asarray(rng.normal(size=(2, 7, *shape)), dtype) for shape in ((8, 8), (4, 8), (4, 6), (2, 3), (1, 3)))
    query = kv.Query(q, index_q, jnp.asarray(rng.normal(size=(2, 7, 2)), jnp.float32))
    sinks = jnp.asarray(rng.normal(size=8), jnp.float32)
    step = kv.Step(rows=None, start=jnp.zeros(2, jnp.int32), count=jnp.asarray([7, 4]))
    want, _ = kv.fresh(INDEXED, 2).layer(0).attend(query, kv.KeyValue(k, v, index_k), step, spec, sinks)
    cache = kv.init(INDEXED, 3, 9, kv.Format(np.dtype(dtype), *orders, as_bits=as_bits))
    there = step.replace(rows=jnp.asarray([2, 0]))
    attend = jax.jit(lambda view, new: view.attend(query, new, there, spec, sinks))
    got, view = attend(cache.layer(1), kv.KeyValue(k, v, index_k))
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (got, want)), atol=0.05 if as_bits else 3e-6)
    assert not np.asarray(got)[1, 4:].any()
    again, after = attend(view, None)  # reading only
    np.testing.assert_array_equal(again, got)
    jax.tree.map(np.testing.assert_array_equal, after, view)
    for array in (view.k, view.v, view.index_k):
        assert np.asarray(array[1, jnp.asarray([0, 2])]).any(axis=(1, 2, 3)).all()
        assert not np.asarray(array[0]).any()  # the other layer
        assert not np.asarray(array[1, 1]).any()  # the other row
