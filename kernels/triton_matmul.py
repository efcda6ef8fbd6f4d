"""`grouped_matmul` on a GPU, in Triton: a program takes a tile of rows, some outputs and a share of the inputs, and widens in registers.

What must move is the packed weights of the experts that have rows, once for every tile; with few rows there is one. A matrix of 4096
outputs is 64 programs wide, which is half the multiprocessors of an H100: the inputs are shared out until there are enough, and the
shares' sums added by XLA.
"""

import functools
import math

import jax
import jax.numpy as jnp

from kernels.pallas_widen import grouped_arrays, scales_sums, widen_numbers, widen_weights
from kernels.quant_array import PLANES, WHOLE
from kernels.transposed_array import CHUNK, GROUPED, TransposedArray

OUTS, PROGRAMS = 64, 512  # outputs of a program; programs that fill a GPU several times over
WHOLE_ROWS = 64  # of codes of a byte that are widened at once


def triton_matmul(x: jax.Array, w: TransposedArray, visits: jax.Array, rows: int, interpret: bool) -> jax.Array:
    """As `mosaic_matmul`; `rows` is a power of two, 16 at least."""
    from jax.experimental import pallas as pl  # here, so that programs without the kernel do not pay for the import
    from jax.experimental.pallas import triton as plgpu

    outs, chunks = w.planes[0].shape[-1], w.blocks * w.span // CHUNK
    grouped = grouped_arrays(w)
    columns = -(-outs // OUTS)
    shares = math.gcd(chunks, 2 ** max(0, (PROGRAMS // (columns * visits.shape[1])).bit_length() - 1))
    kernel = functools.partial(
        _kernel, w=jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), w), names=tuple(grouped), rows=rows
    )
    out = pl.pallas_call(
        kernel,
        grid=(columns, visits.shape[1], shares),
        out_shape=jax.ShapeDtypeStruct((shares, len(x), outs), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
        name="packed_matmul",
    )(visits, x, *w.planes, *grouped.values())
    return out.sum(0)


def _kernel(table, x, *refs, w, names, rows):
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plgpu

    planes, out = refs[: len(w.planes)], refs[-1]
    grouped = dict(zip(names, refs[len(w.planes) : -1], strict=True))
    column, visit, share = (pl.program_id(axis) for axis in range(3))
    expert, tile, first, last = (table[field, visit] for field in range(4))
    outs = w.planes[0].shape[-1]
    columns = column * OUTS + jnp.arange(OUTS)
    there = columns < outs
    row = jnp.arange(rows)
    own = (row >= first) & (row < last)
    of_x = tile * rows + row
    per_block = w.span // CHUNK
    piece = _piece(w)
    pieces = CHUNK // piece
    steps = w.blocks * per_block * pieces // pl.num_programs(2)

    def load(ref, block, each):  # [piece, OUTS]
        return plgpu.load(ref.at[expert, block, each[:, None], columns[None, :]], mask=there[None, :], other=0)

    def number(name, block, start):
        """f32 [1, OUTS], of the group that the piece from `start` of a block lies in."""
        shared, ref = w.inputs_of(name), grouped[name]
        at, group = (block, start // shared) if shared <= w.span else (block * w.span // shared, 0)
        values = plgpu.load(ref.at[expert, at, group, columns], mask=there, other=0)
        return widen_numbers(values, dict(zip(GROUPED, w.floats, strict=True))[name])[None]

    def multiply(step, sums):
        step = share * steps + step
        chunk, start = step // pieces, step % pieces * piece
        block, inside = chunk // per_block, chunk % per_block
        codes = _codes(functools.partial(load, block=block), planes, w.code, inside, start, piece)
        wide = widen_weights(codes, w, functools.partial(number, block=block, start=inside * CHUNK + start))
        mine = plgpu.load(x.at[of_x[:, None], (chunk * CHUNK + start + jnp.arange(piece))[None, :]], mask=own[:, None], other=0)
        return sums + jax.lax.dot(mine, wide.astype(mine.dtype), preferred_element_type=jnp.float32)

    @pl.when(first < last)
    def _():
        sums = jax.lax.fori_loop(0, steps, multiply, jnp.zeros((rows, OUTS), jnp.float32))
        if scales_sums(w):
            scales = number("scales", 0, 0)
            sums *= scales if w.super_scales is None else scales * number("super_scales", 0, 0)
        plgpu.store(out.at[share, of_x[:, None], columns[None, :]], sums, mask=own[:, None] & there[None, :])


def _piece(w):
    """Inputs whose codes are neighbours in every plane, and which share a group."""
    codes = WHOLE_ROWS if w.code in WHOLE else CHUNK * min(PLANES[w.code]) // 8
    return min(codes, *(w.inputs_of(name) for name in grouped_arrays(w)))


def _codes(load, planes, code, chunk, start, piece):
    """int32 [piece, OUTS]: the codes of the inputs from `start` of a chunk."""
    if code in WHOLE:
        return load(planes[0], each=chunk * CHUNK + start + jnp.arange(piece)).astype(jnp.int32)
    whole, below = None, 0
    for bits, plane in zip(PLANES[code], planes, strict=True):
        many = CHUNK * bits // 8  # rows of a chunk
        each = chunk * many + start % many + jnp.arange(piece)
        codes = (load(plane, each=each).astype(jnp.int32) >> (start // many * bits)) & (2**bits - 1)
        whole = codes if whole is None else whole | (codes << below)
        below += bits
    return whole
