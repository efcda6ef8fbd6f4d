"""kernels.argmax against numpy."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import argmax

B, V = 4, 33
ARGMAX = jax.jit(argmax)
values = st.sampled_from([0.0, -0.0, 1.0, 1.0, -2.0, np.inf, -np.inf, np.nan])


@settings(deadline=None, max_examples=200)
@given(st.lists(st.lists(values, min_size=V, max_size=V), min_size=B, max_size=B))
def test_the_first_of_the_largest_is_found_and_nan_is_the_largest(rows):
    x = np.asarray(rows, np.float32)
    got = np.asarray(ARGMAX(x))
    assert got.dtype == np.int32
    assert got.tolist() == np.argmax(x, axis=-1).tolist()


@pytest.mark.parametrize("shape", [(1, 1), (2, 97), (3, 49_152)])
def test_any_number_of_columns_will_do(shape):
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    assert np.asarray(ARGMAX(x)).tolist() == np.argmax(x, axis=-1).tolist()
