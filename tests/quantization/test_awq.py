"""quantization.awq: the search for scales and ranges, against the same search written plainly in f64."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import matmul
from quantization import Scheme, awq, quantize
from quantization.awq import input_scales
from quantization.clipping import best_shrink
from quantization.schemes import fit_grid, grouped_weights
from runtime import UserError
from tests.quantization.references import SHRINKS, correlated

O, I = 16, 128  # noqa: E741
SCHEMES = [Scheme("uint4", group=32), Scheme("uint3", group=64, symmetric=False), Scheme("int8")]


def case(seed=0, tokens=300):
    x = correlated(tokens, I, seed)
    w = np.random.default_rng(seed + 1).normal(size=(O, I)).astype(np.float32)
    return w, x, (x.T @ x).astype(np.float32), np.abs(x).mean(0).astype(np.float32)


def damage(w, widened, x):
    return np.sum((x @ (np.asarray(widened, np.float64) - w).T) ** 2)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_the_scales_are_those_of_20_that_change_the_output_least(scheme):
    w, x, hessian, mean_abs = case()
    damages = []
    for alpha in np.arange(20) / 20:
        scales = mean_abs.astype(np.float64) ** alpha
        scales = (scales / np.sqrt(scales.max() * scales.min())).astype(np.float32)
        damages.append(damage(w, np.asarray(quantize(w * scales, scheme).widen()) / scales, x))
    alpha = np.argmin(damages) / 20
    assert 0 < alpha < 0.95  # a choice at all
    found = awq(w, hessian, mean_abs, scheme)
    np.testing.assert_allclose(1 / found.input_scales, input_scales(jnp.asarray(mean_abs), alpha), rtol=1e-5)
    assert damage(w, found.widen(), x) <= min(damages) * 1.001


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), scheme=st.sampled_from(SCHEMES))
def test_the_output_changes_less_than_by_rounding_to_the_nearest(seed, scheme):
    w, x, hessian, mean_abs = case(seed)
    assert damage(w, awq(w, hessian, mean_abs, scheme).widen(), x) < damage(w, quantize(w, scheme).widen(), x)


@pytest.mark.parametrize("scheme", SCHEMES[:2], ids=str)
def test_each_group_keeps_the_range_of_20_that_changes_its_own_output_least(scheme):
    w, _, hessian, _ = case()
    grouped = grouped_weights(jnp.asarray(w), scheme)
    groups, n = grouped.shape[1:]
    blocks = np.stack([hessian[g * n : (g + 1) * n, g * n : (g + 1) * n] for g in range(groups)])
    found = np.asarray(best_shrink(grouped, jnp.asarray(blocks), scheme))
    errors = []
    for shrink in SHRINKS:
        scales, zeros = fit_grid(grouped, scheme, shrink)
        wide, zero = np.asarray(scales, np.float64)[..., None], 8 if zeros is None else np.asarray(zeros, np.float64)[..., None]
        codes = np.clip(np.round(np.asarray(grouped) / wide) + zero, 0, 2**scheme.bits - 1)
        change = (codes - zero) * wide - np.asarray(grouped)
        errors.append(np.einsum("ogn,gnm,ogm->og", change, blocks, change))
    np.testing.assert_allclose(found, np.asarray(SHRINKS)[np.argmin(errors, axis=0)], atol=1e-6)
    assert 1 > found.min() > 0.5


def test_rows_that_share_scales_keep_their_whole_range():
    w = case()[0]
    scheme = Scheme("float8", group=32, rows=8)
    grouped = grouped_weights(jnp.asarray(w), scheme)
    assert np.all(np.asarray(best_shrink(grouped, jnp.ones((4, 32)), scheme)) == 1)


def test_an_input_that_is_always_0_does_no_harm():
    w, x, _, _ = case()
    x[:, 7] = 0
    found = awq(w, (x.T @ x).astype(np.float32), np.abs(x).mean(0).astype(np.float32), SCHEMES[0])
    assert np.isfinite(np.asarray(found.widen())).all()
    assert damage(w, found.widen(), x) < damage(w, quantize(w, SCHEMES[0]).widen(), x)


def test_axes_of_the_outputs_stay_and_products_multiply_activations_with_the_scales():
    w, x, hessian, mean_abs = case()
    x = jnp.asarray(x[:3], jnp.float32)
    found, flat = (awq(each, hessian, mean_abs, SCHEMES[0]) for each in (w.reshape(2, 8, I), w))
    assert found.shape == (2, 8, I)
    np.testing.assert_array_equal(np.asarray(found.widen()).reshape(O, I), flat.widen())
    np.testing.assert_allclose(matmul(x, found).reshape(3, O), x @ flat.widen().T, rtol=1e-4, atol=1e-4)


def test_errors_name_the_remedy():
    w, _, hessian, mean_abs = case()
    with pytest.raises(UserError, match=r"a group of 48 does not divide the 128 inputs of the matrix: give one of 32, 64, 128"):
        awq(w, hessian, mean_abs, Scheme("uint4", group=48))
    with pytest.raises(ValueError, match=r"shapes \(128, 128\) and \(4,\) are not of 128 inputs"):
        awq(w, hessian, mean_abs[:4], SCHEMES[0])
