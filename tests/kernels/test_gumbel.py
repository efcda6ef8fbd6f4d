"""kernels.gumbel against JAX's own, bit for bit."""

import jax
import numpy as np
import pytest

from kernels import gumbel

NOISE = jax.jit(gumbel, static_argnums=1)


def keys(*seeds):
    return jax.vmap(lambda seed: jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), 7))(np.asarray(seeds, np.uint32))


@pytest.mark.parametrize("count", [1, 2, 97, 1000, 49_152, 100_003])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_noise_is_jaxs_to_the_bit(count, rows):
    seeds = [0, 2**32 - 1, 12345][:rows]
    got = np.asarray(NOISE(keys(*seeds), count))
    assert (got.dtype, got.shape) == (np.float32, (rows, count))
    for row, key in zip(got, keys(*seeds), strict=True):
        np.testing.assert_array_equal(row.view(np.uint32), np.asarray(jax.random.gumbel(key, (count,))).view(np.uint32))


def test_the_noise_is_finite_and_a_gumbel_variable():
    """Of a million draws the mean is within 5 standard errors (1.2825 / 1000) of Euler's constant, the share below 0 likewise of 1 / e."""
    noise = np.asarray(NOISE(keys(*range(10)), 100_000), np.float64)
    assert np.isfinite(noise).all()
    assert abs(noise.mean() - np.euler_gamma) < 5 * np.pi / 6**0.5 / 1000
    share = np.exp(-1)
    assert abs((noise < 0).mean() - share) < 5 * (share * (1 - share)) ** 0.5 / 1000
