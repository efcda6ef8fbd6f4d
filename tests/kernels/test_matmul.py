"""kernels.matmul against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import Observed, head_matmul, matmul

rng = np.random.default_rng(0)
X, W = rng.normal(size=(2, 3, 4, 8)), rng.normal(size=(5, 6, 4, 8))


def test_one_axis_is_contracted_by_default():
    got = matmul(jnp.asarray(X, jnp.float32), jnp.asarray(W[:, :, 0], jnp.float32))
    np.testing.assert_allclose(got, np.einsum("abci,opi->abcop", X, W[:, :, 0]), rtol=1e-5, atol=1e-5)


def test_two_axes_are_contracted_together():
    got = matmul(jnp.asarray(X, jnp.float32), jnp.asarray(W, jnp.float32), axes=2)
    assert got.shape == (2, 3, 5, 6)
    np.testing.assert_allclose(got, np.einsum("abij,opij->abop", X, W), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("x_dtype", "w_dtype"), [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("bfloat16", "float32")])
def test_operands_in_the_format_of_x_are_multiplied_exactly_and_summed_in_f32(x_dtype, w_dtype):
    x, w = jnp.asarray(X, x_dtype), jnp.asarray(W[0, :, 0], w_dtype)
    exact = np.asarray(x, np.float64) @ np.asarray(w.astype(x_dtype), np.float64).T
    got = matmul(x, w)
    assert got.dtype == x_dtype
    # One rounding to the result's format (2^-8 for bf16), besides f32 sums of eight terms.
    np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=2**-8, atol=1e-2 if x_dtype == "bfloat16" else 1e-5)


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize(("x_dtype", "w_dtype"), [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")])
def test_every_head_meets_its_own_matrix(axis, T, x_dtype, w_dtype):
    x, w = jnp.asarray(rng.normal(size=(1, T, 4, 8)), x_dtype), jnp.asarray(rng.normal(size=(4, 8, 8)), w_dtype)
    rounded = np.asarray(w.astype(x_dtype), np.float64)
    exact = np.einsum("btni,nio->btno" if axis == 1 else "btni,noi->btno", np.asarray(x, np.float64), rounded)
    got = head_matmul(x, w, axis)
    assert got.dtype == x_dtype
    np.testing.assert_allclose(np.asarray(got, np.float64), exact, rtol=2**-8 if x_dtype == "bfloat16" else 1e-5, atol=1e-5)


def test_an_observed_weight_shows_what_its_products_read_and_changes_nothing():
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((3, 5, 2, 4), (6, 2, 4)))

    @jax.jit
    def observed(x):
        seen = []
        return matmul(x, Observed(w, seen.append), axes=2), seen

    out, seen = observed(x)
    np.testing.assert_array_equal(out, jax.jit(lambda x: matmul(x, w, axes=2))(x))
    assert len(seen) == 1
    np.testing.assert_array_equal(seen[0], np.asarray(x).reshape(3, 5, 8))
