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
ORDERS = [("SKH", "SKH"), ("KSH", "KSH"), ("KHS", "KSH")]
LLAMA2_13B = Layers((kv.LayerSpec(40, 128, 128),) * 40)
LLAMA3_8B = Layers((kv.LayerSpec(8, 128, 128),) * 32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("orders", ORDERS)
def test_the_byte_count_is_that_of_the_live_arrays(dtype, orders):
    format = kv.Format(np.dtype(dtype), *orders, as_bits=dtype == jnp.bfloat16)
    cache = kv.init(HYBRID, 3, 17, format)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(cache)) == kv.nbytes(HYBRID, 3, 17, format)


def test_published_figures_come_out():
    half = kv.Format(dtype=np.dtype(jnp.bfloat16))
    assert kv.bytes_per_token(LLAMA2_13B, half) == 819_200  # 0.78 MiB
    assert kv.bytes_per_token(LLAMA3_8B, half) == 128 * 1024  # a quarter of what 32 KV heads would take


def test_equal_layers_share_a_stack_and_each_finds_its_place():
    cache = kv.init(HYBRID, 2, 5, kv.Format())
    assert cache.places == ((0, 0), (1, 0), (0, 1), (0, 2))
    assert [store.k.shape[0] for store in cache.stores] == [3, 1]
    assert cache.stores[0].v.shape == (3, 2, 4, 5, 6)


def test_every_array_names_each_of_its_axes():
    for orders in ORDERS:
        cache = kv.init(HYBRID, 2, 5, kv.Format(np.dtype(np.float32), *orders))
        names = jax.tree.leaves(cache.logical_axes(), is_leaf=lambda leaf: isinstance(leaf, tuple) and isinstance(leaf[0], str))
        for array, axis_names in zip(jax.tree.leaves(cache), names, strict=True):
            assert len(axis_names) == array.ndim
            assert set(axis_names) <= axes.AXES
            if array.ndim > 1:
                sizes = dict(zip(axis_names, array.shape, strict=True))
                assert sizes[axes.SLOTS] == 5
                assert sizes[axes.KV_HEADS] in (4, 1)
                assert sizes[axes.HEAD_DIM] in (8, 6)


def test_the_memory_order_follows_the_platform():
    assert kv.Format.for_platform("cpu", np.dtype(np.float32)) == kv.Format(np.dtype(np.float32), "KHS", "KSH")
    assert kv.Format.for_platform("tpu", np.dtype(jnp.bfloat16)) == kv.Format(np.dtype(jnp.bfloat16), "SKH", "SKH")

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
