"""sampling.evaluate: a text's likelihood under cache formats, against the full forward and numpy in f64."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import kv
from runtime import UserError
from sampling import Score, evaluate
from sampling.evaluate import score

F32, BF16 = kv.Format(), kv.Format(np.dtype(jnp.bfloat16), as_bits=True)
WINDOW, CHUNK = 32, 8


@pytest.fixture(scope="module")
def text(lm):
    return np.random.default_rng(5).integers(0, lm.config.vocab_size, 75).tolist()  # two windows and a part of a third


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def expected_nll(full_forward, inputs, targets):
    """Of each window, from logits of the full forward over it alone."""
    windows = [inputs[start : start + WINDOW] for start in range(0, len(inputs), WINDOW)]
    logits = np.concatenate(full_forward(windows))
    return -np.take_along_axis(log_softmax(logits), np.asarray(targets)[:, None], axis=-1)[:, 0]


def test_perplexity_is_that_of_the_full_forward_over_each_window(lm, text, full_forward):
    nll = expected_nll(full_forward, text[:-1], text[1:])
    found = evaluate(lm, text, {"f32": F32}, window=WINDOW, chunk=CHUNK)["f32"]
    assert found.tokens == 74
    np.testing.assert_allclose(found.nll, nll, atol=1e-4 * nll.max())
    assert found.perplexity == pytest.approx(np.exp(nll.mean()), rel=1e-4)


def test_with_bos_every_window_begins_with_it_and_every_token_is_predicted(lm, text, full_forward):
    bos = 3
    wants_bos = dataclasses.replace(lm, tokenizer=dataclasses.replace(lm.tokenizer, bos_id=bos, adds_bos=True))
    inputs = [bos if place % WINDOW == 0 else text[place - 1] for place in range(len(text))]
    nll = expected_nll(full_forward, inputs, text)
    found = evaluate(wants_bos, text, {"f32": F32}, window=WINDOW, chunk=CHUNK)["f32"]
    assert found.tokens == 75
    np.testing.assert_allclose(found.nll, nll, atol=1e-4 * nll.max())


def test_the_chunks_do_not_matter(lm, text):
    cut, whole = (evaluate(lm, text, {"f32": F32}, window=WINDOW, chunk=chunk)["f32"] for chunk in (CHUNK, WINDOW))
    np.testing.assert_allclose(cut.nll, whole.nll, atol=1e-4 * whole.nll.max())


def test_a_format_is_at_no_distance_from_itself_and_bf16_is_at_some(lm, text):
    scores = evaluate(lm, text, {"f32": F32, "again": F32, "bf16": BF16}, window=WINDOW, chunk=CHUNK)
    again, bf16 = scores["again"], scores["bf16"]
    assert np.array_equal(again.nll, scores["f32"].nll)
    assert np.array_equal(again.kl, np.zeros(74)) and again.agreement == 1.0
    assert again.ratio(scores["f32"]) == (1.0, 0.0)
    assert 1e-9 < bf16.mean_kl < 1e-3
    ratio, error = bf16.ratio(scores["f32"])
    assert ratio == pytest.approx(bf16.perplexity / scores["f32"].perplexity, rel=1e-6)
    assert 0 < error < 1e-2


def test_a_block_of_logits_is_reduced_as_numpy_does_it_in_f64():
    rng = np.random.default_rng(0)
    logits, reference = (rng.normal(scale=4, size=(6, 50)).astype(np.float32) for _ in range(2))
    logits[2] = reference[2]
    targets = rng.integers(0, 50, 6).astype(np.int32)
    nll, kl, agrees = (np.asarray(part) for part in score(logits, reference, targets))
    log_q, log_p = log_softmax(logits), log_softmax(reference)
    np.testing.assert_allclose(nll, -log_q[np.arange(6), targets], rtol=1e-5)
    np.testing.assert_allclose(kl, (np.exp(log_p) * (log_p - log_q)).sum(-1), rtol=1e-4)
    assert kl[2] == 0 and kl.max() > 1
    assert np.array_equal(agrees, logits.argmax(-1) == reference.argmax(-1)) and agrees[2] == 1


def test_a_score_is_means_over_its_tokens():
    one = Score(nll=np.log(np.float32([2, 8])), kl=np.float32([0.5, 0.25]), agrees=np.float32([1, 0]))
    other = Score(nll=np.log(np.float32([1, 4])), kl=np.zeros(2, np.float32), agrees=np.ones(2, np.float32))
    assert one.perplexity == pytest.approx(4.0)
    assert (one.mean_kl, one.agreement) == (0.375, 0.5)
    assert one.ratio(other) == pytest.approx((2.0, 0.0), abs=1e-6)  # every token lost the same


def test_progress_is_told_after_every_call(lm, text):
    told = []
    evaluate(lm, text, {"f32": F32}, window=WINDOW, chunk=CHUNK, progress=told.append)
    assert told == [8, 16, 24, 32, 40, 48, 56, 64, 72, 74]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": [1]}, "a text of 1 tokens predicts nothing: give at least two"),
        ({"formats": {}}, "no cache format is given"),
        ({"chunk": 12}, "chunk 12 does not divide window 32: give a divisor"),
        ({"chunk": 64}, "chunk 64 does not divide window 32"),
        ({"window": 4096, "chunk": 8}, "window 4096 is longer than the model's context 2048: give a shorter one"),
    ],
)
def test_what_can_not_be_evaluated_is_an_error_in_one_line(lm, text, changes, message):
    given = {"tokens": text, "formats": {"f32": F32}, "window": WINDOW, "chunk": CHUNK} | changes
    with pytest.raises(UserError, match=message):
        evaluate(lm, given.pop("tokens"), given.pop("formats"), **given)
