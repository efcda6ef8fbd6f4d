"""runtime.corpus: the committed text is the one whose figures are known, and its halves are strangers."""

import hashlib
import importlib.resources
import re
from pydoc_data.topics import topics

import pytest

from runtime import UserError
from runtime import corpus as module
from runtime.corpus import HALVES, SEPARATOR, corpus
from tests.runtime import make_corpus


def long_paragraphs(text):
    return {" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text) if len(paragraph) >= make_corpus.SHORTEST}


def test_the_halves_are_text_of_about_equal_length():
    texts = [corpus(half) for half in HALVES]
    for text in texts:
        assert 120_000 < len(text.encode("utf-8")) < 250_000
        assert len(text.split()) > 20_000
        assert SEPARATOR not in text and not re.search(r"[^\n\x20-\x7e\xa1-\xff\u2010-\u203f]", text)  # letters, marks and lines
    assert texts[0] != texts[1]


def test_no_paragraph_of_the_evaluation_half_is_in_the_calibration_half():
    calibration, evaluation = (long_paragraphs(corpus(half)) for half in HALVES)
    assert len(calibration) > 300 and len(evaluation) > 300
    assert not calibration & evaluation


def test_a_changed_file_is_an_error_that_names_both_hashes(monkeypatch, tmp_path):
    changed = importlib.resources.files("configs").joinpath("text", "pydoc_topics.txt").read_bytes() + b" "
    tmp_path.joinpath("text").mkdir()
    tmp_path.joinpath("text", "pydoc_topics.txt").write_bytes(changed)
    monkeypatch.setattr(importlib.resources, "files", lambda package: tmp_path)
    with pytest.raises(UserError, match=hashlib.sha256(changed).hexdigest() + r", not [0-9a-f]{64}: restore the committed file"):
        corpus("evaluation")


def test_an_unknown_half_is_an_error():
    with pytest.raises(ValueError, match="half='test' is not known: use one of calibration, evaluation"):
        corpus("test")


def test_the_licence_of_the_text_travels_with_it():
    folder = importlib.resources.files("configs").joinpath("text")
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in folder.joinpath("LICENSE.PSF").read_text(encoding="utf-8")
    assert "CPython 3.11.7" in folder.joinpath("README.md").read_text(encoding="utf-8")


def test_a_topic_that_a_longer_one_quotes_is_left_out_and_no_half_quotes_the_other():
    shared, alone = "s" * 100, "a" * 100
    made = make_corpus.make(
        {"long": "l" * 500 + "\n\n" + shared, "quoting": shared + "\n\n" + "q" * 10, "other": "o" * 400 + "\n\n" + alone}
    )
    assert made == "o" * 400 + "\n\n" + alone + "\n" + SEPARATOR + "l" * 500 + "\n\n" + shared + "\n"
    made = make_corpus.make({"long": "l" * 500 + "\n\n" + shared, "other": "o" * 400 + "\n\n" + shared})
    assert made == "o" * 400 + "\n" + SEPARATOR + "l" * 500 + "\n\n" + shared + "\n"


@pytest.mark.skipif(make_corpus.source_sha256(topics) != make_corpus.SOURCE_SHA256, reason="another Python has other topics")
def test_the_committed_file_is_made_of_the_topics_that_are_named():
    assert hashlib.sha256(make_corpus.make(topics).encode("utf-8")).hexdigest() == module._SHA256
