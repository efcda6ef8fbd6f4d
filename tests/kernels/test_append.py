"""kernels.append: what it writes, and above all what it leaves alone."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import append

L, B, K, H, S = 2, 3, 2, 4, 10


def expected(buffer, new, layer, rows, start, count, order):
    """The contract, one slot at a time."""
    buffer = buffer.copy()
    for b in range(new.shape[0]):
        for t in range(count[b]):
            slot = start[b] + t
            if slot < S:
                one = buffer[layer, rows[b]].transpose(*(order.index(axis) for axis in "SKH"))  # a view
                one[slot] = new[b, t]
    return buffer


@functools.cache
def jitted(order):
    return jax.jit(functools.partial(append, order=order))


@pytest.mark.parametrize("order", ["SKH", "KSH", "KHS"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_only_the_real_tokens_slots_change(order, data):
    T = data.draw(st.sampled_from([1, 4, 12]))  # 12 is more than a row's capacity
    width = data.draw(st.sampled_from([1, 3]))
    rows = data.draw(st.permutations(range(B)))[:width]
    start = [data.draw(st.integers(0, S)) for _ in rows]
    count = [data.draw(st.integers(0, T)) for _ in rows]
    layer = data.draw(st.integers(0, L - 1))
    rng = np.random.default_rng(0)
    size = {"S": S, "K": K, "H": H}
    shape = (L, B, *(size[axis] for axis in order))
    buffer, new = rng.normal(size=shape).astype(np.float32), rng.normal(size=(width, T, K, H)).astype(np.float32)
    args = [np.asarray(x, np.int32) for x in (layer, rows, start, count)]
    got = jitted(order)(buffer, new, *args)
    np.testing.assert_array_equal(got, expected(buffer, new, layer, rows, start, count, order))


def test_without_rows_row_b_goes_to_row_b():
    buffer, new = np.zeros((L, B, K, S, H), np.float32), np.ones((B, 1, K, H), np.float32)
    start, count = np.asarray([0, 3, 9], np.int32), np.asarray([1, 0, 1], np.int32)
    got = append(buffer, new, 1, None, start, count, "KSH")
    np.testing.assert_array_equal(got, expected(buffer, new, 1, range(B), start, count, "KSH"))
