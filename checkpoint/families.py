"""Hugging Face's `config.json` as a `ModelConfig`: one function per family, each naming only what makes it different.

Keys, defaults and rules are those of transformers 5 (which also reads the older files: `rope_theta` and `rope_scaling` instead of
`rope_parameters`, no `layer_types`).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from model import (
    AttentionConfig,
    FactorScaling,
    IndexerConfig,
    LayerConfig,
    LinearScaling,
    Llama3Scaling,
    MLAConfig,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    Rope,
    RouterConfig,
    YarnScaling,
)
from runtime import UserError


class Keys:
    """A config's keys. What is null counts as absent, but for the few families that tell the two apart by `nulls`."""

    def __init__(self, values: Mapping[str, Any], path: Path):
        self.values = {key: value for key, value in values.items() if value is not None}
        self.nulls = values.keys() - self.values.keys()
        self.path = path

    def get(self, key: str, default: Any = None) -> Any:
        return self.values.get(key, default)

    def __getitem__(self, key: str) -> Any:
        if key not in self.values:
            raise UserError(f"{self.path} has no {key!r}: it is no complete description of a model; download it again")
        return self.values[key]

    def refuse(self, key: str, what: str) -> None:
        """An error if `key` is there and true."""
        if self.get(key):
            raise UserError(f"{self.path}: {key}={self.get(key)!r} asks for {what}, which is not supported: use another model")

    @property
    def layers(self) -> range:
        return range(self["num_hidden_layers"])


def model_config(values: Mapping[str, Any], path: Path) -> ModelConfig:
    """What a `config.json` says.

    Args:
      values: the parsed file.
      path: of the file, for messages.

    Raises:
      UserError: a `model_type` that is not supported, a missing key, or a key that asks for what is not supported.
    """
    c = Keys(values, path)
    kind = c.get("model_type", "")
    if kind not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise UserError(f"{path} has model_type {kind!r}, which is not supported; supported: {known}. Use another model")
    return FAMILIES[kind](c)


def _model(c: Keys, layers: Sequence[LayerConfig], *, eps: float = 1e-6, tied: bool = False, **rest: Any) -> ModelConfig:
    return ModelConfig(
        vocab_size=c["vocab_size"],
        width=c["hidden_size"],
        layers=tuple(layers),
        norm_eps=c.get("rms_norm_eps", eps),
        tie_embeddings=c.get("tie_word_embeddings", tied),
        context_length=c["max_position_embeddings"],
        **rest,
    )


def _attention(c: Keys, rope: Rope | None, *, kv_heads: int | None = None, head_dim: int | None = None, **rest: Any) -> AttentionConfig:
    heads = c["num_attention_heads"]
    bias = c.get("attention_bias", False)
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=c.get("num_key_value_heads", kv_heads or heads),
        head_dim=_head_dim(c, head_dim),
        rope=rope,
        **{"qkv_bias": bias, "out_bias": bias} | rest,
    )


def _head_dim(c: Keys, default: int | None = None) -> int:
    return c.get("head_dim", default or c["hidden_size"] // c["num_attention_heads"])


def _mlp(c: Keys, hidden: str = "intermediate_size", activation: str = "silu") -> MLPConfig:
    if activation == "silu" and (act := c.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise UserError(f"{c.path}: hidden_act {act!r} is not supported for this family (supported: 'silu'): use another model")
    return MLPConfig(hidden=c[hidden], activation=activation, bias=c.get("mlp_bias", False))


def _rope(
    c: Keys, *, theta: float = 10000.0, head_dim: int | None = None, part: float = 1.0, parameters: Mapping[str, Any] | None = None
) -> Rope:
    """Args: theta, head_dim, part: the family's defaults; parameters: instead of the config's own."""
    if parameters is None:
        parameters = c.get("rope_scaling") or c.get("rope_parameters") or {}
    p = Keys(parameters, c.path)
    dim = int(_head_dim(c, head_dim) * p.get("partial_rotary_factor", c.get("partial_rotary_factor", part)))
    return Rope(theta=float(p.get("rope_theta", c.get("rope_theta", theta))), dim=dim, scaling=_scaling(c, p, dim))


def _scaling(c: Keys, p: Keys, dim: int) -> Any:
    kind = p.get("rope_type", p.get("type", "default"))
    if c.get("model_type") == "phi3" and kind in ("su", "yarn"):  # earlier names of the same
        kind = "longrope"
    longest = c["max_position_embeddings"]
    original = c.get("original_max_position_embeddings", p.get("original_max_position_embeddings", longest))
    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(factor=float(p["factor"]))
        case "llama3":
            return Llama3Scaling(float(p["factor"]), float(p["low_freq_factor"]), float(p["high_freq_factor"]), original)
        case "yarn":
            factor = float(p.get("factor", longest / original))
            mscale, mscale_all = p.get("mscale"), p.get("mscale_all_dim")
            magnitude = _magnitude(factor, mscale) / _magnitude(factor, mscale_all) if mscale and mscale_all else _magnitude(factor, 1.0)
            return YarnScaling(
                factor=factor,
                original_context=original,
                fast=float(p.get("beta_fast", 32)),
                slow=float(p.get("beta_slow", 1)),
                truncate=p.get("truncate", True),
                magnitude=float(p.get("attention_factor", magnitude)),
            )
        case "longrope":
            factor = float(p.get("factor", longest / original))
            magnitude = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
            short, long = (tuple(map(float, p[key])) for key in ("short_factor", "long_factor"))
            return FactorScaling(short, long, original, magnitude=float(p.get("attention_factor", magnitude)))
    raise UserError(f"{c.path}: rotary scaling {kind!r} is not supported (supported: linear, llama3, yarn, longrope): use another model")


def _magnitude(factor: float, scale: float) -> float:
    """YaRN's factor on cos and sin."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _windows(c: Keys, sliding: Callable[[int], bool], window: int | None) -> list[int | None]:
    """Each layer's window: by `layer_types`, else where `sliding` says so. A window of 0 is none."""
    kinds = c.get("layer_types", ["sliding_attention" if sliding(i) else "full_attention" for i in c.layers])
    if len(kinds) != len(c.layers):
        raise UserError(f"{c.path} has {len(kinds)} layer_types for {len(c.layers)} layers: the file is damaged; download it again")
    if unknown := set(kinds) - {"sliding_attention", "full_attention"}:
        raise UserError(f"{c.path}: layer type {min(unknown)!r} is not supported for this family: use another model")
    return [(window or None) if kind == "sliding_attention" else None for kind in kinds]


def _llama(c: Keys) -> ModelConfig:
    return _model(c, [LayerConfig(_attention(c, _rope(c)), _mlp(c))] * len(c.layers))


def _mistral(c: Keys) -> ModelConfig:
    # Here null differs from absent, whose default is a window.
    window = c.get("sliding_window", None if "sliding_window" in c.nulls else 4096)
    return _model(c, [LayerConfig(_attention(c, _rope(c), kv_heads=8, window=window or None), _mlp(c))] * len(c.layers))


def _mixtral(c: Keys) -> ModelConfig:
    router = RouterConfig(num_experts=c.get("num_local_experts", 8), top_k=c.get("num_experts_per_tok", 2), normalize=True)
    attention = _attention(c, _rope(c, theta=1e6), kv_heads=8, window=c.get("sliding_window") or None)
    return _model(c, [LayerConfig(attention, MoEConfig(router, _mlp(c)))] * len(c.layers), eps=1e-5)


def _qwen2(c: Keys, **attention: Any) -> ModelConfig:
    attention = attention or {"qkv_bias": True, "out_bias": False}
    first = c.get("max_window_layers", 28)
    uses = c.get("use_sliding_window", False)
    windows = _windows(c, lambda i: uses and i >= first, c.get("sliding_window", 4096) if uses else None)
    return _model(c, [LayerConfig(_attention(c, _rope(c), window=window, **attention), _mlp(c)) for window in windows])


def _qwen3(c: Keys) -> ModelConfig:
    bias = c.get("attention_bias", False)
    return _qwen2(c, qk_norm="head", head_dim=128, qkv_bias=bias, out_bias=bias)


def _qwen_sparse(c: Keys, windows: Sequence[int | None], shared: bool, top_k: int, experts: int, **attention: Any) -> ModelConfig:
    dense, every = c.get("mlp_only_layers", []), c.get("decoder_sparse_step", 1)
    count = c.get("num_experts", c.get("num_local_experts", experts))
    router = RouterConfig(num_experts=count, top_k=c.get("num_experts_per_tok", top_k), normalize=c.get("norm_topk_prob", False))
    moe = MoEConfig(
        router,
        _mlp(c, "moe_intermediate_size"),
        shared=_mlp(c, "shared_expert_intermediate_size") if shared else None,
        shared_gate=shared,
    )
    layers = []
    for i in c.layers:
        sparse = i not in dense and (i + 1) % every == 0 and count > 0
        layers.append(LayerConfig(_attention(c, _rope(c), window=windows[i], **attention), moe if sparse else _mlp(c)))
    return _model(c, layers)


def _qwen2_moe(c: Keys) -> ModelConfig:
    uses, first = c.get("use_sliding_window", False), c.get("max_window_layers", 28)
    windows = _windows(c, lambda i: uses and i % 2 == 0 and i < first, c.get("sliding_window", 4096) if uses else None)
    return _qwen_sparse(c, windows, shared=True, top_k=4, experts=60, qkv_bias=c.get("qkv_bias", True), out_bias=False)


def _qwen3_moe(c: Keys) -> ModelConfig:
    window = c.get("sliding_window", 4096) if c.get("use_sliding_window", False) else None
    return _qwen_sparse(c, [window or None] * len(c.layers), shared=False, top_k=8, experts=128, kv_heads=4, qk_norm="head")


def _gemma2(c: Keys) -> ModelConfig:
    scale = c.get("query_pre_attn_scalar", 256) ** -0.5
    softcap = c.get("attn_logit_softcapping", None if "attn_logit_softcapping" in c.nulls else 50.0)
    rope, mlp = _rope(c, head_dim=256), _gemma_mlp(c)
    layers = [
        LayerConfig(_attention(c, rope, kv_heads=4, head_dim=256, window=window, scale=scale, softcap=softcap), mlp, norms="sandwich")
        for window in _windows(c, lambda i: i % 2 == 0, c.get("sliding_window", 4096))
    ]
    final = c.get("final_logit_softcapping", None if "final_logit_softcapping" in c.nulls else 30.0)
    return _model(c, layers, tied=True, embedding_scale=c["hidden_size"] ** 0.5, final_softcap=final)


def _gemma_mlp(c: Keys) -> MLPConfig:
    if (act := c.get("hidden_activation", "gelu_pytorch_tanh")) not in ("gelu_pytorch_tanh", "gelu_tanh"):
        raise UserError(f"{c.path}: hidden_activation {act!r} is not supported for Gemma: use another model")
    return _mlp(c, activation="gelu_tanh")


def _gemma3(c: Keys) -> ModelConfig:
    c.refuse("use_bidirectional_attention", "attention to what follows")
    every = c.get("sliding_window_pattern", c.get("_sliding_window_pattern", 6))
    scale, mlp = c.get("query_pre_attn_scalar", 256) ** -0.5, _gemma_mlp(c)
    by_kind = c.get("rope_parameters") or {}
    if "full_attention" in by_kind:
        far, near = by_kind["full_attention"], by_kind["sliding_attention"]
    else:
        far = dict(c.get("rope_scaling") or by_kind)
        far.setdefault("rope_theta", c.get("rope_theta", 1e6))
        near = {"rope_theta": c.get("rope_local_base_freq", 1e4)}
    ropes = {True: _rope(c, head_dim=256, parameters=near), False: _rope(c, head_dim=256, parameters=far, theta=1e6)}
    layers = []
    for window in _windows(c, lambda i: (i + 1) % every != 0, c.get("sliding_window", 4096)):
        rope = ropes[window is not None]
        attention = _attention(c, rope, kv_heads=4, head_dim=256, window=window, scale=scale, qk_norm="head")
        layers.append(LayerConfig(attention, mlp, norms="sandwich"))
    final = c.get("final_logit_softcapping")
    return _model(c, layers, tied=True, embedding_scale=c["hidden_size"] ** 0.5, final_softcap=final)


def _gemma3_with_vision(c: Keys) -> ModelConfig:
    """The text half of a model that also sees."""
    text = {"num_attention_heads": 8, "vocab_size": 262_208, "max_position_embeddings": 131_072} | c["text_config"]
    return _gemma3(Keys(text, c.path))


def _phi3(c: Keys) -> ModelConfig:
    attention = _attention(c, _rope(c), window=c.get("sliding_window") or None)
    return _model(c, [LayerConfig(attention, _mlp(c))] * len(c.layers), eps=1e-5)


def _smollm3(c: Keys) -> ModelConfig:
    every = c.get("no_rope_layer_interval", 4)
    rotated = c.get("no_rope_layers", [int((i + 1) % every != 0) for i in c.layers])  # despite its name
    uses = c.get("use_sliding_window", False)
    windows = _windows(c, lambda i: uses and not rotated[i], c.get("sliding_window") if uses else None)
    rope = _rope(c, theta=2e6)
    layers = [LayerConfig(_attention(c, rope if rotated[i] else None, kv_heads=4, window=windows[i]), _mlp(c)) for i in c.layers]
    return _model(c, layers, tied=True)


def _olmo2(c: Keys) -> ModelConfig:
    layer = LayerConfig(_attention(c, _rope(c), qk_norm="full"), _mlp(c), norms="post")
    return _model(c, [layer] * len(c.layers), eps=1e-5)


def _glm4(c: Keys) -> ModelConfig:
    bias = c.get("attention_bias", True)
    attention = _attention(c, _rope(c, head_dim=128, part=0.5), kv_heads=2, head_dim=128, qkv_bias=bias, out_bias=False)
    return _model(c, [LayerConfig(attention, _mlp(c), norms="sandwich")] * len(c.layers), eps=1.5625e-7)


def _gpt_oss(c: Keys) -> ModelConfig:
    rope = _rope(c, theta=150_000.0, head_dim=64)
    top_k = c.get("num_experts_per_tok", c.get("experts_per_token", 4))
    router = RouterConfig(num_experts=c.get("num_local_experts", 128), top_k=top_k, scoring="softmax_topk")
    limit, alpha = c.get("swiglu_limit", 7.0), c.get("swiglu_alpha", 1.702)
    expert = MLPConfig(c["intermediate_size"], activation="clamped_swiglu", bias=True, limit=limit, alpha=alpha)
    bias = c.get("attention_bias", True)
    layers = [
        LayerConfig(
            _attention(c, rope, kv_heads=8, head_dim=64, window=window, sinks=True, qkv_bias=bias, out_bias=bias),
            MoEConfig(router, expert, router_bias=True),
        )
        for window in _windows(c, lambda i: i % 2 == 0, c.get("sliding_window", 128))
    ]
    return _model(c, layers, eps=1e-5)


def _deepseek(c: Keys, *, sparse_attention: bool = False) -> ModelConfig:
    rope_dim, nope_dim = c["qk_rope_head_dim"], c["qk_nope_head_dim"]
    parameters = dict(c.get("rope_scaling") or c.get("rope_parameters") or {})
    parameters.pop("partial_rotary_factor", None)
    rope = dataclasses.replace(_rope(Keys(c.values | {"head_dim": rope_dim}, c.path), parameters=parameters), dim=rope_dim)
    scale = (nope_dim + rope_dim) ** -0.5
    if isinstance(rope.scaling, YarnScaling) and (mscale := parameters.get("mscale_all_dim")):
        scale *= _magnitude(rope.scaling.factor, mscale) ** 2
    attention = MLAConfig(
        num_heads=c["num_attention_heads"],
        q_rank=c.get("q_lora_rank"),
        kv_rank=c["kv_lora_rank"],
        nope_dim=nope_dim,
        rope=rope,
        value_dim=c["v_head_dim"],
        scale=scale,
        bias=c.get("attention_bias", False),
        indexer=IndexerConfig(c["index_n_heads"], c["index_head_dim"], c["index_topk"], rope) if sparse_attention else None,
    )
    expert = _mlp(c, "moe_intermediate_size")
    router = RouterConfig(
        num_experts=c["n_routed_experts"],
        top_k=c["num_experts_per_tok"],
        scoring="sigmoid",
        normalize=c.get("norm_topk_prob", True),
        scale=c.get("routed_scaling_factor", 1.0),
        num_groups=c.get("n_group", 1),
        groups_kept=c.get("topk_group", 1),
        choice_bias=True,
    )
    shared = dataclasses.replace(expert, hidden=expert.hidden * c.get("n_shared_experts", 1))
    moe = MoEConfig(router, expert, shared=shared)
    first = c.get("first_k_dense_replace", 3)
    kinds = c.get("mlp_layer_types", ["dense" if i < first else "sparse" for i in c.layers])
    return _model(c, [LayerConfig(attention, moe if kind == "sparse" else _mlp(c)) for kind in kinds])


def _deepseek_v32(c: Keys) -> ModelConfig:
    return _deepseek(c, sparse_attention=True)


FAMILIES: dict[str, Callable[[Keys], ModelConfig]] = {
    "deepseek_v3": _deepseek,
    "deepseek_v32": _deepseek_v32,
    "gemma2": _gemma2,
    "gemma3": _gemma3_with_vision,
    "gemma3_text": _gemma3,
    "glm4": _glm4,
    "gpt_oss": _gpt_oss,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "olmo2": _olmo2,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "smollm3": _smollm3,
}
