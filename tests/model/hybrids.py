"""Tiny models with what the families add to plain attention, two or three layers each, for the laws."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from model import (
    AttentionConfig,
    IndexerConfig,
    LayerConfig,
    MLAConfig,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    Rope,
    RouterConfig,
    abstract_params,
)
from model.weights import is_matrix

VOCAB, WIDTH, HEAD, LATENT, TOP_K = 101, 48, 8, 12, 4


def attention(**more) -> AttentionConfig:
    return AttentionConfig(**{"num_heads": 6, "num_kv_heads": 2, "head_dim": HEAD, "rope": Rope(theta=1e4, dim=HEAD)} | more)


def mla(**more) -> MLAConfig:
    sizes = {"num_heads": 4, "q_rank": 10, "kv_rank": LATENT, "nope_dim": 6, "rope": Rope(theta=1e4, dim=4), "value_dim": 7, "scale": 0.3}
    return MLAConfig(**sizes | more)


def model(*layers: LayerConfig, **more) -> ModelConfig:
    common = {"vocab_size": VOCAB, "width": WIDTH, "norm_eps": 1e-5, "tie_embeddings": False, "context_length": 512}
    return ModelConfig(layers=layers, **common | more)


def gemma() -> ModelConfig:
    """Windows of 5 on two layers of three, with a rotation of their own; soft caps; norms before and after each part."""
    common = {"softcap": 5.0, "qk_norm": "head"}
    local, everywhere = attention(window=5, rope=Rope(theta=1e2, dim=HEAD), **common), attention(**common)
    mlp = MLPConfig(hidden=32, activation="gelu_tanh")
    layers = (LayerConfig(each, mlp, norms="sandwich") for each in (local, everywhere, local))
    return model(*layers, tie_embeddings=True, embedding_scale=WIDTH**0.5, final_softcap=3.0)


def gpt_oss() -> ModelConfig:
    """Sinks, windows, biases, and experts with biases."""
    router = RouterConfig(num_experts=8, top_k=2, scoring="softmax_topk")
    expert = MLPConfig(hidden=16, activation="clamped_swiglu", bias=True, limit=0.5)  # so low that it clamps
    moe = MoEConfig(router, expert, router_bias=True)
    common = {"sinks": True, "qkv_bias": True, "out_bias": True}
    return model(LayerConfig(attention(window=5, **common), moe), LayerConfig(attention(**common), moe))


def olmo() -> ModelConfig:
    """Norms after each part only, queries and keys normed over all heads, and a layer that sees no positions (as in SmolLM3)."""
    mlp = MLPConfig(hidden=32)
    return model(*(LayerConfig(attention(qk_norm="full", rope=rope), mlp, norms="post") for rope in (Rope(1e4, HEAD), None)))


def latent() -> ModelConfig:
    """Multi-head latent attention: calls of more than 14 tokens are expanded, shorter ones absorbed."""
    return model(*(LayerConfig(mla(), MLPConfig(hidden=32)),) * 2)


def deepseek() -> ModelConfig:
    """Sparse latent attention, with biases; a dense layer, then one of experts in groups beside a shared one."""
    router = RouterConfig(8, 2, scoring="sigmoid", normalize=True, scale=1.5, num_groups=4, groups_kept=2, choice_bias=True)
    moe = MoEConfig(router, MLPConfig(hidden=16), shared=MLPConfig(hidden=16))
    form = mla(indexer=IndexerConfig(num_heads=3, head_dim=6, top_k=TOP_K, rope=Rope(theta=1e4, dim=4)), bias=True)
    return model(LayerConfig(form, MLPConfig(hidden=32)), LayerConfig(form, moe))


CONFIGS = {
    "gemma": gemma(),
    "gpt_oss": gpt_oss(),
    "olmo": olmo(),
    "mla": latent(),
    "deepseek": deepseek(),
}


def random_params(config: ModelConfig, seed: int) -> Any:
    """Weights from numpy, which compiles nothing. Scales of norms and biases are random too, so that none can be left out unseen."""
    rng = np.random.default_rng(seed)

    def value(path, box):
        noise, name = rng.normal(size=box.value.shape).astype(np.float32), path[-1].key
        if name in ("scale", "q_norm", "k_norm"):
            return jnp.asarray(1 + 0.2 * noise)
        return jnp.asarray(noise * (box.value.shape[-1] ** -0.5 if is_matrix(box.names) else 0.5))

    return jax.tree_util.tree_map_with_path(value, abstract_params(config), is_leaf=lambda leaf: hasattr(leaf, "names"))
