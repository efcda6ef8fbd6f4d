"""Keeps the TPU's compiler from turning a cache over."""

import jax
from jax.experimental.layout import Layout, with_layout_constraint


def row_major(x: jax.Array) -> jax.Array:
    """x, with its axes in memory in the order of its shape; of consequence on TPU alone.

    The compiler chooses the order of every intermediate array to suit whoever reads it next, and carries the choice back through slices and
    updates. A block of a cache in another order than the cache costs a copy of the whole cache; a block that is held to the cache's order
    costs at most a copy of the block.
    """

    def held(x: jax.Array) -> jax.Array:
        return with_layout_constraint(x, Layout(tuple(range(x.ndim))))

    return jax.lax.platform_dependent(x, tpu=held, default=lambda x: x)
