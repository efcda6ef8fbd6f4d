"""How much of a group's range to keep: clipping a few large weights makes the codes of all others finer."""

import jax
import jax.numpy as jnp

from quantization.schemes import Scheme, decode, encode, fit_grid

SHRINKS = 20  # ranges tried: the whole one, and down to
LEAST = 0.5  # of it, in even steps


def best_shrink(grouped: jax.Array, blocks: jax.Array, scheme: Scheme) -> jax.Array:
    """The part of each group's range that costs the product's output least.

    Args:
      grouped: f32 weights [..., groups, n].
      blocks: f32 [groups, n, n]: each group's block on the diagonal of the Hessian, the sum of x x^T over tokens; or its diagonal alone,
        [groups, n].

    Returns:
      f32 [..., groups], for `fit_grid`. 1 where rows share their scales: none of them can choose.
    """
    shrink = jnp.ones(grouped.shape[:-1], jnp.float32)
    if scheme.rows > 1:
        return shrink

    def attempt(best: tuple[jax.Array, jax.Array], candidate: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        grid = fit_grid(grouped, scheme, candidate)
        change = decode(encode(grouped, *grid, scheme), *grid, scheme) - grouped
        if blocks.ndim == 2:
            error = jnp.sum(change * change * blocks, axis=-1)
        else:
            error = jnp.sum(jnp.einsum("...gn,gnm->...gm", change, blocks, precision="highest") * change, axis=-1)
        least, chosen = best
        return (jnp.minimum(error, least), jnp.where(error < least, candidate, chosen)), None

    start = jnp.full(shrink.shape, jnp.inf), shrink
    (_, shrink), _ = jax.lax.scan(attempt, start, 1 - (1 - LEAST) * jnp.arange(SHRINKS) / SHRINKS)
    return shrink
