"""Encoding and decoding."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from runtime import UserError
from tokenizer import tokenizer_from_gguf


def test_merges_apply_in_order(toy):
    assert toy.encode("hello") == [257, ord("l"), ord("o")]
    assert toy.encode("hehehe") == [256, 256, 256]


def test_each_digit_is_a_word_of_its_own(metadata):
    metadata["tokenizer.ggml.tokens"].append("12")
    metadata["tokenizer.ggml.token_type"].append(1)
    metadata["tokenizer.ggml.merges"].append("1 2")
    assert tokenizer_from_gguf(metadata).encode("123") == [ord("1"), ord("2"), ord("3")]


def test_the_empty_text_has_no_tokens(toy):
    assert toy.encode("") == []
    assert toy.decode([]) == ""


@pytest.mark.parametrize("char", ["é", "日", "🙂", "\ufdd0", "\ufdef", "\x00", "\u00ad", " "])
def test_a_character_is_its_utf8_bytes(toy, char):
    assert toy.encode(char) == list(char.encode())
    assert toy.decode(list(char.encode())) == char


def test_every_byte_has_its_token(toy):
    assert [toy.token_bytes(id) for id in range(256)] == [bytes([byte]) for byte in range(256)]
    assert toy.token_bytes(257) == b"hel"
    assert toy.token_bytes(258) == b"<s>"


def test_special_tokens_are_parsed_only_when_asked(toy):
    assert toy.encode("a</s>b") == [97, *b"</s>", 98]
    assert toy.encode("a</s>b", parse_special=True) == [97, 259, 98]
    assert toy.encode("a</s>b") == [97, *b"</s>", 98]


def test_an_added_token_is_parsed_either_way_and_is_text(toy):
    assert toy.encode("<think>") == toy.encode("<think>", parse_special=True) == [260]
    assert toy.special_ids == {258, 259}
    assert toy.decode([258, 260, 97, 259]) == "<think>a"


def test_special_tokens_are_shown_when_asked(toy):
    assert toy.decode([258, 97, 259], skip_special=False) == "<s>a</s>"


def test_bytes_that_are_no_utf8_become_replacement_characters(toy):
    assert toy.decode([0xE6, 0x97]) == "\ufffd"
    assert toy.decode([97, 0xFF, 98]) == "a\ufffdb"


def test_bos_and_eos_are_added_where_the_model_asks(metadata):
    metadata["tokenizer.ggml.add_bos_token"] = True
    metadata["tokenizer.ggml.add_eos_token"] = True
    asking = tokenizer_from_gguf(metadata)
    assert asking.encode("a") == [258, 97, 259]
    assert asking.encode("") == [258, 259]
    assert asking.encode("a", add_bos=False, add_eos=False) == [97]


def test_a_bos_in_the_text_is_not_doubled(metadata):
    metadata["tokenizer.ggml.add_bos_token"] = True
    asking = tokenizer_from_gguf(metadata)
    assert asking.encode("<s>a", parse_special=True) == [258, 97]
    assert asking.encode("<s>a") == [258, *b"<s>a"]


def test_nothing_is_added_where_the_model_does_not_ask(toy):
    assert toy.encode("a") == [97]


def test_a_space_is_put_first_where_the_model_asks(metadata):
    metadata["tokenizer.ggml.add_space_prefix"] = True
    assert tokenizer_from_gguf(metadata).encode("a") == [32, 97]


def test_a_chat_is_rendered_and_encoded_with_one_bos(metadata):
    metadata["tokenizer.ggml.add_bos_token"] = True
    asking = tokenizer_from_gguf(metadata)
    assert asking.encode_chat([{"role": "user", "content": "x"}]) == [258, *b"user: x", 259]


def test_a_model_without_chat_template_says_so(toy):
    plain = dataclasses.replace(toy, chat=None)
    with pytest.raises(UserError, match="no chat template"):
        plain.encode_chat([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("id", [-1, 261, 2**40])
def test_an_id_outside_the_vocabulary_is_an_error(toy, id):
    for ask in (toy.token_bytes, lambda id: toy.decode([id])):
        with pytest.raises(UserError, match=f"token id {id} is not in the vocabulary of 261 tokens"):
            ask(id)


def test_half_a_surrogate_pair_is_an_error_that_says_where(toy):
    with pytest.raises(UserError, match=r"'\\ud800', at character 2"):
        toy.encode("ab\ud800")


@pytest.mark.parametrize("text", [None, b"bytes", 7, ["a"]])
def test_a_prompt_that_is_no_string_is_an_error(toy, text):
    with pytest.raises(UserError, match="a prompt must be a string"):
        toy.encode(text)


def test_the_default_models_prompts_are_those_of_transformers(smollm2, golden):
    for record in golden:
        if record["kind"] == "chat":
            assert smollm2.encode_chat([{"role": "user", "content": record["prompt"]}]) == record["prompt_ids"]
        assert smollm2.encode(record["rendered"], parse_special=True) == record["prompt_ids"]


def test_the_default_models_answers_are_those_of_transformers(smollm2, golden):
    for record in golden:
        assert smollm2.decode(record["greedy_ids"], skip_special=False) == record["text"]


def test_the_default_models_token_bytes_are_those_of_the_tokenizers_package(smollm2):
    """Its byte-level decoder, which works on one token at a time, wherever a token is whole characters."""
    decoder = decoders.ByteLevel()
    compared = 0
    for id in range(smollm2.vocab_size):
        text = decoder.decode([smollm2.backend.native.id_to_token(id)])
        if "\ufffd" not in text:
            assert smollm2.token_bytes(id) == text.encode()
            compared += 1
    assert compared > 48_000


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=st.text())
def test_any_text_survives_a_round_trip_or_is_refused(smollm2, text):
    for parse_special in (True, False):
        if set(smollm2.missing_bytes).isdisjoint(text.encode()):
            assert smollm2.decode(smollm2.encode(text, parse_special=parse_special), skip_special=False) == text
        else:
            with pytest.raises(UserError, match="the model's vocabulary has no token for"):
                smollm2.encode(text, parse_special=parse_special)


def test_the_default_model_lacks_six_control_characters_and_says_so(smollm2):
    lacking = [char for char in map(chr, range(128)) if ord(char) in smollm2.missing_bytes]
    assert lacking == ["\x04", "\x06", "\x13", "\x14", "\x16", "\x1d"]
    with pytest.raises(UserError, match=r"no token for '\\x16', character 2 of the prompt: remove it"):
        smollm2.encode("ab\x16")


def test_the_room_imports_no_jax_and_nothing_heavy_of_its_own():
    heavy = ("jax", "torch", "transformers", "sentencepiece", "google.protobuf")
    program = f"import sys, tokenizer; assert not [name for name in {heavy} if name in sys.modules]"
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[2], check=True)
