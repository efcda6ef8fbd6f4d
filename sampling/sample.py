"""From logits to one token per row.

Nothing here sorts the vocabulary: a filter's cut is a floor, found by bisection, and what no row of a batch asks for is not done.
"""

import jax
import jax.numpy as jnp

from kernels import argmax, gumbel, top_k_floor, top_p_floor
from sampling.options import SamplingParams


def sample(logits: jax.Array, params: SamplingParams, positions: jax.Array, seen: jax.Array, counts: jax.Array) -> jax.Array:
    """One token per row.

    Args:
      logits: f32 [B, V].
      params: per row.
      positions: int32 [B], the position that the token will have. A row's randomness is fold_in(key(seed), position): its own,
        whatever slot it has and whoever is beside it.
      seen: bool [B, V], tokens of the prompt.
      counts: int32 [B, V], how often the answer holds each token.

    Returns:
      int32 [B].
    """
    logits = penalize(logits, params, seen, counts)
    greedy = argmax(logits)
    hot = params.temperature > 0
    filters = params.replace(  # a greedy row asks for none
        top_k=jnp.where(hot, params.top_k, 0), top_p=jnp.where(hot, params.top_p, 1.0), min_p=jnp.where(hot, params.min_p, 0.0)
    )
    drawn = jax.lax.cond(
        jnp.any(hot),
        lambda: _draw(truncate(_heat(logits, params.temperature), filters), params, positions),
        lambda: greedy,
    )
    return jnp.where(hot, drawn, greedy)


def penalize(logits: jax.Array, params: SamplingParams, seen: jax.Array, counts: jax.Array) -> jax.Array:
    """Repetition, presence and frequency penalties, then the bias: f32 [B, V]."""

    def penalties() -> jax.Array:
        factor = params.repetition_penalty[:, None]
        answered = counts > 0
        out = jnp.where(seen | answered, jnp.where(logits > 0, logits / factor, logits * factor), logits)
        return out - params.presence_penalty[:, None] * answered - params.frequency_penalty[:, None] * counts

    wanted = (params.repetition_penalty != 1) | (params.presence_penalty != 0) | (params.frequency_penalty != 0)
    logits = jax.lax.cond(jnp.any(wanted), penalties, lambda: logits)

    def bias() -> jax.Array:
        rows = jnp.arange(logits.shape[0])[:, None]
        tokens = jnp.where(params.bias_tokens >= 0, params.bias_tokens, logits.shape[1])  # unused entries fall outside
        return logits.at[rows, tokens].add(params.bias_values, mode="drop")

    return jax.lax.cond(jnp.any(params.bias_tokens >= 0), bias, lambda: logits)


def _heat(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """Logits over temperature, the largest at 0: a tiny temperature then gives -inf, never inf - inf."""
    return (logits - jnp.max(logits, axis=-1, keepdims=True)) / jnp.where(temperature > 0, temperature, 1.0)[:, None]


def truncate(logits: jax.Array, params: SamplingParams) -> jax.Array:
    """top-k, then top-p of what is left, then min-p: f32 [B, V] with -inf where a token is cut."""

    def top_k() -> jax.Array:
        floor = top_k_floor(logits, params.top_k)
        return jnp.where((params.top_k > 0)[:, None] & (logits < floor[:, None]), -jnp.inf, logits)

    def top_p_and_min_p(logits: jax.Array) -> jax.Array:
        weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))  # unnormalised probabilities

        def top_p() -> jax.Array:
            floor = top_p_floor(logits, weights, params.top_p)
            return jnp.where((params.top_p < 1)[:, None] & (logits < floor[:, None]), -jnp.inf, logits)

        kept = jax.lax.cond(jnp.any(params.top_p < 1), top_p, lambda: logits)
        return jnp.where(weights < params.min_p[:, None], -jnp.inf, kept)

    logits = jax.lax.cond(jnp.any(params.top_k > 0), top_k, lambda: logits)
    wanted = jnp.any((params.top_p < 1) | (params.min_p > 0))
    return jax.lax.cond(wanted, top_p_and_min_p, lambda logits: logits, logits)


def _draw(logits: jax.Array, params: SamplingParams, positions: jax.Array) -> jax.Array:
    """Gumbel-max: the argmax of logits plus Gumbel noise has the softmax's distribution."""

    def key(seed: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)

    return argmax(logits + gumbel(jax.vmap(key)(params.seed, positions), logits.shape[1]))
