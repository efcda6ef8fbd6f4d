"""Where to cut every row of scores so that the best of them stay: thresholds, found by bisection and never by an order.

A pass compares a row with one floor and sums: what reaches the floor is either enough, and the floor may rise, or too little. It needs
nothing but a comparison and a sum, which all platforms do at the speed of memory, and its temporaries are a few numbers per row.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

_BY_VALUE = 16  # passes
_SIGN, _EXPONENT = np.uint32(1 << 31), np.uint32(0xFF << 23)


def top_k_floor(scores: jax.Array, k: jax.Array) -> jax.Array:
    """What the k largest scores of each row reach, and those that equal the k-th, and no others.

    Args:
      scores: f32 [B, V], V up to 2^24, without nan. -inf stands for no score. Subnormal ones count as 0.
      k: int32 [B]; where it is below 1, or not less than the row's number of scores, all reach the floor.

    Returns:
      f32 [B].
    """
    low, high = _ends(scores)
    cuts = (k > 0) & (k < jnp.sum(scores > -jnp.inf, axis=-1))

    def count(floor: jax.Array) -> jax.Array:  # in f32, exactly: the CPU backend sums integers more slowly
        return jnp.sum(jnp.where(scores >= floor[:, None], 1.0, 0.0), axis=-1)

    return _highest(count, k.astype(jnp.float32), jnp.ones_like, low, jnp.where(cuts, high, low))


def top_p_floor(scores: jax.Array, weights: jax.Array, p: jax.Array) -> jax.Array:
    """What the fewest of each row's largest scores reach that have at least `p` of its weight, and those that equal the smallest of them.

    The sums are f32: a score whose weight is within their rounding of the limit may fall on either side of it.

    Args:
      scores: as of `top_k_floor`.
      weights: f32 [B, V], exp(scores - the row's largest).
      p: f32 [B]; where it is 1 or more, all reach the floor. However small it is, the largest score does.

    Returns:
      f32 [B].
    """
    low, high = _ends(scores)
    enough = p * jnp.sum(weights, axis=-1)
    largest = jnp.max(scores, axis=-1)

    def weight(floor: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(scores >= floor[:, None], weights, 0.0), axis=-1)

    return _highest(weight, enough, lambda floor: jnp.exp(floor - largest), low, jnp.where(p < 1, high, low))


def _ends(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Each row's smallest and largest score, as keys; of a row without any, -inf twice."""
    largest = jnp.max(scores, axis=-1)
    smallest = jnp.min(jnp.where(scores > -jnp.inf, scores, largest[:, None]), axis=-1)
    return _key(smallest), _key(largest)


def _highest(
    amount: Callable[[jax.Array], jax.Array],
    enough: jax.Array,
    least: Callable[[jax.Array], jax.Array],
    low: jax.Array,
    high: jax.Array,
) -> jax.Array:
    """The highest floor at which there is still enough, or one that the same scores reach.

    The first passes halve the distance between two numbers and later ones the count of floats in between, which ends in at most 32 more:
    floats near 0 are dense, and by their count alone it takes seven passes to get away from there. A row ends as soon as it could not
    do without any score that reaches its floor, which is most often after log2(V) passes, all being done after the slowest.

    Args:
      amount: what reaches a floor f32 [B], in sum: f32 [B], falling as floors rise.
      enough: f32 [B].
      least: a floor f32 [B] -> f32 [B], what each score that reaches it adds to the amount at least.
      low: uint32 [B], the key of a floor with enough, if there is one.
      high: uint32 [B], the key of the highest floor in question.

    Returns:
      f32 [B].
    """

    def step(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        index, low, high = state
        by_value = jnp.clip(_key(_number(low) / 2 + _number(high) / 2), low + 1, high)
        key = jnp.where(index < _BY_VALUE, by_value, high - (high - low) // 2)  # above low, up to high
        floor = _number(key)
        found = amount(floor)
        rises = found >= enough
        ends = rises & (found - enough < least(floor))
        going = low < high
        lower, upper = jnp.where(rises, key, low), jnp.where(ends, key, jnp.where(rises, high, key - 1))
        return index + 1, jnp.where(going, lower, low), jnp.where(going, upper, high)

    return _number(jax.lax.while_loop(lambda state: jnp.any(state[1] < state[2]), step, (jnp.int32(0), low, high))[1])


def _key(number: jax.Array) -> jax.Array:
    """f32 -> uint32 that compares as the floats do; there is one zero, not two."""
    bits = _flushed(jax.lax.bitcast_convert_type(number, jnp.uint32))
    return jnp.where(bits >= _SIGN, ~bits, bits | _SIGN)


def _number(key: jax.Array) -> jax.Array:
    """The float of a key."""
    bits = jnp.where(key >= _SIGN, key ^ _SIGN, ~key)
    return jax.lax.bitcast_convert_type(_flushed(bits), jnp.float32)


def _flushed(bits: jax.Array) -> jax.Array:
    """With 0 for subnormal floats: some processors compare them so, and what is found must not depend on who compares with it."""
    return jnp.where(bits & _EXPONENT == 0, jnp.uint32(0), bits)
