"""kernels.floors against sorting: the same scores reach the floor."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import top_k_floor, top_p_floor

B, V = 3, 64
K_FLOOR = jax.jit(top_k_floor)
P_FLOOR = jax.jit(lambda scores, p: top_p_floor(scores, jnp.exp(scores - scores.max(-1, keepdims=True)), p))


def kept_by_sorting(scores: np.ndarray, k: int) -> np.ndarray:
    """bool [V]: the scores that are not below the k-th largest."""
    held = np.sort(scores[scores > -np.inf])[::-1]
    return scores >= held[k - 1] if 0 < k < len(held) else scores > -np.inf


numbers = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, -np.inf, 3e38, -3e38, 1e-37, -1e-37]),  # few, so that many tie
    st.floats(-30, 30, width=32, allow_subnormal=False),
)
rows = st.one_of(
    st.lists(numbers, min_size=V, max_size=V),
    st.builds(lambda value: [value] * V, numbers),  # all equal
    st.builds(  # floats side by side: nothing but the last bits tells them apart
        lambda start, steps: (np.float32(start).view(np.int32) + np.asarray(steps, np.int32)).view(np.float32).tolist(),
        st.sampled_from([1.0, -1.0, 8.5, -1e5, 1e-30]),
        st.lists(st.integers(0, 70), min_size=V, max_size=V),
    ),
)


@settings(deadline=None, max_examples=300)
@given(
    scores=st.lists(rows, min_size=B, max_size=B),
    k=st.lists(st.sampled_from([-1, 0, 1, 2, 3, 31, 32, V - 1, V, V + 1, 2**31 - 1]), min_size=B, max_size=B),
)
def test_the_k_largest_and_those_that_tie_with_the_last_reach_the_floor_and_no_others(scores, k):
    scores = np.asarray(scores, np.float32)
    floor = np.asarray(K_FLOOR(scores, np.asarray(k, np.int32)))
    for row in range(B):
        reach = (scores[row] >= floor[row]) & (scores[row] > -np.inf)
        assert reach.tolist() == kept_by_sorting(scores[row], k[row]).tolist(), (row, k[row])


@pytest.mark.parametrize("shape", [(1, 1), (2, 5), (5, 49_152)])
def test_any_number_of_scores_has_a_floor(shape):
    rng = np.random.default_rng(5)
    scores = rng.normal(size=shape).astype(np.float32)
    for k in (1, 2, shape[1] // 2, shape[1] - 1, shape[1]):
        floor = np.asarray(K_FLOOR(scores, np.full(shape[:1], k, np.int32)))
        for row, each in zip(scores, floor, strict=True):
            np.testing.assert_array_equal(row >= each, kept_by_sorting(row, k))


def test_a_row_without_scores_loses_nothing():
    scores = np.full((B, V), -np.inf, np.float32)
    scores[1, 3] = 2.0
    floor = np.asarray(K_FLOOR(scores, np.asarray([1, 1, 5], np.int32)))
    assert (scores >= floor[:, None]).sum(-1).tolist() == [V, 1, V]


def shallow(ties: int = 1) -> np.ndarray:
    """f32 [B, V]: scores so near each other that every weight is 1 and every sum exact, each standing `ties` times."""
    steps = np.random.default_rng(2).permuted(np.tile(np.arange(V) // ties, (B, 1)), axis=1)
    return (-1e-10 * steps).astype(np.float32)


@pytest.mark.parametrize("ties", [1, 4])
@pytest.mark.parametrize("count", [1, 2, 13, 32, 63])
def test_the_fewest_that_have_enough_stay_to_the_bit(count, ties):
    """Of 64 equal weights, p = n / 64 is n of them exactly, the float above it one more, the float below it still n."""
    scores, p = shallow(ties), np.float32(count / V)
    floor = np.asarray(P_FLOOR(scores, np.asarray([np.nextafter(p, np.float32(0)), p, np.nextafter(p, np.float32(1))])))
    kept = [-(-each // ties) * ties for each in (count, count, count + 1)]  # those that tie with the last one stay with it
    assert (scores >= floor[:, None]).sum(-1).tolist() == kept
    for row, each in zip(scores, kept, strict=True):
        assert set(np.sort(row)[::-1][:each]) == set(row[row >= np.sort(row)[::-1][each - 1]])


@pytest.mark.parametrize("p", [1.0, 2.0])
def test_all_of_the_weight_is_all_scores(p):
    scores = np.random.default_rng(3).normal(size=(B, V)).astype(np.float32)
    scores[0, :9] = -np.inf
    floor = np.asarray(P_FLOOR(scores, np.full(B, p, np.float32)))
    assert (scores >= floor[:, None]).sum(-1).tolist() == [V - 9, V, V]


@pytest.mark.parametrize("p", [0.0, 1e-45, 1e-30, 1e-9])
def test_a_vanishing_share_is_the_largest_score(p):
    scores = np.random.default_rng(4).permuted(np.tile(np.arange(V, dtype=np.float32), (B, 1)), axis=1)
    floor = np.asarray(P_FLOOR(scores, np.full(B, p, np.float32)))
    np.testing.assert_array_equal(scores >= floor[:, None], scores == V - 1)


def test_scores_that_are_cut_already_weigh_nothing():
    scores = shallow()
    scores[:, V // 2 :] = -np.inf
    floor = np.asarray(P_FLOOR(scores, np.asarray([0.5, 0.25, 1.0], np.float32)))
    assert (scores >= floor[:, None]).sum(-1).tolist() == [16, 8, 32]


@settings(deadline=None, max_examples=200)
@given(
    seed=st.integers(0, 2**32 - 1),
    scale=st.lists(st.sampled_from([1e-3, 1.0, 5.0, 1e3]), min_size=B, max_size=B),
    p=st.lists(st.floats(2.0**-20, 1, exclude_max=True, width=32), min_size=B, max_size=B),
    rounded=st.booleans(),
)
def test_what_stays_has_enough_and_none_of_it_could_go(seed, scale, p, rounded):
    scores = np.random.default_rng(seed).normal(size=(B, V)) * np.asarray(scale)[:, None]
    scores = (np.round(scores) + 0.0 if rounded else scores).astype(np.float32)
    floor = np.asarray(P_FLOOR(scores, np.asarray(p, np.float32)))
    for row in range(B):
        exact = np.exp(scores[row].astype(np.float64) - scores[row].max())
        reach = scores[row] >= floor[row]
        # Both sums (of all, and of what stays) are of at most 64 terms, each within 63 half units in the last place of its exact value, and
        # each term within two units: 2 * (63 + 4) * 2^-24 of the whole.
        error = 2 * 67 * 2.0**-24 * exact.sum()
        enough = np.float64(np.float32(p[row])) * exact.sum()
        least = reach & (scores[row] == scores[row][reach].min())
        assert exact[reach].sum() >= enough - error
        assert exact[reach & ~least].sum() < enough + error or reach.sum() == least.sum()


def test_nothing_is_sorted():
    scores = np.zeros((B, V), np.float32)
    for lowered in (K_FLOOR.lower(scores, np.zeros(B, np.int32)), P_FLOOR.lower(scores, np.zeros(B, np.float32))):
        operations = set(re.findall(r" ([\w\-]+)\(", lowered.compile().as_text()))
        assert "while" in operations
        assert not operations & {"sort", "topk", "custom-call"}
