"""The `llama` architecture of GGUF files: its metadata as a `ModelConfig`, its tensors as the parameter tree."""

from collections.abc import Callable
from typing import Any

import numpy as np

from checkpoint.gguf_file import GGUFFile
from model import AttentionConfig, LayerConfig, MLPConfig, ModelConfig, Rope
from runtime import UserError

Read = Callable[[str], np.ndarray]  # tensor name -> float32 [out, in]


def config(file: GGUFFile) -> ModelConfig:
    """What the file's metadata say.

    Raises:
        UserError: a key is missing, or asks for what this architecture's code does not do.
    """

    def get(key: str) -> Any:
        return file.require(f"llama.{key}")

    width, heads = get("embedding_length"), get("attention.head_count")
    head_dim = file.metadata.get("llama.attention.key_length", width // heads)
    value_dim = file.metadata.get("llama.attention.value_length", head_dim)
    rotated = file.metadata.get("llama.rope.dimension_count", head_dim)
    refused = {
        "rotary scaling": file.metadata.get("llama.rope.scaling.type", "none") not in ("none", None) or "rope_freqs.weight" in file.tensors,
        "rotary embedding of part of the head": rotated != head_dim,
        "values of another size than keys": value_dim != head_dim,
        "experts": file.metadata.get("llama.expert_count", 0) > 0,
        "a sliding window": file.metadata.get("llama.attention.sliding_window", 0) > 0,
    }
    for what, present in refused.items():
        if present:
            raise UserError(f"{file.path} uses {what}, which is not supported for architecture 'llama': use another model")
    attention = AttentionConfig(
        num_heads=heads,
        num_kv_heads=file.metadata.get("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        rope=Rope(theta=file.metadata.get("llama.rope.freq_base", 10000.0)),
    )
    layer = LayerConfig(attention=attention, mlp=MLPConfig(hidden=get("feed_forward_length")))
    return ModelConfig(
        vocab_size=file.tensor("token_embd.weight").shape[0],
        width=width,
        layers=(layer,) * get("block_count"),
        # The file holds the f32 nearest to 1e-5; the short decimal is what the model was trained with.
        norm_eps=float(f"{get('attention.layer_norm_rms_epsilon'):.6g}"),
        tie_embeddings="output.weight" not in file.tensors,
        context_length=get("context_length"),
    )


def params(config: ModelConfig, read: Read) -> dict[str, Any]:
    """The parameter tree with a function in each weight's place that reads it, so that the caller can take them one at a time."""
    tree: dict[str, Any] = {
        "embedding": lambda: read("token_embd.weight"),
        "final_norm": {"scale": lambda: read("output_norm.weight")},
    }
    if not config.tie_embeddings:
        tree["head"] = lambda: read("output.weight")
    for number, layer in enumerate(config.layers):
        tree[f"layer_{number}"] = _layer(f"blk.{number}", layer, read)
    return tree


def _layer(prefix: str, layer: LayerConfig, read: Read) -> dict[str, Any]:
    c = layer.attention
    K, G, H = c.num_kv_heads, c.queries_per_kv, c.head_dim

    def wqkv() -> np.ndarray:
        q = _half_split(read(f"{prefix}.attn_q.weight"), H)
        k = _half_split(read(f"{prefix}.attn_k.weight"), H)
        v = read(f"{prefix}.attn_v.weight")
        heads = [q.reshape(K, G, H, -1), k.reshape(K, 1, H, -1), v.reshape(K, 1, H, -1)]
        return np.concatenate(heads, axis=1)  # [K, G + 2, H, D]

    def w_gate_up() -> np.ndarray:
        return np.stack([read(f"{prefix}.ffn_gate.weight"), read(f"{prefix}.ffn_up.weight")])  # [2, F, D]

    return {
        "attention_norm": {"scale": lambda: read(f"{prefix}.attn_norm.weight")},
        "attention": {"wqkv": wqkv, "wo": lambda: read(f"{prefix}.attn_output.weight").reshape(-1, K, G, H)},
        "mlp_norm": {"scale": lambda: read(f"{prefix}.ffn_norm.weight")},
        "mlp": {"w_gate_up": w_gate_up, "w_down": lambda: read(f"{prefix}.ffn_down.weight")},
    }


def _half_split(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Undoes the row order of q and k in these files, which puts the two halves of a rotated pair side by side:

    stored 0 2 1 3 (pairs (0, 2), (1, 3) adjacent)  ->  0 1 2 3 (pair i with i + H/2), for H = 4.
    """
    rows, width = weight.shape
    return weight.reshape(rows // head_dim, head_dim // 2, 2, width).swapaxes(1, 2).reshape(rows, width)
