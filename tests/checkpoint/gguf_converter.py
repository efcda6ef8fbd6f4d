"""Writes a Hugging Face model as a GGUF file, in the way of llama.cpp's converters: tensor and key names are the gguf package's.

It shares nothing with `checkpoint`: what is done here (rows reordered, experts stacked, 1 added to norms, ...) the loader has to undo.
"""

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

LLM, ATTENTION, ROPE = gguf.Keys.LLM, gguf.Keys.Attention, gguf.Keys.Rope
ARCHITECTURES = {
    "deepseek_v3": gguf.MODEL_ARCH.DEEPSEEK2,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "mixtral": gguf.MODEL_ARCH.LLAMA,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen2_moe": gguf.MODEL_ARCH.QWEN2MOE,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
}
EXPERT = re.compile(r"(model\.layers\.\d+\.(?:mlp|block_sparse_moe)\.experts)\.(\d+)\.(\w+)\.weight")
STYLES = ("mla", "whole_kv_b", "single_experts", "fused_experts", "first_files")

Packed = tuple[np.ndarray, gguf.GGMLQuantizationType]


def architecture(config: Mapping[str, Any]) -> str:
    """The file's `general.architecture`."""
    return gguf.MODEL_ARCH_NAMES[ARCHITECTURES[config["model_type"]]]


def write(
    path: Path,
    config: Mapping[str, Any],
    weights: Mapping[str, np.ndarray],
    style: str = "mla",
    tensors: Mapping[str, np.ndarray | Packed] | None = None,
    **metadata: Any,
) -> Path:
    """Writes the file.

    Args:
      path: of the file.
      config: a `config.json`, as transformers 5 writes it.
      weights: of a model folder, by name.
      style: "mla" is what converters do today. Others, where they make a difference: "whole_kv_b" keeps MLA's up-projection in one piece,
        "single_experts" keeps every expert by itself, "fused_experts" joins gate and up, "first_files" leaves out the keys that the first
        files of an architecture do not have.
      tensors: written instead of what `converted` makes of the weights.
      metadata: more keys without the architecture's name, dots as `__`; None takes a key out.

    Returns:
      The path.
    """
    assert style in STYLES
    name = architecture(config)
    values = keys(config, style) | {f"{name}.{key.replace('__', '.')}": value for key, value in metadata.items()}
    writer = gguf.GGUFWriter(path, name)
    for key, value in values.items():
        match value:
            case None:
                continue
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    for tensor, value in (dict(converted(config, weights, style)) if tensors is None else tensors).items():
        if isinstance(value, tuple):
            writer.add_tensor(tensor, value[0], raw_dtype=value[1])
        else:
            writer.add_tensor(tensor, np.ascontiguousarray(value, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def keys(config: Mapping[str, Any], style: str = "mla") -> dict[str, Any]:
    """The file's metadata, tokenizer and general keys aside."""
    c, kind = config, config["model_type"]
    rope = c["rope_parameters"].get("full_attention", c["rope_parameters"])
    heads = c["num_attention_heads"]
    out = {
        LLM.BLOCK_COUNT: c["num_hidden_layers"],
        LLM.CONTEXT_LENGTH: c["max_position_embeddings"],
        LLM.EMBEDDING_LENGTH: c["hidden_size"],
        LLM.FEED_FORWARD_LENGTH: c["intermediate_size"],
        LLM.VOCAB_SIZE: c["vocab_size"],
        ATTENTION.HEAD_COUNT: heads,
        ATTENTION.HEAD_COUNT_KV: c["num_key_value_heads"],
        ATTENTION.LAYERNORM_RMS_EPS: c["rms_norm_eps"],
        ROPE.FREQ_BASE: rope["rope_theta"],
    }
    if c.get("head_dim"):
        out |= {ATTENTION.KEY_LENGTH: c["head_dim"], ATTENTION.VALUE_LENGTH: c["head_dim"]}
    if rope["rope_type"] in ("linear", "yarn"):
        out |= {ROPE.SCALING_TYPE: rope["rope_type"], ROPE.SCALING_FACTOR: rope["factor"]}
    if rope["rope_type"] == "yarn":
        out |= {ROPE.SCALING_ORIG_CTX_LEN: rope["original_max_position_embeddings"]}
        out |= {ROPE.SCALING_YARN_BETA_FAST: float(rope["beta_fast"]), ROPE.SCALING_YARN_BETA_SLOW: float(rope["beta_slow"])}
    if experts := c.get("num_experts", c.get("num_local_experts", c.get("n_routed_experts"))):
        out |= {LLM.EXPERT_COUNT: experts, LLM.EXPERT_USED_COUNT: c["num_experts_per_tok"]}
    match kind:
        case "llama" | "mistral" | "mixtral":
            out |= {ROPE.DIMENSION_COUNT: c.get("head_dim") or c["hidden_size"] // heads}
        case "qwen2_moe":
            if style != "first_files":
                out |= {LLM.EXPERT_FEED_FORWARD_LENGTH: c["moe_intermediate_size"]}
                out |= {LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH: c["shared_expert_intermediate_size"]}
        case "qwen3_moe":
            out |= {LLM.EXPERT_FEED_FORWARD_LENGTH: c["moe_intermediate_size"]}
        case "gemma2":
            out |= {ATTENTION.SLIDING_WINDOW: c["sliding_window"]}
            if style != "first_files":
                out |= {LLM.ATTN_LOGIT_SOFTCAPPING: c["attn_logit_softcapping"], LLM.FINAL_LOGIT_SOFTCAPPING: c["final_logit_softcapping"]}
        case "gemma3_text":
            out |= {ATTENTION.SLIDING_WINDOW: c["sliding_window"]}
            if style != "first_files":
                out |= {ROPE.FREQ_BASE_SWA: c["rope_parameters"]["sliding_attention"]["rope_theta"]}
        case "phi3":
            original = c["original_max_position_embeddings"]
            turned = int(rope.get("partial_rotary_factor", 1.0) * c["hidden_size"]) // heads
            out |= {ROPE.SCALING_ORIG_CTX_LEN: original, ROPE.DIMENSION_COUNT: turned, ATTENTION.SLIDING_WINDOW: c["sliding_window"] or 0}
            if rope["rope_type"] == "longrope":
                stretch = math.log(c["max_position_embeddings"] / original)
                out |= {ROPE.SCALING_ATTN_FACTOR: math.sqrt(1 + stretch / math.log(original))}
        case "gpt_oss":
            out |= {ATTENTION.SLIDING_WINDOW: c["sliding_window"], LLM.EXPERT_FEED_FORWARD_LENGTH: c["intermediate_size"]}
        case "deepseek_v3":
            out |= _deepseek_keys(c, rope, style)
    return {key.format(arch=architecture(c)): value for key, value in out.items()}


def _deepseek_keys(c: Mapping[str, Any], rope: Mapping[str, Any], style: str) -> dict[str, Any]:
    head, latent = c["qk_nope_head_dim"] + c["qk_rope_head_dim"], c["kv_lora_rank"]
    out = {
        ROPE.DIMENSION_COUNT: c["qk_rope_head_dim"],
        ATTENTION.Q_LORA_RANK: c["q_lora_rank"],
        ATTENTION.KV_LORA_RANK: latent,
        LLM.EXPERT_FEED_FORWARD_LENGTH: c["moe_intermediate_size"],
        LLM.EXPERT_SHARED_COUNT: c["n_shared_experts"],
        LLM.EXPERT_WEIGHTS_SCALE: c["routed_scaling_factor"],
        LLM.EXPERT_WEIGHTS_NORM: c["norm_topk_prob"] or None,
        LLM.EXPERT_GATING_FUNC: int(gguf.ExpertGatingFuncType.SIGMOID),
        LLM.LEADING_DENSE_BLOCK_COUNT: c["first_k_dense_replace"],
    }
    if style == "whole_kv_b":
        out |= {ATTENTION.KEY_LENGTH: head, ATTENTION.VALUE_LENGTH: c["v_head_dim"]}
    else:  # one head of keys, which is what is cached
        out |= {ATTENTION.HEAD_COUNT_KV: 1, ATTENTION.KEY_LENGTH: latent + c["qk_rope_head_dim"], ATTENTION.VALUE_LENGTH: latent}
        out |= {ATTENTION.KEY_LENGTH_MLA: head, ATTENTION.VALUE_LENGTH_MLA: c["v_head_dim"]}
    if style != "first_files":
        out |= {LLM.EXPERT_GROUP_COUNT: c["n_group"], LLM.EXPERT_GROUP_USED_COUNT: c["topk_group"]}
    if "mscale_all_dim" in rope:
        out |= {ROPE.SCALING_YARN_LOG_MUL: 0.1 * rope["mscale_all_dim"]}
    return out


def converted(
    config: Mapping[str, Any], weights: Mapping[str, np.ndarray], style: str = "mla"
) -> Iterator[tuple[str, np.ndarray | Packed]]:
    """Names and values of the file's tensors: f32, or bytes and their format."""
    c, kind = config, config["model_type"]
    names = gguf.get_tensor_name_map(ARCHITECTURES[kind], c["num_hidden_layers"])

    def named(name: str) -> str:
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        return found

    experts: dict[tuple[str, str], dict[int, np.ndarray]] = {}
    for name, value in weights.items():
        if kind == "gpt_oss" and ".experts." in name:
            yield from _oss_experts(name, value, weights, named)
            continue
        value = value.astype(np.float32)
        if match := EXPERT.fullmatch(name):
            if style == "single_experts":
                part = named(f"{match[1]}.{match[3]}.weight").removesuffix("_exps.weight")
                yield f"{part}.{match[2]}.weight", value
            else:
                experts.setdefault((match[1], match[3]), {})[int(match[2])] = value
            continue
        if architecture(c) == "llama" and (turned := re.search(r"\.([qk])_proj\.", name)):
            value = _side_by_side(value, c["num_attention_heads"] if turned[1] == "q" else c["num_key_value_heads"])
        if kind.startswith("gemma") and name.endswith("norm.weight"):
            value = value + 1
        if name.endswith(".sinks"):
            name += ".weight"
        if name.endswith(".e_score_correction_bias"):
            name = name.removesuffix("_bias") + ".bias"
        if name.endswith(".kv_b_proj.weight") and style != "whole_kv_b":
            heads = value.reshape(c["num_attention_heads"], -1, c["kv_lora_rank"])
            keys_part, values_part = np.split(heads, [c["qk_nope_head_dim"]], axis=1)
            yield named(name.replace("kv_b", "k_b")), keys_part.swapaxes(1, 2)
            yield named(name.replace("kv_b", "v_b")), values_part
            continue
        yield named(name), value
    stacked = {named(f"{base}.{part}.weight"): np.stack([of[e] for e in range(len(of))]) for (base, part), of in experts.items()}
    for name, value in stacked.items():
        if style != "fused_experts" or "ffn_down" in name:
            yield name, value
        elif "ffn_gate" in name:
            yield name.replace("ffn_gate", "ffn_gate_up"), np.concatenate([value, stacked[name.replace("ffn_gate", "ffn_up")]], axis=1)
    yield from _rope_tensors(c)


def _rope_tensors(c: Mapping[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    rope = c["rope_parameters"]
    match rope.get("rope_type"):
        case "longrope":
            yield "rope_factors_long.weight", np.array(rope["long_factor"])
            yield "rope_factors_short.weight", np.array(rope["short_factor"])
        case "llama3":
            factors = []
            for i in range(0, c["head_dim"], 2):
                wavelength = 2 * math.pi * rope["rope_theta"] ** (i / c["head_dim"])
                turns = rope["original_max_position_embeddings"] / wavelength
                low, high = rope["low_freq_factor"], rope["high_freq_factor"]
                if turns > high:
                    factors.append(1.0)
                elif turns < low:
                    factors.append(rope["factor"])
                else:
                    smooth = (turns - low) / (high - low)
                    factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
            yield "rope_freqs.weight", np.array(factors)


def _side_by_side(value: np.ndarray, heads: int) -> np.ndarray:
    """Rows of every head from halves to neighbouring pairs: a b c d (pairs (a, c), (b, d)) -> a c b d."""
    rows = value.reshape(heads, 2, -1, *value.shape[1:])
    return np.stack([rows[:, 0], rows[:, 1]], axis=2).reshape(value.shape)


def _oss_experts(name: str, value: np.ndarray, weights: Mapping[str, np.ndarray], named: Any) -> Iterator[tuple[str, np.ndarray | Packed]]:
    """gpt-oss holds all experts in one tensor, rows of gate and up in turns; as f32 transposed, or as MXFP4 in a layout of its own."""
    if name.endswith("_scales"):
        return  # goes with its blocks
    base, part, kind = re.fullmatch(r"(.*)\.(gate_up_proj|down_proj)_?(\w*)", name).groups()
    suffix = "bias" if kind == "bias" else "weight"
    if kind == "blocks":
        value = _mxfp4(value, weights[name.replace("_blocks", "_scales")])
    else:
        value = value.astype(np.float32)
        value = value if kind == "bias" else value.swapaxes(1, 2)
    pieces = {"down_proj": value} if part == "down_proj" else {"gate_proj": value[:, ::2], "up_proj": value[:, 1::2]}
    for each, data in pieces.items():
        data = np.ascontiguousarray(data)
        yield named(f"{base}.{each}.{suffix}"), (data, gguf.GGMLQuantizationType.MXFP4) if kind == "blocks" else data


def _mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[E, rows, blocks, 16] bytes, two neighbours each, low nibble first -> [E, rows, blocks * 17]: the scale, then 16 bytes of which
    the low nibbles are a block's first 16 values and the high ones the last."""
    values = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    joined = np.concatenate([scales[..., None], values[..., :16] | values[..., 16:] << 4], axis=-1)
    return joined.reshape(*joined.shape[:2], -1)
