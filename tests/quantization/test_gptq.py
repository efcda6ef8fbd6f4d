"""quantization.gptq: against the plain column loop in f64, and what it is for."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import matmul
from quantization import Scheme, gptq, quantize
from runtime import UserError
from tests.quantization.references import correlated, optimal_brain

O, I = 8, 128  # noqa: E741
SCHEMES = [Scheme("uint4", group=32), Scheme("uint3", group=64, symmetric=False), Scheme("uint4", symmetric=False)]


def case(seed=0, tokens=300):
    x = correlated(tokens, I, seed)
    return np.random.default_rng(seed + 1).normal(size=(O, I)).astype(np.float32), x, (x.T @ x).astype(np.float32)


def damage(w, packed, x):
    return np.mean((x @ (np.asarray(packed.widen(), np.float64) - w).T) ** 2)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_gptq_is_the_plain_column_loop_in_f64(scheme):
    w, _, hessian = case()
    found = np.asarray(gptq(w, hessian, scheme).widen())
    np.testing.assert_allclose(found, optimal_brain(w, hessian, scheme), atol=1e-5)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), scheme=st.sampled_from(SCHEMES), tokens=st.sampled_from([20, 300]))
def test_on_inputs_that_correlate_the_output_changes_less_than_by_rounding_to_the_nearest(seed, scheme, tokens):
    w, x, hessian = case(seed, tokens)
    assert damage(w, gptq(w, hessian, scheme), x) < 0.7 * damage(w, quantize(w, scheme), x)


def test_act_order_is_gptq_of_the_columns_in_that_order():
    w, _, hessian = case()
    scheme = SCHEMES[0]
    order = np.argsort(-np.diag(hessian), kind="stable")
    found = gptq(w, hessian, scheme, act_order=True)
    plain = gptq(w[:, order], hessian[order][:, order], scheme)
    assert found.order.dtype == jnp.int32
    np.testing.assert_array_equal(found.order, order)
    np.testing.assert_array_equal(found.planes[0], plain.planes[0])
    np.testing.assert_array_equal(np.asarray(found.widen())[:, order], plain.widen())


def test_act_order_helps_where_some_inputs_are_much_larger():
    w, x, hessian = case()
    assert damage(w, gptq(w, hessian, SCHEMES[1], act_order=True), x) < damage(w, gptq(w, hessian, SCHEMES[1]), x)


def test_with_a_diagonal_hessian_no_column_makes_up_for_another():
    w, _, _ = case()
    scheme = SCHEMES[0]
    found = np.asarray(gptq(w, np.eye(I, dtype=np.float32), scheme).widen())
    np.testing.assert_allclose(found, optimal_brain(w, np.eye(I), scheme), atol=1e-6)
    scales = np.repeat(np.asarray(gptq(w, np.eye(I, dtype=np.float32), scheme).scales, np.float32), 32, axis=1)
    inside = np.abs(w) < 7 * np.abs(scales)
    assert np.all(np.abs(found - w)[inside] <= np.abs(scales)[inside] / 2 + 1e-6)


def test_an_input_that_is_always_0_gets_weights_of_0_and_costs_the_others_nothing():
    w, x, _ = case()
    x[:, 5] = 0
    hessian = (x.T @ x).astype(np.float32)
    found = np.asarray(gptq(w, hessian, SCHEMES[0]).widen())
    assert np.all(found[:, 5] == 0)
    np.testing.assert_allclose(found, optimal_brain(w, hessian, SCHEMES[0]), atol=1e-5)


@pytest.mark.parametrize("code", ["int8", "float8", "float4"])
def test_codes_of_other_kinds_are_rounded_as_well(code):
    w, x, hessian = case()
    scheme = Scheme(code, group=32)
    found = gptq(w, hessian, scheme)
    assert found.code == code and found.planes[0].dtype == quantize(w, scheme).planes[0].dtype
    assert damage(w, found, x) < 0.7 * damage(w, quantize(w, scheme), x)


def test_axes_of_the_outputs_stay_and_products_read_the_result():
    w, x, hessian = case()
    scheme, x = SCHEMES[0], jnp.asarray(x[:3], jnp.float32)
    found, flat = gptq(w.reshape(2, 4, I), hessian, scheme, act_order=True), gptq(w, hessian, scheme, act_order=True)
    assert found.shape == (2, 4, I)
    np.testing.assert_array_equal(np.asarray(found.widen()).reshape(O, I), flat.widen())
    np.testing.assert_allclose(matmul(x, found).reshape(3, O), x @ flat.widen().T, rtol=1e-4, atol=1e-4)


def test_errors_name_the_remedy():
    w, _, hessian = case()
    with pytest.raises(UserError, match=r"not positive definite with damping 0.01: give more text, or more damping"):
        gptq(w, -hessian, SCHEMES[0])
    with pytest.raises(UserError, match=r"a group of 48 does not divide the 128 inputs of the matrix: give one of 32, 64, 128"):
        gptq(w, hessian, Scheme("uint4", group=48))
    with pytest.raises(ValueError, match=r"\(4, 4\) is not of 128 inputs"):
        gptq(w, hessian[:4, :4], SCHEMES[0])
