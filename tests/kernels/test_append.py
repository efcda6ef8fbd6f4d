"""kernels.append: what each of the three places is written, and above all what is left alone."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import append, append_pages, append_ring

L, B, K, H, S = 2, 3, 2, 4, 10
P, C, M = 7, 4, 3  # pages of a pool, slots of each, and how many of them a row has places for
ORDERS = ["SKH", "KSH", "KHS"]


def expected(buffer, new, layer, order, place):
    """The contract, one token after another: `place(b, t)` is (row or page, slot), or None where token t of row b goes nowhere."""
    buffer = buffer.copy()
    for b, t in np.ndindex(new.shape[:2]):
        if (where := place(b, t)) is not None:
            row, slot = where
            one = buffer[layer, row].transpose(*(order.index(axis) for axis in "SKH"))  # a view
            one[slot] = new[b, t]
    return buffer


def random_arrays(order, rows, slots, width, T):
    """A stack of L buffers [L, rows, ...] and new rows [width, T, K, H]."""
    rng = np.random.default_rng(0)
    size = {"S": slots, "K": K, "H": H}
    shape = (L, rows, *(size[axis] for axis in order))
    return rng.normal(size=shape).astype(np.float32), rng.normal(size=(width, T, K, H)).astype(np.float32)


def integers(*values):
    return [np.asarray(value, np.int32) for value in values]


@functools.cache
def jitted(function, order):
    return jax.jit(functools.partial(function, order=order))


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_only_the_real_tokens_slots_change(order, data):
    T = data.draw(st.sampled_from([1, 4, 12]))  # 12 is more than a row's capacity
    width = data.draw(st.sampled_from([1, 3]))
    rows = data.draw(st.permutations(range(B)))[:width]
    # Below 0, the tokens before slot 0 are dropped.
    start = [data.draw(st.integers(0 if T == 1 else -T, S)) for _ in rows]
    count = [data.draw(st.integers(0, T)) for _ in rows]
    layer = data.draw(st.integers(0, L - 1))
    buffer, new = random_arrays(order, B, S, width, T)
    got = jitted(append, order)(buffer, new, *integers(layer, rows, start, count))

    def place(b, t):
        return (rows[b], start[b] + t) if t < count[b] and 0 <= start[b] + t < S else None

    np.testing.assert_array_equal(got, expected(buffer, new, layer, order, place))


def test_without_rows_row_b_goes_to_row_b():
    buffer, new = np.zeros((L, B, K, S, H), np.float32), np.ones((B, 1, K, H), np.float32)
    start, count = np.asarray([0, 3, 9], np.int32), np.asarray([1, 0, 1], np.int32)
    got = append(buffer, new, 1, None, start, count, "KSH")
    np.testing.assert_array_equal(got, expected(buffer, new, 1, "KSH", lambda b, t: (b, start[b]) if count[b] else None))


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_ring_keeps_the_last_of_the_real_tokens_at_their_positions_modulo_its_slots(order, data):
    T = data.draw(st.sampled_from([1, 4, 10, 23]))  # 23 goes round more than twice
    width = 3
    rows = data.draw(st.permutations(range(B)))
    start = [data.draw(st.integers(0, 5 * S)) for _ in rows]
    count = [data.draw(st.integers(0, T)) for _ in rows]
    layer = data.draw(st.integers(0, L - 1))
    buffer, new = random_arrays(order, B, S, width, T)
    got = jitted(append_ring, order)(buffer, new, *integers(layer, rows, start, count))
    # Tokens are written in order, so what stands in a slot at last is the latest that falls into it.
    want = expected(buffer, new, layer, order, lambda b, t: (rows[b], (start[b] + t) % S) if t < count[b] else None)
    np.testing.assert_array_equal(got, want)


def test_a_ring_of_four_is_the_one_drawn_out():
    positions = np.arange(6, dtype=np.float32).reshape(1, 6, 1, 1)
    write = jitted(append_ring, "SKH")
    got = write(np.full((1, 1, 4, 1, 1), -1, np.float32), positions, *integers(0, [0], [0], [6]))
    np.testing.assert_array_equal(got.ravel(), [4, 5, 2, 3])
    got = write(got, positions[:, :3] + 6, *integers(0, [0], [6], [2]))
    np.testing.assert_array_equal(got.ravel(), [4, 5, 6, 7])


@pytest.mark.parametrize("order", ORDERS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_pages_take_the_real_tokens_that_have_one_and_others_keep_their_bits(order, data):
    T = data.draw(st.sampled_from([1, 6, 13]))  # 13 is more than a row's pages hold
    width = data.draw(st.sampled_from([1, 2]))
    pages = np.asarray(data.draw(st.permutations(range(P)))[: width * M]).reshape(width, M)
    missing = np.asarray(data.draw(st.lists(st.booleans(), min_size=width * M, max_size=width * M))).reshape(width, M)
    table = np.where(missing, P, pages)
    start = [data.draw(st.integers(0, M * C + 2)) for _ in range(width)]
    count = [data.draw(st.integers(0, T)) for _ in range(width)]
    layer = data.draw(st.integers(0, L - 1))
    pool, new = random_arrays(order, P, C, width, T)
    got = jitted(append_pages, order)(pool, new, *integers(layer, table, start, count))

    def place(b, t):
        position = start[b] + t
        there = t < count[b] and position < M * C and table[b, position // C] < P
        return (table[b, position // C], position % C) if there else None

    np.testing.assert_array_equal(got, expected(pool, new, layer, order, place))


def test_tokens_reach_into_as_many_pages_as_their_first_ones_place_in_its_page_makes_them():
    table = [[5, 0, 3]]
    pool, new = random_arrays("KSH", P, C, 1, 6)
    for start in range(M * C - 6 + 1):
        got = jitted(append_pages, "KSH")(pool, new, *integers(1, table, [start], [6]))
        want = expected(pool, new, 1, "KSH", lambda b, t, start=start: (table[b][(start + t) // C], (start + t) % C))
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("T", [1, 6])
def test_a_page_that_two_rows_share_keeps_its_bits_when_they_go_on_in_their_own(T):
    pool, new = random_arrays("KSH", P, C, 2, T)
    got = np.asarray(jitted(append_pages, "KSH")(pool, new, *integers(0, [[2, 0, P], [2, 5, 3]], [4, 4], [T, T])))
    changed = (got != pool).any(axis=(2, 3, 4))
    np.testing.assert_array_equal(np.argwhere(changed), [[0, 0], [0, 5]] if T == 1 else [[0, 0], [0, 3], [0, 5]])


@pytest.mark.parametrize("function", [append, append_ring, append_pages])
def test_rows_are_stored_in_the_buffers_format(function):
    buffer, new = random_arrays("SKH", B, S, B, 3)
    where = [[0], [1], [2]] if function is append_pages else [0, 1, 2]
    got = jitted(function, "SKH")(np.zeros_like(buffer, np.float16), new, *integers(1, where, [0, 2, 4], [3, 3, 3]))
    assert got.dtype == np.float16
    np.testing.assert_array_equal(got[1, 1, 2:5], new[1].astype(np.float16))
