"""quantization.learn: rounding by gradient descent, of a small block that has all a block has: two matrices, a norm, a residual."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import matmul
from quantization import Scheme, awq, gptq, learn, quantize
from quantization.learned import _grid, _rounded, _store, relative_loss
from runtime import UserError
from tests.quantization.references import correlated

D, F = 64, 128
INT4 = Scheme("uint4", group=32)
INT3 = Scheme("uint3", group=32, symmetric=False)


@dataclasses.dataclass(frozen=True)
class Block:
    def __call__(self, dense, held, x):
        inside = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True)) * held["norm"]
        return x + matmul(jax.nn.silu(matmul(inside, dense["up"])), dense["down"])


BLOCK = Block()


@pytest.fixture(scope="module")
def case():
    rng = np.random.default_rng(0)
    weights = {"up": rng.normal(size=(F, D)) / 8, "down": rng.normal(size=(D, F)) / 6}
    weights = {name: jnp.asarray(w, jnp.float32) for name, w in weights.items()}
    held = {"norm": jnp.asarray(np.exp(0.3 * rng.normal(size=D)), jnp.float32)}
    inputs = jnp.asarray(correlated(16 * 32, D).reshape(16, 32, D), jnp.float32)
    return weights, held, inputs, BLOCK(weights, held, inputs)


def dense(packed):
    return {name: w.widen() for name, w in packed.items()}


def loss(case, packed):
    _, held, inputs, targets = case
    out, targets = (np.asarray(each, np.float64) for each in (BLOCK(dense(packed), held, inputs), targets))
    return np.mean(((out - targets) ** 2).sum(-1) / (targets**2).sum(-1))


def rtn(case, scheme):
    return {name: quantize(w, scheme) for name, w in case[0].items()}


def calibrated(case, scheme):
    """GPTQ's in its own order, and AWQ's."""
    weights, held, inputs, _ = case
    x = inputs / jnp.sqrt(jnp.mean(inputs**2, -1, keepdims=True)) * held["norm"]
    after = jax.nn.silu(x @ weights["up"].T)
    seen = {"up": x.reshape(-1, D), "down": after.reshape(-1, F)}
    return (
        {name: gptq(w, seen[name].T @ seen[name], scheme, act_order=True) for name, w in weights.items()},
        {name: awq(w, seen[name].T @ seen[name], jnp.abs(seen[name]).mean(0), scheme) for name, w in weights.items()},
    )


@pytest.mark.parametrize("scheme", [INT4, pytest.param(INT3, marks=pytest.mark.slow)], ids=str)
def test_the_blocks_output_is_nearer_than_with_rounding_to_the_nearest(case, scheme):
    weights, held, inputs, targets = case
    start = rtn(case, scheme)
    found = learn(BLOCK, weights, [start], scheme, inputs, targets, held=held, steps=100, batch=8)
    assert loss(case, found) < 0.6 * loss(case, start)
    for name, w in found.items():
        assert w.shape == weights[name].shape and w.code == scheme.code
        assert w.scales.dtype == start[name].scales.dtype and w.planes[0].dtype == np.uint8


@pytest.mark.slow
def test_it_begins_with_the_best_start_whatever_its_order_and_input_scales_and_ends_better(case):
    weights, held, inputs, targets = case
    by_gptq, by_awq = calibrated(case, INT4)
    for best, starts in ((by_gptq, [rtn(case, INT4), by_gptq]), (by_awq, [by_awq, rtn(case, INT4)])):
        found = learn(BLOCK, weights, starts, INT4, inputs, targets, held=held, steps=100, batch=8)
        assert loss(case, found) < 0.9 * loss(case, best) < loss(case, rtn(case, INT4))
        assert (found["up"].order is None, found["up"].input_scales is None) == (best["up"].order is None, best["up"].input_scales is None)


@pytest.mark.parametrize("which", [0, 1], ids=["gptq", "awq"])
@pytest.mark.parametrize("scheme", [INT4, *(pytest.param(s, marks=pytest.mark.slow) for s in (INT3, Scheme("int8")))], ids=str)
def test_before_the_first_step_it_is_the_start_bit_for_bit(case, scheme, which):
    start = calibrated(case, scheme)[which]
    for name, w in case[0].items():
        grid = _grid(w, start[name])
        free = jnp.zeros(grid.weights.shape), jnp.ones(start[name].scales.shape)
        for mine, other in zip(jax.tree.leaves(_store(grid, free, scheme)), jax.tree.leaves(start[name]), strict=True):
            np.testing.assert_array_equal(mine, other)


def test_what_descends_is_what_is_stored(case):
    start, rng = rtn(case, INT3), np.random.default_rng(1)
    for name, w in case[0].items():
        grid = _grid(w, start[name])
        free = jnp.asarray(rng.uniform(-0.5, 0.5, grid.weights.shape)), jnp.asarray(rng.uniform(0.5, 1.2, start[name].scales.shape))
        free = jax.tree.map(lambda each: each.astype(jnp.float32), free)
        codes, scales = _rounded(grid, free, INT3)
        wide = (codes - np.asarray(start[name].zeros, np.float32)[..., None]) * scales[..., None]
        np.testing.assert_allclose(_store(grid, free, INT3).widen(), wide.reshape(w.shape), atol=1e-6)


def test_it_never_ends_worse_than_it_began(case):
    weights, held, inputs, targets = case
    start = rtn(case, INT4)
    found = learn(BLOCK, weights, [start], INT4, inputs, targets, held=held, steps=2, rate=0.5, batch=1)  # wild steps
    assert loss(case, found) <= loss(case, start) * (1 + 1e-6)


def test_a_token_counts_as_much_as_another_that_is_larger():
    target = jnp.asarray([[1.0, 0.0], [0.0, 300.0]])
    assert relative_loss(1.1 * target, target) == pytest.approx(0.01, rel=1e-4)
    assert relative_loss(target.at[0, 0].set(1.1), target) == pytest.approx(0.005, rel=1e-4)


def test_codes_that_are_floats_are_refused_with_the_remedy(case):
    weights, held, inputs, targets = case
    with pytest.raises(UserError, match=r"the rounding of float8 is not learned, .* or --method=gptq"):
        learn(BLOCK, weights, [rtn(case, Scheme("float8"))], Scheme("float8"), inputs, targets, held=held)
