"""model.mlp: activations, and what a mixture of experts reads and computes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model import MLPConfig, MoEConfig, RouterConfig, abstract_params
from model.mlp import MLP, MoE, activate
from tests.model.hybrids import CONFIGS

D, F, E = 6, 8, 16


def numbers(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("name", ["silu", "gelu_tanh", "clamped_swiglu"])
def test_activations_are_what_their_papers_say(name):
    gate, up = 4 * numbers(0, 50).astype(np.float64), 4 * numbers(1, 50).astype(np.float64)
    config = MLPConfig(hidden=1, activation=name, limit=3.0, alpha=1.7)
    match name:
        case "silu":
            want = gate / (1 + np.exp(-gate)) * up
        case "gelu_tanh":
            want = gate * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) / 2 * up
        case "clamped_swiglu":
            gate, clipped = np.minimum(gate, 3.0), np.clip(up, -3.0, 3.0)
            assert (clipped != up).any()
            want = (clipped + 1) * gate / (1 + np.exp(-1.7 * gate))
    got = activate(config, jnp.asarray(gate, jnp.float32), jnp.asarray(up, jnp.float32))
    np.testing.assert_allclose(got, want, atol=1e-5, rtol=1e-5)
    half = activate(config, jnp.asarray(gate, jnp.bfloat16), jnp.asarray(up, jnp.bfloat16))
    assert half.dtype == jnp.float32


def moe_params():
    """The first expert's logit is the sum of x's elements; the others' are further and further below it."""
    w_router = np.ones((E, D), np.float32) * (1 - np.arange(E)[:, None] / E)
    return {"w_router": jnp.asarray(w_router), "w_gate_up": jnp.asarray(numbers(1, E, 2, F, D)), "w_down": jnp.asarray(numbers(2, E, D, F))}


MIXTURE = MoEConfig(RouterConfig(num_experts=E, top_k=2, normalize=True), MLPConfig(hidden=F))


def run(config, params, x, real):
    return np.asarray(jax.jit(MoE(config).apply)({"params": params}, x, real))


def test_on_cpu_experts_that_no_token_chose_are_not_read():
    x, params = np.abs(numbers(3, 1, 1, D)) + 0.1, moe_params()  # positive: experts 0 and 1 are the best two
    want = run(MIXTURE, params, x, np.ones((1, 1), bool))
    spoilt = params | {name: params[name].at[2:].set(jnp.nan) for name in ("w_gate_up", "w_down")}
    np.testing.assert_array_equal(run(MIXTURE, spoilt, x, np.ones((1, 1), bool)), want)
    assert np.abs(want).max() > 0


@pytest.mark.parametrize(("signs", "hit"), [([1], 2), ([1] * 8, 2), ([1, -1] * 4, 4)])  # eight tokens of one expert are one product
def test_on_cpu_a_decode_step_takes_as_many_passes_as_experts_are_hit(monkeypatch, signs, hit):
    passes = []

    def counted(config, gate, up):
        jax.debug.callback(lambda: passes.append(1))
        return activate(config, gate, up)

    monkeypatch.setattr("model.mlp.activate", counted)
    x = (np.abs(numbers(4, len(signs), 1, D)) + 0.1) * np.asarray(signs, np.float32)[:, None, None]
    jax.block_until_ready(jax.jit(lambda params: MoE(MIXTURE).apply({"params": params}, x, np.ones((len(signs), 1), bool)))(moe_params()))
    jax.effects_barrier()
    assert len(passes) == hit


def test_padding_neither_chooses_an_expert_nor_adds_to_one():
    x, real = numbers(5, 2, 3, D), np.asarray([[True, True, False], [True, False, False]])
    params = moe_params()
    want = run(MIXTURE, params, x, real)
    assert not want[~real].any()
    x[~real] = 100 * numbers(6, 3, D)
    np.testing.assert_array_equal(run(MIXTURE, params, x, real), want)
    x[~real] = np.nan
    np.testing.assert_array_equal(run(MIXTURE, params, x, real), want)


def test_a_shared_expert_is_added_through_its_gate():
    config = dataclasses.replace(MIXTURE, shared=MLPConfig(hidden=F), shared_gate=True)
    x, real = numbers(7, 1, 4, D), np.ones((1, 4), bool)
    shared = {"w_gate_up": jnp.asarray(numbers(8, 2, F, D)), "w_down": jnp.asarray(numbers(9, D, F))}
    gate = numbers(10, 1, D)
    params = moe_params() | {"shared": shared, "w_shared_gate": jnp.asarray(gate)}
    alone = MLP(MLPConfig(hidden=F)).apply({"params": shared}, x)
    want = run(MIXTURE, params, x, real) + alone / (1 + np.exp(-x @ gate.T))
    np.testing.assert_allclose(run(config, params, x, real), want, atol=1e-5)


def test_the_router_sees_f32_whatever_the_activations_are():
    """Two experts whose logits are equal in bf16, but not in f32."""
    params = moe_params()
    params["w_router"] = params["w_router"].at[:2].set(jnp.asarray([[1.0] * D, [1.0] * (D - 1) + [1.0 + 2.0**-7]]))
    one = MoEConfig(RouterConfig(num_experts=E, top_k=1), MLPConfig(hidden=F))
    x = jnp.ones((1, 1, D), jnp.bfloat16)  # the logits are 6 and 6.0078125; near 6, bf16 counts in steps of 2^-5
    spoilt = params | {"w_down": params["w_down"].at[0].set(jnp.nan)}
    out = run(one, spoilt, x, np.ones((1, 1), bool))
    assert out.dtype == jnp.bfloat16
    assert np.isfinite(out.astype(np.float32)).all()


@pytest.mark.parametrize("name", CONFIGS)
def test_vectors_of_every_family_stay_f32_and_matrices_do_not(name):
    boxes = jax.tree_util.tree_leaves_with_path(abstract_params(CONFIGS[name], jnp.bfloat16), is_leaf=lambda leaf: hasattr(leaf, "names"))
    for path, box in boxes:
        leaf = path[-1].key
        vector = leaf in ("scale", "bias", "sinks", "q_norm", "k_norm", "choice_bias") or leaf.startswith("b")
        assert box.value.dtype == (jnp.float32 if vector else jnp.bfloat16), f"{leaf} {box.names}"
