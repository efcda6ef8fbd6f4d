"""Which number format the CPU backend multiplies fast."""

import jax
import jax.numpy as jnp

from runtime import cpu_multiplies_bf16


def cpu_operands(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The operands of a dot in the format that the CPU backend multiplies fast: bf16 with a f32 result where the processor has bf16
    products (twice the speed of f32), else f32 (elsewhere bf16 falls into a naive loop at 1 GB/s). The result is the same: f32 holds every
    bf16 product exactly."""
    if x.dtype == y.dtype == jnp.bfloat16 and cpu_multiplies_bf16():
        return x, y
    return x.astype(jnp.float32), y.astype(jnp.float32)
