"""Grouped-query attention, with what families add to it: biases, norms of queries and keys, windows, soft caps, sinks."""

from typing import Any

import jax
from flax import linen as nn

import kv
from kernels import Heads, Normed, matmul
from model.config import AttentionConfig
from model.weights import scaled_normal, weight
from sharding import axes

RopeTable = tuple[jax.Array, jax.Array]


class Attention(nn.Module):
    config: AttentionConfig
    norm_eps: float

    @nn.compact
    def __call__(
        self, x: jax.Array | Normed, tables: tuple[RopeTable | None], step: kv.Step, cache: Any, residual: jax.Array | None = None
    ) -> tuple[jax.Array, Any]:
        """Args: x [B, T, D]; residual: what the answer is added to. Returns: as of `Block`."""
        c, (table,) = self.config, tables
        D = x.shape[-1]
        K, G, H = c.num_kv_heads, c.queries_per_kv, c.head_dim
        # One weight for q, k and v, interleaved by KV head: a shard of K is a working attention of its own.
        wqkv = weight(self, "wqkv", (K, G + 2, H, D), (axes.KV_HEADS, axes.QKV, axes.HEAD_DIM, axes.EMBED), scaled_normal(1))
        wo = weight(self, "wo", (D, K, G, H), (axes.EMBED, axes.KV_HEADS, axes.Q_PER_KV, axes.HEAD_DIM), scaled_normal(3))
        qkv = matmul(x, wqkv)  # [B, T, K, G + 2, H]
        if c.qkv_bias:
            bias = weight(self, "bqkv", (K, G + 2, H), (axes.KV_HEADS, axes.QKV, axes.HEAD_DIM), scaled_normal(0))
            qkv = qkv + bias.astype(qkv.dtype)
        q_norm = k_norm = None
        if c.qk_norm is not None:
            heads = c.qk_norm == "full"  # over all heads at once
            names = (axes.KV_HEADS, axes.Q_PER_KV, axes.HEAD_DIM)
            q_shape, k_shape = ((K, G, H), (K, H)) if heads else ((H,), (H,))
            q_names, k_names = (names, (names[0], names[2])) if heads else ((axes.HEAD_DIM,), (axes.HEAD_DIM,))
            q_norm = weight(self, "q_norm", q_shape, q_names, nn.initializers.ones)
            k_norm = weight(self, "k_norm", k_shape, k_names, nn.initializers.ones)
        sinks = weight(self, "sinks", (K, G), (axes.KV_HEADS, axes.Q_PER_KV), scaled_normal(0)) if c.sinks else None
        out, cache = kv.attend_heads(cache, Heads(qkv, q_norm, k_norm, table, self.norm_eps), step, c.spec, sinks)  # [B, T or 1, N, H]
        out = out.reshape(*out.shape[:2], K, G, H)
        if not c.out_bias:
            return matmul(out, wo, 3, residual), cache
        out = matmul(out, wo, 3) + weight(self, "bo", (D,), (axes.EMBED,), scaled_normal(0)).astype(out.dtype)
        return out if residual is None else out + residual, cache
