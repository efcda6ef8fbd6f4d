"""kv: grouping, axis names, errors, and one layer's reads and writes."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import kv
from kernels import Heads
from runtime import UserError
from sharding import axes


@dataclasses.dataclass(frozen=True)
class Layers:
    cache_layers: tuple[kv.LayerSpec | kv.LatentSpec, ...]


WIDE, NARROW = kv.LayerSpec(num_kv_heads=4, key_dim=8, value_dim=6), kv.LayerSpec(num_kv_heads=1, key_dim=8, value_dim=8)
BROAD = kv.LayerSpec(num_kv_heads=2, key_dim=64, value_dim=32)
HYBRID = Layers((WIDE, NARROW, WIDE, WIDE))
LATENT = Layers((kv.LatentSpec(latent_dim=4, rope_dim=2, index_dim=3),) * 2)
WINDOWED = Layers((dataclasses.replace(WIDE, window=4), WIDE))
ORDERS = [("SKH", "SKH"), ("KSH", "KSH"), ("KHS", "KSH")]
INT8 = np.dtype(np.int8)


def test_equal_layers_share_a_stack_and_each_finds_its_place():
    cache = kv.init(HYBRID, 2, 5, kv.Format())
    assert cache.places == ((0, 0), (1, 0), (0, 1), (0, 2))
    assert [store.tensors["k"].parts[0].shape[0] for store in cache.stores] == [3, 1]
    assert cache.stores[0].tensors["v"].parts[0].shape == (3, 2, 4, 5, 6)


def test_a_window_becomes_a_ring_where_that_saves_slots():
    cache = kv.init(WINDOWED, 2, 32, kv.Format(margin=3))
    assert [store.layout.kind for store in cache.stores] == ["ring", "dense"]
    assert [store.tensors["k"].parts[0].shape[-1] for store in cache.stores] == [4 + 3, 32]  # "KHS"
    cache = kv.init(WINDOWED, 2, 7, kv.Format(margin=3))
    assert [store.layout.kind for store in cache.stores] == ["dense", "dense"]


def test_layers_of_a_page_group_share_tables_and_each_group_has_a_pool():
    format = kv.Format(page_size=4, margin=2)
    assert kv.page_groups(WINDOWED, 32, format) == (None, 4)
    assert kv.page_groups(WINDOWED, 6, format) == (None,)  # no window that saves anything
    assert kv.page_groups(WINDOWED, 32, kv.Format()) == ()
    cache = kv.init(WINDOWED, 2, 30, format, pages=[9, 5])
    assert [store.tensors["v"].parts[0].shape[1:] for store in cache.stores] == [(5, 4, 4, 6), (9, 4, 4, 6)]
    assert [store.num_pages for store in cache.stores] == [5, 9]
    for table, pages in zip(cache.tables, (9, 5), strict=True):
        np.testing.assert_array_equal(table, np.full((2, 8), pages))  # 8 pages of 4 reach to 30 tokens; none is there yet


def test_the_default_pool_has_a_page_for_every_token_that_rows_may_hold():
    format = kv.Format(page_size=4, margin=3)
    # All 32 tokens of each row; or a window of 4 and a margin of 3, which may begin within a page, and a chunk of 9 of one row.
    assert kv.default_pages(WINDOWED, 2, 32, format, chunk=9) == (2 * 8, 2 * (2 + 1) + 3)
    assert kv.default_pages(WINDOWED, 2, 32, format) == (2 * 8, 2 * 3 + 8)  # a chunk of 512 is all that a row holds
    assert [store.num_pages for store in kv.init(WINDOWED, 2, 32, format).stores] == [14, 16]  # the one with the window stands first


def test_as_many_pools_as_page_groups_must_be_given():
    with pytest.raises(ValueError, match="1 page pools are given, but there are 2 page groups"):
        kv.init(WINDOWED, 2, 32, kv.Format(page_size=4, margin=2), pages=[9])
    with pytest.raises(UserError, match="page pool 1 0 is below 1"):
        kv.init(WINDOWED, 2, 32, kv.Format(page_size=4, margin=2), pages=[9, 0])


def test_the_room_of_a_row_is_what_its_pages_reach_to():
    cache = kv.init(WINDOWED, 3, 30, kv.Format(page_size=4, margin=2), pages=[9, 5])
    np.testing.assert_array_equal(cache.room, [0, 0, 0])
    everywhere = jnp.asarray([[0, 1, 2, 9, 9, 9, 9, 9], [3, 4, 9, 9, 9, 9, 9, 9], [5, 6, 7, 8, 1, 2, 3, 4]])
    window = jnp.asarray([[5, 1, 2, 5, 5, 5, 5, 5], [5, 5, 5, 5, 5, 5, 5, 5], [5, 5, 5, 5, 5, 5, 3, 4]])  # what is behind it may be gone
    np.testing.assert_array_equal(cache.replace(tables=(everywhere, window)).room, [12, 0, 30])  # at most the capacity
    assert kv.init(WINDOWED, 3, 30, kv.Format()).room == 30
    assert kv.fresh(WINDOWED, 3).room is None


@pytest.mark.parametrize("orders", ORDERS)
@pytest.mark.parametrize("more", [{}, {"page_size": 4}, {"dtype": INT8, "group": 2}], ids=["dense", "paged", "int8"])
def test_every_array_names_each_of_its_axes(orders, more):
    widths = {"k": 8, "v": 6, "latent": 6, "index_k": 3}
    layers = Layers((WIDE, NARROW, kv.LatentSpec(4, 2, 3))) if "group" not in more else Layers((WIDE, NARROW, kv.LatentSpec(4, 2)))
    cache = kv.init(layers, 2, 5, kv.Format(key_order=orders[0], value_order=orders[1], **more))
    named = cache.logical_axes()
    for store, names in zip(cache.stores, named.stores, strict=True):
        for name, tensor in store.tensors.items():
            for number, (array, axis_names) in enumerate(zip(tensor.parts, names.tensors[name].parts, strict=True)):
                assert set(axis_names) <= axes.AXES
                sizes = dict(zip(axis_names, array.shape, strict=True))
                assert sizes[axes.LAYERS] == 1
                rows, slots = (axes.PAGES, axes.PAGE_SLOTS) if "page_size" in more else (axes.BATCH, axes.SLOTS)
                assert (sizes[rows], sizes[slots]) == ((4, 4) if "page_size" in more else (2, 5))
                assert sizes[axes.ONE] == 1 if name in ("latent", "index_k") else sizes[axes.KV_HEADS] in (4, 1)
                width = 8 if store is cache.stores[1] else widths[name]
                assert sizes[axes.HEAD_DIM] == (width if number == 0 else width // 2)  # a scale for two channels
    assert named.lengths == (None,)  # small, and whole on every device
    assert named.tables == (((None, None),) if "page_size" in more else ())


def test_the_memory_order_follows_the_platform():
    assert kv.Format.for_platform("cpu", np.dtype(np.float32)) == kv.Format(np.dtype(np.float32), "KHS", "KSH")
    assert kv.Format.for_platform("tpu", np.dtype(jnp.bfloat16)) == kv.Format(np.dtype(jnp.bfloat16), "SKH", "SKH", lanes=128)
    assert kv.Format.for_platform("gpu", np.dtype(jnp.bfloat16)) == kv.Format(np.dtype(jnp.bfloat16), "SKH", "SKH")
    assert kv.Format.for_platform("cpu", np.dtype(jnp.bfloat16)) == kv.Format(np.dtype(jnp.bfloat16), "KHS", "KSH", as_bits=True)
    assert kv.Format.for_platform("cpu", INT8, margin=5) == kv.Format(INT8, "KHS", "KSH", as_bits=True, margin=5)


def test_bf16_kept_as_bits_is_bf16():
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, 5, heads, 8)), jnp.bfloat16) for heads in (4, 2, 2))
    step = kv.Step(rows=None, start=jnp.zeros(2, jnp.int32), count=jnp.asarray([5, 3]))
    outs = []
    for as_bits in (False, True):
        cache = kv.init(Layers((kv.LayerSpec(2, 8, 8),)), 2, 8, kv.Format(np.dtype(jnp.bfloat16), as_bits=as_bits))
        outs.append(cache.layer(0).attend(kv.Query(q), kv.KeyValue(k, v), step, kv.AttentionSpec(scale=0.3)))
    (plain, plain_view), (bits, bits_view) = outs
    np.testing.assert_array_equal(bits, plain)
    for name in ("k", "v"):
        (kept,), (want,) = bits_view.tensors[name].parts, plain_view.tensors[name].parts
        assert kept.dtype == jnp.uint16
        np.testing.assert_array_equal(kept, np.asarray(want).view(np.uint16))


@pytest.mark.parametrize("order", ["SK", "SKV", "ksh", "SSKH"])
def test_an_order_that_is_none_is_refused(order):
    with pytest.raises(ValueError, match=f"key_order='{order}' is not an order"):
        kv.Format(key_order=order)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"page_size": 24}, "page size 24 is not a power of two: give 16 or 32"),
        ({"page_size": 0}, "page size 0 is not a power of two: give 1 or 2"),
        ({"group": 24}, "a group of 24 channels per scale is not a power of two"),
        ({"group": 1}, "a group of 1 channels per scale"),
        ({"margin": -1}, "cache margin -1 is below 0"),
        ({"dtype": np.dtype(np.int32)}, "a cache of int32 is not known: use f32, bf16"),
    ],
)
def test_a_format_that_is_none_is_refused(field, message):
    with pytest.raises(UserError, match=message):
        kv.Format(**field)


@pytest.mark.parametrize(("batch", "capacity", "message"), [(0, 5, "batch 0 is below 1"), (1, 0, "capacity 0 is below 1")])
def test_sizes_below_one_are_refused(batch, capacity, message):
    with pytest.raises(UserError, match=message):
        kv.init(HYBRID, batch, capacity, kv.Format())


def test_a_cache_is_a_value_and_its_views_do_not_change_it():
    cache = kv.init(HYBRID, 1, 4, kv.Format())
    step = kv.Step(rows=None, start=jnp.zeros(1, jnp.int32), count=jnp.ones(1, jnp.int32))
    ones = jnp.ones((1, 1, 4, 8))
    out, view = cache.layer(2).attend(kv.Query(ones), kv.KeyValue(ones, ones[..., :6]), step, kv.AttentionSpec(scale=1.0))
    assert float(cache.stores[0].tensors["k"].parts[0].sum()) == 0.0
    after = cache.with_layer(2, view)
    np.testing.assert_array_equal(np.flatnonzero(np.asarray(after.stores[0].tensors["k"].parts[0]).sum((1, 2, 3, 4))), [1])
    np.testing.assert_array_equal(out, np.ones((1, 1, 4, 6)))  # one slot: its value


def test_reading_only_sees_what_is_held_without_writing():
    cache = kv.init(Layers((NARROW,)), 1, 4, kv.Format())
    step = kv.Step(rows=None, start=jnp.zeros(1, jnp.int32), count=jnp.ones(1, jnp.int32))
    ones = jnp.ones((1, 1, 1, 8))
    _, view = cache.layer(0).attend(kv.Query(ones), kv.KeyValue(ones, 3 * ones), step, kv.AttentionSpec(scale=1.0))
    out, again = view.attend(kv.Query(ones), None, step, kv.AttentionSpec(scale=1.0))
    np.testing.assert_array_equal(out, 3 * ones)
    jax.tree.map(np.testing.assert_array_equal, again, view)


def test_a_ring_refuses_to_be_read_by_more_queries_than_it_keeps_the_windows_of():
    cache = kv.init(WINDOWED, 1, 32, kv.Format(margin=3))
    step = kv.Step(rows=None, start=jnp.zeros(1, jnp.int32), count=jnp.ones(1, jnp.int32))
    with pytest.raises(ValueError, match="5 queries see more than Ring"):
        cache.layer(0).attend(kv.Query(jnp.ones((1, 5, 4, 8))), None, step, kv.AttentionSpec(scale=1.0, window=4))


SPECS = {
    "window": kv.AttentionSpec(scale=0.3, window=3),
    "softcap": kv.AttentionSpec(scale=0.3, softcap=2.0),
    "latent": kv.AttentionSpec(scale=0.3),
    "indexer": kv.AttentionSpec(scale=0.3, top_k=2),
}


def call(name, dtype):
    """Layers of the kind, two rows of seven tokens' queries and new rows, and the layer's own weights."""
    rng = np.random.default_rng(0)

    def normal(*shape, dtype=dtype):
        return jnp.asarray(rng.normal(size=shape), dtype)

    if name in ("window", "softcap"):
        new = kv.KeyValue(normal(2, 7, 4, 8), normal(2, 7, 4, 6))
        return HYBRID, kv.Query(normal(2, 7, 8, 8)), new, normal(8, dtype=jnp.float32)
    query, new = kv.LatentQuery(normal(2, 7, 3, 5), normal(2, 7, 3, 2)), kv.LatentRow(normal(2, 7, 1, 6))
    layers = Layers((kv.LatentSpec(4, 2),) * 2)
    if name == "indexer":
        layers, query = LATENT, query._replace(index_q=normal(2, 7, 2, 3), index_w=normal(2, 7, 2, dtype=jnp.float32))
        new = new._replace(index_k=normal(2, 7, 1, 3))
    return layers, query, new, kv.LatentWeights(normal(3, 5, 4), normal(3, 6, 4))


@pytest.mark.parametrize(
    ("name", "orders", "as_bits"),
    [
        ("indexer", ORDERS[0], False),
        pytest.param("indexer", ORDERS[1], False, marks=pytest.mark.slow),
        pytest.param("indexer", ORDERS[2], False, marks=pytest.mark.slow),
        pytest.param("indexer", ORDERS[2], True, marks=pytest.mark.slow),
        ("latent", ORDERS[1], False),
        pytest.param("window", ORDERS[0], False, marks=pytest.mark.slow),
        pytest.param("softcap", ORDERS[2], False, marks=pytest.mark.slow),
    ],
)
def test_the_dense_kind_answers_as_the_one_that_stores_nothing_in_every_order(name, orders, as_bits):
    spec, dtype = SPECS[name], jnp.bfloat16 if as_bits else jnp.float32
    layers, query, new, weights = call(name, dtype)
    step = kv.Step(rows=None, start=jnp.zeros(2, jnp.int32), count=jnp.asarray([7, 4]))
    want, _ = kv.fresh(layers, 2).layer(0).attend(query, new, step, spec, weights)
    cache = kv.init(layers, 3, 9, kv.Format(np.dtype(dtype), *orders, as_bits=as_bits))
    number = len(layers.cache_layers) - 1
    place, there = cache.places[number][1], step.replace(rows=jnp.asarray([2, 0]))
    attend = jax.jit(lambda view, new: view.attend(query, new, there, spec, weights))
    got, view = attend(cache.layer(number), new)
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (got, want)), atol=0.05 if as_bits else 3e-6)
    assert not np.asarray(got)[1, 4:].any()
    again, after = attend(view, None)  # reading only
    np.testing.assert_array_equal(again, got)
    jax.tree.map(np.testing.assert_array_equal, after, view)
    for array in jax.tree.leaves(view.tensors):
        assert np.asarray(array[place, jnp.asarray([0, 2])]).any(axis=(1, 2, 3)).all()
        assert not np.asarray(array[:place]).any()  # the other layers
        assert not np.asarray(array[place, 1]).any()  # the other row


NATIVE = {
    "f32": (np.float32, {}, WIDE, ("native", None)),
    "bf16": (jnp.bfloat16, {}, WIDE, ("native", None)),
    "int8": (np.int8, {}, BROAD, ("native", None)),
    "int8, a scale for every 16": (np.int8, {"group": 16, "page_size": 8}, BROAD, ("native", None)),
    "int8, a scale for every 8": (np.int8, {"group": 8}, WIDE, ("xla", "a cache of int8 in groups of 8")),
    "int4": (ml_dtypes.int4, {}, BROAD, ("xla", "a cache of int4")),
    "fp8": (ml_dtypes.float8_e4m3fn, {}, BROAD, ("xla", "a cache of float8_e4m3fn")),
    "latent rows": (np.int8, {}, LATENT.cache_layers[0], ("xla", "latent attention")),
}


@pytest.mark.parametrize(("dtype", "more", "spec", "answered"), NATIVE.values(), ids=NATIVE)
def test_native_kernels_answer_from_floats_and_from_int8_in_groups_of_16_and_more(dtype, more, spec, answered):
    format = kv.Format.for_platform("cpu", np.dtype(dtype), kernels="native", **more)
    assert format.kernels_of(spec) == answered
    assert dataclasses.replace(format, kernels="xla").kernels_of(spec) == ("xla", None)


EQUAL = dataclasses.replace(NARROW, window=4)
SCALE, FULL = jnp.ones((8,)), jnp.ones((1, 3, 8))
TAKEN = {
    "nothing to do": ({}, {}, True),
    "norms of each head": ({"q_norm": SCALE, "k_norm": SCALE}, {}, True),
    "norms over all heads": ({"q_norm": FULL, "k_norm": FULL[:, 0]}, {}, False),
    "bf16": ({"qkv": jnp.ones((2, 4, 1, 5, 8), jnp.bfloat16)}, {}, False),
    "more than a ring is read back of": ({"qkv": jnp.ones((2, 5, 1, 5, 8))}, {}, False),
    "the last token's queries": ({}, {"last_only": True}, False),
}


@pytest.mark.parametrize(("changed", "how", "taken"), TAKEN.values(), ids=TAKEN)
def test_native_kernels_take_joined_heads_that_they_can_split_and_all_others_are_split_before(changed, how, taken):
    heads = Heads(**{"qkv": jnp.ones((2, 4, 1, 5, 8)), "q_norm": None, "k_norm": None, "table": None, "eps": 1e-5} | changed)
    step = kv.Step(rows=None, start=jnp.zeros((2,), jnp.int32), count=jnp.full((2,), 4, jnp.int32), **how)
    for kernels in ("native", "xla"):
        format = kv.Format.for_platform("cpu", np.dtype(np.float32), margin=3, kernels=kernels)
        layer = kv.init(Layers((EQUAL,)), 2, 32, format).layer(0)
        assert layer.layout.kind == "ring"
        assert layer.takes(heads, step) == (taken and kernels == "native")
