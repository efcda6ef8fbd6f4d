"""DeepSeek Sparse Attention's lightning indexer (DeepSeek-V3.2, 2025): which slots a query may attend to."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def index_scores(q: jax.Array, weights: jax.Array, k: jax.Array) -> jax.Array:
    """sum over heads h of weights[h] * relu(q[h] . k), in f32.

    Args:
      q: [B, T, Hi, D]; weights: [B, T, Hi]; k: [B, C, D].

    Returns:
      f32 [B, T, C].
    """
    dots = jnp.einsum("bthd,bcd->bthc", q.astype(jnp.float32), k.astype(jnp.float32))
    return jnp.einsum("bthc,bth->btc", jax.nn.relu(dots), weights.astype(jnp.float32))


def top_slots(scores: jax.Array, limit: jax.Array, k: int) -> jax.Array:
    """The k best slots of each query among those up to its limit; all of them where they are no more than k.

    Args:
      scores: f32 [B, T, S]; what stands past the limit does not matter.
      limit: int32 [B, T], the last slot that each query sees; -1 sees none.
      k: static.

    Returns:
      bool [B, T, S]. Of slots tied with the k-th, the first ones.
    """
    slots = scores.shape[-1]
    seen = jnp.arange(slots) <= limit[..., None]
    if k >= slots:
        return seen
    scores = jnp.where(seen, scores, -jnp.inf)
    kth = jax.lax.top_k(scores, k)[0][..., -1:]
    above, tied = scores > kth, scores == kth
    room = k - above.sum(-1, keepdims=True)
    return seen & (above | (tied & (jnp.cumsum(tied, axis=-1) <= room)))


def blockwise_index_scores(
    q: jax.Array, weights: jax.Array, read: Callable[[jax.Array], jax.Array], block: int, limit: jax.Array, slots: int
) -> jax.Array:
    """`index_scores` over keys that are read a block at a time, as far as the last visible slot; 0 past it.

    Args:
      q, weights: as above.
      read: block index i (traced) -> k [B, C, D] of the slots from i * C on; the last block may begin early, to end with the last slot.
      block: C.
      limit: int32 [B, T].
      slots: S.

    Returns:
      f32 [B, T, S].
    """

    def step(index, scores):
        return jax.lax.dynamic_update_slice_in_dim(scores, index_scores(q, weights, read(index)), index * block, axis=2)  # clamped likewise

    bound = (jnp.max(limit) + block) // block
    return jax.lax.fori_loop(0, bound, step, jnp.zeros((*q.shape[:2], slots), jnp.float32))
