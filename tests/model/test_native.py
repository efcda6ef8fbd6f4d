"""A model over native attention: what it answers over XLA's, and what is left of a layer of a decode step beside the kernels."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

import kv
from kernels import cpu, tile
from model import LayerConfig, MLPConfig, Rope, Transformer, decode_step, prefill
from quantization import SCHEMES, quantize
from tests.model.hybrids import CONFIGS, HEAD, VOCAB, attention, model, random_params

pytestmark = pytest.mark.skipif(cpu.instruction_set() is None, reason=f"no native kernels here: {cpu.reason()}")

INSTRUCTION = re.compile(r"^ *(?:ROOT )?%(\S+) = (?:\(.*?\)|\S+) [\w-]+\((.*?)\)")  # of a compiled program: its name and its operands
OPERAND = re.compile(r"%([\w.-]+)")
B, CAPACITY, T = 3, 40, 24
MLP = MLPConfig(hidden=64)
LLAMA = model(*(LayerConfig(attention(), MLP),) * 2, width=64)
QWEN3 = model(*(LayerConfig(attention(qk_norm="head"), MLP),) * 2, width=64)
PHI = model(*(LayerConfig(attention(rope=Rope(theta=1e4, dim=HEAD // 2), qkv_bias=True), MLP),) * 2, width=64)
MODELS = {"llama": LLAMA, "qwen3": QWEN3, "phi": PHI} | {name: CONFIGS[name] for name in ("gemma", "gpt_oss", "olmo")}

QUICK = ("qwen3", "gemma")


def cache(config, kernels, **more):
    return kv.init(config, B, CAPACITY, kv.Format.for_platform("cpu", np.dtype(np.float32), margin=3, kernels=kernels, **more))


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MODELS])
def test_prefill_and_decode_answer_as_over_xlas_attention(name):
    config = MODELS[name]
    transformer, params = Transformer(config), random_params(config, seed=2)
    tokens = jnp.asarray(np.random.default_rng(7).integers(0, VOCAB, (B, T)), jnp.int32)
    calls = [("last", 17, [17, 1, 9]), ("all", 4, [4, 0, 2]), ("one", 1, [1, 1, 0]), ("one", 1, [1, 1, 1])]
    answers = []
    for kernels in ("native", "xla"):
        own, found = cache(config, kernels), []
        for logits, width, counts in calls:
            held, counts = np.asarray(own.lengths), np.asarray(counts, np.int32)
            part = np.take_along_axis(np.asarray(tokens), np.minimum(held[:, None] + np.arange(width), T - 1), axis=1)
            if logits == "one":
                out, own = decode_step(transformer, params, own, jnp.where(counts > 0, part[:, 0], -1))
            else:
                out, own = prefill(transformer, params, own, jnp.asarray(part), counts, logits=logits)
            real = counts > 0 if logits != "all" else np.arange(width) < counts[:, None]
            found.append(np.asarray(out)[real])
        answers.append(found)
    for got, want in zip(*answers, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4 * np.abs(want).max(), rtol=0)


@pytest.mark.parametrize("config", [LLAMA, QWEN3], ids=["llama", "qwen3"])
def test_between_the_product_for_queries_and_attention_a_decode_step_computes_nothing(config):
    params = random_params(config, seed=2)
    for number in range(len(config.layers)):
        weights = params[f"layer_{number}"]["attention"]
        weights["wqkv"] = tile(quantize(weights["wqkv"], SCHEMES["int8"]), rounds=15)
    lowered = decode_step.lower(Transformer(config), params, cache(config, "native"), jnp.zeros((B,), jnp.int32))
    made = {name: (line, inputs) for line in lowered.compile().as_text().splitlines() for name, inputs in INSTRUCTION.findall(line)}
    calls = [inputs for line, inputs in made.values() if 'custom_call_target="diptych_attend"' in line]
    assert len(calls) == len(config.layers)
    for inputs in calls:
        line, inputs = made[OPERAND.findall(inputs)[2]]
        while " bitcast(" in line:
            line, inputs = made[OPERAND.findall(inputs)[0]]
        assert 'custom_call_target="diptych_matmul"' in line
