"""`grouped_matmul` on a TPU: packed blocks are fetched into the vector memory, widened there, and multiplied by the matrix unit.

What must move is the packed weights of the experts that have rows, once, as long as a tile holds all rows; and the activations once per
column of blocks. A block of 1024 x 1024 is 1 MiB of bytes at most, and its fetch takes longer than a step's own cost; two of it, two tiles
of 512 activations (1 MiB each in bf16), the sums and two blocks of results (2 MiB each) fit in the 16 MiB that a kernel may have.
"""

import functools

import jax
import jax.numpy as jnp

from kernels.pallas_widen import grouped_arrays, scales_sums, widen_numbers, widen_weights
from kernels.quant_array import PLANES, WHOLE
from kernels.transposed_array import CHUNK, GROUPED, TransposedArray

MOST_OUTS, STRIP = 1024, 256  # outputs of a block, and of what is widened at once
MOST_HELD = 2**21  # bytes of a tile's activations that stay for all blocks of inputs


def mosaic_matmul(x: jax.Array, w: TransposedArray, visits: jax.Array, rows: int, interpret: bool) -> jax.Array:
    """
    Args:
      x: [M, blocks * span], M a multiple of `rows`.
      w: [E, O..., I].
      visits: int32 [4, V], as of `kernels.grouped_matmul`.
      rows: of a tile.

    Returns:
      f32 [M, O]; rows of no visit hold anything.
    """
    from jax.experimental import pallas as pl  # here, so that programs without the kernel do not pay for the import
    from jax.experimental.pallas import tpu as pltpu

    (count, _), blocks, span, outs = x.shape, w.blocks, w.span, w.planes[0].shape[-1]
    width = outs if outs < STRIP else min(MOST_OUTS, -(-outs // STRIP) * STRIP)
    grouped = grouped_arrays(w)
    held = rows * blocks * span * x.dtype.itemsize <= MOST_HELD

    def at(visit, block, table):  # a visit of no rows stays where the one before it ended
        return jax.lax.select(table[2, visit] < table[3, visit], block, blocks - 1)

    def of_x(out, visit, block, table):
        return table[1, visit], 0 if held else at(visit, block, table)

    def of_w(many):  # an array with a block for so many of the weight's
        return lambda out, visit, block, table: (table[0, visit], at(visit, block, table) // many, 0, out)

    def spec(array, many):
        return pl.BlockSpec((None, None, array.shape[2], width), of_w(many))

    specs = [spec(plane, 1) for plane in w.planes]
    specs += [spec(array, max(1, w.inputs_of(name) // span)) for name, array in grouped.items()]
    kernel = functools.partial(_kernel, w=_static(w), names=tuple(grouped), held=held)
    steps = -(-outs // width), visits.shape[1], blocks
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=steps,
            in_specs=[pl.BlockSpec((rows, blocks * span if held else span), of_x), *specs],
            out_specs=pl.BlockSpec((rows, width), lambda out, visit, block, table: (table[1, visit], out)),
            scratch_shapes=[pltpu.VMEM((rows, width), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((count, outs), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * count * blocks * span * outs,
            bytes_accessed=w.nbytes // len(w) * min(len(w), visits.shape[1]) + x.nbytes + 4 * count * outs,
            transcendentals=0,
        ),
        interpret=interpret,
        name="packed_matmul",
    )(visits, x, *w.planes, *grouped.values())


def _static(w: TransposedArray) -> TransposedArray:
    """The weight without its arrays: shapes in their places, to be closed over by a kernel."""
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), w)


def _kernel(table, x, *refs, w, names, held):
    from jax.experimental import pallas as pl

    planes, (out, sums) = refs[: len(w.planes)], refs[-2:]
    grouped = dict(zip(names, refs[len(w.planes) : -2], strict=True))
    visit, block = pl.program_id(1), pl.program_id(2)
    first, last = table[2, visit], table[3, visit]
    width = sums.shape[1]
    strip = min(width, STRIP)

    @pl.when(first < last)
    def _():
        mine = x[:, pl.ds(pl.multiple_of(block * w.span, CHUNK), w.span)] if held else x[...]

        def multiply(number, _):
            columns = pl.ds(pl.multiple_of(number * strip, strip), strip) if strip < width else slice(None)
            wide = _widened(
                w, [plane[:, columns] for plane in planes], {name: ref[:, columns] for name, ref in grouped.items()}, mine.dtype
            )
            # Products of bf16 are exact, and the compiler refuses to be asked for more.
            precision = jax.lax.Precision.DEFAULT if mine.dtype == jnp.bfloat16 else None
            part = jax.lax.dot(mine, wide, precision=precision, preferred_element_type=jnp.float32)
            sums[:, columns] = jnp.where(block == 0, part, sums[:, columns] + part)
            return _

        jax.lax.fori_loop(0, width // strip, multiply, None)

        @pl.when(block == pl.num_programs(2) - 1)
        def _():
            row = jax.lax.broadcasted_iota(jnp.int32, sums.shape, 0)
            scaled = sums[...] * _scales(w, grouped) if scales_sums(w) else sums[...]
            out[...] = jnp.where((row >= first) & (row < last), scaled, out[...])


def _scales(w, grouped):
    scales = widen_numbers(grouped["scales"][...], w.floats[0])
    return scales if w.super_scales is None else scales * widen_numbers(grouped["super_scales"][...], w.floats[3])


def _widened(w: TransposedArray, planes: list[jax.Array], grouped: dict[str, jax.Array], dtype: jnp.dtype) -> jax.Array:
    """[span, n] of a block's planes [span * bits / 8, n] and numbers [groups of it, n]."""
    kinds = dict(zip(GROUPED, w.floats, strict=True))
    numbers = {name: widen_numbers(array, kinds[name]) for name, array in grouped.items()}
    planes = [plane.astype(jnp.int32) for plane in planes]
    wide = []
    for start in range(0, w.span, CHUNK):

        def spread(name: str, start: int = start) -> jax.Array:
            """[128 or 1, n]: each group's number on all its rows."""
            each = w.inputs_of(name)
            if each >= CHUNK:
                row = start // each if each < w.span else 0
                return numbers[name][row : row + 1]
            rows = numbers[name][start // each : (start + CHUNK) // each]
            return jnp.concatenate([jnp.broadcast_to(row, (each, row.shape[1])) for row in jnp.split(rows, len(rows))])

        wide.append(widen_weights(_chunk(planes, w.code, start), w, spread).astype(dtype))
    return jnp.concatenate(wide)


def _chunk(planes: list[jax.Array], code: str, start: int) -> jax.Array:
    """int32 [128, n]: the codes of the chunk of inputs from `start`."""
    if code in WHOLE:
        return planes[0][start : start + CHUNK]
    whole, below = None, 0
    for bits, plane in zip(PLANES[code], planes, strict=True):
        mine = plane[start * bits // 8 : (start + CHUNK) * bits // 8]
        codes = jnp.concatenate([(mine >> shift) & (2**bits - 1) for shift in range(0, 8, bits)])
        whole = codes if whole is None else whole | (codes << below)
        below += bits
    return whole
