"""A vocabulary small enough to check by hand, and the default model's."""

import json
from pathlib import Path

import pytest

from checkpoint import open_gguf
from tokenizer import tokenizer_from_gguf
from tokenizer.from_gguf import byte_alphabet

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
