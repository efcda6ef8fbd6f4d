"""`gumbel`: the noise that makes an argmax a draw, every row's from a key of its own."""

import jax
import jax.numpy as jnp
import numpy as np

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def gumbel(keys: jax.Array, count: int) -> jax.Array:
    """Standard Gumbel noise, the same bits as `jax.random.gumbel(key, (count,))` of each key.

    Args:
      keys: threefry2x32 keys [B].
      count: static, up to 2^32.

    Returns:
      f32 [B, count].
    """

    def default(data: jax.Array) -> jax.Array:
        return jax.vmap(lambda key: jax.random.gumbel(jax.random.wrap_key_data(key, impl="threefry2x32"), (count,)))(data)

    # JAX has the CPU go through the rounds in a loop, from memory to memory, to compile less: as one expression they take a third of it.
    return jax.lax.platform_dependent(jax.random.key_data(keys), cpu=lambda data: _noise(_bits(data, count)), default=default)


def _bits(data: jax.Array, count: int) -> jax.Array:
    """uint32 [B, count] of keys uint32 [B, 2]: 20 rounds of Threefry-2x32 (Salmon et al. 2011, doi 10.1145/2063384.2063405) over the number
    of each place, both halves of the result in one."""
    first, second = data[:, :1], data[:, 1:]
    words = first, second, first ^ second ^ _PARITY
    x, y = words[0], jnp.arange(count, dtype=jnp.uint32) + words[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x = x + y
            y = x ^ (y << np.uint32(rotation) | y >> np.uint32(32 - rotation))
        x = x + words[(group + 1) % 3]
        y = y + words[(group + 2) % 3] + np.uint32(group + 1)
    return x ^ y


def _noise(bits: jax.Array) -> jax.Array:
    """-log(-log(u)) of u in (0, 1), whose 23 bits are a float's in [1, 2)."""
    uniform = jax.lax.bitcast_convert_type(bits >> 9 | np.float32(1).view(np.uint32), jnp.float32) - 1
    return -jnp.log(-jnp.log(jnp.maximum(uniform, jnp.finfo(jnp.float32).tiny)))
