"""kernels.attention: the block loop against the reference, and what it may read."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import attention, blockwise_attention

B, K, G, H, S, BLOCK = 2, 2, 3, 8, 40, 16  # the last block of 40 slots starts at 24: it gives slots 24..31 a second time


def reader(k, v, block, on_read=lambda index: None):
    """Reads [B, S, K, H] arrays block by block, the last block moved back so that it ends at the last slot."""

    def read(index):
        on_read(index)
        first = jnp.minimum(index * block, k.shape[1] - block)
        k_part, v_part = (jax.lax.dynamic_slice_in_dim(x, first, block, axis=1) for x in (k, v))
        return k_part.transpose(0, 2, 3, 1), v_part.swapaxes(1, 2), first + jnp.arange(block, dtype=jnp.int32)

    return read


@pytest.fixture(scope="module")
def blockwise():
    return jax.jit(lambda q, k, v, limit: blockwise_attention(q, reader(k, v, BLOCK), BLOCK, limit, scale=0.3))


def random_case(seed, T):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in ((B, T, K * G, H), (B, S, K, H), (B, S, K, H)))
    limit = rng.integers(-1, S, (B, T)).astype(np.int32)
    return q, k, v, limit


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), T=st.sampled_from([1, 5]))
def test_the_block_loop_equals_the_reference_for_any_limits(blockwise, seed, T):
    q, k, v, limit = random_case(seed, T)
    np.testing.assert_allclose(blockwise(q, k, v, limit), attention(q, k, v, limit, 0.3), atol=2e-6)  # f32, precision highest


@pytest.mark.parametrize("value_dim", [H, 5, 11])
def test_more_queries_than_one_query_block_equal_the_reference(value_dim):
    T = 300
    rng = np.random.default_rng(0)
    shapes = (1, T, K * G, H), (1, T, K, H), (1, T, K, value_dim)
    q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    limit = np.where(np.arange(T) < 290, np.arange(T), -1)[None].astype(np.int32)
    got = blockwise_attention(q, reader(k, v, 64), 64, limit, scale=0.3)
    np.testing.assert_allclose(got, attention(q, k, v, limit, 0.3), atol=2e-6)


def test_one_query_over_two_slots_is_the_softmax_written_out():
    q = jnp.ones((1, 1, 1, 1))
    k = jnp.asarray([0.0, 1.0, 9.0]).reshape(1, 3, 1, 1)
    v = jnp.asarray([10.0, 20.0, 99.0]).reshape(1, 3, 1, 1)
    expected = (10 + 20 * np.e) / (1 + np.e)  # slot 2 is past the limit
    for out in (attention(q, k, v, jnp.asarray([[1]]), 1.0), blockwise_attention(q, reader(k, v, 2), 2, jnp.asarray([[1]]), 1.0)):
        np.testing.assert_allclose(out[0, 0, 0, 0], expected, rtol=1e-6)


def test_a_query_that_sees_nothing_returns_zero(blockwise):
    q, k, v, limit = random_case(0, 5)
    limit[0, 2] = limit[1, 0] = -1
    for out in (attention(q, k, v, limit, 0.3), blockwise(q, k, v, limit)):
        assert np.all(np.asarray(out)[0, 2] == 0)
        assert np.all(np.asarray(out)[1, 0] == 0)


def test_garbage_past_the_held_slots_does_not_matter(blockwise):
    q, k, v, limit = random_case(3, 5)
    limit = np.minimum(limit, 20)
    clean = blockwise(q, k, v, limit)
    for row in range(B):
        k[row, limit[row].max() + 1 :] = np.nan
        v[row, limit[row].max() + 1 :] = np.nan
    np.testing.assert_array_equal(blockwise(q, k, v, limit), clean)


@pytest.mark.parametrize("longest", [0, 15, 16, 39])
def test_blocks_past_the_longest_row_are_never_read(longest):
    q, k, v, _ = random_case(4, 1)
    limit = np.asarray([[min(longest, 2)], [longest]], np.int32)
    blocks = []
    read = reader(k, v, BLOCK, on_read=lambda index: jax.debug.callback(lambda i: blocks.append(int(i)), index))
    jax.block_until_ready(blockwise_attention(q, read, BLOCK, limit, 0.3))
    jax.effects_barrier()
    assert sorted(blocks) == list(range(longest // BLOCK + 1))


def test_extreme_scores_stay_finite(blockwise):
    q, k, v, limit = random_case(5, 5)
    out = blockwise(q * 1e4, k * 1e4, v, np.maximum(limit, 0))
    assert np.all(np.isfinite(out))
