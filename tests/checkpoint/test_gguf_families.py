"""Every architecture, written as a GGUF file in the way of llama.cpp's converters, against the logits that transformers gave for the model.

Where the format or what its readers make of it cannot say all that a fixture has, the fixture is reduced: its config is changed, and the
answers are those of the changed model folder, whose reading `tests/parity` compares with transformers.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import checkpoint
import kv
from model import Transformer, prefill
from runtime import UserError
from tests.checkpoint import gguf_converter
from tests.parity import fixture as fixtures

TOLERANCE = 2e-4  # of the largest logit


@dataclasses.dataclass(frozen=True)
class Case:
    """A fixture, how it is written, and what is changed before.

    Attributes:
      fixture: its name.
      style: of the file, see `gguf_converter.write`.
      config: keys that are set to other values; "a.b" is key b of the dict a.
      like: tensors of these layers are added as those of `like[layer]` are, with other values.
    """

    fixture: str
    style: str = "mla"
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    like: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.fixture}-{self.style}"


NO_WINDOW = {"sliding_window": None}  # no key for it: readers see all tokens
OWN_WIDTH = {"query_pre_attn_scalar": 12}  # no key for it: a head's width, but for the largest models
ONE_MSCALE = {"rope_parameters.mscale": 1.2}  # one key for mscale and mscale_all_dim, equal in all published models
LIMIT = {"swiglu_limit": 7.0}  # no key for it: 7 in all published models
ALL_SPARSE = {"decoder_sparse_step": 1, "mlp_only_layers": []}  # no keys for them
CASES = (
    Case("llama2"),
    Case("llama3"),
    Case("mistral", config=NO_WINDOW),
    Case("mixtral"),
    Case("mixtral", "single_experts"),
    Case("mixtral", "fused_experts"),
    Case("qwen2", config=NO_WINDOW | {"use_sliding_window": False, "layer_types": None}),
    Case("qwen2_moe", config=ALL_SPARSE, like=dict.fromkeys(range(3), 3)),
    Case("qwen2_moe", "first_files", ALL_SPARSE | {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 48}, {0: 3, 1: 3, 2: 3}),
    Case("qwen3"),
    Case("qwen3_moe", config=ALL_SPARSE, like={0: 1}),
    Case("gemma2", config=OWN_WIDTH),
    Case("gemma2", "first_files", OWN_WIDTH | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
    Case("gemma3", config=OWN_WIDTH),
    Case("gemma3", "first_files", OWN_WIDTH),
    Case("phi3"),
    Case("phi3_long"),
    Case("gpt_oss", config=LIMIT),
    Case("gpt_oss_mxfp4", config=LIMIT),
    Case("deepseek_v3", config=ONE_MSCALE),
    Case("deepseek_v3", "whole_kv_b", ONE_MSCALE),
    Case("deepseek_v3", "fused_experts", ONE_MSCALE),
    Case("deepseek_v3_no_q_lora"),
    Case("deepseek_v3_no_q_lora", "first_files"),
)


def model(case: Case) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The case's config and weights, of the shapes that the config asks for."""
    fixture = fixtures.read(case.fixture)
    config, described = fixtures.changed(fixture.config, case.config), {name: dict(of) for name, of in fixture.tensors.items()}
    for layer, like in case.like.items():
        prefix = f"model.layers.{layer}.mlp."
        described = {name: of for name, of in described.items() if not name.startswith(prefix)}
        source = f"model.layers.{like}.mlp."
        described |= {name.replace(source, prefix): dict(of) for name, of in described.items() if name.startswith(source)}
    for name, of in described.items():
        width = config.get("shared_expert_intermediate_size" if ".shared_expert." in name else "moe_intermediate_size")
        if config["model_type"] == "qwen2_moe" and (".shared_expert." in name or ".experts." in name):
            D = config["hidden_size"]
            of["shape"] = [D, width] if "down_proj" in name else [width, D]
    return config, fixtures.tensors(fixture.seed, described)


def logits(loaded: checkpoint.Checkpoint, fixture: fixtures.Fixture) -> np.ndarray:
    """Of the full forward: f32 [B, T, V]."""
    cache = kv.fresh(loaded.config, len(fixture.lengths))
    return np.asarray(
        prefill(Transformer(loaded.config), loaded.params, cache, fixture.tokens, jnp.asarray(fixture.lengths), logits="all")[0]
    )


def expected(case: Case, config: Mapping[str, Any], weights: Mapping[str, np.ndarray], folder: Any) -> np.ndarray:
    """What transformers answered; for a reduced model, what its folder answers."""
    fixture = fixtures.read(case.fixture)
    if not case.config:
        return fixture.logits
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    safetensors.numpy.save_file(dict(weights), folder / "model.safetensors")
    return logits(checkpoint.load(folder), fixture)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_gguf_file_computes_what_the_model_folder_does(case, tmp_path):
    fixture = fixtures.read(case.fixture)
    config, weights = model(case)
    want = expected(case, config, weights, tmp_path / "folder")
    loaded = checkpoint.load(gguf_converter.write(tmp_path / "model.gguf", config, weights, case.style))
    assert loaded.kind == "gguf" and not loaded.notices
    got, scale = logits(loaded, fixture), np.abs(want).max()
    for row, length in enumerate(fixture.lengths):
        assert np.abs(got[row, :length] - want[row, :length]).max() <= TOLERANCE * scale


def deepseek(path: Any, extra: Mapping[str, np.ndarray], without: str = "", **metadata: Any) -> Any:
    config, weights = model(Case("deepseek_v3", config=ONE_MSCALE))
    tensors = {name: value for name, value in gguf_converter.converted(config, weights) if name != without} | dict(extra)
    return gguf_converter.write(path, config, weights, tensors=tensors, **metadata)


def test_a_layer_that_predicts_further_tokens_is_left_out_with_a_notice(tmp_path):
    extra = {f"blk.3.{name}": np.ones((4, 8), np.float32) for name in ("nextn.eh_proj.weight", "attn_norm.weight", "attn_q_a.weight")}
    loaded = checkpoint.load(deepseek(tmp_path / "a.gguf", extra, block_count=4, nextn_predict_layers=1))
    assert loaded.notices == (f"{tmp_path / 'a.gguf'}: not used: 3 tensors of layers that predict further tokens",)
    assert loaded.config == checkpoint.load(deepseek(tmp_path / "b.gguf", {})).config


@pytest.mark.parametrize(
    ("extra", "without", "message"),
    [
        ({"blk.0.attn_k_b.weight": np.ones((64, 12))}, "", r"attn_k_b.weight \(64, 12\) and .* \(4, 10, 16\) do not fit together"),
        ({"blk.0.attn_v_b.weight": np.ones((4, 10, 17))}, "", r"\(4, 16, 12\) and blk.0.attn_v_b.weight \(4, 10, 17\) do not fit"),
        ({}, "blk.1.attn_v_b.weight", "has no tensor 'blk.1.attn_v_b.weight'"),
        ({}, "blk.1.exp_probs_b.bias", r"1 tensors are missing: model.layers.1.mlp.gate.e_score_correction_bias \(8,\)"),
        ({"blk.1.ffn_up_exps.weight": np.ones(8)}, "", r"no place in the model: model.layers.1.ffn_up_exps.weight \(8,\)"),
        ({"blk.1.ffn_extra.weight": np.ones(8)}, "", r"no place in the model: model.layers.1.ffn_extra.weight \(8,\)"),
        ({"blk.0.post_attention_norm.weight": np.ones(32)}, "", "is model.layers.0.post_attention_layernorm.weight, which another one is"),
        ({"v.blk.0.attn_q.weight": np.ones(8)}, "", r"no place in the model: v.blk.0.attn_q.weight \(8,\)"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_in_one_line(tmp_path, extra, without, message):
    with pytest.raises(UserError, match=message) as error:
        checkpoint.load(deepseek(tmp_path / "a.gguf", {k: v.astype(np.float32) for k, v in extra.items()}, without))
    assert "\n" not in str(error.value)


def test_kv_b_in_one_piece_goes_before_its_parts(tmp_path):
    """Files of one fork hold both, the parts as matrices."""
    config, weights = model(Case("deepseek_v3", config=ONE_MSCALE))
    extra = {f"blk.{i}.attn_k_b.weight": np.ones((64, 12), np.float32) for i in range(3)}
    tensors = dict(gguf_converter.converted(config, weights, "whole_kv_b")) | extra
    both = checkpoint.load(gguf_converter.write(tmp_path / "a.gguf", config, weights, "whole_kv_b", tensors=tensors))
    one = checkpoint.load(gguf_converter.write(tmp_path / "b.gguf", config, weights, "whole_kv_b"))
    jax.tree.map(np.testing.assert_array_equal, both.params, one.params)
