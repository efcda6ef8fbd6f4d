"""kernels.indexer against numpy, one query at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import blockwise_index_scores, index_scores, top_slots

B, T, HEADS, D, S, BLOCK = 2, 3, 4, 8, 40, 16


def random_case(seed):
    rng = np.random.default_rng(seed)
    q, weights, k = (rng.normal(size=shape).astype(np.float32) for shape in ((B, T, HEADS, D), (B, T, HEADS), (B, S, D)))
    return q, weights, k


def test_scores_are_weighted_sums_of_positive_parts():
    q, weights, k = random_case(0)
    exact = np.zeros((B, T, S))
    for b, t, s in np.ndindex(exact.shape):
        exact[b, t, s] = sum(weights[b, t, h] * max(np.float64(q[b, t, h]) @ np.float64(k[b, s]), 0) for h in range(HEADS))
    got = index_scores(q, weights, k)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, exact, atol=1e-5)


def test_scores_of_bf16_operands_are_sums_in_f32():
    q, weights, k = (jnp.asarray(x, jnp.bfloat16) for x in random_case(1))
    np.testing.assert_array_equal(index_scores(q, weights, k), index_scores(*(x.astype(jnp.float32) for x in (q, weights, k))))


def best(scores, limit, k):
    """bool [S], one query's: a stable sort puts the first of equals first."""
    order = sorted(range(limit + 1), key=lambda slot: -scores[slot])
    return np.isin(np.arange(len(scores)), order[:k])


CHOOSE = jax.jit(top_slots, static_argnums=2)


@pytest.mark.parametrize("k", [1, 4, S, S + 1])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), values=st.sampled_from([1, 2, 5, 1000]))
def test_the_best_slots_are_chosen_and_of_equals_the_first(k, seed, values):
    rng = np.random.default_rng(seed)
    scores = (rng.integers(0, values, (B, T, S)) - values // 2).astype(np.float32)
    scores = np.where(rng.random(scores.shape) < 0.5, -scores, scores)  # some zeros are negative ones
    limit = rng.integers(-1, S, (B, T)).astype(np.int32)
    got = np.asarray(CHOOSE(scores, limit, k))
    for b, t in np.ndindex(B, T):
        np.testing.assert_array_equal(got[b, t], best(scores[b, t], limit[b, t], k))
    np.testing.assert_array_equal(got.sum(-1), np.minimum(limit + 1, k))


def test_what_stands_past_the_limit_does_not_matter():
    scores = np.asarray([[[1.0, 3.0, 2.0, np.inf, np.nan]]], np.float32)
    np.testing.assert_array_equal(top_slots(scores, np.asarray([[2]]), 2)[0, 0], [False, True, True, False, False])
    np.testing.assert_array_equal(top_slots(scores, np.asarray([[2]]), 4)[0, 0], [True, True, True, False, False])


@pytest.mark.parametrize(("longest", "blocks"), [(-1, []), (0, [0]), (15, [0]), (16, [0, 1]), (39, [0, 1, 2])])
def test_scores_by_blocks_are_those_of_the_whole_as_far_as_any_query_sees(longest, blocks):
    q, weights, k = random_case(2)
    limit = np.minimum(np.asarray([[-1, 0, 1], [longest] * 3], np.int32), longest)
    blocks_read = []

    def read(index):
        jax.debug.callback(lambda i: blocks_read.append(int(i)), index)
        first = jnp.minimum(index * BLOCK, S - BLOCK)  # the last block is moved back: it gives slots 24..31 a second time
        return jax.lax.dynamic_slice_in_dim(k, first, BLOCK, axis=1)

    got = np.asarray(blockwise_index_scores(q, weights, read, BLOCK, limit, S))
    jax.effects_barrier()
    assert sorted(blocks_read) == blocks
    np.testing.assert_allclose(got[..., : longest + 1], index_scores(q, weights, k)[..., : longest + 1], atol=1e-5)
    assert not got[..., len(blocks) * BLOCK :].any()
