"""model.mla: the two forms of latent attention, and what each of them stores."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kv
from model import MLAConfig, Rope, Transformer, decode_step, prefill
from tests.model.hybrids import CONFIGS, VOCAB, expanded, random_params

B, T, CAPACITY = 2, 12, 16


def answers(config, params, compute, cached):
    """Logits of a prefill of 11 tokens of which one row's last three are padding, and of a decode step after it: f32 [2, B, V]."""
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, VOCAB, (B, T)))
    model, dtype = Transformer(config, jnp.dtype(compute)), np.dtype(compute)
    cache = kv.init(config, B, CAPACITY, kv.Format.for_platform("cpu", dtype)) if cached else kv.fresh(config, B)
    first, cache = prefill(model, params, cache, tokens[:, :-1], jnp.asarray([T - 1, T - 4]))
    return np.stack([first, decode_step(model, params, cache, tokens[:, -1])[0]]) if cached else np.asarray(first)[None]


@pytest.mark.parametrize("name", ["mla_absorbed", "deepseek"])
def test_both_forms_give_the_same_logits_from_the_same_weights(name):
    config = CONFIGS[name]
    params = random_params(config, seed=0)
    assert expanded(config) != config
    got, want = answers(config, params, "float32", cached=True), answers(expanded(config), params, "float32", cached=True)
    np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max(), rtol=0)


def test_in_bf16_neither_form_is_further_from_f32_than_rounding_takes_it():
    config = CONFIGS["mla_absorbed"]
    params = random_params(config, seed=0)
    exact = answers(config, params, "float32", cached=True)
    for form in (config, expanded(config)):
        error = answers(form, params, "bfloat16", cached=True) - exact
        # Two layers, each rounding about ten values to 2^-9 of their size on the way; errors add up as squares do.
        assert 0 < np.sqrt(np.mean(error**2) / np.mean(exact**2)) < 20**0.5 * 2**-8


def test_an_indexer_that_may_pick_all_slots_changes_nothing_and_one_that_may_not_does():
    sparse = CONFIGS["deepseek"]

    def with_top_k(top_k):
        def changed(layer):
            indexer = None if top_k is None else dataclasses.replace(layer.attention.indexer, top_k=top_k)
            return dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, indexer=indexer))

        return dataclasses.replace(sparse, layers=tuple(changed(layer) for layer in sparse.layers))

    params = random_params(sparse, seed=0)
    full, all_slots, few = (answers(with_top_k(k), params, "float32", cached=False) for k in (None, T, 4))
    np.testing.assert_allclose(all_slots, full, atol=1e-5 * np.abs(full).max(), rtol=0)
    assert np.abs(few - full).max() > 1e-2 * np.abs(full).max()


@dataclasses.dataclass(frozen=True)
class Layers:
    cache_layers: tuple[kv.LayerSpec, ...]


def test_deepseek_v3_takes_what_is_computed_by_hand():
    deepseek = MLAConfig(
        num_heads=128, q_rank=1536, kv_rank=512, nope_dim=128, rope=Rope(theta=1e4, dim=64), value_dim=128, scale=0.1, absorbed=True
    )
    half = kv.Format(dtype=np.dtype(jnp.bfloat16))
    # Absorbed, a token keeps its latent and rotated key (512 + 64), and, as the dense kind stores values apart, the latent again.
    assert kv.bytes_per_token(Layers((deepseek.cache_layer,) * 61), half) == 61 * (576 + 512) * 2 == 132_736
    form = dataclasses.replace(deepseek, absorbed=False)
    assert kv.bytes_per_token(Layers((form.cache_layer,) * 61), half) == 61 * 128 * (192 + 128) * 2 == 4_997_120


@pytest.mark.parametrize("name", ["mla_absorbed", "mla_expanded", "deepseek"])
def test_the_byte_count_is_that_of_the_live_arrays(name):
    cache = kv.init(CONFIGS[name], 3, 17, kv.Format())
    arrays = [array for store in cache.stores for array in (store.k, store.v, store.index_k) if array is not None]
    assert sum(array.nbytes for array in arrays) + cache.lengths.nbytes == kv.nbytes(CONFIGS[name], 3, 17, kv.Format())
    per_token = {"mla_absorbed": 12 + 4 + 12, "mla_expanded": 4 * (6 + 4 + 7), "deepseek": 12 + 4 + 12 + 6}[name]
    assert kv.bytes_per_token(CONFIGS[name], kv.Format()) == 2 * per_token * 4  # two layers, f32
