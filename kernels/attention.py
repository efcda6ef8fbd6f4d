"""Softmax attention over keys and values that are given whole, or read block by block with a running softmax.

Both take grouped queries: G query heads share one of K key/value heads. A query may see positions 0..limit of its own row, or, with a
window, the last `window` of them:

    limit [B, T]       count = 2, start = 1, T = 4  position  0 1 2 3      window = 1
    query 0  -> 1                                             x x . .      . x . .
    query 1  -> 2                                             x x x .      . . x .
    query 2  -> -1  (padding: sees nothing, returns 0)        . . . .      . . . .
    query 3  -> -1                                            . . . .      . . . .
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from kernels.operands import cpu_operands

_MASKED = -1e30  # finite: a row with nothing to see must not give inf - inf


@dataclasses.dataclass(frozen=True, eq=False)
class Scoring:
    """How scores are made and which of them count.

    Attributes:
      scale: multiplies q . k.
      window: positions that a query sees, its own included; None sees all up to its limit.
      softcap: scores become softcap * tanh(scores / softcap) (Gemma 2, arXiv 2408.00118).
      sinks: f32 [N], one more logit per head that takes probability and has no value (gpt-oss, arXiv 2508.10925).
      allowed: bool [B, T, S], positions that a query may see besides; None allows all.
      spread: inside `jax.shard_map`, the mesh axes over which positions are spread: every device has some of them, and partial answers are
        merged by their log-sum-exp. All devices answer alike.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: jax.Array | None = None
    allowed: jax.Array | None = None
    spread: tuple[str, ...] = ()

    def score(self, dots: jax.Array) -> jax.Array:
        """What goes into the softmax, from the products of scaled queries with keys."""
        return dots if self.softcap is None else self.softcap * jnp.tanh(dots / self.softcap)

    def seen(self, positions: jax.Array, limit: jax.Array) -> jax.Array:
        """Which of `positions` a query with this limit sees; the two are broadcast."""
        inside = positions <= limit
        return inside if self.window is None else inside & (positions > limit - self.window)


@dataclasses.dataclass(frozen=True, eq=False)
class Blocks:
    """Keys and values that are read a block of C at a time.

    Attributes:
      read: block index (traced) -> k [B, K, H, C], v [B, K, C, Hv], and the position of each slot, int32 [1, C] (the same in all rows) or
        [B, C]; negative where there is none, or where another block gives it.
      span: the first and the last position that any query of a row sees, int32 [B] each -> the first block to read, and the one after
        the last.
    """

    read: Callable[[jax.Array], tuple[jax.Array, jax.Array, jax.Array]]
    span: Callable[[jax.Array, jax.Array], tuple[jax.Array | int, jax.Array | int]]


def attention(q: jax.Array, k: jax.Array, v: jax.Array, limit: jax.Array, scoring: Scoring) -> jax.Array:
    """The reference: scores of all keys at once.

    Args:
      q: [B, T, N, H]; k: [B, S, K, H]; v: [B, S, K, Hv].
      limit: int32 [B, T], the last slot that each query sees; -1 sees none.
      scoring: how scores are made.

    Returns:
      [B, T, N, Hv] in q's dtype; 0 where a query sees nothing.
    """
    B, T, N, _ = q.shape
    K = k.shape[2]
    grouped = q.reshape(B, T, K, N // K, -1).astype(jnp.float32) * scoring.scale
    seen = scoring.seen(jnp.arange(k.shape[1]), limit[..., None])
    if scoring.allowed is not None:
        seen &= scoring.allowed
    seen = seen[:, None, None]  # [B, 1, 1, T, S]
    scores = scoring.score(jnp.einsum("btkgh,bskh->bkgts", grouped, k.astype(jnp.float32)))
    scores = jnp.where(seen, scores, _MASKED)
    top = scores.max(-1, keepdims=True)
    rest = 0.0
    if scoring.sinks is not None:
        sinks = scoring.sinks.astype(jnp.float32).reshape(K, N // K, 1, 1)
        top = jnp.maximum(top, sinks)
        rest = jnp.exp(sinks - top)
    weights = jnp.where(seen, jnp.exp(scores - top), 0.0)
    weights = weights / jnp.maximum(weights.sum(-1, keepdims=True) + rest, 1e-30)
    out = jnp.einsum("bkgts,bskh->btkgh", weights, v.astype(jnp.float32))
    return out.reshape(B, T, N, -1).astype(q.dtype)


def blockwise_attention(q: jax.Array, sources: Sequence[Blocks], limit: jax.Array, scoring: Scoring, query_block: int = 256) -> jax.Array:
    """Attention over keys that are read a block at a time, with a running maximum and sum (Milakov & Gimelshein 2018,
    arXiv 1805.02867; Dao et al. 2022, arXiv 2205.14135). Its cost follows what the queries see, not the capacity: blocks that no query of
    a query block sees are not read.

    Args:
      q: [B, T, N, H].
      sources: where keys and values come from; a position is in one of them.
      limit: int32 [B, T], the last position that each query sees; -1 sees none.
      scoring: how scores are made.
      query_block: queries that share a pass over the blocks. More of them read the keys less often, and keep more partial results.

    Returns:
      [B, T, N, Hv] in q's dtype; 0 where a query sees nothing.
    """
    T, H = q.shape[1], q.shape[3]
    if query_block >= T:
        return _query_block(q, sources, limit, scoring)
    blocks = -(-T // query_block)
    pad = blocks * query_block - T
    q = jnp.pad(q, ((0, 0), (0, pad), (0, 0), (0, 0)))
    limit = jnp.pad(limit, ((0, 0), (0, pad)), constant_values=-1)
    allowed = scoring.allowed
    if allowed is not None:
        allowed = jnp.pad(allowed, ((0, 0), (0, pad), (0, 0)))
    width = jax.eval_shape(sources[0].read, jax.ShapeDtypeStruct((), jnp.int32))[1].shape[3]
    if width > H:
        q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, width - H)))

    def one(index, both):  # queries not answered yet, and answers, which take their places
        first = index * query_block

        def part(x):
            return None if x is None else jax.lax.dynamic_slice_in_dim(x, first, query_block, axis=1)

        here = dataclasses.replace(scoring, allowed=part(allowed))
        answer = _query_block(part(both)[..., :H], sources, part(limit), here)
        return jax.lax.dynamic_update_slice(both, answer, (0, first, 0, 0))

    return jax.lax.fori_loop(0, blocks, one, q)[:, :T, :, :width]


def _query_block(q, sources, limit, scoring):
    B, T, N, H = q.shape
    first_k, first_v, _ = jax.eval_shape(sources[0].read, jax.ShapeDtypeStruct((), jnp.int32))
    K, Hv = first_k.shape[1], first_v.shape[3]
    G = N // K
    # Queries of one KV head are rows of one matrix, so that each block costs two dots per (row, KV head).
    queries = q.reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4).reshape(B, K, G * T, H) * scoring.scale
    limits = jnp.tile(limit, (1, G))[:, None, :, None]  # [B, 1, G*T, 1]
    last = jnp.max(limit, axis=1)  # [B], the last position that any query of a row sees
    first = jnp.zeros_like(last)  # and the first one
    if scoring.window is not None:
        lowest = jnp.min(jnp.where(limit >= 0, limit, jnp.max(last)), axis=1)
        first = jnp.maximum(lowest - scoring.window + 1, 0)

    def step(read, index, state):
        top, total, out = state
        k, v, positions = read(index)
        here = positions[:, None, None]  # [B or 1, 1, 1, C]
        seen = scoring.seen(here, limits) & (here >= 0)  # [B, 1, G*T, C]
        if scoring.allowed is not None:
            seen &= jnp.tile(_columns(scoring.allowed, positions), (1, G, 1))[:, None]
        # What lies past the held tokens is garbage, perhaps nan: 0 * nan would leak through the product with v.
        held = (positions <= last[:, None]) & (positions >= first[:, None])
        scores = jnp.where(seen, scoring.score(_product(queries, k)), _MASKED)
        new_top = jnp.maximum(top, scores.max(-1, keepdims=True))
        # 0 where masked; or 1 in rows that have seen nothing yet, which the first visible slot shrinks to 0.
        weights = jnp.exp(scores - new_top)
        shrink = jnp.exp(top - new_top)
        mixed = _product(weights.astype(q.dtype), jnp.where(held[:, None, :, None], v, 0))
        return new_top, total * shrink + weights.sum(-1, keepdims=True), out * shrink + mixed

    top, total = jnp.full((B, K, G * T, 1), _MASKED, jnp.float32), jnp.zeros((B, K, G * T, 1), jnp.float32)
    state = top, total, jnp.zeros((B, K, G * T, Hv), jnp.float32)
    for source in sources:
        state = jax.lax.fori_loop(*source.span(first, last), functools.partial(step, source.read), state)
    if scoring.spread:
        state = _merged(*state, scoring.spread)
    top, total, out = state
    if scoring.sinks is not None:  # one more position, whose value is 0
        sinks = jnp.repeat(scoring.sinks.astype(jnp.float32).reshape(K, G), T, axis=1)[None, :, :, None]
        before, top = top, jnp.maximum(top, sinks)
        total, out = total * jnp.exp(before - top) + jnp.exp(sinks - top), out * jnp.exp(before - top)
    out = jnp.where(top == _MASKED, 0.0, out / jnp.maximum(total, 1e-30))  # a top that has not moved: nothing was seen
    out = out.reshape(B, K, G, T, Hv).transpose(0, 3, 1, 2, 4)
    return out.reshape(B, T, N, Hv).astype(q.dtype)


def _merged(top, total, out, spread):
    """Partial answers of devices that each saw other positions, as one (Milakov & Gimelshein 2018, arXiv 1805.02867)."""
    best = jax.lax.pmax(top, spread)
    shrink = jnp.exp(top - best)  # 1 where no device saw anything: then out is 0
    return best, jax.lax.psum(total * shrink, spread), jax.lax.psum(out * shrink, spread)


def _columns(allowed, positions):  # bool [B, T, S], int32 [1 or B, C] -> [B, T, C]
    if positions.shape[0] == 1:
        return allowed[:, :, positions[0]]
    return jnp.take_along_axis(allowed, positions[:, None], axis=2)


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
