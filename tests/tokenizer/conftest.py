"""A vocabulary small enough to check by hand, and the default model's."""

import functools
import io
import json
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import sentencepiece

from checkpoint import open_gguf
from tokenizer import tokenizer_from_gguf
from tokenizer.pieces import byte_alphabet

GOLDEN = Path(__file__).parents[1] / "golden" / "smollm2-135m-instruct.json"


@pytest.fixture
def metadata() -> dict:
    """Every byte has a token (id = byte); then two merges (256, 257), two special tokens and one that is added but not special."""
    tokens = [*byte_alphabet(), "he", "hel", "<s>", "</s>", "<think>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 258 + [3, 3, 4],
        "tokenizer.ggml.merges": ["h e", "he l"],
        "tokenizer.ggml.bos_token_id": 258,
        "tokenizer.ggml.eos_token_id": 259,
        "tokenizer.chat_template": "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}",
    }


@pytest.fixture
def toy(metadata):
    return tokenizer_from_gguf(metadata)


@pytest.fixture(scope="session")
def smollm2_metadata(smollm2_path):
    return open_gguf(smollm2_path).metadata


@pytest.fixture(scope="session")
def smollm2(smollm2_metadata):
    return tokenizer_from_gguf(smollm2_metadata)


@pytest.fixture(scope="session")
def golden() -> list[dict]:
    """Prompts with the ids and texts that the transformers library makes of them."""
    return json.loads(GOLDEN.read_text(encoding="utf-8"))["records"]


@pytest.fixture(scope="session")
def english() -> str:
    """Python's own documentation, the start of it."""
    return "\n".join(topics[name] for name in sorted(topics))[:60_000]


@pytest.fixture(scope="session")
def train_sentencepiece(english):
    """Trains a SentencePiece model of 700 tokens (0.2 s) and gives it as bytes; equal calls share one."""

    @functools.cache
    def train(kind: str, *, add_dummy_prefix: bool, byte_fallback: bool = True) -> bytes:
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(english.split("\n")),
            model_writer=model,
            model_type=kind,
            vocab_size=700,
            byte_fallback=byte_fallback,
            add_dummy_prefix=add_dummy_prefix,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            control_symbols=["<|im_end|>"],
            user_defined_symbols=["<think>"],
            minloglevel=2,
        )
        return model.getvalue()

    return train
