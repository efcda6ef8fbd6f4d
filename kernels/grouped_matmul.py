"""`grouped_matmul(x, w, sizes)`: rows times their own expert's matrix, which is read packed; with one expert, a plain product.

Rows that are sorted by expert are taken in tiles. A visit is one tile with one expert; a tile where two experts meet is visited twice:

    sizes [3, 0, 5], tiles of 4 rows        visit    0  1  2
    rows    0 0 0 2 | 2 2 2 2               tile     0  0  1
                                            expert   0  2  2
                                            from     0  3  0
                                            to       3  4  4

An expert without rows has no visit: nothing is read of it. There are as many visits as there could be; those past the last repeat it,
from 0 to 0, and cost a step.
"""

import functools

import jax
import jax.numpy as jnp

from kernels.mosaic_matmul import mosaic_matmul
from kernels.transposed_array import TransposedArray
from kernels.triton_matmul import triton_matmul

FIELDS = ("expert", "tile", "from", "to")


def grouped_matmul(x: jax.Array, w: TransposedArray, sizes: jax.Array) -> jax.Array:
    """The first sizes[0] rows of x times w[0] over the last axis of both, the next sizes[1] times w[1] and so on.

    Args:
      x: [M, I], bf16 or f32; weights are rounded to its dtype.
      w: [E, O..., I], without input scales or an order.
      sizes: int32 [E], of which the sum is at most M.

    Returns:
      f32 [M, O...], of sums in f32; rows past the last expert's hold anything.
    """
    kernels = {"tpu": (mosaic_matmul, _mosaic_rows), "cuda": (triton_matmul, _triton_rows)}

    def run(name: str, interpret: bool, x: jax.Array, w: TransposedArray, sizes: jax.Array) -> jax.Array:
        kernel, rows_of = kernels[name]
        rows = rows_of(len(x), len(sizes), x.dtype)
        padded = jnp.pad(x, ((0, -len(x) % rows), (0, w.blocks * w.span - w.inputs)))
        return kernel(padded, w, visits(sizes, len(padded), rows), rows, interpret)[: len(x)]

    if w.interpret:
        out = run("tpu", True, x, w, sizes)
    else:
        lowerings = {name: functools.partial(run, name, False) for name in kernels}
        out = jax.lax.platform_dependent(x, w, sizes, **lowerings, default=_widened)
    return out.reshape(len(x), *w.outs)


def visits(sizes: jax.Array, count: int, rows: int) -> jax.Array:
    """int32 [4, V], the fields of every visit.

    Args:
      sizes: int32 [E].
      count: rows of all tiles.
      rows: of a tile.
    """
    ends = jnp.cumsum(sizes)
    starts = ends - sizes
    first = starts // rows
    tiles = jnp.where(sizes > 0, (ends - 1) // rows - first + 1, 0)  # that each expert's rows lie in
    last = jnp.cumsum(tiles)  # the visit after each expert's own
    most = count // rows + min(len(sizes), count) - 1
    visit = jnp.arange(most)
    own = jnp.clip(visit, 0, jnp.maximum(last[-1] - 1, 0))
    expert = jnp.minimum(jnp.searchsorted(last, own, side="right", method="compare_all"), len(sizes) - 1)
    tile = jnp.clip(first[expert] + own - (last - tiles)[expert], 0, count // rows - 1)
    real = visit < last[-1]
    begin = jnp.where(real, jnp.clip(starts[expert] - tile * rows, 0, rows), 0)
    end = jnp.where(real, jnp.clip(ends[expert] - tile * rows, 0, rows), 0)
    return jnp.stack([expert, tile, begin, end]).astype(jnp.int32)


def _mosaic_rows(count: int, experts: int, dtype: jnp.dtype) -> int:
    """Rows of a tile. All of a decode step's, so that a weight is read once; of a prefill as many as an expert has, or for one matrix so
    many that widening it takes a small part of the time."""
    most = (512 if dtype == jnp.bfloat16 else 256) if experts == 1 else 256 if count >= 256 * experts else 128
    return min(most, -(-count // 16) * 16)


def _triton_rows(count: int, experts: int, dtype: jnp.dtype) -> int:
    return 16 if count <= 16 * experts else 64


def _widened(x: jax.Array, w: TransposedArray, sizes: jax.Array) -> jax.Array:
    """Where there is no kernel: XLA's grouped product."""
    wide = w.widen(x.dtype).reshape(len(sizes), -1, w.inputs)
    dims = jax.lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), [0], [0])
    return jax.lax.ragged_dot_general(x, wide, sizes, dims, preferred_element_type=jnp.float32)
