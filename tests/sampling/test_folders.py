"""sampling.load for folders: Hugging Face's, and those that `LanguageModel.save` writes; and folders that are not whole."""

import json

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from runtime import UserError
from sampling import generate, load
from tests.parity import fixture as fixtures


def write_tokenizer(folder, tokens):
    """A byte-level tokenizer of single characters, without merges."""
    letters = [chr(code) for code in range(33, 127)] + ["Ġ"]
    vocab = {token: number for number, token in enumerate(letters + [f"word{n}" for n in range(tokens - len(letters))])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))


@pytest.fixture
def folder(tmp_path):
    folder = fixtures.write_folder(fixtures.read("llama3"), tmp_path / "llama3")
    write_tokenizer(folder, 96)
    return folder


@pytest.mark.slow  # tests/checkpoint/test_orbax_folder.py compares what is written and read
def test_a_saved_model_is_the_model_again(folder, tmp_path):
    lm = load(folder, weights="f32", compute="f32", kv_dtype="f32")
    lm.save(tmp_path / "saved")
    again = load(tmp_path / "saved", weights="f32", compute="f32", kv_dtype="f32")
    assert again.config == lm.config
    jax.tree.map(np.testing.assert_array_equal, again.params, lm.params)
    wanted = generate(lm, "hello there", raw=True, max_new_tokens=8, capacity=64)
    got = generate(again, "hello there", raw=True, max_new_tokens=8, capacity=64)
    assert (got.tokens, got.text) == (wanted.tokens, wanted.text)
    assert len(wanted.tokens) == 8


def truncate(folder):
    shard = next(folder.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    return shard.name


def rename_family(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "nonesuch"}))
    return "config.json"


def longer_tokenizer(folder):
    write_tokenizer(folder, 105)
    return "llama3"


def no_weights(folder):
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    return "llama3"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"is incomplete: it has \d+ bytes, of which its tensors need \d+: download it again"),
        (rename_family, r"has model_type 'nonesuch', which is not supported; supported: .*llama.*Use another model"),
        (longer_tokenizer, r"the tokenizer has 105 tokens, but the model has 96 rows of embedding: .* download the model again"),
        (no_weights, r"holds no \*\.safetensors, only config.json, tokenizer.json: download the model's weights"),
    ],
)
def test_a_folder_that_is_not_whole_is_one_line_with_its_name_and_the_remedy(folder, damage, message):
    named = damage(folder)
    with pytest.raises(UserError, match=message) as error:
        load(folder)
    assert named in str(error.value)
    assert "\n" not in str(error.value)
