"""Products with packed weights against float64 products with the same weights widened."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import JoinedArray, experts, matmul
from kernels.experts import experts_reference, grouped_experts
from kernels.quant_matmul import round_activations
from quantization import SCHEMES, Scheme, quantize

rng = np.random.default_rng(0)
FORMATS = [*SCHEMES.values(), Scheme("uint3", 32), Scheme("uint4", 64), Scheme("uint5", 32, symmetric=False), Scheme("uint6", 16)]
FLOATS = [scheme for scheme in FORMATS if scheme.activations is None]


def normal(*shape, dtype=jnp.float32):
    return jnp.asarray(rng.normal(size=shape), dtype)


@pytest.mark.parametrize("scheme", FLOATS, ids=str)
@pytest.mark.parametrize("lead", [pytest.param((1, 1), marks=pytest.mark.slow), (2, 3)])
def test_a_product_is_that_of_the_widened_weights(scheme, lead):
    w = quantize(normal(3, 5, 7, 128), scheme)
    x = normal(*lead, 128)
    got = jax.jit(matmul)(x, w)
    want = np.einsum("bti,kghi->btkgh", np.asarray(x, np.float64), np.asarray(w.widen(), np.float64))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(matmul(x, w.replace(spread=True)), want, rtol=1e-5, atol=1e-4)


def test_several_axes_are_summed_over_as_one():
    w, x = quantize(normal(6, 3 * 2 * 16), Scheme("uint4", 32)), normal(2, 4, 3, 2, 16)
    want = np.einsum("bti,oi->bto", np.asarray(x, np.float64).reshape(2, 4, -1), np.asarray(w.widen(), np.float64))
    np.testing.assert_allclose(matmul(x, w, axes=3), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 5])
def test_bf16_activations_meet_weights_rounded_to_bf16(rows):
    w, x = quantize(normal(64, 256), Scheme("uint4", 64)), normal(rows, 256, dtype=jnp.bfloat16)
    got = matmul(x, w)
    want = np.asarray(x, np.float64) @ np.asarray(w.widen(), np.float64).T
    assert got.dtype == jnp.bfloat16
    # Weights and result are rounded to 2^-9 of themselves each; the sum of 256 terms is not rounded in between.
    scale = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(w.widen(), np.float64)).T
    assert (np.abs(np.asarray(got, np.float64) - want) <= 2**-8 * np.abs(want) + 2**-9 * scale).all()


def test_inputs_in_another_order_and_with_scales_of_their_own():
    w, x = quantize(normal(8, 64), Scheme("uint4", 32)), normal(3, 64)
    order, scales = rng.permutation(64), normal(64)
    changed = w.replace(order=jnp.asarray(order, jnp.int32), input_scales=scales)
    want = np.asarray(x * scales, np.float64)[:, order] @ np.asarray(w.widen(), np.float64).T
    np.testing.assert_allclose(matmul(x, changed), want, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(x @ changed.widen().T, want, rtol=1e-4, atol=1e-4)


def test_integer_products_are_exact():
    w, x = quantize(normal(3, 7, 96), SCHEMES["w8a8"]), normal(2, 96) * jnp.asarray([[1e-4], [30.0]])
    codes, scales = round_activations(x)
    assert codes.dtype == jnp.int8 and int(jnp.abs(codes).max()) == 127
    want = np.einsum("bi,oki->bok", np.asarray(codes, np.int64), np.asarray(w.planes[0], np.int64))
    want = want * np.asarray(scales, np.float64)[:, None] * np.asarray(w.scales[..., 0], np.float64)
    np.testing.assert_allclose(matmul(x, w), want, rtol=1e-6)
    np.testing.assert_allclose(matmul(x[:1], w), want[:1], rtol=1e-6)
    assert not np.asarray(matmul(jnp.zeros((2, 96)), w)).any()


def test_joined_weights_give_joined_products():
    parts = quantize(normal(2, 4, 8, 64), Scheme("uint4", 32)), quantize(normal(2, 1, 8, 64), SCHEMES["int8"]), normal(2, 1, 8, 64)
    x, joined = normal(3, 2, 64), JoinedArray(parts, 1)
    np.testing.assert_allclose(matmul(x, joined), jnp.einsum("bti,kghi->btkgh", x, joined.widen()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("joined", [False, True])
def test_experts_are_read_packed(joined):
    E, F, D, T, k = 4, 32, 96, 9, 2
    scheme = Scheme("uint4", 32)
    halves = normal(E, 1, F, D), normal(E, 1, F, D)
    w_in = quantize(jnp.concatenate(halves, 1), scheme)
    if joined:
        w_in = JoinedArray((quantize(halves[0], scheme), quantize(halves[1], SCHEMES["int8"])), 1)
    w_out, x, shares = quantize(normal(E, D, F), scheme), normal(T, D), jnp.asarray(rng.random((T, k)), jnp.float32)
    indices = jnp.asarray(rng.integers(-1, E, (T, k)), jnp.int32)

    def activation(gate, up):
        return jax.nn.silu(gate) * up

    want = experts_reference(x, indices, shares, w_in.widen(), w_out.widen(), activation)
    for product in (experts, grouped_experts):
        np.testing.assert_allclose(product(x, indices, shares, w_in, w_out, activation), want, rtol=1e-4, atol=2e-3)
