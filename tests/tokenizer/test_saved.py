"""A tokenizer written to one file and read back."""

import json

import pytest

from runtime import UserError
from tokenizer import Tokenizer, tokenizer_from_folder, tokenizer_from_gguf, tokenizer_from_saved

TEXTS = ["", " ", "hello  the\nend", "日本 🙂 é", "<s></s><|im_end|><think>", "aaaa12"]
MESSAGES = [{"role": "user", "content": "Hi </s> there"}]
PLAIN = (
    "pieces",
    "special_ids",
    "eos_ids",
    "bos_id",
    "eos_id",
    "pad_id",
    "unknown_id",
    "adds_bos",
    "adds_eos",
    "drops_space",
    "missing_bytes",
    "chat",
)


@pytest.fixture(params=["byte-level GGUF", "SentencePiece folder", "default model"])
def tokenizer(request, train_sentencepiece, tmp_path) -> Tokenizer:
    if request.param == "byte-level GGUF":
        return tokenizer_from_gguf(request.getfixturevalue("metadata"))
    if request.param == "default model":
        return request.getfixturevalue("smollm2")
    (tmp_path / "tokenizer.model").write_bytes(train_sentencepiece("unigram", add_dummy_prefix=True))
    (tmp_path / "added_tokens.json").write_text('{"<|new|>": 702}')
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}</s>")
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "legacy": false}')
    return tokenizer_from_folder(tmp_path)


def test_what_is_read_back_is_equal_in_every_part(tokenizer, tmp_path):
    path = tokenizer.save(tmp_path)
    assert path == tmp_path / "diptych_tokenizer.json"
    written = path.read_bytes()
    restored = tokenizer_from_saved(tmp_path)
    for name in PLAIN:
        assert getattr(restored, name) == getattr(tokenizer, name), name
    for text in TEXTS:
        for parse_special in (True, False):
            assert restored.encode(text, parse_special=parse_special) == tokenizer.encode(text, parse_special=parse_special)
    assert restored.encode_chat(MESSAGES) == tokenizer.encode_chat(MESSAGES)
    assert restored.save(tmp_path).read_bytes() == written


def test_a_folder_that_is_not_there_is_an_error_and_leaves_nothing(toy, tmp_path):
    with pytest.raises(UserError, match="can't be written"):
        toy.save(tmp_path / "nowhere")
    assert list(tmp_path.iterdir()) == []


def changed(**changes):
    return lambda data: json.dumps({**json.loads(data), **changes})


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda data: data[:1000], "is no JSON"),
        (lambda data: "[]", "is no saved tokenizer"),
        (changed(format="other"), "is no saved tokenizer"),
        (changed(version=2), "is of version 2, but this program reads version 1"),
        (changed(pieces=[7]), "is damaged"),
        (changed(pieces=["日"]), "is damaged"),
        (changed(backend={}), "is damaged"),
        (changed(backend={"kind": "other"}), "is damaged"),
        (changed(backend={"kind": "tokenizers", "definition": "{}"}), "is damaged"),
        (changed(backend={"kind": "sentencepiece", "model": "%%", "prefix": "each", "added": []}), "is damaged"),
        (changed(surprise=1), "is damaged"),
    ],
)
def test_a_damaged_file_is_one_line_that_names_it(toy, tmp_path, damage, message):
    path = toy.save(tmp_path)
    path.write_text(damage(path.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(UserError, match=f"diptych_tokenizer.json {message}.*save .* again"):
        tokenizer_from_saved(tmp_path)


def test_a_missing_file_is_one_line_that_names_it(tmp_path):
    with pytest.raises(UserError, match=r"diptych_tokenizer.json can't be read \(No such file"):
        tokenizer_from_saved(tmp_path)
