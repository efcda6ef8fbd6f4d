"""The default model against its reference (transformers, f32), and against itself in company."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kv
from model import prefill
from sampling import SamplingOptions, generate, load
from tests.conftest import GOLDEN

CAPACITY = 2048  # one shape for every test here
LENGTHS = (1, 2, 17, 30, 300, 505, 512, 700)


def test_greedy_tokens_equal_the_reference_for_raw_and_chat_prompts(smollm2, smollm2_golden):
    for kind in ("raw", "chat"):
        records = [record for record in smollm2_golden if record["kind"] == kind]
        assert len(records) == 3
        for record in records:
            completion = generate(smollm2, record["prompt"], raw=kind == "raw", max_new_tokens=48, capacity=CAPACITY)
            assert smollm2.encode(record["prompt"], raw=kind == "raw") == record["prompt_ids"]
            assert list(completion.tokens) == record["greedy_ids"]
            assert completion.text == record["text"].removesuffix("<|im_end|>")
            assert completion.finish_reason == ("stop" if record["greedy_ids"][-1] in smollm2.tokenizer.eos_ids else "length")


def check_first_logits(lm, records):
    for record in records:
        tokens = np.zeros((1, 64), np.int32)
        tokens[0, : len(record["prompt_ids"])] = record["prompt_ids"]
        cache = kv.init(lm.config, 1, CAPACITY, lm.kv_format)
        count = np.asarray([len(record["prompt_ids"])], np.int32)
        logits, _ = prefill(lm.model, lm.params, cache, tokens, count, np.zeros((1,), np.int32))
        ids, values = zip(*record["top5_first"], strict=True)
        np.testing.assert_allclose(np.asarray(logits)[0, list(ids)], values, atol=2e-3)
        assert list(np.argsort(-np.asarray(logits)[0])[:5]) == list(ids)


@pytest.mark.slow  # as the tokens that follow from them are the reference's
def test_first_logits_are_within_2e_3_of_the_reference(smollm2, smollm2_golden):
    check_first_logits(smollm2, smollm2_golden)


@pytest.mark.slow
def test_gemma_3_equals_its_reference():
    lm = load("gemma3-270m", weights="f32", compute="f32", kv_dtype="f32")
    records = json.loads((GOLDEN / "gemma3-270m.json").read_text(encoding="utf-8"))["records"]
    assert len(records) == 3
    for record in records:
        assert lm.encode(record["prompt"], raw=True) == record["prompt_ids"]
        completion = generate(lm, record["prompt"], raw=True, max_new_tokens=len(record["greedy_ids"]), capacity=CAPACITY)
        assert list(completion.tokens) == record["greedy_ids"]
    check_first_logits(lm, records)


@pytest.mark.slow  # on a tiny model: tests/model/test_laws.py, tests/sampling/test_loop.py
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_batch_of_eight_equals_each_prompt_alone(smollm2, temperature):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(100, 49000, length).tolist() for length in LENGTHS]
    options = [
        SamplingOptions(max_new_tokens=16, temperature=temperature, top_k=50, top_p=0.95, seed=seed, ignore_eos=True)
        for seed in range(len(LENGTHS))
    ]
    together = generate(smollm2, prompts, options, batch_size=8, capacity=CAPACITY)
    for prompt, option, batched in zip(prompts, options, together, strict=True):
        alone = generate(smollm2, prompt, option, capacity=CAPACITY)
        assert_equal_tokens(smollm2, prompt, option, alone.tokens, batched.tokens)


def assert_equal_tokens(lm, prompt, option, alone, batched):
    """Equal, unless the first difference is a tie within the tolerance of f32 across shapes: 1e-4 of the logits' scale, twice."""
    if alone == batched:
        return
    at = next(i for i, (x, y) in enumerate(zip(alone, batched, strict=True)) if x != y)
    context = [*prompt, *alone[:at]]
    tokens = np.zeros((1, 1024), np.int32)
    tokens[0, : len(context)] = context
    cache = kv.init(lm.config, 1, CAPACITY, lm.kv_format)
    logits, _ = prefill(lm.model, lm.params, cache, tokens, np.asarray([len(context)], np.int32), np.zeros((1,), np.int32))
    tolerance = 2e-4 * float(jnp.abs(logits).max())
    scores = logits[0]
    if option.temperature:
        key = jax.random.fold_in(jax.random.key(option.seed), len(context))
        scores = scores / option.temperature + jax.random.gumbel(key, scores.shape)
        tolerance /= option.temperature
    margin = abs(float(scores[alone[at]] - scores[batched[at]]))
    print(
        f"exception: {len(prompt)} tokens, seed {option.seed}: {alone[at]} or {batched[at]} at {at}, margin {margin:.2e} < {tolerance:.2e}"
    )
    assert margin < tolerance


def test_options_that_change_nothing_change_nothing(smollm2, smollm2_golden):
    record = smollm2_golden[0]
    plain = SamplingOptions(max_new_tokens=8)
    for changes in ({"temperature": 1.0, "top_k": 1}, {"repetition_penalty": 1.0}, {"logit_bias": {0: 0.0}}, {"stop": ("\0",)}):
        completion = generate(smollm2, record["prompt"], dataclasses.replace(plain, **changes), raw=True, capacity=CAPACITY)
        assert list(completion.tokens) == record["greedy_ids"][:8]
