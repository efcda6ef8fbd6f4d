"""model.config and the abstract parameter tree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import AttentionConfig, LayerConfig, MLPConfig, Rope, abstract_params, init_params
from runtime import UserError
from sharding import axes


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(UserError, match="num_heads 9 is not a multiple of num_kv_heads 2"):
        AttentionConfig(num_heads=9, num_kv_heads=2, head_dim=8, rope=None)


def test_a_rotation_must_fit_the_head():
    with pytest.raises(UserError, match="rotary embedding of 7 elements: their number must be even"):
        Rope(theta=1e4, dim=7)
    with pytest.raises(UserError, match="rotary embedding of 16 elements does not fit head_dim 8"):
        AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8, rope=Rope(theta=1e4, dim=16))


@pytest.mark.parametrize(
    "make",
    [
        lambda: AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=8, rope=None, qk_norm="both"),
        lambda: MLPConfig(hidden=8, activation="relu"),
        lambda: LayerConfig(None, MLPConfig(hidden=8), norms="none"),
    ],
)
def test_an_unknown_choice_is_refused(make):
    with pytest.raises(ValueError, match="is not known: use"):
        make()


def test_vectors_stay_f32_whatever_matrices_are_stored_in(tiny_config):
    for box in jax.tree.leaves(abstract_params(tiny_config, jnp.bfloat16), is_leaf=lambda leaf: hasattr(leaf, "names")):
        assert box.value.dtype == (jnp.float32 if box.value.ndim == 1 else jnp.bfloat16)


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
