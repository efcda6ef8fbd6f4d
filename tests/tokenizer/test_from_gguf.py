"""Tokenizers out of GGUF metadata."""

import re
import time

import pytest

from runtime import UserError
from tokenizer import tokenizer_from_gguf


def test_the_ids_of_the_metadata_are_kept(metadata):
    metadata["tokenizer.ggml.eot_token_id"] = 260
    metadata["tokenizer.ggml.padding_token_id"] = 0
    built = tokenizer_from_gguf(metadata)
    assert built.vocab_size == 261
    assert (built.bos_id, built.eos_id, built.pad_id) == (258, 259, 0)
    assert built.eos_ids == {259, 260}
    assert built.chat.bos_token == "<s>" and built.chat.eos_token == "</s>"


def test_a_file_without_those_ids_and_without_template_has_none(metadata):
    for key in ("tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id", "tokenizer.chat_template", "tokenizer.ggml.token_type"):
        del metadata[key]
    built = tokenizer_from_gguf(metadata)
    assert (built.bos_id, built.eos_id, built.pad_id, built.chat) == (None, None, None, None)
    assert built.eos_ids == built.special_ids == frozenset()


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("model", "bert", "tokenizer kind 'bert' is not supported (supported: 'gpt2', byte-level BPE, 'llama', SentencePiece BPE)"),
        ("model", None, "the file holds no tokenizer (no tokenizer.ggml.model)"),
        ("pre", "gpt-99", "pre-tokenizer 'gpt-99' is not supported (supported: 'gpt-2', "),
        ("pre", None, "does not say how text is cut into words (no tokenizer.ggml.pre)"),
        ("pre", ["smollm"], "tokenizer.ggml.pre is a list, not a str"),
        ("tokens", None, "the file holds no tokenizer (no tokenizer.ggml.tokens)"),
        ("tokens", 7, "tokenizer.ggml.tokens is a int, not a list"),
        ("tokens", [1, 2], "tokenizer.ggml.tokens holds other things than text"),
        ("tokens", ["a", "b", "a"], "lists token 'a' twice"),
        ("token_type", [1, 1], "has 261 tokens but 2 token types"),
        ("merges", None, "no tokenizer.ggml.merges"),
        ("merges", ["h q"], "merges do not fit its tokens"),
        ("merges", ["he"], "merges do not fit its tokens"),
        ("merges", ["h e l"], "merges do not fit its tokens"),
        ("eos_token_id", 261, "tokenizer.ggml.eos_token_id is 261, but there are 261 tokens"),
        ("bos_token_id", -1, "tokenizer.ggml.bos_token_id is -1"),
        ("bos_token_id", "<s>", "tokenizer.ggml.bos_token_id is a str, not a int"),
    ],
)
def test_what_does_not_fit_is_an_error_that_names_it(metadata, key, value, message):
    metadata[f"tokenizer.ggml.{key}"] = value
    if value is None:
        del metadata[f"tokenizer.ggml.{key}"]
    if key == "tokens":
        del metadata["tokenizer.ggml.token_type"]
    with pytest.raises(UserError, match=re.escape(message)):
        tokenizer_from_gguf(metadata)


@pytest.mark.parametrize("name", ["bos", "eos"])
def test_a_wanted_token_that_is_not_named_is_an_error(metadata, name):
    metadata[f"tokenizer.ggml.add_{name}_token"] = True
    del metadata[f"tokenizer.ggml.{name}_token_id"]
    with pytest.raises(UserError, match=f"asks for a {name.upper()} token but names none"):
        tokenizer_from_gguf(metadata)


def test_a_template_that_is_no_text_is_an_error(metadata):
    metadata["tokenizer.chat_template"] = ["a"]
    with pytest.raises(UserError, match="the chat template is a list, not text"):
        tokenizer_from_gguf(metadata)


def test_the_default_model_has_the_tokens_it_is_known_for(smollm2):
    assert smollm2.vocab_size == 49_152
    assert smollm2.eos_ids == {2} and smollm2.bos_id == 1 and not smollm2.adds_bos
    assert smollm2.special_ids == set(range(17))
    assert smollm2.token_bytes(2) == b"<|im_end|>"


def test_the_default_models_tokenizer_is_built_in_half_a_second(smollm2_metadata):
    tokenizer_from_gguf(smollm2_metadata)
    start = time.perf_counter()
    tokenizer_from_gguf(smollm2_metadata)
    assert time.perf_counter() - start < 0.5
