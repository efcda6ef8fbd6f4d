"""Weights transposed for the Pallas kernels, which run interpreted here: each family computes with them what it computes without, and gets
back what it was given."""

import jax
import numpy as np
import pytest

import checkpoint
from kernels import QuantArray, TransposedArray
from model import transposed, untiled
from parity.compare import forward
from quantization import SCHEMES
from tests.checkpoint.test_storage import NAMES, QUICK, TOKENS
from tests.parity import fixture as fixtures


def load(name, tmp_path, scheme):
    folder = fixtures.write_folder(fixtures.read(name), tmp_path / "model")
    return checkpoint.load(folder, layers=scheme, head=scheme)


def of_kind(params, kind):
    return [w for w in jax.tree.leaves(params, is_leaf=lambda w: isinstance(w, kind)) if isinstance(w, kind)]


@pytest.mark.parametrize("name", [name if name in (*QUICK, "mixtral") else pytest.param(name, marks=pytest.mark.slow) for name in NAMES])
def test_every_family_computes_the_same_with_transposed_weights(name, tmp_path):
    loaded = load(name, tmp_path, SCHEMES["int8"])
    changed = transposed(loaded.params, loaded.config, interpret=True)
    assert len(of_kind(changed, TransposedArray)) >= 2 * len(loaded.config.layers)
    with jax.default_matmul_precision("highest"):
        got, want = (forward(loaded.config, params, TOKENS)[0] for params in (changed, loaded.params))
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())
    jax.tree.map(np.testing.assert_array_equal, untiled(changed), loaded.params)


def test_without_the_interpreter_a_cpu_computes_the_same(tmp_path):
    loaded = load("mixtral", tmp_path, SCHEMES["int8"])
    got, want = (forward(loaded.config, params, TOKENS)[0] for params in (transposed(loaded.params, loaded.config), loaded.params))
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())


def test_what_is_transposed_can_be_freed(tmp_path):
    loaded = load("llama3", tmp_path, SCHEMES["int8"])
    changed = transposed(loaded.params, loaded.config, free=True)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(changed))
    before = jax.tree.leaves(loaded.params)
    assert sum(leaf.is_deleted() for leaf in before) == sum(len(jax.tree.leaves(w)) for w in of_kind(changed, TransposedArray))


def test_tokens_are_looked_up_in_rows(tmp_path):
    """A tied table is multiplied as well, and stays as it is for that."""
    loaded = load("gemma3", tmp_path, SCHEMES["int8"])
    assert isinstance(transposed(loaded.params, loaded.config)["embedding"], QuantArray)
