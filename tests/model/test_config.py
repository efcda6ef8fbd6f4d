"""model.config and the abstract parameter tree."""

import jax
import numpy as np
import pytest

from model import AttentionConfig, MLPConfig, Rope, abstract_params, init_params
from model.layers import apply_rope, rope_table
from runtime import UserError
from sharding import axes


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(UserError, match="num_heads 9 is not a multiple of num_kv_heads 2"):
        AttentionConfig(num_heads=9, num_kv_heads=2, head_dim=8, rope=None)


def test_an_odd_head_cannot_be_rotated():
    with pytest.raises(UserError, match="head_dim 7 is odd"):
        AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=7, rope=Rope(theta=1e4))


def test_a_config_is_hashable_so_that_it_can_be_static(tiny_config):
    assert hash(tiny_config) == hash(tiny_config)
    assert MLPConfig(hidden=8) == MLPConfig(hidden=8)


def test_every_weight_names_each_of_its_axes(tiny_config):
    boxes = jax.tree.leaves(abstract_params(tiny_config), is_leaf=lambda leaf: hasattr(leaf, "names"))
    assert boxes
    for box in boxes:
        assert len(box.names) == box.value.ndim
        assert set(box.names) <= axes.AXES


def test_the_abstract_tree_is_the_tree_of_real_weights(tiny_config, tiny_params):
    promised = jax.tree.map(lambda box: box.value.shape, abstract_params(tiny_config), is_leaf=lambda leaf: hasattr(leaf, "names"))
    assert promised == jax.tree.map(lambda leaf: leaf.shape, tiny_params)


def test_random_weights_follow_their_seed(tiny_config, tiny_params):
    again = init_params(tiny_config, seed=1)
    for old, new in zip(jax.tree.leaves(tiny_params), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(old, new)
    other = init_params(tiny_config, seed=2)
    assert not np.array_equal(other["embedding"], tiny_params["embedding"])


def test_rotation_turns_pairs_of_halves_by_position_over_theta():
    x = np.zeros((1, 1, 1, 4), np.float32)
    x[..., 0], x[..., 1] = 1.0, 1.0  # pairs (0, 2) and (1, 3)
    got = apply_rope(x, rope_table(Rope(theta=100.0), 4, np.asarray([[3]])))
    expected = [np.cos(3), np.cos(3 / 10), np.sin(3), np.sin(3 / 10)]  # frequencies 100^0 and 100^(-1/2)
    np.testing.assert_allclose(got[0, 0, 0], expected, rtol=1e-6)


def test_scores_of_rotated_vectors_depend_on_their_distance_only():
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, 1, 1, 1, 8)).astype(np.float32)

    def score(i, j):
        rotated = (apply_rope(x, rope_table(Rope(theta=1e4), 8, np.asarray([[p]]))) for x, p in ((q, i), (k, j)))
        return float(np.sum(np.multiply(*rotated)))

    np.testing.assert_allclose(score(105, 100), score(5, 0), rtol=1e-4)
