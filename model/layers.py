"""The parts of a Transformer layer: norm, rotary embedding, attention, gated MLP."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

import kv
from kernels import matmul
from model.config import AttentionConfig, LayerConfig, MLPConfig, Rope
from model.weights import scaled_normal, weight
from sharding import axes

RopeTables = dict[Rope, tuple[jax.Array, jax.Array]]  # cos and sin, each f32 [B, T, 1, H]


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * scale, in f32 (Zhang & Sennrich 2019, arXiv 1910.07467)."""

    eps: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # [..., D]
        scale = weight(self, "scale", (x.shape[-1],), (axes.NORM,), nn.initializers.ones)
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * scale).astype(x.dtype)


def rope_table(rope: Rope, head_dim: int, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin of the angles position * theta^(-2i/H), i < H/2.

    Args:
      positions: int32 [B, T].

    Returns:
      cos and sin, f32 [B, T, 1, H]: every angle for both of its elements, the sines of the first half negative.
    """
    frequencies = rope.theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
    return jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)


def apply_rope(x: jax.Array, table: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the pairs (i, i + H/2) of every head of x [B, T, heads, H] by its position's angles."""
    cos, sin = table
    wide = x.astype(jnp.float32)
    return (wide * cos + jnp.roll(wide, x.shape[-1] // 2, axis=-1) * sin).astype(x.dtype)


class Attention(nn.Module):
    config: AttentionConfig

    @nn.compact
    def __call__(self, x: jax.Array, ropes: RopeTables, step: kv.Step, cache: Any) -> tuple[jax.Array, Any]:  # x [B, T, D]
        c = self.config
        B, T, D = x.shape
        K, G, H = c.num_kv_heads, c.queries_per_kv, c.head_dim
        # One weight for q, k and v, interleaved by KV head: a shard of K is a working attention of its own.
        wqkv = weight(self, "wqkv", (K, G + 2, H, D), (axes.KV_HEADS, axes.QKV, axes.HEAD_DIM, axes.EMBED), scaled_normal(1))
        wo = weight(self, "wo", (D, K, G, H), (axes.EMBED, axes.KV_HEADS, axes.Q_PER_KV, axes.HEAD_DIM), scaled_normal(3))
        qkv = matmul(x, wqkv)  # [B, T, K, G + 2, H]
        q, k, v = qkv[..., :G, :].reshape(B, T, K * G, H), qkv[..., G, :], qkv[..., G + 1, :]
        if c.rope is not None:
            q, k = apply_rope(q, ropes[c.rope]), apply_rope(k, ropes[c.rope])
        out, cache = cache.attend(kv.Query(step.queried(q)), kv.KeyValue(k, v), step, c.spec)  # [B, T or 1, N, H]
        return matmul(out.reshape(B, -1, K, G, H), wo, axes=3), cache


class MLP(nn.Module):
    config: MLPConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # [B, T, D]
        D, F = x.shape[-1], self.config.hidden
        w_gate_up = weight(self, "w_gate_up", (2, F, D), (axes.GATE_UP, axes.MLP, axes.EMBED), scaled_normal(1))
        w_down = weight(self, "w_down", (D, F), (axes.EMBED, axes.MLP), scaled_normal(1))
        gate_up = matmul(x, w_gate_up)  # [B, T, 2, F]
        hidden = nn.silu(gate_up[..., 0, :].astype(jnp.float32)) * gate_up[..., 1, :].astype(jnp.float32)
        return matmul(hidden.astype(x.dtype), w_down)


class Block(nn.Module):
    config: LayerConfig
    norm_eps: float

    @nn.compact
    def __call__(self, x: jax.Array, ropes: RopeTables, step: kv.Step, cache: Any) -> tuple[jax.Array, Any]:  # x [B, T, D]
        out, cache = Attention(self.config.attention, name="attention")(
            RMSNorm(self.norm_eps, name="attention_norm")(x), ropes, step, cache
        )
        x = step.queried(x) + out
        return x + MLP(self.config.mlp, name="mlp")(RMSNorm(self.norm_eps, name="mlp_norm")(x)), cache
