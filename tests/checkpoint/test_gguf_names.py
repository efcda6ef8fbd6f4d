"""The metadata of published GGUF files, as they are, mean what the models' own config.json mean; and what must be refused, in one line."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoint import families
from checkpoint.gguf_file import GGUFFile, TensorInfo
from checkpoint.gguf_names import GGUFSource, config_keys, further_layers
from model import MLAConfig, ModelConfig
from runtime import UserError


class Described(GGUFFile):
    """A file of which only metadata and a few tensors exist."""

    def dequantize(self, name: str, index: int | None = None) -> np.ndarray:
        return np.array(FACTORS[name], np.float32)


def llama3_factors() -> list[float]:
    """What Llama 3.2's frequencies are divided by: rope_freqs.weight of its files, of 64 elements per head."""
    turns = 8192 / (2 * np.pi * 500_000.0 ** (np.arange(0, 64, 2) / 64))
    kept = np.clip((turns - 1) / (4 - 1), 0, 1)
    return (1 / (kept + (1 - kept) / 32)).tolist()


SHORT, LONG = [1 + 0.01 * i for i in range(48)], [1 + 0.5 * i for i in range(48)]
FACTORS = {"rope_freqs.weight": llama3_factors(), "rope_factors_short.weight": SHORT, "rope_factors_long.weight": LONG}
LONG_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")


def described(architecture: str, values: dict[str, Any], vocabulary: int, tied: bool = False, *more: str) -> Described:
    names = ["token_embd.weight", *([] if tied else ["output.weight"]), *more]
    tensors = {n: TensorInfo(n, Path("a.gguf"), (vocabulary, 8), gguf.GGMLQuantizationType.F32, 0, 0) for n in names}
    metadata = {f"{architecture}.{key}": value for key, value in values.items()}
    return Described(Path("a.gguf"), {"general.architecture": architecture} | metadata, tensors)


def sizes(context: int, width: int, layers: int, hidden: int, heads: int, kv_heads: int, eps: float, base: float | None = None) -> dict:
    """The keys that all files have. Floats are stored in f32."""
    out = {"context_length": context, "embedding_length": width, "block_count": layers, "feed_forward_length": hidden}
    out |= {"attention.head_count": heads, "attention.head_count_kv": kv_heads}
    out["attention.layer_norm_rms_epsilon"] = float(np.float32(eps))
    return out if base is None else out | {"rope.freq_base": base}


def hub(kind: str, vocabulary: int, context: int, width: int, layers: int, hidden: int, heads: int, kv_heads: int, eps: float, **more: Any):
    """The same, as config.json has them."""
    out = {"model_type": kind, "vocab_size": vocabulary, "max_position_embeddings": context, "hidden_size": width, "rms_norm_eps": eps}
    out |= {"num_hidden_layers": layers, "intermediate_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return out | more


def head(size: int) -> dict[str, int]:
    return {"attention.key_length": size, "attention.value_length": size}


GEMMA2 = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "attention.sliding_window": 4096}
LINEAR = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0}
HUB_LINEAR = {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.original_context_length": 4096}
LONGROPE = {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}
ATTENTION_FACTOR = float(np.float32(math.sqrt(1 + math.log(32) / math.log(4096))))
LLAMA = (131072, 2048, 16, 8192, 32, 8, 1e-5)
MISTRAL = (32768, 4096, 32, 14336, 32, 8, 1e-5)
QWEN25 = (32768, 3584, 28, 18944, 28, 4, 1e-6)
QWEN3 = (40960, 2048, 48, 6144, 32, 4, 1e-6)
OSS = (131072, 2880, 24, 2880, 64, 8, 1e-5)
V3 = (163840, 7168, 61, 18432, 128, 128, 1e-6)
PHI3, PHI3_LONG, PHI4 = (4096, 3072, 32, 8192, 32, 32, 1e-5), (131072, 3072, 32, 8192, 32, 32, 1e-5), (131072, 3072, 32, 8192, 24, 8, 1e-5)
GEMMAS2 = {"2b": (26, 2304, 9216, 8, 4, 256, 256), "9b": (42, 3584, 14336, 16, 8, 256, 256), "27b": (46, 4608, 36864, 32, 16, 128, 144)}
GEMMAS3 = {
    "1b": (26, 1152, 6912, 4, 1, 256, 256),
    "4b": (34, 2560, 10240, 8, 4, 256, 256),
    "12b": (48, 3840, 15360, 16, 8, 256, 256),
    "27b": (62, 5376, 21504, 32, 16, 128, 168),
}
V3_FILE = {
    "rope.dimension_count": 64, "attention.q_lora_rank": 1536, "attention.kv_lora_rank": 512, "leading_dense_block_count": 3,
    "expert_count": 256, "expert_used_count": 8, "expert_shared_count": 1, "expert_feed_forward_length": 2048, "expert_weights_scale": 2.5,
    "expert_weights_norm": True, "expert_gating_func": 2, "rope.scaling.factor": 40.0,
    "rope.scaling.yarn_log_multiplier": float(np.float32(0.1)),
} | YARN  # fmt: skip
V3_TODAY = {"attention.head_count_kv": 1, "attention.key_length": 576, "attention.value_length": 512}
V3_TODAY |= {"attention.key_length_mla": 192, "attention.value_length_mla": 128, "expert_group_count": 8, "expert_group_used_count": 4}
V3_HUB = hub(
    "deepseek_v3", 129280, *V3, q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    n_routed_experts=256, num_experts_per_tok=8, n_shared_experts=1, moe_intermediate_size=2048, routed_scaling_factor=2.5, n_group=8,
    topk_group=4, first_k_dense_replace=3, norm_topk_prob=True, rope_theta=10000, scoring_func="sigmoid",
    rope_scaling={"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                  "mscale_all_dim": 1.0},
)  # fmt: skip


def gemma2(size: str) -> tuple[Described, dict[str, Any]]:
    layers, width, hidden, heads, kv_heads, dim, scalar = GEMMAS2[size]
    common = (8192, width, layers, hidden, heads, kv_heads, 1e-6)
    config = hub("gemma2", 256000, *common, head_dim=dim, query_pre_attn_scalar=scalar, sliding_window=4096)
    config |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return described("gemma2", sizes(*common) | head(dim) | GEMMA2, 256000, True), config


def gemma3(size: str) -> tuple[Described, dict[str, Any]]:
    layers, width, hidden, heads, kv_heads, dim, scalar = GEMMAS3[size]
    small = size == "1b"
    window = 512 if small else 1024
    common = (32768 if small else 131072, width, layers, hidden, heads, kv_heads, 1e-6)
    values = sizes(*common, base=1e6) | head(dim) | {"attention.sliding_window": window} | ({} if small else LINEAR)
    config = hub("gemma3_text", 262144, *common, head_dim=dim, query_pre_attn_scalar=scalar, sliding_window=window, rope_theta=1e6)
    return described("gemma3", values, 262144, True), config | ({} if small else HUB_LINEAR)


PUBLISHED = {
    "Llama 3.2 1B": (
        described("llama", sizes(*LLAMA, base=5e5) | head(64) | {"rope.dimension_count": 64}, 128256, True, "rope_freqs.weight"),
        hub("llama", 128256, *LLAMA, head_dim=64, rope_theta=5e5, tie_word_embeddings=True)
        | {"rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}}
        | {"original_max_position_embeddings": 8192},
    ),
    "Mistral 7B v0.3": (
        described("llama", sizes(*MISTRAL, base=1e6) | {"rope.dimension_count": 128}, 32768),
        hub("mistral", 32768, *MISTRAL, rope_theta=1e6, sliding_window=None),
    ),
    "Mixtral 8x7B": (
        described("llama", sizes(*MISTRAL, base=1e6) | {"rope.dimension_count": 128, "expert_count": 8, "expert_used_count": 2}, 32000),
        hub("mixtral", 32000, *MISTRAL, rope_theta=1e6, sliding_window=None, num_local_experts=8, num_experts_per_tok=2),
    ),
    "Qwen2.5 7B": (
        described("qwen2", sizes(*QWEN25, base=1e6), 152064),
        hub("qwen2", 152064, *QWEN25, rope_theta=1e6, use_sliding_window=False, sliding_window=131072, max_window_layers=28),
    ),
    "Qwen3 30B A3B": (
        described(
            "qwen3moe",
            sizes(*QWEN3, base=1e6) | head(128) | {"expert_count": 128, "expert_used_count": 8, "expert_feed_forward_length": 768},
            151936,
        ),
        hub("qwen3_moe", 151936, *QWEN3, rope_theta=1e6, head_dim=128, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768)
        | {"norm_topk_prob": True},
    ),
    **{f"Gemma 2 {size}": gemma2(size) for size in GEMMAS2},
    **{f"Gemma 3 {size}": gemma3(size) for size in GEMMAS3},
    "Phi-3 mini 4k": (
        described("phi3", sizes(*PHI3, base=1e4) | {"rope.dimension_count": 96, "attention.sliding_window": 2047}, 32064),
        hub("phi3", 32064, *PHI3, rope_theta=1e4, sliding_window=2047, original_max_position_embeddings=4096),
    ),
    "Phi-3 mini 4k, first files": (
        described("phi3", sizes(*PHI3) | {"rope.dimension_count": 96}, 32064),
        hub("phi3", 32064, *PHI3, rope_theta=1e4, sliding_window=2047, original_max_position_embeddings=4096),
    ),
    "Phi-3 mini 128k": (
        described(
            "phi3",
            sizes(*PHI3_LONG, base=1e4)
            | {"rope.dimension_count": 96, "attention.sliding_window": 262144, "rope.scaling.original_context_length": 4096}
            | {"rope.scaling.attn_factor": ATTENTION_FACTOR},
            32064, False, *LONG_FACTORS,
        ),
        hub("phi3", 32064, *PHI3_LONG, rope_theta=1e4, sliding_window=262144, original_max_position_embeddings=4096, rope_scaling=LONGROPE),
    ),
    "Phi-4 mini": (
        described(
            "phi3",
            sizes(*PHI4, base=1e4)
            | {"rope.dimension_count": 96, "attention.sliding_window": 262144, "rope.scaling.original_context_length": 4096}
            | {"rope.scaling.attn_factor": ATTENTION_FACTOR},
            200064, True, *LONG_FACTORS,
        ),
        hub("phi3", 200064, *PHI4, rope_theta=1e4, sliding_window=262144, original_max_position_embeddings=4096, rope_scaling=LONGROPE)
        | {"partial_rotary_factor": 0.75, "tie_word_embeddings": True},
    ),
    "gpt-oss 20B": (
        described(
            "gpt-oss",
            sizes(*OSS, base=150000.0) | head(64) | YARN
            | {"attention.sliding_window": 128, "expert_count": 32, "expert_used_count": 4, "expert_feed_forward_length": 2880}
            | {"rope.scaling.factor": 32.0},
            201088,
        ),
        hub("gpt_oss", 201088, *OSS, head_dim=64, rope_theta=150000, sliding_window=128, num_local_experts=32, num_experts_per_tok=4)
        | {"rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}}
        | {"original_max_position_embeddings": 4096},
    ),
    "DeepSeek V3": (described("deepseek2", sizes(*V3, base=1e4) | V3_FILE | V3_TODAY, 129280), V3_HUB),
    "DeepSeek V3, first files": (
        described("deepseek2", sizes(*V3, base=1e4) | V3_FILE | {"attention.key_length": 192, "attention.value_length": 128}, 129280),
        V3_HUB,
    ),
    "DeepSeek V3, further layer in the file": (
        described("deepseek2", sizes(*V3, base=1e4) | V3_FILE | V3_TODAY | {"block_count": 62, "nextn_predict_layers": 1}, 129280),
        V3_HUB,
    ),
}  # fmt: skip


def without_ropes(config: ModelConfig) -> ModelConfig:
    """The same with rotations that say nothing, and with no scale and no window that change nothing."""
    plain = {}

    def layer(of):
        if of not in plain:
            attention, rope = of.attention, dataclasses.replace(of.attention.rope, theta=1.0, scaling=None)
            attention = dataclasses.replace(attention, rope=rope, scale=round(attention.spec.scale, 7))
            if not isinstance(attention, MLAConfig) and attention.window and attention.window >= config.context_length:
                attention = dataclasses.replace(attention, window=None)
            plain[of] = dataclasses.replace(of, attention=attention)
        return plain[of]

    return dataclasses.replace(config, layers=tuple(layer(of) for of in config.layers))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_says_what_the_models_own_config_says(name):
    file, config = PUBLISHED[name]
    got, want = (families.model_config(keys, Path("a")) for keys in (config_keys(file), config))
    assert without_ropes(got) == without_ropes(want)
    for ours, theirs in {(a.attention.rope, b.attention.rope) for a, b in zip(got.layers, want.layers, strict=True)}:
        for context in (1, got.context_length):
            np.testing.assert_allclose(ours.frequencies(context), theirs.frequencies(context), rtol=1e-5)
        assert ours.magnitude == pytest.approx(theirs.magnitude, rel=1e-6)


def changed(name: str, **values: Any) -> Described:
    """A published file with other metadata: dots are `__`, None takes a key out."""
    file, _ = PUBLISHED[name]
    architecture = file.metadata["general.architecture"]
    metadata = file.metadata | {f"{architecture}.{key.replace('__', '.')}": value for key, value in values.items()}
    return dataclasses.replace(file, metadata={key: value for key, value in metadata.items() if value is not None})


def layers(file: GGUFFile) -> tuple[Any, ...]:
    return families.model_config(config_keys(file), Path("a")).layers


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("Gemma 3 4b", {"attention__head_count_kv": [4] * 34}),
        ("Gemma 3 4b", {"feed_forward_length": [10240] * 34}),
        ("Gemma 3 4b", {"attention__sliding_window_pattern": 6}),
        ("Gemma 3 4b", {"attention__sliding_window_pattern": [(i + 1) % 6 != 0 for i in range(34)]}),
        ("Gemma 3 4b", {"rope__freq_base_swa": 10000.0}),
        ("Gemma 3 4b", {"rope__freq_base": None}),
        ("Gemma 2 9b", {"attention__sliding_window_pattern": 2, "attention__sliding_window": None}),
        ("Gemma 2 9b", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
        ("Mistral 7B v0.3", {"attention__causal": True, "logit_scale": 1.0, "attention__scale": 0.0, "attention__sliding_window": 0}),
        ("Qwen3 30B A3B", {"expert_gating_func": 1, "expert_weights_norm": True}),
        ("gpt-oss 20B", {"attention__sliding_window_pattern": 2, "rope__scaling__yarn_beta_fast": 32.0}),
    ],
)
def test_keys_of_other_converters_say_the_same(name, values):
    assert layers(changed(name, **values)) == layers(PUBLISHED[name][0])


def test_a_window_pattern_in_the_file_goes_before_the_familys_own():
    got = [layer.attention.window for layer in layers(changed("Gemma 3 1b", attention__sliding_window_pattern=2))]
    assert got == [512, None] * 13
    everywhere = layers(changed("Gemma 3 1b", attention__sliding_window=None))
    assert {layer.attention.window for layer in everywhere} == {None}
    assert {layer.attention.rope.theta for layer in everywhere} == {1e6}


def test_the_older_key_of_linear_scaling_is_read():
    assert layers(changed("Mistral 7B v0.3", rope__scale_linear=4.0)) == layers(
        changed("Mistral 7B v0.3", rope__scaling__type="linear", rope__scaling__factor=4.0)
    )
    assert layers(changed("Mistral 7B v0.3", rope__scaling__type="none", rope__scaling__factor=4.0)) == layers(
        PUBLISHED["Mistral 7B v0.3"][0]
    )


def test_router_weights_are_normalized_only_if_the_file_says_so():
    assert not layers(changed("DeepSeek V3", expert_weights_norm=None))[-1].mlp.router.normalize
    assert layers(changed("DeepSeek V3", expert_weights_scale=None))[-1].mlp.router.scale == 1.0


@given(st.integers(1, 256).flatmap(lambda half: st.tuples(st.just(2 * half), st.integers(1, half))))
def test_any_rotated_part_of_a_head_is_read_exactly(sizes):
    dim, half = sizes
    values = {"attention__key_length": dim, "attention__value_length": dim, "rope__dimension_count": 2 * half}
    assert layers(changed("Mistral 7B v0.3", **values))[0].attention.rope.dim == 2 * half


def test_further_layers_are_counted():
    assert further_layers(PUBLISHED["DeepSeek V3, further layer in the file"][0]) == 1
    assert further_layers(PUBLISHED["DeepSeek V3"][0]) == 0


REQUIRED = ("block_count", "context_length", "embedding_length", "feed_forward_length", "attention__head_count")


@pytest.mark.parametrize("key", [*REQUIRED, "attention__layer_norm_rms_epsilon"])
@pytest.mark.parametrize("name", ["Llama 3.2 1B", "gpt-oss 20B", "DeepSeek V3"])
def test_a_missing_key_is_named(name, key):
    with pytest.raises(UserError, match=f"^a.gguf has no metadata '[a-z0-9-]+.{key.replace('__', '.')}': convert the model again"):
        config_keys(changed(name, **{key: None}))


@pytest.mark.parametrize("key", REQUIRED)
@pytest.mark.parametrize("value", [0, -1, True, "many", 2.5, []])
def test_a_number_that_is_none_is_called_damaged(key, value):
    with pytest.raises(UserError, match=f"^a.gguf is damaged: its llama.{key.replace('__', '.')} is .*: download it again$"):
        config_keys(changed("Llama 3.2 1B", **{key: value}))


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("Mistral 7B v0.3", {"attention__head_count_kv": [8, 4] * 16}, "head_count_kv differs from layer to layer, which is not supported"),
        ("Mistral 7B v0.3", {"feed_forward_length": [1, 2] * 16}, "feed_forward_length differs from layer to layer"),
        ("Mistral 7B v0.3", {"attention__value_length": 64}, "llama.attention.value_length=64 is not supported for this architecture"),
        ("Mistral 7B v0.3", {"attention__sliding_window": 4096}, "llama.attention.sliding_window=4096 is not supported"),
        ("Mistral 7B v0.3", {"attention__causal": False}, "llama.attention.causal=False is not supported"),
        ("Mistral 7B v0.3", {"attention__scale": 0.5}, "llama.attention.scale=0.5 is not supported"),
        ("Mistral 7B v0.3", {"final_logit_softcapping": 30.0}, "llama.final_logit_softcapping=30.0 is not supported"),
        ("Mistral 7B v0.3", {"rope__scaling__type": "longrope"}, "by rope_factors_short.weight and .*, which it does not hold"),
        ("Llama 3.2 1B", {"rope__scaling__type": "yarn"}, "has factors for its rotary frequencies beside scaling 'yarn'"),
        ("Llama 3.2 1B", {"rope__freq_base": "fast"}, "is damaged: its llama.rope.freq_base is 'fast'"),
        ("Qwen2.5 7B", {"rope__freq_base_swa": 10000.0}, "qwen2.rope.freq_base_swa=10000.0 is not supported"),
        ("Qwen3 30B A3B", {"expert_gating_func": 2}, "qwen3moe.expert_gating_func=2 is not supported"),
        ("gpt-oss 20B", {"expert_gating_func": 1}, "gpt-oss.expert_gating_func=1 is not supported"),
        ("gpt-oss 20B", {"attention__sliding_window": None}, "has no metadata 'gpt-oss.attention.sliding_window'"),
        ("Gemma 3 4b", {"attention__sliding_window_pattern": [True] * 33}, "has 33 layer_types for 34 layers"),
        ("Gemma 3 4b", {"attention__sliding_window_pattern": 0}, "is damaged: its gemma3.attention.sliding_window_pattern is 0"),
        ("DeepSeek V3", {"expert_gating_func": None}, "routes by softmax, as DeepSeek V2 does, which is not supported"),
        ("DeepSeek V3", {"expert_gating_func": 1}, "deepseek2.expert_gating_func=1 is not supported"),
        ("DeepSeek V3", {"expert_count": 0}, "has no experts, without which this architecture is not supported"),
        ("DeepSeek V3", {"attention__temperature_scale": 0.1}, "deepseek2.attention.temperature_scale=.* is not supported"),
        ("DeepSeek V3", {"attention__kv_lora_rank": None}, "has no metadata 'deepseek2.attention.kv_lora_rank'"),
        ("DeepSeek V3", {"rope__dimension_count": None}, "has no metadata 'deepseek2.rope.dimension_count'"),
        ("Mixtral 8x7B", {"expert_used_count": 9}, "top_k 9 is not within 1 to num_experts 8"),
    ],
)
def test_what_is_not_supported_is_refused_in_one_line(name, values, message):
    with pytest.raises(UserError, match=message) as error:
        layers(changed(name, **values))
    assert "\n" not in str(error.value)


def test_an_unknown_architecture_is_refused_with_those_that_are_known():
    file = described("mamba", sizes(*LLAMA), 100)
    for ask in (config_keys, GGUFSource):
        with pytest.raises(UserError, match=r"^a\.gguf holds architecture 'mamba'; supported: deepseek2, gemma2, .*qwen3moe\. Use another"):
            ask(file)


def test_a_file_that_does_not_say_its_architecture_is_refused():
    with pytest.raises(UserError, match=r"has no metadata 'general\.architecture'"):
        config_keys(GGUFFile(Path("a.gguf"), {}, {}))
