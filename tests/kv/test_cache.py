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
LLAMA2_13B = Layers((kv.LayerSpec(40, 128, 128),) * 40)
LLAMA3_8B = Layers((kv.LayerSpec(8, 128, 128),) * 32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("slot_axis", [2, 3])
def test_the_byte_count_is_that_of_the_live_arrays(dtype, slot_axis):
    format = kv.Format(dtype=np.dtype(dtype), slot_axis=slot_axis)
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
    for slot_axis in (2, 3):
        cache = kv.init(HYBRID, 2, 5, kv.Format(slot_axis=slot_axis))
        names = jax.tree.leaves(cache.logical_axes(), is_leaf=lambda leaf: isinstance(leaf, tuple) and isinstance(leaf[0], str))
        for array, axis_names in zip(jax.tree.leaves(cache), names, strict=True):
            assert len(axis_names) == array.ndim
            assert set(axis_names) <= axes.AXES
            if array.ndim > 1:
                assert axis_names[slot_axis] == axes.SLOTS
                assert array.shape[slot_axis] == 5


def test_the_memory_order_follows_the_platform():
    assert kv.Format.for_platform("cpu", np.dtype(np.float32)).slot_axis == 3
    assert kv.Format.for_platform("tpu", np.dtype(jnp.bfloat16)).slot_axis == 2


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
