"""Weights laid out for the native kernels: each family computes with them what it computes without, and gets back what it was given."""

import jax
import numpy as np
import pytest

import checkpoint
import sampling
from kernels import QuantArray, TiledArray, can_tile, cpu
from model import tiled, untiled
from parity.compare import forward
from quantization import SCHEMES
from runtime.corpus import corpus
from tests.checkpoint.test_storage import NAMES, QUICK, TOKENS
from tests.parity import fixture as fixtures

pytestmark = pytest.mark.skipif(cpu.instruction_set() is None, reason=f"no native kernels here: {cpu.reason()}")


MIXTURES = ("gpt_oss_mxfp4", "qwen3_moe")  # of which all of the experts' matrices are tiled, and those for gates and up alone


@pytest.mark.parametrize("name", [name if name in QUICK + MIXTURES else pytest.param(name, marks=pytest.mark.slow) for name in NAMES])
def test_every_family_computes_the_same_with_native_kernels(name, tmp_path):
    folder = fixtures.write_folder(fixtures.read(name), tmp_path / "model")
    loaded = checkpoint.load(folder, layers=SCHEMES["int8"], head=SCHEMES["int8"])
    native = tiled(loaded.params, loaded.config, activation_bits=0)
    leaves = jax.tree.leaves(native, is_leaf=lambda w: isinstance(w, TiledArray | QuantArray))
    assert not any(isinstance(w, QuantArray) and can_tile(w) for w in leaves)
    count = sum(isinstance(w, TiledArray) for w in leaves)
    assert count >= len(loaded.config.layers)  # those whose inputs are a multiple of 32
    got, want = (forward(loaded.config, params, TOKENS)[0] for params in (native, loaded.params))
    np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max())
    jax.tree.map(np.testing.assert_array_equal, untiled(native), loaded.params)


@pytest.mark.parametrize(("bits", "most"), [(15, 1e-6), (8, 0.01)])
def test_rounded_activations_change_predictions_a_little(bits, most, small):
    text = small.encode(corpus("evaluation")[:2000], raw=True)
    exact, rounded = (
        forward(small.config, tiled(small.params, small.config, activation_bits=flag), np.asarray(text, np.int32))[0] for flag in (0, bits)
    )
    chances = [np.exp(logits - logits.max(-1, keepdims=True)) for logits in (exact, rounded)]
    chances = [each / each.sum(-1, keepdims=True) for each in chances]
    divergence = (chances[0] * (np.log(chances[0] + 1e-30) - np.log(chances[1] + 1e-30))).sum(-1)
    assert abs(divergence.mean()) < most


@pytest.fixture(scope="module")
def small():
    return sampling.load("smollm2-135m-instruct", weights="native", kernels="xla")
