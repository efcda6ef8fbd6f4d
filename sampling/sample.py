"""From logits to one token per row.

Nothing here sorts the vocabulary: a filter's cut is found by bisection over the bits of the logits, 32 passes of one comparison
and one sum, and the passes run only in a batch where some row asks for them.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

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
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    drawn = jax.lax.cond(
        jnp.any(params.temperature > 0),
        lambda: _draw(truncate(_heat(logits, params.temperature), params), params, positions),
        lambda: greedy,
    )
    return jnp.where(params.temperature > 0, drawn, greedy)


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
    order = _order(logits)

    def top_k() -> jax.Array:
        k = jnp.clip(params.top_k, 1, logits.shape[1])
        floor = _bisect(lambda floor: jnp.sum(order >= floor[:, None], axis=-1) >= k, logits.shape[0])
        return jnp.where((params.top_k[:, None] > 0) & (order < floor[:, None]), -jnp.inf, logits)

    logits = jax.lax.cond(jnp.any(params.top_k > 0), top_k, lambda: logits)
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))  # unnormalised probabilities

    def top_p() -> jax.Array:
        enough = params.top_p * jnp.sum(weights, axis=-1)
        floor = _bisect(lambda floor: jnp.sum(jnp.where(order >= floor[:, None], weights, 0), axis=-1) >= enough, logits.shape[0])
        floor = jnp.minimum(floor, jnp.max(order, axis=-1))  # a top_p that underflows keeps the likeliest
        return jnp.where((params.top_p[:, None] < 1) & (order < floor[:, None]), -jnp.inf, logits)

    logits = jax.lax.cond(jnp.any(params.top_p < 1), top_p, lambda: logits)
    return jnp.where(weights < params.min_p[:, None], -jnp.inf, logits)


def _order(values: jax.Array) -> jax.Array:
    """f32 -> uint32 that compares as the floats do."""
    bits = jax.lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.uint32)  # one zero, not two
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _bisect(holds: Callable[[jax.Array], jax.Array], rows: int) -> jax.Array:
    """The largest uint32 per row for which `holds` is still true; true at 0 and never true again once false."""

    def bit(index: jax.Array, floor: jax.Array) -> jax.Array:
        candidate = floor | (jnp.uint32(1 << 31) >> index.astype(jnp.uint32))
        return jnp.where(holds(candidate), candidate, floor)

    return jax.lax.fori_loop(0, 32, bit, jnp.zeros((rows,), jnp.uint32))


def _draw(logits: jax.Array, params: SamplingParams, positions: jax.Array) -> jax.Array:
    """Gumbel-max: the argmax of logits plus Gumbel noise has the softmax's distribution."""

    def noise(seed: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), position), (logits.shape[1],))

    return jnp.argmax(logits + jax.vmap(noise)(params.seed, positions), axis=-1).astype(jnp.int32)
