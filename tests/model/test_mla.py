"""model.mla: the two forms of latent attention, and what is stored for both."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kv
import kv.latent
from model import MLAConfig, Transformer, prefill
from tests.model.hybrids import CONFIGS, VOCAB, random_params

B, T, CAPACITY = 2, 12, 16
FORMS = {"expanded": lambda length, weights: True, "absorbed": lambda length, weights: False}


def layer_answers(name, dtype="float32", page_size=None):
    """What one layer gives 11 random tokens of which one row's last three are padding, and one more after them: [B, T, N, Hv]."""
    layer, rng = CONFIGS[name].layers[0].attention, np.random.default_rng(4)
    N, P, R, C, V = layer.num_heads, layer.nope_dim, layer.rope.dim, layer.kv_rank, layer.value_dim

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), dtype)

    query, new = kv.LatentQuery(normal(B, T, N, P), normal(B, T, N, R)), kv.LatentRow(normal(B, T, 1, C + R))
    if layer.indexer is not None:
        query = query._replace(index_q=normal(B, T, 3, 6), index_w=normal(B, T, 3).astype(jnp.float32))
        new = new._replace(index_k=normal(B, T, 1, 6))
    weights = kv.LatentWeights(*(normal(N, width, C) * jnp.asarray(C**-0.5, dtype) for width in (P, V)))
    cache = kv.init(CONFIGS[name], B, CAPACITY, kv.Format(np.dtype(dtype), page_size=page_size))
    tables = (jnp.asarray([[5, 1, 7, 0], [2, 6, 3, 4]]),) if page_size else ()
    view, outs, held = cache.layer(1), [], jnp.zeros((B,), jnp.int32)
    for part, count in ((slice(T - 1), [T - 1, T - 4]), (slice(T - 1, T), [1, 1])):
        step = kv.Step(rows=None, start=held, count=jnp.asarray(count), tables=tables)
        out, view = jax.jit(lambda view, query, new, step: view.attend(query, new, step, layer.spec, weights))(
            view, *jax.tree.map(lambda x, part=part: x[:, part], (query, new)), step
        )
        outs.append(np.asarray(out, np.float32))
        held = held + step.count
    return np.concatenate(outs, axis=1)


@pytest.mark.parametrize(
    ("name", "page_size"),
    [
        ("mla", None),
        pytest.param("mla", 4, marks=pytest.mark.slow),
        pytest.param("deepseek", None, marks=pytest.mark.slow),
        pytest.param("deepseek", 4, marks=pytest.mark.slow),
    ],
)
def test_both_forms_give_the_same_answers_from_the_same_weights(monkeypatch, name, page_size):
    got = {}
    for form, choice in FORMS.items():
        monkeypatch.setattr(kv.latent, "is_expanded", choice)
        got[form] = layer_answers(name, page_size=page_size)
    assert (got["expanded"] != got["absorbed"]).any()  # it is two forms that are compared
    np.testing.assert_allclose(got["expanded"], got["absorbed"], atol=1e-5 * np.abs(got["absorbed"]).max(), rtol=0)


def test_a_long_call_is_expanded_and_a_short_one_absorbed():
    def weights(heads, nope, value, rank):
        return kv.LatentWeights(jnp.zeros((heads, nope, rank)), jnp.zeros((heads, value, rank)))

    v3 = weights(2, 128, 128, 512)  # its sizes, of which the number of heads takes no part
    assert [kv.latent.is_expanded(length, v3) for length in (1, 170, 171, 4096)] == [False, False, True, True]
    # By hand: T (P + R + V) + C (P + V) multiplications per key and head against T (2 C + R), here 320 T + 131,072 and 1,088 T.
    assert 320 * 170 + 131_072 > 1088 * 170 and 320 * 171 + 131_072 < 1088 * 171
    tiny = weights(4, 6, 7, 12)
    assert [kv.latent.is_expanded(length, tiny) for length in (1, 14, 15)] == [False, False, True]


@pytest.mark.parametrize("form", FORMS)
def test_in_bf16_neither_form_is_further_from_f32_than_rounding_takes_it(monkeypatch, form):
    monkeypatch.setattr(kv.latent, "is_expanded", FORMS[form])
    exact = layer_answers("mla")
    error = layer_answers("mla", "bfloat16") - exact
    # About ten values on the way, rounded to 2^-9 of their size each; errors add up as squares do.
    assert 0 < np.sqrt(np.mean(error**2) / np.mean(exact**2)) < 10**0.5 * 2**-8


def test_an_indexer_that_may_pick_all_slots_changes_nothing_and_one_that_may_not_does():
    sparse = CONFIGS["deepseek"]

    def with_top_k(top_k):
        def changed(layer):
            indexer = None if top_k is None else dataclasses.replace(layer.attention.indexer, top_k=top_k)
            return dataclasses.replace(layer, attention=dataclasses.replace(layer.attention, indexer=indexer))

        return dataclasses.replace(sparse, layers=tuple(changed(layer) for layer in sparse.layers))

    params, tokens = random_params(sparse, seed=0), jnp.asarray(np.random.default_rng(3).integers(0, VOCAB, (B, T)))

    def logits(config):
        return np.asarray(prefill(Transformer(config), params, kv.fresh(config, B), tokens, jnp.asarray([T, T - 3]))[0])

    full, all_slots, few = (logits(with_top_k(k)) for k in (None, T, 4))
    np.testing.assert_allclose(all_slots, full, atol=1e-5 * np.abs(full).max(), rtol=0)
    assert np.abs(few - full).max() > 1e-2 * np.abs(full).max()


@pytest.mark.parametrize("name", ["mla", "deepseek"])
def test_what_a_layer_keeps_follows_from_its_config(name):
    assert isinstance(CONFIGS[name].layers[0].attention, MLAConfig)
    per_token = {"mla": 12 + 4, "deepseek": 12 + 4 + 6}[name]  # latent, rotated key, index key
    assert kv.bytes_per_token(CONFIGS[name], kv.Format()) == 2 * per_token * 4  # two layers, f32
