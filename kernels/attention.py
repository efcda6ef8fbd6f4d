"""Softmax attention over keys and values that are given whole, or read block by block with a running softmax.

Both take grouped queries: G query heads share one of K key/value heads. A query may see slots 0..limit of its own row:

    limit [B, T]       count = 2, start = 1, T = 4      slot  0 1 2 3
    query 0  -> 1                                             x x . .
    query 1  -> 2                                             x x x .
    query 2  -> -1  (padding: sees nothing, returns 0)        . . . .
    query 3  -> -1                                            . . . .
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from kernels.matmul import cpu_operands

_MASKED = -1e30  # finite: a row with nothing to see must not give inf - inf
_QUERY_BLOCK = 256


def attention(q: jax.Array, k: jax.Array, v: jax.Array, limit: jax.Array, scale: float) -> jax.Array:
    """The reference: scores of all keys at once.

    Args:
      q: [B, T, N, H]; k: [B, S, K, H]; v: [B, S, K, Hv].
      limit: int32 [B, T], the last slot that each query sees; -1 sees none.
      scale: multiplies the scores.

    Returns:
      [B, T, N, Hv] in q's dtype; 0 where a query sees nothing.
    """
    B, T, N, _ = q.shape
    K = k.shape[2]
    grouped = q.reshape(B, T, K, N // K, -1).astype(jnp.float32)
    seen = (jnp.arange(k.shape[1]) <= limit[..., None])[:, None, None]  # [B, 1, 1, T, S]
    scores = jnp.einsum("btkgh,bskh->bkgts", grouped, k.astype(jnp.float32)) * scale
    scores = jnp.where(seen, scores, _MASKED)
    weights = jnp.where(seen, jnp.exp(scores - scores.max(-1, keepdims=True)), 0.0)
    weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), 1e-30)
    out = jnp.einsum("bkgts,bskh->btkgh", weights, v.astype(jnp.float32))
    return out.reshape(B, T, N, -1).astype(q.dtype)


def blockwise_attention(
    q: jax.Array, read: Callable[[jax.Array], tuple[jax.Array, jax.Array, jax.Array]], block: int, limit: jax.Array, scale: float
) -> jax.Array:
    """Attention over keys that are read a block at a time, with a running maximum and sum (Milakov & Gimelshein 2018,
    arXiv 1805.02867; Dao et al. 2022, arXiv 2205.14135). Its cost follows `limit`, not the capacity: blocks past the last
    visible slot are never read, and a block of queries reads only what the last of them sees.

    Args:
      q: [B, T, N, H].
      read: block index (traced) -> (k [B, K, H, C], v [B, K, C, Hv], slots int32 [C]); a slot may be given by two blocks,
        then the first counts.
      block: C, slots per block.
      limit: int32 [B, T], the last slot that each query sees; -1 sees none.
      scale: multiplies the scores.

    Returns:
      [B, T, N, Hv] in q's dtype; 0 where a query sees nothing.
    """
    T, H = q.shape[1], q.shape[3]
    if T <= _QUERY_BLOCK:
        return _query_block(q, read, block, limit, scale)
    blocks = -(-T // _QUERY_BLOCK)
    pad = blocks * _QUERY_BLOCK - T
    q = jnp.pad(q, ((0, 0), (0, pad), (0, 0), (0, 0)))
    limit = jnp.pad(limit, ((0, 0), (0, pad)), constant_values=-1)
    width = jax.eval_shape(read, jax.ShapeDtypeStruct((), jnp.int32))[1].shape[3]
    if width > H:
        q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, width - H)))

    def one(index, both):  # queries not answered yet, and answers, which take their places
        first = index * _QUERY_BLOCK
        part, seen = (jax.lax.dynamic_slice_in_dim(x, first, _QUERY_BLOCK, axis=1) for x in (both, limit))
        return jax.lax.dynamic_update_slice(both, _query_block(part[..., :H], read, block, seen, scale), (0, first, 0, 0))

    return jax.lax.fori_loop(0, blocks, one, q)[:, :T, :, :width]


def _query_block(q, read, block, limit, scale):
    B, T, N, H = q.shape
    first_k, first_v, _ = jax.eval_shape(read, jax.ShapeDtypeStruct((), jnp.int32))
    K, Hv = first_k.shape[1], first_v.shape[3]
    G = N // K
    # Queries of one KV head are rows of one matrix, so that each block costs two dots per (row, KV head).
    queries = q.reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, H) * scale
    limits = jnp.tile(limit, (1, G))[:, None, :, None]  # [B, 1, G*T, 1]
    bound = (jnp.max(limit) + block) // block  # blocks that hold a visible slot

    def step(index, state):
        top, total, out = state
        k, v, slots = read(index)
        seen = (slots <= limits) & (slots >= index * block)  # [B, 1, G*T, C]
        # What lies past the held tokens is garbage, perhaps nan: 0 * nan would leak through the product with v.
        held = (slots <= jnp.max(limit, axis=1)[:, None])[:, None, :, None]
        scores = jnp.where(seen, _product(queries, k), _MASKED)
        new_top = jnp.maximum(top, scores.max(-1, keepdims=True))
        # 0 where masked; or 1 in rows that have seen nothing yet, which the first visible slot shrinks to 0.
        weights = jnp.exp(scores - new_top)
        shrink = jnp.exp(top - new_top)
        mixed = _product(weights.astype(q.dtype), jnp.where(held, v, 0))
        return new_top, total * shrink + weights.sum(-1, keepdims=True), out * shrink + mixed

    state = (
        jnp.full((B, K, G * T, 1), _MASKED, jnp.float32),
        jnp.zeros((B, K, G * T, 1), jnp.float32),
        jnp.zeros((B, K, G * T, Hv), jnp.float32),
    )
    _, total, out = jax.lax.fori_loop(0, bound, step, state)
    out = jnp.where(limits >= 0, out / jnp.maximum(total, 1e-30), 0.0).reshape(B, K, G, T, Hv).transpose(0, 3, 1, 2, 4)
    return out.reshape(B, T, N, Hv).astype(q.dtype)


def _product(x, y):  # [B, K, R, I], [B, K, I, J] -> f32 [B, K, R, J], from operands in x's dtype
    def product(x, y):
        return jax.lax.dot_general(x, y, (((3,), (2,)), ((0, 1), (0, 1))), preferred_element_type=jnp.float32)

    def cpu(x, y):
        x, y = cpu_operands(x, y)
        rows = x.shape[2]
        if x.dtype == jnp.bfloat16 and rows == 1:
            x = jnp.pad(x, ((0, 0), (0, 0), (0, 1), (0, 0)))  # one row of bf16 would take a naive loop
        return product(x, y)[:, :, :rows]

    return jax.lax.platform_dependent(x, y.astype(x.dtype), cpu=cpu, default=product)
