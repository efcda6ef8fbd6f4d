"""The reference models as data: a tiny config per family with all its special features on, and what each feature is worth.

Widths, windows and limits are small, so that a prompt of 24 tokens crosses every one of them. `make_fixtures` checks with transformers
that each model notices when a feature is missing.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Ablation:
    """A model without one of its features.

    Attributes:
      name: the feature that is gone.
      config: config keys that are set to other values; "a.b" is key b of the dict a.
      weights: pattern of tensor names -> the constant that fills them.
      modules: pattern of module names -> attributes that are set to other values.
      without: pattern of modules that pass their input through.
      felt: by how much of the largest logit it must move the logits.
    """

    name: str
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    weights: Mapping[str, float] = dataclasses.field(default_factory=dict)
    modules: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    without: str = ""
    felt: float = 1e-2


@dataclasses.dataclass(frozen=True)
class Family:
    """A reference model.

    Attributes:
      name: of its fixture.
      config: what its transformers config is built from.
      ablations: its features.
      seed: of weights and tokens. Chosen such that no router and no indexer is near a tie.
      sharded: whether its folder has several weights files and an index.
      tensor_dtype: "F32" or "BF16", of all tensors that are not packed.
      packed: the expert weights are MXFP4 blocks and scales.
    """

    name: str
    config: Mapping[str, Any]
    ablations: tuple[Ablation, ...]
    seed: int = 0
    sharded: bool = False
    tensor_dtype: str = "F32"
    packed: bool = False


def fill(name: str, shape: tuple[int, ...], family: Family) -> dict[str, Any]:
    """How a tensor is filled: {"normal": [mean, deviation]}, or {"integers": [low, high]} with both ends included."""
    if name.endswith("_blocks"):
        return {"integers": [0, 255]}
    if name.endswith("_scales"):
        return {"integers": [121, 124]}  # powers of two, biased by 127
    gemma = family.config["model_type"].startswith("gemma")
    for pattern, mean, deviation in (
        (r"embed_tokens\.weight", 0, 0.4 if gemma else 1),  # Gemma multiplies them by sqrt(D)
        (r"norm.*\.weight", 0 if gemma else 1, 0.3),  # Gemma's norms add 1
        (r"sinks", 1, 1),
        (r"e_score_correction_bias", 0, 0.2),
        (r"bias", 0, 0.5),
    ):
        if re.search(pattern, name):
            return {"normal": [mean, deviation]}
    fan_in = shape[-2] if len(shape) == 3 else shape[-1]
    gain = 2 if re.search(r"(lm_head|gate|router|shared_expert_gate|wk|wq_b|weights_proj)\.weight", name) else 1.5
    return {"normal": [0, round(gain * fan_in**-0.5, 4)]}


BASE = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
BASE |= {"max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "rms_norm_eps": 0.05}


def _rope(theta: float, **scaling: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta} | scaling}


EPS = Ablation("eps of the norms", {"rms_norm_eps": 1e-6})
THETA = Ablation("rope base", {"rope_parameters.rope_theta": 300.0})
WINDOW = Ablation("window", {"sliding_window": 64})
WINDOW_BY_ONE = Ablation("window by one", {"sliding_window": 6})
BIASES = Ablation("biases of q, k and v", weights={r"[qkv]_proj\.bias": 0})
EMBEDDING_SCALE = Ablation("scale of the embedding", weights={r"embed_scale": 1})
QK_NORM = Ablation("norm of q and k", without=r"self_attn\.[qk]_norm$")
QK_NORM_SCALE = Ablation("scales of the norm of q and k", weights={r"self_attn\.[qk]_norm\.weight": 1})
TOP_K = Ablation("experts per token", {"num_experts_per_tok": 1})
NORM_TOP_K = Ablation("router weights sum to 1", {"norm_topk_prob": False})


def _layers(types: list[str]) -> dict[str, Any]:
    return {"num_hidden_layers": len(types), "layer_types": [f"{kind}_attention" for kind in types]}


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.2, 1.5, 1.9, 2.2, 2.6],
    "long_factor": [1.3, 2.5, 4.0, 7.0, 12.0, 16.0],
    "partial_rotary_factor": 0.75,
}
PHI3 = BASE | {"model_type": "phi3", "hidden_size": 64, "num_hidden_layers": 2, "sliding_window": 5}
LONGROPE_ABLATIONS = (
    EPS,
    THETA,
    WINDOW,
    WINDOW_BY_ONE,
    Ablation("attention factor", {"rope_parameters.attention_factor": 1.0}),
    Ablation("short factors", {"rope_parameters.short_factor": [1.0] * 6, "rope_parameters.long_factor": LONGROPE["long_factor"]}),
    Ablation("long factors", {"rope_parameters.long_factor": [1.0] * 6, "rope_parameters.short_factor": LONGROPE["short_factor"]}),
)
GPT_OSS = (
    BASE
    | {"model_type": "gpt_oss", "head_dim": 16, "sliding_window": 5, "num_local_experts": 8, "num_experts_per_tok": 3}
    | {"swiglu_limit": 1.5, "attention_bias": True}
    | _layers(["sliding", "full", "sliding"])
    | _rope(1000.0, rope_type="yarn", factor=16.0, beta_fast=4.0, beta_slow=1.0, truncate=False, original_max_position_embeddings=64)
)
YARN_ABLATIONS = (
    EPS,
    THETA,
    Ablation("YaRN factor", {"rope_parameters.factor": 1.0}),
    Ablation("YaRN attention factor", {"rope_parameters.attention_factor": 1.0}),
    Ablation("YaRN ramp", {"rope_parameters.beta_fast": 32.0}),
    Ablation("YaRN original context", {"rope_parameters.original_max_position_embeddings": 16}),
)
GPT_OSS_ABLATIONS = (
    *YARN_ABLATIONS,
    Ablation("YaRN ramp between whole numbers", {"rope_parameters.truncate": True}),
    BIASES,
    WINDOW,
    WINDOW_BY_ONE,
    TOP_K,
    Ablation("alternation", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    Ablation("sinks", weights={r"sinks": -1e9}),
    Ablation("bias of the output projection", weights={r"o_proj\.bias": 0}),
    Ablation("bias of the router", weights={r"router\.bias": 0}),
    Ablation("biases of the experts, first product", weights={r"gate_up_proj_bias": 0}),
    Ablation("biases of the experts, second product", weights={r"down_proj_bias": 0}),
    Ablation("clamp", {"swiglu_limit": 1e9}),
    Ablation("sigmoid's slope", {"swiglu_alpha": 1.0}),
)
DEEPSEEK = BASE | {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
DEEPSEEK_YARN = {"rope_type": "yarn", "factor": 40.0, "beta_fast": 4, "beta_slow": 1, "mscale": 0.8, "mscale_all_dim": 1.2}
DEEPSEEK_YARN |= {"original_max_position_embeddings": 256}
DEEPSEEK_ABLATIONS = (
    EPS,
    THETA,
    TOP_K,
    Ablation("score correction", weights={r"e_score_correction_bias": 0}),
    Ablation("routed scale", {"routed_scaling_factor": 1.0}),
    Ablation("norm of the KV latent", without=r"kv_a_layernorm$"),
    Ablation("shared experts", weights={r"shared_experts\.down_proj": 0}),
    Ablation("eps of the latent norm is 1e-6", modules={r"kv_a_layernorm$": {"variance_epsilon": 0.05}}),
)
DEEPSEEK_YARN_ABLATIONS = (
    *YARN_ABLATIONS[1:],
    Ablation("mscale", {"rope_parameters.mscale": 1.0}),
    Ablation("mscale_all_dim", {"rope_parameters.mscale_all_dim": 1.0}),
    Ablation("norm of the query latent", without=r"q_a_layernorm$"),
    Ablation("routing by groups", {"n_group": 1, "topk_group": 1}),
    NORM_TOP_K,
)

FAMILIES = (
    Family(
        "llama2",
        BASE | {"model_type": "llama", "num_key_value_heads": 4, "num_hidden_layers": 2} | _rope(10000.0),
        (
            EPS,
            THETA,
        ),
    ),
    Family(
        "llama3",
        BASE | {"model_type": "llama", "num_hidden_layers": 2, "head_dim": 12, "tie_word_embeddings": True} | _rope(10000.0, **LLAMA3),
        (
            EPS,
            THETA,
            Ablation("factor", {"rope_parameters.factor": 1.0}),
            Ablation("low_freq_factor", {"rope_parameters.low_freq_factor": 3.9}),
            Ablation("high_freq_factor", {"rope_parameters.high_freq_factor": 1.1}),
            Ablation("original context", {"rope_parameters.original_max_position_embeddings": 128}),
        ),
        sharded=True,
    ),
    Family(
        "mistral",
        BASE | {"model_type": "mistral", "num_hidden_layers": 3, "head_dim": 12, "sliding_window": 5} | _rope(10000.0),
        (EPS, THETA, WINDOW, WINDOW_BY_ONE),
    ),
    Family(
        "mixtral",
        BASE
        | {"model_type": "mixtral", "num_hidden_layers": 2, "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
        | _rope(1e6),
        (EPS, THETA, TOP_K),
        sharded=True,
    ),
    Family(
        "qwen2",
        BASE
        | {"model_type": "qwen2", "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}
        | _rope(1e6),
        (
            EPS,
            THETA,
            BIASES,
            WINDOW,
            WINDOW_BY_ONE,
            Ablation("which layers have the window", {"layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 2}),
        ),
        tensor_dtype="BF16",
    ),
    Family(
        "qwen2_moe",
        BASE
        | {"model_type": "qwen2_moe", "num_hidden_layers": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40}
        | {"num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": False, "decoder_sparse_step": 2, "mlp_only_layers": [1]}
        | _rope(1e6),
        (
            EPS,
            THETA,
            BIASES,
            TOP_K,
            Ablation("router weights do not sum to 1", {"norm_topk_prob": True}),
            Ablation("shared expert", weights={r"shared_expert\.down_proj": 0}),
            Ablation("gate of the shared expert", weights={r"shared_expert_gate\.weight": 0}),
        ),
        sharded=True,
        seed=6,
    ),
    Family(
        "qwen3",
        BASE | {"model_type": "qwen3", "num_hidden_layers": 2, "head_dim": 12, "tie_word_embeddings": True} | _rope(1e6),
        (EPS, THETA, QK_NORM, QK_NORM_SCALE),
    ),
    Family(
        "qwen3_moe",
        BASE
        | {"model_type": "qwen3_moe", "num_hidden_layers": 3, "head_dim": 12, "moe_intermediate_size": 24, "num_experts": 8}
        | {"num_experts_per_tok": 3, "norm_topk_prob": True, "mlp_only_layers": [0]}
        | _rope(1e6),
        (EPS, THETA, QK_NORM, QK_NORM_SCALE, TOP_K, NORM_TOP_K),
        sharded=True,
        seed=37,
    ),
    Family(
        "gemma2",
        BASE
        | {"model_type": "gemma2", "num_hidden_layers": 4, "head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 5}
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}
        | _rope(10000.0),
        (
            EPS,
            THETA,
            EMBEDDING_SCALE,
            WINDOW,
            WINDOW_BY_ONE,
            Ablation("alternation", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
            Ablation("scale", {"query_pre_attn_scalar": 12}),
            Ablation("soft cap of scores", {"attn_logit_softcapping": None}),
            Ablation("soft cap of logits", {"final_logit_softcapping": None}),
            Ablation("norm after attention", without=r"post_attention_layernorm$"),
            Ablation("norm after the MLP", without=r"post_feedforward_layernorm$"),
            Ablation("activation", {"hidden_activation": "silu"}),
            Ablation("activation is the tanh form", {"hidden_activation": "gelu"}, felt=5e-4),
        ),
    ),
    Family(
        "gemma3",
        BASE
        | {"model_type": "gemma3_text", "head_dim": 12, "query_pre_attn_scalar": 20, "sliding_window": 5}
        | _layers(["sliding"] * 5 + ["full"])
        | {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            }
        },
        (
            EPS,
            EMBEDDING_SCALE,
            WINDOW,
            WINDOW_BY_ONE,
            QK_NORM,
            QK_NORM_SCALE,
            Ablation("scale", {"query_pre_attn_scalar": 12}),
            Ablation("base of the local layers", {"rope_parameters.sliding_attention.rope_theta": 1e6}),
            Ablation("base of the global layer", {"rope_parameters.full_attention.rope_theta": 10000.0}, felt=5e-3),
            Ablation("linear scaling of the global layer", {"rope_parameters.full_attention.factor": 1.0}),
            Ablation("place of the global layer", {"layer_types": ["full_attention"] + ["sliding_attention"] * 5}),
            Ablation("norm after attention", without=r"post_attention_layernorm$"),
            Ablation("norm after the MLP", without=r"post_feedforward_layernorm$"),
        ),
        sharded=True,
    ),
    # transformers takes the long factors once a call's last position is past the original context: never here, always in phi3_long.
    Family(
        "phi3",
        PHI3 | {"original_max_position_embeddings": 32} | _rope(10000.0, **LONGROPE, original_max_position_embeddings=32),
        LONGROPE_ABLATIONS[:-1],
    ),
    Family(
        "phi3_long",
        PHI3 | {"original_max_position_embeddings": 4} | _rope(10000.0, **LONGROPE, original_max_position_embeddings=4),
        (*LONGROPE_ABLATIONS[:-2], LONGROPE_ABLATIONS[-1]),
        sharded=True,
    ),
    Family(
        "smollm3",
        BASE | {"model_type": "smollm3", "num_hidden_layers": 4, "no_rope_layer_interval": 4, "tie_word_embeddings": True} | _rope(5e6),
        (
            EPS,
            THETA,
            Ablation("layer without rotation", {"no_rope_layers": [1, 1, 1, 1]}),
            Ablation("which layer is without rotation", {"no_rope_layers": [0, 1, 1, 1]}),
        ),
    ),
    Family(
        "olmo2",
        BASE | {"model_type": "olmo2", "num_hidden_layers": 2} | _rope(500000.0),
        (
            EPS,
            THETA,
            QK_NORM,
            QK_NORM_SCALE,
            Ablation("norm after attention", without=r"post_attention_layernorm$"),
            Ablation("norm after the MLP", without=r"post_feedforward_layernorm$"),
        ),
        sharded=True,
    ),
    Family(
        "glm4",
        BASE
        | {"model_type": "glm4", "num_hidden_layers": 2, "head_dim": 12, "attention_bias": True}
        | _rope(10000.0, partial_rotary_factor=0.5),
        (
            EPS,
            THETA,
            BIASES,
            Ablation("rotated part of a head", {"rope_parameters.partial_rotary_factor": 1.0}),
            Ablation("norm after attention", without=r"post_self_attn_layernorm$"),
            Ablation("norm after the MLP", without=r"post_mlp_layernorm$"),
        ),
    ),
    Family("gpt_oss", GPT_OSS, GPT_OSS_ABLATIONS, sharded=True),
    Family(
        "gpt_oss_mxfp4",
        GPT_OSS | {"hidden_size": 64, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
        GPT_OSS_ABLATIONS,
        tensor_dtype="BF16",
        packed=True,
        seed=19,
    ),
    Family(
        "deepseek_v3",
        DEEPSEEK | {"model_type": "deepseek_v3"} | _rope(1000.0, **DEEPSEEK_YARN),
        (*DEEPSEEK_ABLATIONS, *DEEPSEEK_YARN_ABLATIONS, Ablation("rotated pairs are neighbours", {"rope_interleave": False})),
    ),
    Family(
        "deepseek_v3_no_q_lora",
        DEEPSEEK
        | {"model_type": "deepseek_v3", "q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False}
        | _rope(10000.0),
        (*DEEPSEEK_ABLATIONS, Ablation("router weights do not sum to 1", {"norm_topk_prob": True})),
        sharded=True,
        seed=25,
    ),
    Family(
        "deepseek_v32",
        DEEPSEEK
        | {"model_type": "deepseek_v32", "index_topk": 6, "index_n_heads": 8, "index_head_dim": 16}
        | _rope(1000.0, **DEEPSEEK_YARN),
        (
            *DEEPSEEK_ABLATIONS,
            *DEEPSEEK_YARN_ABLATIONS,
            Ablation("selection", {"index_topk": 64}),
            Ablation("number selected", {"index_topk": 7}),
            Ablation("bias of the index keys' norm", weights={r"k_norm\.bias": 0}),
            Ablation("norm of the index keys", without=r"indexer\.k_norm$"),
        ),
        sharded=True,
        seed=42,
    ),
)
