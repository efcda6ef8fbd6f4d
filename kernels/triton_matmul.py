"""`grouped_matmul` on a GPU, in Triton: a program takes a tile of rows, some outputs and a share of the inputs, and widens in registers.

What must move is the packed weights of the experts that have rows, once for every tile; with few rows there is one. A matrix of 4096 outputs
is 64 programs wide, which is half the multiprocessors of an H100: the inputs are shared out until there are enough, and the shares' sums
added by XLA.
"""

import functools
import math

import jax
import jax.numpy as jnp

from kernels.pallas_widen import grouped_arrays, scales_sums, widen_numbers, widen_weights
from kernels.quant_array import PLANES, WHOLE
from kernels.transposed_array import CHUNK, GROUPED, TransposedArray

OUTS, PROGRAMS = 64, 512  # outputs of a program; programs that fill a GPU several times over
WHOLE_ROWS = 32  # of codes of a byte that are widened at once


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
    chunks = w.blocks * per_block // pl.num_programs(2)
    piece = _piece(w.code)

    def load(ref, block, each):  # [piece, OUTS]
        return plgpu.load(ref.at[expert, block, each[:, None], columns[None, :]], mask=there[None, :], other=0)

    def spread(block, start):
        def numbers(name):
            """f32 [piece, OUTS] of the inputs from `start`, each with its group's number."""
            shared, ref = w.inputs_of(name), grouped[name]
            inputs = block * w.span + start + jnp.arange(piece)
            per = max(1, w.span // shared)  # groups of a block
            group = inputs // shared
            at = group // per if shared > w.span else block * (ref.shape[1] > 1)
            values = plgpu.load(
                ref.at[expert, jnp.broadcast_to(at, (piece,))[:, None], (group % per)[:, None], columns[None, :]],
                mask=there[None, :],
                other=0,
            )
            return widen_numbers(values, dict(zip(GROUPED, w.floats, strict=True))[name])

        return numbers

    def multiply(number, sums):
        chunk = share * chunks + number
        block, inside = chunk // per_block, chunk % per_block
        for start in range(0, CHUNK, piece):
            codes = _codes(functools.partial(load, block=block), planes, w.code, inside, start, piece)
            wide = widen_weights(codes, w, spread(block, inside * CHUNK + start))
            inputs = chunk * CHUNK + start + jnp.arange(piece)
            mine = plgpu.load(x.at[of_x[:, None], inputs[None, :]], mask=own[:, None], other=0)
            sums += jax.lax.dot(mine, wide.astype(mine.dtype), preferred_element_type=jnp.float32)
        return sums

    @pl.when(first < last)
    def _():
        sums = jax.lax.fori_loop(0, chunks, multiply, jnp.zeros((rows, OUTS), jnp.float32))
        if scales_sums(w):
            sums = sums * _scales(plgpu, w, grouped, expert, columns, there)
        plgpu.store(out.at[share, of_x[:, None], columns[None, :]], sums, mask=own[:, None] & there[None, :])


def _scales(plgpu, w, grouped, expert, columns, there):
    """f32 [1, OUTS], of the only group."""

    def only(name):
        values = plgpu.load(grouped[name].at[expert, 0, 0, columns], mask=there, other=0)
        return widen_numbers(values, dict(zip(GROUPED, w.floats, strict=True))[name])[None]

    return only("scales") if w.super_scales is None else only("scales") * only("super_scales")


def _piece(code: str) -> int:
    """Inputs whose codes are neighbours in every plane."""
    return WHOLE_ROWS if code in WHOLE else CHUNK * min(PLANES[code]) // 8


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
