"""model.rope: the rotation, and the frequencies of every scaling against their definitions."""

import math

import numpy as np
import pytest

from kernels import apply_rope
from model import FactorScaling, LinearScaling, Llama3Scaling, Rope, YarnScaling
from model.rope import rope_table
from runtime import UserError


def test_rotation_turns_pairs_of_halves_by_position_over_theta():
    x = np.zeros((1, 1, 1, 4), np.float32)
    x[..., 0], x[..., 1] = 1.0, 1.0  # pairs (0, 2) and (1, 3)
    got = apply_rope(x, rope_table(Rope(theta=100.0, dim=4), np.asarray([[3]]), 64))
    expected = [np.cos(3), np.cos(3 / 10), np.sin(3), np.sin(3 / 10)]  # frequencies 100^0 and 100^(-1/2)
    np.testing.assert_allclose(got[0, 0, 0], expected, rtol=1e-6)


def test_scores_of_rotated_vectors_depend_on_their_distance_only():
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 1, 1, 1, 8)).astype(np.float32)

    def score(i, j):
        rotated = (apply_rope(x, rope_table(Rope(theta=1e4, dim=8), np.asarray([[p]]), 512)) for x, p in ((q, i), (k, j)))
        return float(np.sum(np.multiply(*rotated)))

    np.testing.assert_allclose(score(105, 100), score(5, 0), rtol=1e-4)


def test_elements_past_the_rotated_ones_stay():
    x = np.random.default_rng(0).normal(size=(1, 1, 2, 10)).astype(np.float32)
    rope = Rope(theta=100.0, dim=4)
    got = apply_rope(x, rope_table(rope, np.asarray([[3]]), 64))
    np.testing.assert_array_equal(got[..., 4:], x[..., 4:])
    np.testing.assert_array_equal(got[..., :4], apply_rope(x[..., :4], rope_table(rope, np.asarray([[3]]), 64)))


def plain(theta, dim):
    return np.asarray([theta ** (-2 * i / dim) for i in range(dim // 2)])


def test_linear_scaling_divides_positions():
    np.testing.assert_allclose(Rope(1e4, 8, LinearScaling(4.0)).frequencies(1), plain(1e4, 8) / 4, rtol=1e-6)


def test_llama3_scaling_keeps_short_waves_stretches_long_ones_and_mixes_between():
    rope = Rope(5e5, 128, Llama3Scaling(8.0, 1.0, 4.0, 8192))
    for frequency, got in zip(plain(5e5, 128), rope.frequencies(1), strict=True):
        wave = 2 * math.pi / frequency
        if wave < 8192 / 4:
            wanted = frequency
        elif wave > 8192 / 1:
            wanted = frequency / 8
        else:
            smooth = (8192 / wave - 1) / (4 - 1)
            wanted = (1 - smooth) * frequency / 8 + smooth * frequency
        np.testing.assert_allclose(got, wanted, rtol=1e-5)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_keeps_what_turns_fast_and_stretches_what_turns_slowly(truncate):
    rope = Rope(1e4, 64, YarnScaling(factor=40.0, original_context=4096, truncate=truncate, magnitude=1.5))
    got, before = rope.frequencies(1), plain(1e4, 64)
    turns = 4096 * before / (2 * np.pi)
    np.testing.assert_allclose(got[turns > 45], before[turns > 45], rtol=1e-5)
    np.testing.assert_allclose(got[turns < 0.7], before[turns < 0.7] / 40, rtol=1e-5)
    assert np.all(np.diff(got) < 0)
    cos, _ = rope_table(rope, np.asarray([[0]]), 1)
    np.testing.assert_allclose(cos, 1.5)


def test_long_factors_are_for_rows_that_may_outgrow_the_original_context():
    rope = Rope(1e4, 4, FactorScaling((1.0, 2.0), (3.0, 5.0), original_context=32, magnitude=1.25))
    np.testing.assert_allclose(rope.frequencies(32), plain(1e4, 4) / [1, 2], rtol=1e-6)
    np.testing.assert_allclose(rope.frequencies(33), plain(1e4, 4) / [3, 5], rtol=1e-6)
    assert rope.magnitude == 1.25


def test_factors_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match="1 short factors for 2 frequencies"):
        Rope(1e4, 4, FactorScaling((1.0,), (3.0, 5.0), original_context=32))
