"""A GGUF file under Hugging Face's names: its metadata as the keys of a `config.json`, its tensors as those of a model folder.

So each family's config and tensor table exist once. Names of keys and tensors are those of llama.cpp's converters; where a converter
changed values (rows of rotated heads, scales of norms, stacked experts), the change is undone or told to the table.
"""

import dataclasses
import fractions
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from checkpoint.gguf_blocks import packing
from checkpoint.gguf_file import GGUFFile
from checkpoint.source import Box, Packing
from checkpoint.tensors import NAMES, Names
from kernels import QuantArray
from runtime import UserError

Read = Callable[..., Any]  # GGUFFile.dequantize, or its packed: name and box -> values, or a QuantArray
ARCHITECTURES = {  # general.architecture -> model_type; llama files with experts are mixtral
    "deepseek2": "deepseek_v3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "gpt-oss": "gpt_oss",
    "llama": "llama",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen2moe": "qwen2_moe",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
}
NEIGHBOURS = ("llama", "mixtral", "deepseek_v3")  # whose rows of q and k stand as neighbouring pairs

_WHOLE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NEUTRAL = {  # keys for what is not supported -> the values that ask for none of it
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "attention.scale": (0,),
    "attention.shared_kv_layers": (0,),
    "attention.temperature_scale": (0,),
    "embedding_scale": (0, 1),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "rope.scaling.alpha": (0,),
    "rope.scaling.yarn_ext_factor": (-1, 1),
    "router_logit_softcapping": (0,),
    "use_parallel_residual": (False,),
}
_GATING = {"deepseek_v3": (2,), "gpt_oss": (0, 3)}  # expert_gating_func of each; else softmax, 1, or 0 for a file that does not say
_FROM_METADATA = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight")  # tensors that belong to the config


class GGUFSource:
    """The tensors of a GGUF file as `checkpoint.source.Source`."""

    def __init__(self, file: GGUFFile):
        self.file = file
        self.model_type = _model_type(file)
        names = NAMES.get(self.model_type, Names())
        self.table = dataclasses.replace(names, norm_offset=0.0, neighbours=self.model_type in NEIGHBOURS, interleaved_experts=False)
        self._places: dict[str, Callable[[Read, Box], Any]] = {}
        self._origins: dict[str, str] = {}  # where rows of one tensor make a logical one
        self._shapes: dict[str, tuple[int, ...]] = {}
        for name in file.tensors:
            if not _FROM_METADATA.fullmatch(name):
                self._add(name)

    @property
    def path(self) -> Path:
        return self.file.path

    def names(self) -> set[str]:
        return set(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str, box: Box = ()) -> np.ndarray:
        return self._places[name](self.file.dequantize, box)

    def packing(self, name: str) -> Packing | None:
        return packing(self.file.tensor(self._origins[name]).type) if name in self._origins else None

    def packed(self, name: str, box: Box = ()) -> QuantArray:
        return self._places[name](self.file.packed, box)

    def _add(self, name: str) -> None:
        info = self.file.tensor(name)
        if name in _WHOLE:
            return self._put(_WHOLE[name], info.shape, name, lambda read, box: read(name, box))
        match = re.fullmatch(r"blk\.(\d+)\.(.+)\.(weight|bias)", name)
        if match is None:
            return self._put(name, info.shape, name, lambda read, box: read(name, box))  # no table has a use for it: an error by this name
        layer, part, kind = match.groups()
        prefix = f"model.layers.{layer}."
        if (exps := re.fullmatch(r"ffn_(gate|up|down|gate_up)_exps", part)) and len(info.shape) > 1:
            return self._stacked(name, f"{prefix}{{}}.{kind}", exps[1])
        if part in ("attn_k_b", "attn_v_b"):
            return self._latent_up(f"{prefix}self_attn.kv_b_proj.weight", layer)
        if part == "ffn_gate_inp_shexp":
            shape = (1, info.shape[-1])
            return self._put(
                f"{prefix}{self.table.shared}_gate.{kind}", shape, name, lambda read, box: read(name).reshape(shape)[box], rows=False
            )
        return self._put(self._layer_name(prefix, part, kind), info.shape, name, lambda read, box: read(name, box))

    def _layer_name(self, prefix: str, part: str, kind: str) -> str:
        if self.model_type.startswith("gemma") and part == "ffn_norm":
            return f"{prefix}{self.table.mlp_norm}.{kind}"
        if self.model_type == "phi3" and part == "ffn_up":
            return f"{prefix}mlp.gate_up_proj.{kind}"
        if part == "attn_sinks":
            return f"{prefix}self_attn.sinks"
        if part == "ffn_gate_inp":
            return f"{prefix}{self.table.router}.{kind}"
        if part == "exp_probs_b":
            return f"{prefix}{self.table.router}.e_score_correction_bias"
        if expert := re.fullmatch(r"ffn_(gate|up|down)\.(\d+)", part):  # files from before April 2024 hold every expert by itself
            return f"{prefix}{self._expert(expert[1], int(expert[2]))}.{kind}"
        if shared := re.fullmatch(r"ffn_(gate|up|down)_shexp", part):
            return f"{prefix}{self.table.shared}.{shared[1]}_proj.{kind}"
        return f"{prefix}{_LAYER.get(part, part)}.{kind}"

    def _expert(self, part: str, number: int) -> str:
        return getattr(self.table, f"expert_{part}").format(number)

    def _stacked(self, name: str, named: str, part: str) -> None:
        """All experts in one tensor [E, F, ...]; `gate_up` holds an expert's rows of gate, then those of up, [E, 2F, ...]."""
        E, rows, *rest = self.file.tensor(name).shape
        parts = part.split("_")
        F = rows // len(parts)
        for expert in range(E):
            for number, each in enumerate(parts):
                self._put(
                    named.format(self._expert(each, expert)),
                    (F, *rest),
                    name,
                    functools.partial(self._of_expert, name, expert, number * F, F),
                )

    def _of_expert(self, name: str, expert: int, first: int, count: int, read: Read, box: Box) -> Any:
        start, stop, _ = (box[0] if box else slice(None)).indices(count)
        return read(name, (expert, slice(first + start, first + stop), *box[1:]))

    def _latent_up(self, whole: str, layer: str) -> None:
        """Newer files cut kv_b_proj into every head's key part, transposed, [N, C, P], and value part [N, V, C]."""
        if whole in self._places or f"blk.{layer}.attn_kv_b.weight" in self.file.tensors:
            return  # by the other part, or there in one piece
        key, value = (f"blk.{layer}.attn_{part}_b.weight" for part in ("k", "v"))
        shapes = [self.file.tensor(name).shape for name in (key, value)]
        if [len(shape) for shape in shapes] != [3, 3] or shapes[0][:2] != shapes[1][::2]:
            raise UserError(
                f"{self.path}: {key} {shapes[0]} and {value} {shapes[1]} do not fit together: use another conversion of the model"
            )
        (N, C, P), V = shapes[0], shapes[1][1]

        def joined(read: Read, box: Box) -> np.ndarray:
            start, stop, _ = (box[0] if box else slice(None)).indices(N * (P + V))
            first = start // (P + V)
            heads = (slice(first, -(-stop // (P + V))),)
            keys, values = read(key, heads).swapaxes(1, 2), read(value, heads)
            rows = np.concatenate([keys, values], axis=1).reshape(-1, C)
            return rows[(slice(start - first * (P + V), stop - first * (P + V)), *box[1:])]

        self._put(whole, (N * (P + V), C), key, joined, rows=False)

    def _put(self, name: str, shape: tuple[int, ...], origin: str, place: Callable[[Read, Box], Any], rows: bool = True) -> None:
        """A logical tensor, which `place` finds in the file; `rows`: it is rows of the tensor `origin`, and nothing else."""
        if name in self._places:
            raise UserError(f"{self.path}: tensor {origin!r} is {name}, which another one is as well: use another conversion of the model")
        self._places[name], self._shapes[name] = place, shape
        if rows:
            self._origins[name] = origin


def _model_type(file: GGUFFile) -> str:
    architecture = file.require("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UserError(
            f"{file.path} holds architecture {architecture!r}; supported: {', '.join(sorted(ARCHITECTURES))}. Use another model"
        )
    return "mixtral" if architecture == "llama" and file.metadata.get("llama.expert_count", 0) else ARCHITECTURES[architecture]


def further_layers(file: GGUFFile) -> int:
    """How many of the file's last layers predict further tokens: the model works without them."""
    return _Metadata(file).count("nextn_predict_layers", 0)


class _Metadata:
    """A file's values, by their keys without the architecture's name before them."""

    def __init__(self, file: GGUFFile):
        self.file, self.path = file, file.path
        self.architecture = file.require("general.architecture")

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}", default)

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number, above 0 if there is no default. A list of one per layer counts as one if all are equal."""
        value = self.get(key, default)
        if value is None:
            value = self.file.require(f"{self.architecture}.{key}")
        if isinstance(value, list) and value:
            if len(set(value)) > 1:
                raise UserError(
                    f"{self.path}: {self.architecture}.{key} differs from layer to layer, which is not supported: use another model"
                )
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or value < (default is None):
            raise self.damaged(key, value)
        return value

    def number(self, key: str, default: float | None = None) -> float | None:
        value = self.get(key, default)
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
            raise self.damaged(key, value)
        return value

    def damaged(self, key: str, value: Any) -> UserError:
        return UserError(f"{self.path} is damaged: its {self.architecture}.{key} is {value!r}: download it again")

    def refused(self, key: str, value: Any) -> UserError:
        return UserError(f"{self.path}: {self.architecture}.{key}={value!r} is not supported for this architecture: use another model")


def config_keys(file: GGUFFile) -> dict[str, Any]:
    """The keys of a `config.json` that says the same as the file's metadata.

    Raises:
      UserError: metadata that is missing or damaged, or asks for what is not supported.
    """
    kind, m = _model_type(file), _Metadata(file)
    heads, width, hidden = m.count("attention.head_count"), m.count("embedding_length"), m.count("feed_forward_length")
    head_dim = m.count("attention.key_length", 0) or max(width // heads, 1)
    experts, used = m.count("expert_count", 0), m.count("expert_used_count", 0)
    eps = m.number("attention.layer_norm_rms_epsilon", file.require(f"{m.architecture}.attention.layer_norm_rms_epsilon"))
    keys: dict[str, Any] = {
        "model_type": kind,
        "vocab_size": file.tensor("token_embd.weight").shape[0],
        "hidden_size": width,
        "num_hidden_layers": m.count("block_count") - further_layers(file),
        "intermediate_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": m.count("attention.head_count_kv", 0) or heads,
        "head_dim": head_dim,
        # The file holds the f32 nearest to 1e-5; the short decimal is what the model was trained with.
        "rms_norm_eps": float(f"{eps:.6g}"),
        "max_position_embeddings": m.count("context_length"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "rope_theta": m.number("rope.freq_base", 1e6 if kind == "gemma3_text" else 1e4),
        "sliding_window": m.count("attention.sliding_window", 0) or None,
    }
    if experts:  # the first files of a family leave out what all its models had in common
        keys |= {
            "num_local_experts": experts,
            "num_experts_per_tok": used,
            "moe_intermediate_size": m.count("expert_feed_forward_length", 0) or hidden // max(used, 1),
            "shared_expert_intermediate_size": m.count("expert_shared_feed_forward_length", 0) or hidden,
        }
    _refuse(m, kind, keys)
    if kind != "deepseek_v3":
        keys["partial_rotary_factor"] = fractions.Fraction(
            m.count("rope.dimension_count", 0) or head_dim, head_dim
        )  # exact, unlike a float
    keys["rope_scaling"] = _rope_scaling(m, keys)
    match kind:
        case "qwen2_moe" | "qwen3_moe":
            keys["norm_topk_prob"] = m.get("expert_weights_norm", kind == "qwen3_moe")
        case "gemma2" | "gemma3_text":
            # Of both generations, the largest model alone divides by the width per head.
            largest = keys["num_hidden_layers"] == {"gemma2": 46, "gemma3_text": 62}[kind]
            keys["query_pre_attn_scalar"] = width // heads if largest else head_dim
            scores, logits = (50.0, 30.0) if kind == "gemma2" else (None, None)  # the first files of Gemma 2 do not name their caps
            keys["attn_logit_softcapping"] = m.number("attn_logit_softcapping", scores) or None
            keys["final_logit_softcapping"] = m.number("final_logit_softcapping", logits) or None
            keys["rope_local_base_freq"] = m.number("rope.freq_base_swa", 1e4)
            keys["layer_types"] = _layer_types(m, keys)
            if kind == "gemma3_text" and keys["sliding_window"] is None:
                keys["layer_types"] = ["full_attention"] * keys["num_hidden_layers"]
        case "phi3":
            if m.get("attention.sliding_window") is None and keys["max_position_embeddings"] == 4096:
                keys["sliding_window"] = 2047  # the first files of the 4k models do not name it
        case "gpt_oss":
            keys["sliding_window"] = m.count("attention.sliding_window")
            keys["layer_types"] = _layer_types(m, keys)
            keys["intermediate_size"] = keys["moe_intermediate_size"]
        case "deepseek_v3":
            keys |= _deepseek(m, keys)
    return keys


def _refuse(m: _Metadata, kind: str, keys: dict[str, Any]) -> None:
    """An error for metadata that would change what the model computes, and that its family knows nothing of."""
    neutral = dict(_NEUTRAL)
    if kind in ("llama", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "deepseek_v3"):
        neutral["attention.sliding_window"] = (0,)
    if not kind.startswith("gemma"):
        neutral |= {"attn_logit_softcapping": (0,), "final_logit_softcapping": (0,)}
    if kind != "gemma3_text":
        neutral["rope.freq_base_swa"] = (keys["rope_theta"],)
    if kind != "deepseek_v3":
        neutral |= dict.fromkeys(("attention.value_length", "attention.key_length_swa", "attention.value_length_swa"), (keys["head_dim"],))
    if "num_local_experts" in keys:
        neutral["expert_gating_func"] = _GATING.get(kind, (0, 1))
    for key, values in neutral.items():
        if (value := m.get(key)) is not None and value not in values:
            raise m.refused(key, value)


def _layer_types(m: _Metadata, keys: dict[str, Any]) -> list[str] | None:
    """What a file says of its layers: one value each, or how many layers a full one ends. None: what its family always has."""
    layers, pattern = range(keys["num_hidden_layers"]), m.get("attention.sliding_window_pattern")
    if pattern is None:
        return None
    if not isinstance(pattern, list):
        every = m.count("attention.sliding_window_pattern")
        pattern = [(i + 1) % every != 0 for i in layers]
    return ["sliding_attention" if sliding else "full_attention" for sliding in pattern[: len(layers)]]


def _rope_scaling(m: _Metadata, keys: dict[str, Any]) -> dict[str, Any] | None:
    file, factor = m.file, m.number("rope.scaling.factor", m.number("rope.scale_linear"))  # the latter is the older name
    kind = m.get("rope.scaling.type", "linear" if factor and factor != 1 else "none") or "none"
    original = m.count("rope.scaling.original_context_length", 0) or keys["max_position_embeddings"]
    both = [f"rope_factors_{length}.weight" for length in ("short", "long")]
    if all(name in file.tensors for name in both) or "rope_freqs.weight" in file.tensors:
        if kind not in ("none", "longrope"):
            raise UserError(f"{m.path} has factors for its rotary frequencies beside scaling {kind!r}: use another conversion of the model")
        short, long = (file.dequantize(name if name in file.tensors else "rope_freqs.weight").tolist() for name in both)
        # rope_freqs are Llama 3's stretched frequencies, which need no factor on cos and sin.
        magnitude = m.number("rope.scaling.attn_factor", 1.0)
        return {"type": "longrope", "short_factor": short, "long_factor": long, "attention_factor": magnitude} | {
            "original_max_position_embeddings": original
        }
    if kind == "none":
        return None
    if kind == "longrope":
        raise UserError(f"{m.path} scales its rotary frequencies by {both[0]} and {both[1]}, which it does not hold: download it again")
    scaling = {"type": kind, "factor": factor, "original_max_position_embeddings": original}
    if kind == "yarn":
        scaling |= {"beta_fast": m.number("rope.scaling.yarn_beta_fast"), "beta_slow": m.number("rope.scaling.yarn_beta_slow")}
        scaling["attention_factor"] = m.number("rope.scaling.yarn_attn_factor")
        scaling["truncate"] = keys["model_type"] != "gpt_oss"
        if log_multiplier := m.number("rope.scaling.yarn_log_multiplier"):
            scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), float(f"{10 * log_multiplier:.6g}"))
    return scaling


def _deepseek(m: _Metadata, keys: dict[str, Any]) -> dict[str, Any]:
    if "num_local_experts" not in keys:
        raise UserError(f"{m.path} has no experts, without which this architecture is not supported: use another model")
    if m.get("expert_gating_func") is None:
        raise UserError(f"{m.path} routes by softmax, as DeepSeek V2 does, which is not supported (V3 is): use another model")
    rope_dim, experts = m.count("rope.dimension_count"), keys["num_local_experts"]
    return {
        "q_lora_rank": m.count("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": m.count("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        # Newer files say what is cached under the plain names, and the sizes of a head under these.
        "qk_nope_head_dim": (m.count("attention.key_length_mla", 0) or m.count("attention.key_length")) - rope_dim,
        "v_head_dim": m.count("attention.value_length_mla", 0) or m.count("attention.value_length"),
        "num_key_value_heads": keys["num_attention_heads"],
        "n_routed_experts": experts,
        "n_shared_experts": m.count("expert_shared_count", 1),
        "first_k_dense_replace": m.count("leading_dense_block_count", 0),
        "moe_intermediate_size": m.count("expert_feed_forward_length"),
        "norm_topk_prob": m.get("expert_weights_norm", False),
        "routed_scaling_factor": m.number("expert_weights_scale") or 1.0,
        # The first files of V3 and R1, alone in having 256 experts, do not name their groups.
        "n_group": m.count("expert_group_count", 0) or (8 if experts == 256 else 1),
        "topk_group": m.count("expert_group_used_count", 0) or (4 if experts == 256 else 1),
    }
