"""How text is cut into words, for every value of `tokenizer.ggml.pre`."""

import json
from pathlib import Path

import pytest

from runtime import UserError
from tokenizer import tokenizer_from_gguf
from tokenizer.pieces import byte_alphabet
from tokenizer.pre_tokenizers import PRE_TOKENIZERS

RECORDED = json.loads((Path(__file__).parent / "llama_cpp.json").read_text(encoding="utf-8"))


def words(pre: str, text: str) -> list[str]:
    return [text[start:end] for _, (start, end) in PRE_TOKENIZERS[pre].build().pre_tokenize_str(text)]


@pytest.mark.parametrize("pre", RECORDED["ids"])
def test_the_ids_are_those_of_llama_cpp(pre):
    """With merges that cross the borders of words, so that a border in another place gives other ids."""
    built = tokenizer_from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": [*sorted(byte_alphabet()), *(merge.replace(" ", "") for merge in RECORDED["merges"])],
            "tokenizer.ggml.merges": RECORDED["merges"],
        }
    )
    for text, ids in zip(RECORDED["texts"], RECORDED["ids"][pre], strict=True):
        assert built.encode(text) == ids, text
        assert built.decode(ids) == text


def test_every_rule_is_recorded_or_cut_by_hand_below():
    rules = {PRE_TOKENIZERS[pre] for pre in [*RECORDED["ids"], "gpt-4o", "tekken"]}
    assert rules == set(PRE_TOKENIZERS.values())


@pytest.mark.parametrize(
    "pre, text, expected",
    [
        ("gpt-4o", "HTTPServer camelCase", ["HTTPServer", " camel", "Case"]),
        ("gpt-4o", "don't I'LL 12345", ["don't", " I'LL", " ", "123", "45"]),
        ("gpt-4o", "नमस्ते a//\n b", ["नमस्ते", " a", "//\n", " b"]),
        ("gpt-4o", "日本かa", ["日本かa"]),
        ("tekken", "HTTPServer camelCase", ["HTTPServer", " camel", "Case"]),
        ("tekken", "don't I'LL 123", ["don", "'t", " I", "'LL", " ", "1", "2", "3"]),
        ("tekken", "नमस्ते a//\n b", ["नमस्ते", " a", "//\n", " b"]),
        ("llama-bpe", "नमस्ते 1234 I'LL", ["नमस", "्त", "े", " ", "123", "4", " I", "'LL"]),
        ("qwen35", "नमस्ते 12", ["नमस्ते", " ", "1", "2"]),
        ("gpt-2", "I'LL it's 1234  x", ["I", "'", "LL", " it", "'s", " 1234", " ", " x"]),
    ],
)
def test_words_are_those_of_the_models_own_files(pre, text, expected):
    assert words(pre, text) == expected


def test_a_word_that_is_a_token_is_that_token_where_merges_are_ignored():
    parts = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*sorted(byte_alphabet()), "ab", "bc", "abc"],
        "tokenizer.ggml.merges": ["b c", "a b"],  # no way to abc
        "tokenizer.ggml.bos_token_id": 0,
    }
    assert tokenizer_from_gguf({**parts, "tokenizer.ggml.pre": "llama-bpe"}).encode("abc") == [0, 258]
    assert tokenizer_from_gguf({**parts, "tokenizer.ggml.pre": "qwen2"}).encode("abc") == [sorted(byte_alphabet()).index("a"), 257]


def test_bos_is_added_where_such_models_want_it_and_the_file_is_silent(metadata):
    metadata["tokenizer.ggml.pre"] = "llama-bpe"
    assert tokenizer_from_gguf(metadata).encode("a") == [258, 97]
    assert tokenizer_from_gguf({**metadata, "tokenizer.ggml.add_bos_token": False}).encode("a") == [97]


@pytest.mark.parametrize("pre", ["", "Qwen2", "gpt-4o "])
def test_an_unknown_rule_is_refused_by_name(metadata, pre):
    metadata["tokenizer.ggml.pre"] = pre
    with pytest.raises(UserError, match=f"pre-tokenizer '{pre}' is not supported"):
        tokenizer_from_gguf(metadata, "x.gguf")
