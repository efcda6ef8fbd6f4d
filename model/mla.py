"""Multi-head latent attention, in both forms, and the lightning indexer that makes it sparse."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

import kv
from kernels import apply_rope, matmul, plain
from model.attention import RopeTable
from model.config import MLAConfig
from model.norm import LayerNorm, RMSNorm
from model.weights import scaled_normal, weight
from sharding import axes

LATENT_EPS = 1e-6  # of the norms inside; the model's own epsilon does not reach them


class MLA(nn.Module):
    config: MLAConfig

    @nn.compact
    def __call__(
        self, x: jax.Array, tables: tuple[RopeTable, RopeTable | None], step: kv.Step, cache: Any
    ) -> tuple[jax.Array, Any]:  # x [B, T, D]; tables of the heads' and of the indexer's rotation
        c = self.config
        D = x.shape[-1]
        N, C, P, R, V = c.num_heads, c.kv_rank, c.nope_dim, c.rope.dim, c.value_dim

        def bias(name: str, width: int) -> jax.Array | float:
            return weight(self, name, (width,), (axes.LATENT,), scaled_normal(0)).astype(x.dtype) if c.bias else 0.0

        source, source_axis = x, axes.EMBED
        if c.q_rank is not None:
            wq_a = weight(self, "wq_a", (c.q_rank, D), (axes.LATENT, axes.EMBED), scaled_normal(1))
            source = RMSNorm(LATENT_EPS, name="q_norm")(matmul(x, wq_a) + bias("bq_a", c.q_rank))
            source_axis = axes.LATENT
        wq = weight(self, "wq", (N, P + R, source.shape[-1]), (axes.KV_HEADS, axes.HEAD_DIM, source_axis), scaled_normal(1))
        wkv_a = weight(self, "wkv_a", (C + R, D), (axes.LATENT, axes.EMBED), scaled_normal(1))
        w_uk = weight(self, "w_uk", (N, P, C), (axes.KV_HEADS, axes.HEAD_DIM, axes.LATENT), scaled_normal(1))
        w_uv = weight(self, "w_uv", (N, V, C), (axes.KV_HEADS, axes.HEAD_DIM, axes.LATENT), scaled_normal(1))
        wo = weight(self, "wo", (D, N, V), (axes.EMBED, axes.KV_HEADS, axes.HEAD_DIM), scaled_normal(2))

        q = matmul(source, wq)  # [B, T, N, P + R]
        q_nope, q_rope = q[..., :P], apply_rope(q[..., P:], tables[0])
        latent = matmul(x, wkv_a) + bias("bkv_a", C + R)
        k_rope = apply_rope(latent[:, :, None, C:], tables[0])  # [B, T, 1, R]: one for all heads
        latent = plain(RMSNorm(LATENT_EPS, name="kv_norm")(latent[..., :C]))

        new = kv.LatentRow(jnp.concatenate([latent[:, :, None], k_rope], axis=-1))
        query = kv.LatentQuery(step.queried(q_nope), step.queried(q_rope))
        if c.indexer is not None:
            index_q, index_w, index_k = self._indexed(x, source, tables[1])
            query = query._replace(index_q=step.queried(index_q), index_w=step.queried(index_w))
            new = new._replace(index_k=index_k)
        out, cache = cache.attend(query, new, step, c.spec, kv.LatentWeights(w_uk, w_uv))  # [B, T or 1, N, Hv]
        out = matmul(out, wo, axes=2)
        return (out + weight(self, "bo", (D,), (axes.EMBED,), scaled_normal(0)).astype(out.dtype) if c.bias else out), cache

    @nn.compact
    def _indexed(self, x: jax.Array, source: jax.Array, table: RopeTable) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The indexer's queries [B, T, Hi, Di], their weights [B, T, Hi], and the keys [B, T, 1, Di]."""
        c = self.config.indexer
        wq = weight(
            self, "index_wq", (c.num_heads, c.head_dim, source.shape[-1]), (axes.INDEX, axes.HEAD_DIM, axes.LATENT), scaled_normal(1)
        )
        wk = weight(self, "index_wk", (c.head_dim, x.shape[-1]), (axes.HEAD_DIM, axes.EMBED), scaled_normal(1))
        weigh = weight(self, "index_weights", (c.num_heads, x.shape[-1]), (axes.INDEX, axes.EMBED), scaled_normal(1))
        k = LayerNorm(LATENT_EPS, name="index_k_norm")(matmul(x, wk))
        scale = (c.num_heads * c.head_dim) ** -0.5
        return apply_rope(matmul(source, wq), table), matmul(x, weigh).astype(jnp.float32) * scale, apply_rope(k[:, :, None], table)
