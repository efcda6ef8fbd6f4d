"""Multi-head latent attention's cache (DeepSeek-V2 2024, arXiv 2405.04434): one row per token, of which all heads' keys and values are
projections; and DeepSeek Sparse Attention's reads of it (DeepSeek-V3.2, 2025).

Two forms of the same algebra. Expanded makes every head's keys and values of each block that is read; absorbed moves the projections to the
queries and the outputs, so that all heads read the rows themselves. Per key and head, a call of T queries costs (multiplications)

    expanded  T (P + R + Hv) + C (P + Hv)        absorbed  T (2 C + R)

With DeepSeek-V3's P = Hv = 128, R = 64, C = 512: 320 T + 131,072 against 1,088 T. So decode is absorbed, and a prefill of more than 170
tokens expanded.
"""

import jax
import jax.numpy as jnp

from kernels import Blocks, attention, blockwise_attention, blockwise_index_scores, head_matmul, index_scores, matmul, top_slots
from kv.layer import Layer
from kv.types import LatentQuery, LatentRow, LatentWeights
from sharding import axes

GATHERING = 16  # queries of a call whose chosen rows are gathered, `top_k` for each: more would take more memory than a mask


class LatentLayer(Layer):
    """Latent rows: queries are `LatentQuery`, new rows `LatentRow`, weights `LatentWeights`. All heads read the same rows, so that every
    device of those that share the heads keeps all of them."""

    NAMES = (
        LatentQuery(
            nope=(axes.BATCH, None, axes.HEADS, None),
            rope=(axes.BATCH, None, axes.HEADS, None),
            index_q=(axes.BATCH, None, None, None),
            index_w=(axes.BATCH, None, None),
        ),
        LatentRow(latent=(axes.BATCH, None, None, None), index_k=(axes.BATCH, None, None, None)),
        LatentWeights(w_uk=(axes.KV_HEADS, None, None), w_uv=(axes.KV_HEADS, None, None)),
    )

    def answer(self, query, new, step, spec, weights):
        length, top_k = query.nope.shape[1], spec.top_k
        if top_k is not None and step.stripes == 1 and length <= GATHERING and length * top_k <= self._positions(step):
            return self._sparse(query, step, spec, weights)
        allowed, limit = None, step.limit(length)
        if top_k is not None:
            allowed = top_slots(self._index_scores(query, step), limit, top_k)
        scoring = spec.scoring(allowed=allowed, spread=step.spread)
        if is_expanded(length, weights):

            def read_expanded(block, where):
                k, v = expand(block("latent", "KSH")[:, 0], weights, query.nope.dtype)
                return k.transpose(0, 2, 3, 1), v.swapaxes(1, 2), where

            q = jnp.concatenate([query.nope, query.rope], axis=-1)
            # All queries share a pass, since each pass expands every block anew.
            return blockwise_attention(q, self.sources(read_expanded, new, step), limit, scoring, query_block=length)

        def read(block, where):
            rows = block("latent", "KSH")
            return rows.swapaxes(2, 3), rows[..., : weights.w_uk.shape[2]], where

        heads_as_rows = max(1, 256 // query.nope.shape[2])  # all heads' queries multiply one matrix: a query block counts them
        out = blockwise_attention(absorb(query, weights), self.sources(read, new, step), limit, scoring, query_block=heads_as_rows)
        return head_matmul(out, weights.w_uv, axis=2)

    def _positions(self, step) -> int:
        """Positions that a row can hold (of a stripe: of its tokens)."""
        return self.layout.capacity if not step.tables else step.tables[self.layout.group].shape[1] * self.layout.page_size

    def _index_scores(self, query, step):
        """[B, T, S], of all stripes."""
        reader = self.layout.reader(step.kept, after=True)

        def read(index):
            return self.tensors["index_k"].block(reader, self.layer, index, "KSH")[:, 0]

        limit = step.limit(query.nope.shape[1])
        limit = limit if step.stripes == 1 else step.kept_limit(limit)
        scores = blockwise_index_scores(query.index_q, query.index_w, read, reader.size, limit, self._positions(step))
        if step.stripes == 1:
            return scores
        return jax.lax.all_gather(scores, step.spread, axis=3).reshape(*scores.shape[:2], -1)

    def _sparse(self, query, step, spec, weights):
        """Reads the chosen rows only: `top_k` for each query, whatever is held."""
        B, T = query.nope.shape[:2]
        limit, positions = step.limit(T), jnp.arange(self._positions(step))
        scores = jnp.where(positions <= limit[..., None], self._index_scores(query, step), -jnp.inf)
        best, chosen = jax.lax.top_k(scores, min(spec.top_k, positions.shape[0]))  # [B, T, k]; of equal ones the first
        chosen = jnp.where(best > -jnp.inf, chosen, -1).reshape(B, -1)
        rows = self.tensors["latent"].gather(self.layer, self.layout, step, jnp.maximum(chosen, 0))  # [B, T * k, C + R]
        where = chosen.reshape(B * T, -1)
        rows = rows.reshape(B * T, 1, where.shape[1], -1)
        rows = jnp.where(where[:, None, :, None] >= 0, rows, 0)
        one = Blocks(lambda _: (rows.swapaxes(2, 3), rows[..., : weights.w_uk.shape[2]], where), lambda first, last: (0, 1))
        q = absorb(query, weights)
        out = blockwise_attention(q.reshape(B * T, 1, *q.shape[2:]), [one], limit.reshape(B * T, 1), spec.scoring())
        return head_matmul(out.reshape(B, T, *out.shape[2:]), weights.w_uv, axis=2)


def is_expanded(length: int, weights: LatentWeights) -> bool:
    """Whether a call of `length` queries is cheaper with expanded keys and values."""
    _, P, C = weights.w_uk.shape
    V = weights.w_uv.shape[1]
    return length * (2 * C - P - V) > C * (P + V)


def absorb(query: LatentQuery, weights: LatentWeights) -> jax.Array:
    """[B, T, N, C + R]: q . (w_uk c) == (w_uk^T q) . c."""
    return jnp.concatenate([head_matmul(query.nope, weights.w_uk, axis=1), query.rope], axis=-1)


def expand(rows: jax.Array, weights: LatentWeights, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Latent rows [B, S, C + R] -> keys [B, S, N, P + R] and values [B, S, N, Hv] in `dtype`."""
    N, _, C = weights.w_uk.shape
    rows = rows.astype(dtype)
    latent, rope = rows[..., :C], rows[:, :, None, C:]
    k = jnp.concatenate([matmul(latent, weights.w_uk), jnp.broadcast_to(rope, (*rope.shape[:2], N, rope.shape[3]))], axis=-1)
    return k, matmul(latent, weights.w_uv)


def latent_attention(query: LatentQuery, new, limit: jax.Array, spec, weights: LatentWeights) -> jax.Array:
    """The reference: expanded, all scores at once, among the call's own tokens."""
    allowed = None
    if spec.top_k is not None:
        allowed = top_slots(index_scores(query.index_q, query.index_w, new.index_k[:, :, 0]), limit, spec.top_k)
    k, v = expand(new.latent[:, :, 0], weights, query.nope.dtype)
    return attention(jnp.concatenate([query.nope, query.rope], axis=-1), k, v, limit, spec.scoring(allowed=allowed))
