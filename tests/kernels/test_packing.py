"""kernels.Packing: where slots that share a row lie, and that writes to them change what writes to slots of their own would."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import Packing, append, append_pages, append_ring

L, ROWS, HEADS, WIDTH, SLOTS, PAGE = 2, 3, 2, 3, 16, 8
PACKINGS = [
    Packing(4, HEADS, WIDTH, padding=8),
    Packing(2, HEADS, WIDTH, tile=2),
    Packing(2, HEADS, WIDTH),
    Packing(1, HEADS, WIDTH, tile=4),
]
SAMPLED = [*PACKINGS[:2], *(pytest.param(packing, marks=pytest.mark.slow) for packing in PACKINGS[2:])]


def test_a_row_holds_the_slots_of_its_first_head_then_those_of_the_next():
    x = np.arange(12).reshape(2, 2, 3)  # [S, K, W]
    packing = Packing(2, 2, 3)
    np.testing.assert_array_equal(packing.pack(x), [[[0, 1, 2, 6, 7, 8, 3, 4, 5, 9, 10, 11]]])
    np.testing.assert_array_equal(packing.unpack(packing.pack(x)), x)


@pytest.mark.parametrize("packing", PACKINGS)
def test_packing_and_unpacking_lose_nothing_and_have_the_shape_that_is_stated(packing):
    x = np.arange(5 * SLOTS * HEADS * WIDTH).reshape(5, SLOTS, HEADS, WIDTH)
    packed = packing.pack(x)
    assert packed.shape == (5, *packing.shape(SLOTS))
    np.testing.assert_array_equal(packing.unpack(packed), x)
    for slot in range(SLOTS):  # `at` finds the row of each slot
        row = packing.unpack_rows(packed[0][packing.at(np.asarray(slot))][None])
        np.testing.assert_array_equal(row[slot % packing.slots], x[0, slot])


@pytest.mark.parametrize(
    ("width", "itemsize", "most", "slots"),
    [
        (128, 2, 64, 1),
        (256, 2, 64, 1),
        (64, 2, 64, 2),
        (64, 2, 16, 2),
        (64, 2, 8, None),
        (96, 4, 64, 4),
        (80, 2, 64, None),
        (128, 1, 64, None),
    ],
)
def test_heads_fill_rows_by_themselves_with_few_slots_or_not_at_all(width, itemsize, most, slots):
    packing = Packing.per_head(128, 3, width, itemsize, most)
    assert packing == (None if slots is None else Packing(slots, 3, width))


@pytest.mark.parametrize(
    ("heads", "width", "itemsize", "most", "want"),
    [
        (8, 128, 2, 64, None),  # a slot's heads fill a tile
        (4, 128, 2, 64, Packing(1, 4, 128)),  # half a tile
        (1, 576, 2, 64, Packing(2, 1, 576)),  # DeepSeek's latent rows
        (8, 4, 2, 64, Packing(4, 8, 4)),  # scales
        (1, 18, 2, 64, Packing(64, 1, 18)),  # of latent rows
        (1, 18, 2, 16, Packing(16, 1, 18, padding=96)),  # in pages of 16
        (8, 64, 1, 64, Packing(1, 8, 64, tile=8)),  # int4
        (1, 288, 1, 64, Packing(4, 1, 288, tile=8)),
        (1, 576, 1, 4, Packing(1, 1, 576, padding=64, tile=4)),  # in pages of 4
    ],
)
def test_rows_are_filled_with_the_fewest_slots(heads, width, itemsize, most, want):
    assert Packing.to_fill(128, heads, width, itemsize, most) == want


@functools.cache
def jitted(write, packing):
    return jax.jit(functools.partial(write, order="SKH", packing=packing))


def compare(write, packing, buffer, new, *more):
    """What the packed write does, and what the write to slots of their own does."""
    want = jitted(write, None)(buffer, new, 1, *more)
    got = jitted(write, packing)(packing.pack(buffer), new, 1, *more)
    np.testing.assert_array_equal(packing.unpack(got), want)
    if packing.padding:
        np.testing.assert_array_equal(np.asarray(got)[..., -packing.padding :], 0)


@pytest.mark.parametrize("write", [append, append_ring])
@pytest.mark.parametrize("packing", SAMPLED)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_write_to_packed_rows_is_the_write_to_slots_of_their_own(packing, write, data):
    T = data.draw(st.sampled_from([1, 5, 20]))  # 20 is more than a row holds
    rows = data.draw(st.permutations(range(ROWS)))[:2]
    most = SLOTS if write is append else 5 * SLOTS
    start = [data.draw(st.integers(0, most)) for _ in rows]
    count = [data.draw(st.integers(0, T)) for _ in rows]
    rng = np.random.default_rng(0)
    buffer = rng.normal(size=(L, ROWS, SLOTS, HEADS, WIDTH)).astype(np.float32)
    new = rng.normal(size=(len(rows), T, HEADS, WIDTH)).astype(np.float32)
    compare(write, packing, buffer, new, *(np.asarray(x, np.int32) for x in (rows, start, count)))


@pytest.mark.parametrize("packing", SAMPLED)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_write_to_packed_pages_is_the_write_to_slots_of_their_own(packing, data):
    T, pages, per_row = data.draw(st.sampled_from([1, 5, 20])), 7, 3
    table = np.asarray(data.draw(st.permutations(range(pages + 2)))[: 2 * per_row]).reshape(2, per_row)
    start = [data.draw(st.integers(0, PAGE * per_row)) for _ in range(2)]
    count = [data.draw(st.integers(0, T)) for _ in range(2)]
    rng = np.random.default_rng(0)
    pool = rng.normal(size=(L, pages, PAGE, HEADS, WIDTH)).astype(np.float32)
    new = rng.normal(size=(2, T, HEADS, WIDTH)).astype(np.float32)
    compare(append_pages, packing, pool, new, *(np.asarray(x, np.int32) for x in (np.minimum(table, pages), start, count)))
