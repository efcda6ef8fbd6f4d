"""sampling.evaluate: a text's likelihood under models and cache formats, against the full forward and numpy in f64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kv
from runtime import LEDGER, UserError
from sampling import Score, evaluate
from sampling.evaluate import score, window_and_stride, windows

F32, BF16 = kv.Format(), kv.Format(np.dtype(jnp.bfloat16), as_bits=True)
WINDOW, CHUNK = 32, 8
APART = {"window": WINDOW, "stride": WINDOW, "chunk": CHUNK}  # windows that share nothing


@pytest.fixture(scope="module")
def text(lm):
    return np.random.default_rng(5).integers(0, lm.config.vocab_size, 75).tolist()  # two windows and a part of a third


@pytest.fixture(scope="module")
def rounded(lm):
    """The same model, whose matrices are stored in bf16."""
    return dataclasses.replace(lm, params=jax.tree.map(lambda w: w.astype(jnp.bfloat16) if w.ndim > 1 else w, lm.params))


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def expected_nll(full_forward, inputs, targets):
    """Of each window, from logits of the full forward over it alone."""
    windows = [inputs[start : start + WINDOW] for start in range(0, len(inputs), WINDOW)]
    logits = np.concatenate(full_forward(windows))
    return -np.take_along_axis(log_softmax(logits), np.asarray(targets)[:, None], axis=-1)[:, 0]


def strided_nll(full_forward, inputs, targets, stride, bos=None):
    """As the field computes it: windows that begin every `stride` tokens, of each the tokens that no earlier one has scored."""
    nll, scored, begin = [], 0, 0
    while scored < len(targets):
        end = min(begin + WINDOW, len(targets))
        window = [*([] if bos is None else [bos]), *inputs[begin + (bos is not None) : end]]
        (logits,) = full_forward([window])
        log_p = log_softmax(logits)
        nll += [-log_p[place - begin, targets[place]] for place in range(scored, end)]
        scored, begin = end, begin + stride
    return np.asarray(nll)


def test_perplexity_is_that_of_the_full_forward_over_each_window(lm, text, full_forward):
    nll = expected_nll(full_forward, text[:-1], text[1:])
    found = evaluate({"f32": (lm, F32)}, text, **APART)["f32"]
    assert found.tokens == 74
    np.testing.assert_allclose(found.nll, nll, atol=1e-4 * nll.max())
    assert found.perplexity == pytest.approx(np.exp(nll.mean()), rel=1e-4)


def test_with_bos_every_window_begins_with_it_and_every_token_is_predicted(lm, text, full_forward):
    bos = 3
    wants_bos = dataclasses.replace(lm, tokenizer=dataclasses.replace(lm.tokenizer, bos_id=bos, adds_bos=True))
    inputs = [bos if place % WINDOW == 0 else text[place - 1] for place in range(len(text))]
    nll = expected_nll(full_forward, inputs, text)
    found = evaluate({"f32": (wants_bos, F32)}, text, **APART)["f32"]
    assert found.tokens == 75
    np.testing.assert_allclose(found.nll, nll, atol=1e-4 * nll.max())


@pytest.mark.parametrize("stride", [pytest.param(1, marks=pytest.mark.slow), 12, 16, pytest.param(31, marks=pytest.mark.slow)])
def test_windows_that_overlap_score_each_token_once_from_all_of_its_window(lm, text, full_forward, stride):
    nll = strided_nll(full_forward, text[:-1], text[1:], stride)
    found = evaluate({"f32": (lm, F32)}, text, window=WINDOW, stride=stride, chunk=CHUNK)["f32"]
    assert found.tokens == 74
    np.testing.assert_allclose(found.nll, nll, atol=1e-4 * nll.max())


def test_windows_that_overlap_begin_with_bos_where_the_model_wants_it(lm, text, full_forward):
    bos = 3
    wants_bos = dataclasses.replace(lm, tokenizer=dataclasses.replace(lm.tokenizer, bos_id=bos, adds_bos=True))
    nll = strided_nll(full_forward, [bos, *text[:-1]], text, 16, bos)
    found = evaluate({"f32": (wants_bos, F32)}, text, window=WINDOW, stride=16, chunk=CHUNK)["f32"]
    np.testing.assert_allclose(found.nll, nll, atol=1e-4 * nll.max())
    assert evaluate({"f32": (wants_bos, F32)}, text[:1], **APART)["f32"].nll == pytest.approx(nll[:1], abs=1e-4)


@pytest.mark.parametrize(("count", "window", "stride"), [(1, 4, 2), (4, 4, 1), (5, 4, 1), (40, 8, 3), (40, 8, 8), (41, 8, 7), (3, 1, 1)])
def test_windows_are_full_but_the_last_and_score_all_tokens_in_order(count, window, stride):
    found = list(windows(count, window, stride))
    assert [place for _, scored, stop in found for place in range(scored, stop)] == list(range(count))
    assert all(stop - start == window for start, _, stop in found[:-1])
    assert all(scored - start == window - stride for start, scored, _ in found[1:])
    assert [start for start, _, _ in found] == [stride * number for number in range(len(found))]


def test_by_default_windows_are_of_1024_tokens_or_the_context_and_overlap_by_half():
    assert window_and_stride(None, None) == window_and_stride(None, None, 8192) == (1024, 512)
    assert window_and_stride(None, None, 100) == (100, 50) and window_and_stride(1, None) == (1, 1)
    assert window_and_stride(64, 64, 64) == (64, 64)


def test_the_chunks_do_not_matter(lm, text):
    sizes = {"window": WINDOW, "stride": 20}
    cut, whole = (evaluate({"f32": (lm, F32)}, text, **sizes, chunk=chunk)["f32"] for chunk in (CHUNK, 4096))
    np.testing.assert_allclose(cut.nll, whole.nll, atol=1e-4 * whole.nll.max())


def test_all_windows_of_any_text_share_three_programs_whatever_divides_what(lm, text):
    before = len(LEDGER.entries)
    evaluate({"f32": (lm, F32)}, text[:40], window=WINDOW, stride=7, chunk=11)
    assert sorted(entry.name for entry in LEDGER.programs(before)) == ["prefill", "prefill", "score"]
    with LEDGER.sealed():
        uneven = evaluate({"f32": (lm, F32)}, text, window=WINDOW, stride=13, chunk=11)["f32"]
    even = evaluate({"f32": (lm, F32)}, text, window=WINDOW, stride=13, chunk=CHUNK)["f32"]
    np.testing.assert_allclose(uneven.nll, even.nll, atol=1e-4 * even.nll.max())


def test_a_format_is_at_no_distance_from_itself_and_bf16_is_at_some(lm, text):
    scores = evaluate({"f32": (lm, F32), "again": (lm, F32), "bf16": (lm, BF16)}, text, **APART)
    again, bf16 = scores["again"], scores["bf16"]
    assert np.array_equal(again.nll, scores["f32"].nll)
    assert np.array_equal(again.kl, np.zeros(74)) and again.agreement == 1.0
    assert again.ratio(scores["f32"]) == (1.0, 0.0)
    assert 1e-9 < bf16.mean_kl < 1e-3
    ratio, error = bf16.ratio(scores["f32"])
    assert ratio == pytest.approx(bf16.perplexity / scores["f32"].perplexity, rel=1e-6)
    assert 0 < error < 1e-2


def test_a_model_is_at_no_distance_from_its_copy_and_one_with_bf16_weights_is_at_some(lm, rounded, text, full_forward):
    copy = dataclasses.replace(lm, params=jax.tree.map(jnp.copy, lm.params))
    candidates = {"f32": (lm, F32), "copy": (copy, F32), "bf16": (rounded, F32)}
    scores = evaluate(candidates, text, window=WINDOW, stride=16, chunk=CHUNK)
    assert np.array_equal(scores["copy"].kl, np.zeros(74)) and scores["copy"].agreement == 1.0
    assert np.array_equal(scores["copy"].nll, scores["f32"].nll)
    bf16 = scores["bf16"]
    assert 1e-7 < bf16.mean_kl < bf16.p99_kl <= bf16.max_kl < 0.1
    assert 0.8 < bf16.agreement <= 1.0
    assert scores["bf16"].perplexity != scores["f32"].perplexity
    alone = evaluate({"bf16": (rounded, F32)}, text, window=WINDOW, stride=16, chunk=CHUNK)["bf16"]
    assert np.array_equal(alone.nll, bf16.nll) and alone.max_kl == 0.0


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
    assert one.max_kl == 0.5 and one.p99_kl == pytest.approx(0.25 + 0.99 * 0.25)
    # ln 2 and ln 8 are ln 2 from their mean; over the root of two tokens, times the perplexity of 4
    assert one.perplexity_error == pytest.approx(4 * np.log(2) / np.sqrt(2))
    assert one.bits_per_byte(8) == pytest.approx(4 / 8)  # a bit and three
    assert one.tokens_per_second is None and dataclasses.replace(one, seconds=0.5).tokens_per_second == 4.0


def test_progress_is_told_after_every_call(lm, text):
    told = []
    evaluate({"f32": (lm, F32)}, text, **APART, progress=told.append)
    assert told == [0, 8, 16, 24, 32, 40, 48, 56, 64, 72, 74]


def with_tokenizer(lm, **changes):
    return dataclasses.replace(lm, tokenizer=dataclasses.replace(lm.tokenizer, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": [1]}, "a text of 1 tokens predicts nothing: give at least two"),
        ({"candidates": {}}, "no candidate is given: give at least one"),
        ({"chunk": 0}, "chunk 0 is below 1: give at least 1"),
        ({"window": 0}, "window 0 is below 1: give at least 1"),
        ({"stride": 0}, "stride 0 is below 1: give at least 1"),
        ({"stride": 33}, "stride 33 is longer than window 32, which would skip tokens: give at most 32"),
        ({"window": 4096}, "window 4096 is longer than the model's context 2048: give at most 2048"),
    ],
)
def test_what_can_not_be_evaluated_is_an_error_in_one_line(lm, text, changes, message):
    given = {"candidates": {"f32": (lm, F32)}, "tokens": text} | APART | changes
    with pytest.raises(UserError, match=message):
        evaluate(given.pop("candidates"), given.pop("tokens"), **given)


def test_a_cache_of_pages_is_refused(lm, text):
    with pytest.raises(UserError, match="the cache of paged is paged, which changes no number: give its format without pages"):
        evaluate({"f32": (lm, F32), "paged": (lm, kv.Format(page_size=16))}, text, **APART)


def test_models_with_two_vocabularies_are_refused(lm, text):
    pieces = lm.tokenizer.pieces
    other = with_tokenizer(lm, pieces=(pieces[1], pieces[0], *pieces[2:]))
    with pytest.raises(UserError, match=r"other has another vocabulary than f32 \(97 tokens, not the same 97\): give models that share"):
        evaluate({"f32": (lm, F32), "other": (other, F32)}, text, **APART)
    with pytest.raises(UserError, match="other and f32 do not begin a text with the same BOS"):
        evaluate({"f32": (lm, F32), "other": (with_tokenizer(lm, adds_bos=True), F32)}, text, **APART)
