"""kernels.matmul against float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from kernels import matmul, matmul_rows

rng = np.random.default_rng(0)
X, W = rng.normal(size=(2, 3, 4, 8)), rng.normal(size=(4, 8, 5, 6))


def test_one_axis_is_contracted_by_default():
    got = matmul(jnp.asarray(X, jnp.float32), jnp.asarray(W[0], jnp.float32))
    np.testing.assert_allclose(got, np.tensordot(X, W[0], 1), rtol=1e-5, atol=1e-5)


def test_two_axes_are_contracted_together():
    got = matmul(jnp.asarray(X, jnp.float32), jnp.asarray(W, jnp.float32), axes=2)
    assert got.shape == (2, 3, 5, 6)
    np.testing.assert_allclose(got, np.tensordot(X, W, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("x_dtype", "w_dtype"), [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("bfloat16", "float32")])
def test_operands_in_the_format_of_x_are_multiplied_exactly_and_summed_in_f32(x_dtype, w_dtype):
    x, w = jnp.asarray(X, x_dtype), jnp.asarray(W[0], w_dtype)
    exact = np.tensordot(np.asarray(x, np.float64), np.asarray(w.astype(x_dtype), np.float64), 1)
    got = matmul(x, w)
    assert got.dtype == x_dtype
    # One rounding to the result's format (2^-8 for bf16), besides f32 sums of eight terms.
    np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=2**-8, atol=1e-2 if x_dtype == "bfloat16" else 1e-5)


@pytest.mark.parametrize("rows", [1, 3, 64, 65])
@pytest.mark.parametrize("vocab_size", [48, 50, 53])  # twelve pieces, two, and one
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_product_with_rows_is_the_same_however_it_is_cut(rows, vocab_size, dtype):
    x, w = jnp.asarray(rng.normal(size=(rows, 16)), dtype), jnp.asarray(rng.normal(size=(vocab_size, 16)), dtype)
    exact = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    got = matmul_rows(x, w)
    assert got.dtype == dtype
    np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=2**-8, atol=2e-2 if dtype == "bfloat16" else 1e-5)
