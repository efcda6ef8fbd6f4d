"""sampling.measure_quality: the figures of one text, against what its tokens' likelihoods and its bytes make of them."""

import dataclasses
import json

import numpy as np
import pytest

import kv
from runtime import UserError
from runtime.corpus import corpus
from sampling import Quality, Score, evaluate, measure_quality
from sampling.quality import read_evaluation_text

TEXT = "hel hel: in the hell, 日本é 🙂 and then some more\nof it."  # merges, and characters of several tokens
SIZES = {"window": 32, "stride": 16, "chunk": 8}


def measured(lm, text=TEXT, **changes):
    return measure_quality({"f32": (lm, kv.Format())}, text, **SIZES | changes)


def test_the_bytes_are_those_that_the_predicted_tokens_write(lm):
    ids = lm.tokenizer.encode(TEXT, add_bos=False, add_eos=False)
    assert lm.tokenizer.decode(ids[:4]) == "hel hel:" and len(TEXT.encode()) > len(TEXT) > len(ids)
    whole = measured(lm)
    assert (whole.tokens, whole.num_bytes) == (len(ids) - 1, len(TEXT.encode()) - len("hel"))
    short = measured(lm, max_tokens=3)
    assert (short.tokens, short.num_bytes) == (3, len(" hel:"))
    assert measured(lm, max_tokens=10_000).tokens == whole.tokens


def test_with_bos_the_whole_text_counts(lm):
    wants_bos = dataclasses.replace(lm, tokenizer=dataclasses.replace(lm.tokenizer, bos_id=3, adds_bos=True))
    found = measured(wants_bos)
    assert found.num_bytes == len(TEXT.encode())
    assert found.tokens == len(lm.tokenizer.encode(TEXT, add_bos=False, add_eos=False))


def test_a_space_that_the_tokenizer_puts_before_a_text_is_no_byte_of_it(lm):
    spaced = dataclasses.replace(lm, tokenizer=dataclasses.replace(lm.tokenizer, drops_space=True, bos_id=3, adds_bos=True))
    assert measured(spaced, " in").num_bytes == 2


def test_the_figures_are_those_of_the_scores(lm):
    ids = lm.tokenizer.encode(TEXT, add_bos=False, add_eos=False)
    candidates = {"f32": (lm, kv.Format()), "int8": (lm, kv.Format(np.dtype(np.int8), group=8))}
    scores = evaluate(candidates, ids, **SIZES)
    told = []
    found = measure_quality(candidates, TEXT, name="a text", **SIZES, progress=lambda *done: told.append(done))
    assert told[0] == (0, len(ids) - 1) and told[-1] == (len(ids) - 1, len(ids) - 1)
    as_json = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert list(as_json) == ["text", "tokens", "bytes", "window", "stride", "candidates"]
    assert (as_json["text"], as_json["window"], as_json["stride"]) == ("a text", 32, 16)
    reference, int8 = as_json["candidates"]["f32"], as_json["candidates"]["int8"]
    bits = scores["int8"].nll.sum() / np.log(2)
    assert int8["bits_per_byte"] == pytest.approx(bits / found.num_bytes, rel=1e-6)
    assert int8["perplexity"] == scores["int8"].perplexity
    assert int8["perplexity"] == pytest.approx(2 ** (bits / found.tokens), rel=1e-6)
    assert (reference["compute"], reference["kv"], int8["kv"]) == ("float32", "float32", "int8")
    assert reference["weight_bytes"] == lm.weight_bytes and reference["tokens_per_s"] > 0
    assert "against" not in reference and int8["against"]["reference"] == "f32"
    assert int8["against"]["perplexity_ratio"] == pytest.approx(int8["perplexity"] / reference["perplexity"], rel=1e-6)
    assert 0 < int8["against"]["mean_kl"] < int8["against"]["p99_kl"] <= int8["against"]["max_kl"] < 1


def quality(*names, nll=(1.0, 3.0)):
    scores = {name: Score(np.float32(nll), np.float32([0, 0.25]), np.float32([1, 0]), seconds=0.5) for name in names}
    about = {name: {"model": "tiny", "weight_bytes": 1_500_000, "compute": "float32", "kv": "float32"} for name in names}
    return Quality("a text", 2, 8, 1024, 512, scores, about)


def test_the_table_has_a_line_per_candidate_and_one_against_the_reference():
    one = quality("f32").table().splitlines()
    assert one[0] == "tiny on a text: 2 tokens of 8 bytes, in windows of 1,024 tokens, stride 512"
    assert one[1].split() == ["candidate", "perplexity", "bits/byte", "tokens/s", "MB"]
    assert one[2].split() == ["f32", "7.3891", "±", "5.2249", "0.7213", "4", "1.5"]  # e^2; e^2 / sqrt 2; 4 / ln 2 / 8
    assert len(one) == 3
    two = quality("f32", "int4").table().splitlines()
    assert two[2].split()[1:] == two[3].split()[1:] == one[2].split()[1:]
    assert two[5] == "against f32 (KL in nats per token):"
    assert two[-1].split() == ["int4", "1.00000", "±", "0.00000", "0.125", "0.247", "0.25", "50.00%"]


def test_json_says_null_for_what_is_no_number():
    found = quality("f32", "broken", nll=(1.0, np.nan)).as_json()["candidates"]["broken"]
    assert found["perplexity"] is None and found["against"]["perplexity_ratio"] is None
    assert found["against"]["max_kl"] == 0.25


def test_the_text_is_a_file_as_it_is_or_the_committed_half(tmp_path):
    assert read_evaluation_text(None) == (corpus("evaluation"), "the evaluation text")
    path = tmp_path / "text.txt"
    path.write_bytes(b"one\r\ntwo\rthree\n")
    assert read_evaluation_text(str(path)) == ("one\r\ntwo\rthree\n", str(path))
    path.write_bytes(b"")
    with pytest.raises(UserError, match=r"text.txt is empty: give a text of at least two tokens"):
        read_evaluation_text(str(path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text": "h"}, "the text is of 1 token, too short to predict any of it: give at least two"),
        ({"text": ""}, "the text is of 0 tokens, too short"),
        ({"max_tokens": 0}, "max_tokens 0 is below 1: give at least 1"),
        ({"stride": 33}, "stride 33 is longer than window 32"),
        ({"window": 4096}, "window 4096 is longer than the model's context 2048"),
    ],
)
def test_what_can_not_be_measured_is_an_error_in_one_line(lm, changes, message):
    with pytest.raises(UserError, match=message):
        measured(lm, **changes)


def test_without_candidates_there_is_nothing_to_measure():
    with pytest.raises(UserError, match="no candidate is given: give at least one"):
        measure_quality({}, TEXT)
