"""model.route against a slow version in float64, one token and one expert at a time."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from model.router import RouterConfig, route
from runtime import UserError

route_jit = jax.jit(route, static_argnums=1)
MIXTRAL = RouterConfig(num_experts=8, top_k=2, normalize=True)
QWEN = RouterConfig(num_experts=6, top_k=3)
GPT_OSS = RouterConfig(num_experts=8, top_k=3, scoring="softmax_topk")
DEEPSEEK = RouterConfig(
    num_experts=12, top_k=4, scoring="sigmoid", normalize=True, scale=2.5, num_groups=4, groups_kept=2, choice_bias=True
)
UNGROUPED = RouterConfig(num_experts=5, top_k=5, scoring="sigmoid", scale=0.5, choice_bias=True)
CONFIGS = [MIXTRAL, QWEN, GPT_OSS, DEEPSEEK, UNGROUPED]


def best(values, count):
    """The indices of the largest, the first of equals first. Numbers too close for f32 to tell apart are no case for a test."""
    for a in values:
        assume(all(a == b or abs(a - b) > 1e-5 for b in values))
    return sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]


def slow_route(logits, config, bias):
    """One token: logits is a list of floats."""
    if config.scoring == "sigmoid":
        scores = [1 / (1 + math.exp(-z)) for z in logits]
    elif config.scoring == "softmax":
        scores = [math.exp(z) / math.fsum(math.exp(other) for other in logits) for z in logits]
    else:
        scores = logits
    wanted = [score + b for score, b in zip(scores, bias, strict=True)]
    size = config.num_experts // config.num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(config.num_groups)]
    candidates = range(config.num_experts)
    if config.groups_kept < config.num_groups:
        kept = best([sum(sorted(wanted[e] for e in group)[-2:]) for group in groups], config.groups_kept)
        candidates = [e for g in sorted(kept) for e in groups[g]]
    chosen = [candidates[i] for i in best([wanted[e] for e in candidates], config.top_k)]
    weights = [scores[e] for e in chosen]
    if config.scoring == "softmax_topk":
        weights = [math.exp(w) / math.fsum(math.exp(other) for other in weights) for w in weights]
    if config.normalize:
        weights = [w / math.fsum(weights) for w in weights]
    return chosen, [w * config.scale for w in weights]


@pytest.mark.parametrize("config", CONFIGS, ids=["mixtral", "qwen", "gpt_oss", "deepseek", "ungrouped"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_choice_and_its_weights_are_those_of_the_slow_version(config, data):
    E, T = config.num_experts, 3
    # Quarters tie often; every number is exact in f32.
    quarters = st.integers(-16, 16).map(lambda n: n / 4)
    logits = data.draw(st.lists(st.lists(quarters, min_size=E, max_size=E), min_size=T, max_size=T))
    bias = data.draw(st.lists(st.integers(-4, 4).map(lambda n: n / 8), min_size=E, max_size=E)) if config.choice_bias else [0.0] * E
    indices, weights = route_jit(jnp.asarray(logits, jnp.float32), config, jnp.asarray(bias) if config.choice_bias else None)
    assert indices.dtype == jnp.int32
    assert weights.dtype == jnp.float32
    for row, got, got_weights in zip(logits, indices.tolist(), weights, strict=True):
        chosen, expected = slow_route(row, config, bias)
        assert got == chosen
        np.testing.assert_allclose(got_weights, expected, rtol=1e-5)


def test_of_equal_experts_the_first_are_chosen():
    indices, weights = route(jnp.zeros((1, 8)), MIXTRAL)
    assert indices.tolist() == [[0, 1]]
    np.testing.assert_allclose(weights, [[0.5, 0.5]])


def test_the_bias_moves_the_choice_and_not_the_weight():
    config = RouterConfig(num_experts=3, top_k=1, scoring="sigmoid", choice_bias=True)
    indices, weights = route(jnp.asarray([[2.0, 0.0, 1.0]]), config, jnp.asarray([0.0, 1.0, 0.0]))
    assert indices.tolist() == [[1]]
    np.testing.assert_allclose(weights, [[0.5]])


def test_an_expert_of_a_group_that_is_not_kept_is_never_chosen():
    config = RouterConfig(num_experts=4, top_k=2, scoring="sigmoid", num_groups=2, groups_kept=1, choice_bias=True)
    # The best expert stands in the group with the worse sum.
    indices, _ = route(jnp.asarray([[4.0, -4.0, 2.0, 2.0]]), config, jnp.zeros(4))
    assert indices.tolist() == [[2, 3]]


def test_scores_are_f32_whatever_the_logits_are():
    logits = jnp.asarray([[1.0, 0.5, 0.25, 2.0, 0.0, 0.0, 0.0, 0.0]])
    for exact, rounded in zip(route(logits, MIXTRAL), route(logits.astype(jnp.bfloat16), MIXTRAL), strict=True):
        np.testing.assert_array_equal(exact, rounded)


def test_weights_too_small_to_sum_stay_finite():
    config = RouterConfig(num_experts=2, top_k=1, scoring="sigmoid", normalize=True)
    _, weights = route(jnp.full((1, 2), -200.0), config)
    assert weights.tolist() == [[0.0]]


@pytest.mark.parametrize("config", [MIXTRAL, DEEPSEEK])
def test_a_bias_that_is_missing_or_not_asked_for_is_an_error(config):
    bias = None if config.choice_bias else jnp.zeros(config.num_experts)
    with pytest.raises(ValueError, match=f"choice_bias={config.choice_bias}"):
        route(jnp.zeros((1, config.num_experts)), config, bias)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"top_k": 9}, "top_k 9 .* num_experts 8"),
        ({"top_k": 0}, "top_k 0"),
        ({"num_groups": 3}, "num_experts 8 .* num_groups 3"),
        ({"num_groups": 0}, "num_groups 0"),
        ({"num_groups": 2, "groups_kept": 3}, "groups_kept 3 .* num_groups 2"),
        ({"num_groups": 2, "groups_kept": 0}, "groups_kept 0"),
        ({"num_groups": 8, "groups_kept": 2}, "num_groups 8 leaves 1 expert"),
        ({"num_groups": 4, "top_k": 3}, "top_k 3 .* 2 experts"),
    ],
)
def test_numbers_that_contradict_each_other_are_a_user_error(values, words):
    with pytest.raises(UserError, match=words):
        RouterConfig(**{"num_experts": 8, "top_k": 2} | values)


def test_an_unknown_scoring_is_an_error():
    with pytest.raises(ValueError, match="scoring='tanh'"):
        RouterConfig(num_experts=8, top_k=2, scoring="tanh")
