"""parity.compare: each class of cause is named. The reference is this stack itself over a folder whose config was changed, so that no other
one is needed; `test_parity` holds both stacks against each other."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import checkpoint
from parity import compare
from parity import reference as reference_module
from parity.compare import forward
from runtime import UserError
from tests.parity import fixture as fixtures


@pytest.fixture(autouse=True)
def own_reference(monkeypatch):
    """`parity.reference` answered by this stack."""

    def answers(loaded, tokens):
        return forward(loaded.config, loaded.params, np.asarray(tokens, np.int32))

    monkeypatch.setattr(reference_module, "load_reference", lambda folder: checkpoint.load(folder, jnp.float32))
    monkeypatch.setattr(reference_module, "answers", answers)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    def write(name):
        return fixtures.write_folder(fixtures.read(name), tmp_path_factory.mktemp("compare") / name)

    return write


def changed(folder, tmp_path, changes):
    """A copy of the folder whose config.json has other values at dotted keys."""
    copy = tmp_path / "changed"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(fixtures.changed(config, changes)))
    return copy


def test_equal_models_agree(folder):
    found = compare(folder("mistral"))
    assert found.agrees
    assert found.cause is None
    assert found.first_token is None
    assert all(difference <= 1e-6 * largest for difference, largest in (*found.layers, found.logits))
    assert "agrees" in found.table()


@pytest.mark.parametrize(
    ("family", "changes", "cause"),
    [
        pytest.param("mistral", {"rms_norm_eps": 0.02}, "eps/norm", marks=pytest.mark.slow),
        pytest.param("mistral", {"rope_parameters.rope_theta": 3e4}, "positions/rope", marks=pytest.mark.slow),
        pytest.param("mistral", {"rope_parameters.rope_theta": 1e6}, "positions/rope", marks=pytest.mark.slow),
        ("mistral", {"sliding_window": None}, "mask/window"),
        pytest.param("mistral", {"sliding_window": 7}, "mask/window", marks=pytest.mark.slow),
        pytest.param("gemma2", {"query_pre_attn_scalar": 64}, "scale/softcap", marks=pytest.mark.slow),
        pytest.param("gemma2", {"final_logit_softcapping": None}, "scale/softcap", marks=pytest.mark.slow),
    ],
)
def test_the_cause_of_a_mismatch_is_named(folder, tmp_path, family, changes, cause):
    model = folder(family)
    found = compare(model, changed(model, tmp_path, changes))
    assert not found.agrees
    assert found.cause == cause, found.table()
    assert found.as_json()["agrees"] is False
    assert f"likely cause: {cause}" in found.table()


@pytest.mark.slow
def test_rounding_to_bf16_is_told_from_a_fault(folder, monkeypatch):
    def rounded(loaded, tokens):
        return forward(loaded.config, loaded.params, np.asarray(tokens, np.int32), jnp.bfloat16)

    monkeypatch.setattr(reference_module, "answers", rounded)
    assert compare(folder("llama2")).cause == "dtype"


def test_models_of_other_shapes_are_refused(folder):
    with pytest.raises(UserError, match="they are not the same model"):
        compare(folder("mistral"), folder("qwen3"))


def test_a_gguf_file_has_no_reference(smollm2_path):
    with pytest.raises(UserError, match="is no Hugging Face folder, which is what transformers reads"):
        compare(smollm2_path)
