"""What tells two copies of a model apart."""

import hashlib

import pytest

from checkpoint.fingerprint import HEAD, fingerprint
from runtime import UserError


def test_a_file_is_its_name_its_size_and_its_head(tmp_path):
    file = tmp_path / "model.gguf"
    data = b"GGUF" + bytes(HEAD)
    file.write_bytes(data)
    assert fingerprint(file) == {"model.gguf": [HEAD + 4, hashlib.sha256(data[:HEAD]).hexdigest()]}


def test_any_part_of_a_split_model_stands_for_all(tmp_path):
    for number in (1, 2):
        (tmp_path / f"m[q]-0000{number}-of-00002.gguf").write_bytes(b"GGUF")
    (tmp_path / "other-00001-of-00002.gguf").write_bytes(b"GGUF")
    found = fingerprint(tmp_path / "m[q]-00002-of-00002.gguf")
    assert list(found) == ["m[q]-00001-of-00002.gguf", "m[q]-00002-of-00002.gguf"]


def test_a_folder_is_its_files_wherever_it_lies(tmp_path):
    for place in ("a", "b"):
        (tmp_path / place / "params").mkdir(parents=True)
        (tmp_path / place / "config.json").write_text("{}")
        (tmp_path / place / "params" / "d").write_bytes(b"123")
        (tmp_path / place / ".cache").mkdir()
        (tmp_path / place / ".cache" / "when").write_text(place)
    assert fingerprint(tmp_path / "a") == fingerprint(tmp_path / "b")
    assert list(fingerprint(tmp_path / "a")) == ["config.json", "params/d"]


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "model.safetensors").write_bytes(b"x" * 11),
        lambda folder: (folder / "model.safetensors").write_bytes(b"y" * 10),
        lambda folder: (folder / "tokenizer.json").write_text(" " * (HEAD + 1) + "2"),
        lambda folder: (folder / "more.json").write_text("{}"),
    ],
    ids=["size", "head", "end of a description", "file"],
)
def test_a_change_shows(tmp_path, change):
    (tmp_path / "model.safetensors").write_bytes(b"x" * 10)
    (tmp_path / "tokenizer.json").write_text(" " * (HEAD + 1) + "1")
    before = fingerprint(tmp_path)
    change(tmp_path)
    assert fingerprint(tmp_path) != before


def test_what_is_not_there_is_said(tmp_path):
    with pytest.raises(UserError, match=r"gone\.gguf can't be read: No such file or directory; check the path"):
        fingerprint(tmp_path / "gone.gguf")
