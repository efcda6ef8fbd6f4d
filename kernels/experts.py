"""`experts(...)`: the gated MLPs of a mixture of experts. No choice is dropped, however unevenly the router spreads them.

The T*k choices are sorted by expert, so that each expert's rows stand together:

    indices [T = 3, k = 2]      choice   0  1  2  3  4  5        order   1  2  0  4  3  5
    0:  2  0                    token    0  0  1  1  2  2   ->   token   0  1  0  2  1  2
    1:  0 -1                    expert   2  0  0 -1  2 -1        expert  0  0  2  2  .  .
    2:  2 -1                                                     starts of the experts 0, 1, 2 and the end:  0  2  2  4

An accelerator takes two grouped products over the sorted rows; the CPU loops over the experts that were chosen at all. Packed weights are
widened whole for a grouped product, unless they are transposed for the Pallas kernels or tiled for the native ones, which read those of the
chosen experts, packed.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from kernels.grouped_matmul import grouped_matmul
from kernels.native_matmul import can_gate, native_grouped_matmul
from kernels.operands import cpu_operands
from kernels.quant_array import JoinedArray, QuantArray, Weight, is_packed, widen
from kernels.tiled_array import TiledArray
from kernels.transposed_array import TransposedArray

_BLOCK = 2**20  # weights of one matrix: what the CPU copies at once, 4 MiB in f32
_MIN_UNITS = 128


def experts(
    x: jax.Array,
    indices: jax.Array,
    weights: jax.Array,
    w_in: Weight,
    w_out: Weight,
    activation: Callable[[jax.Array, jax.Array], jax.Array],
    b_in: jax.Array | None = None,
    b_out: jax.Array | None = None,
    gate: str | None = None,
) -> jax.Array:
    """The weighted sum of each token's chosen experts: sum over j of weights[j] * (w_out @ activation(w_in @ x + b_in) + b_out).

    All sums are f32; the operands of the products (x, weights, the activation's result) are in x's dtype.

    Args:
      x: tokens [T, D], any float dtype.
      indices: int32 [T, k], the expert of each choice. One outside 0..E-1 (-1 by custom) is no expert: it adds 0 and costs nothing.
      weights: f32 [T, k].
      w_in: gate and up projections [E, 2, F, D]; w_out: down projections [E, D, F]. They may be packed, or stored in another float
        dtype than x, and are rounded to x's.
      activation: gate f32 [..., F], up f32 [..., F] -> [..., F], element by element (it may be given a part of F); static.
      b_in: [E, 2, F]; b_out: [E, D]; added in f32.
      gate: the name of what `activation` does, for the kernels that do it themselves.

    Returns:
      [T, D] in x's dtype.
    """
    if any(isinstance(part, TransposedArray) and part.interpret for w in (w_in, w_out) for part in _parts(w)):
        return grouped_experts(x, indices, weights, w_in, w_out, activation, b_in, b_out)
    if _is_tiled(w_in) and _is_tiled(w_out):
        return grouped_experts(x, indices, weights, w_in, w_out, activation, b_in, b_out, gate)
    return jax.lax.platform_dependent(
        *(x, indices, weights, w_in, w_out, b_in, b_out),
        cpu=lambda x, indices, weights, w_in, w_out, *biases: tiled_experts(
            x, indices, weights, _untransposed(w_in), _untransposed(w_out), activation, *biases
        ),
        default=lambda *arrays: grouped_experts(*arrays[:5], activation, *arrays[5:]),
    )


def experts_reference(x, indices, weights, w_in, w_out, activation, b_in=None, b_out=None):
    """`experts` as every expert on every token, which is E/k times the work."""
    E = len(w_in)
    w_in, w_out = widen(w_in, x.dtype), widen(w_out, x.dtype)
    gate_up = jnp.einsum("td,egfd->tegf", x, w_in, preferred_element_type=jnp.float32)
    gate_up = gate_up if b_in is None else gate_up + b_in
    hidden = activation(gate_up[:, :, 0], gate_up[:, :, 1]).astype(x.dtype)  # [T, E, F]
    out = jnp.einsum("tef,edf->ted", hidden, w_out, preferred_element_type=jnp.float32)
    out = out if b_out is None else out + b_out
    shares = jnp.where(indices[..., None] == jnp.arange(E), weights[..., None], 0).sum(1)  # [T, E]
    return jnp.einsum("te,ted->td", shares, out).astype(x.dtype)


def grouped_experts(x, indices, weights, w_in, w_out, activation, b_in=None, b_out=None, gate=None):
    """`experts` as two grouped products (as in MegaBlocks, Gale et al. 2022, arXiv 2211.15841): a row meets its own expert only."""
    E, k = len(w_in), indices.shape[1]
    expert, order, starts = _by_expert(indices, E)
    sizes = jnp.diff(starts)
    if isinstance(w_in, TiledArray) and b_in is None and can_gate(w_in, gate):
        hidden = native_grouped_matmul(x[order // k], w_in, sizes, gate)
    else:
        gate_up = _grouped_dot(x[order // k], w_in, sizes)  # [T*k, 2, F]
        gate_up = gate_up if b_in is None else gate_up + b_in[expert]
        hidden = activation(gate_up[:, 0], gate_up[:, 1])
    out = _grouped_dot(hidden.astype(x.dtype), w_out, sizes)  # [T*k, F] -> [T*k, D]
    out = out if b_out is None else out + b_out[expert]
    return _combine(out, order, indices, weights, E).astype(x.dtype)


def _grouped_dot(x, w, sizes):
    """x [M, I] times w [E, O..., I], the first sizes[0] rows with w[0] and so on: f32 [M, O...]. Rows past the last group hold anything."""
    if isinstance(w, TiledArray):
        return native_grouped_matmul(x, w, sizes)
    if isinstance(w, TransposedArray):
        return grouped_matmul(x, w, sizes)
    if isinstance(w, JoinedArray) and any(isinstance(part, TiledArray | TransposedArray) for part in w.parts):
        return jnp.concatenate([_grouped_dot(x, part, sizes) for part in w.parts], w.axis)
    w3 = widen(w, x.dtype).reshape(len(w), -1, w.shape[-1])
    return jax.lax.platform_dependent(x, w3, sizes, tpu=_grouped_dot_tpu, default=_grouped_dot_xla).reshape(len(x), *w.shape[1:-1])


def _grouped_dot_xla(x, w, sizes):
    dims = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
    )
    return jax.lax.ragged_dot_general(x, w, sizes, dims, preferred_element_type=jnp.float32)


def _grouped_dot_tpu(x, w, sizes, interpret=False):
    """JAX's own Pallas kernel, since XLA's ragged dot wants w as [E, I, O] on a TPU: it would copy the weights of all E in each call."""
    from jax.experimental.pallas.ops.tpu.megablox import gmm  # here, so that programs without experts do not pay for the import

    (count, inner), (E, outs, _) = x.shape, w.shape
    rows = min(128 if count < 256 * E else 256, -(-count // 16) * 16)  # per tile; 16 rows of bf16 fill a register
    tile = rows, min(inner, 2048 // x.dtype.itemsize), min(outs, 1024)  # all its buffers fit in 16 MiB of fast memory
    padded = jnp.pad(x, ((0, -count % rows), (0, 0)))
    # Products of bf16 are exact, and the kernel's compiler refuses to be asked for more.
    with jax.default_matmul_precision("default" if x.dtype == jnp.bfloat16 else jax.config.jax_default_matmul_precision):
        return gmm(padded, w, sizes, jnp.float32, tile, transpose_rhs=True, interpret=interpret)[:count]


def tiled_experts(x, indices, weights, w_in, w_out, activation, b_in=None, b_out=None):
    """`experts` as a loop over the experts hit: the CPU backend's grouped product costs as much as all E on every row.

    A step copies one block of one expert's hidden units, and multiplies that expert's rows with it in tiles.
    """
    (T, k), D, (E, _, F, _) = indices.shape, x.shape[1], w_in.shape
    expert, order, starts = _by_expert(indices, E)
    counts = jnp.diff(starts)
    (hit,) = jnp.nonzero(counts, size=min(E, T * k), fill_value=0)
    tiles, block = _tiles(T, k, E), F if is_packed(w_in) or is_packed(w_out) else _block(F, D)
    blocks, slack = F // block, tiles[-1] - 1  # the last tile may reach past the last row

    def operand(array):  # rounded to x's dtype; with few rows f32 products of bf16 values are faster than bf16 ones
        array = array.astype(x.dtype)
        return cpu_operands(array, array)[0] if len(tiles) > 1 else array.astype(jnp.float32)

    rows = operand(jnp.pad(x[order // k], ((0, slack), (0, 0))))

    def step(index, out):
        e, first = hit[index // blocks], index % blocks * block
        up = operand(_slice(w_in, (e, 0, first, 0), (1, 2, block, D)).reshape(2 * block, D))
        down = operand(_slice(w_out, (e, 0, first), (1, D, block)).reshape(D, block))

        def multiply(start, R, out):  # R rows from `start`; those past this expert's end are the next one's
            gate_up = _dot(up, jax.lax.dynamic_slice_in_dim(rows, start, R)).reshape(R, 2, block)
            if b_in is not None:
                gate_up += _slice(b_in, (e, 0, first), (1, 2, block))
            hidden = operand(activation(gate_up[:, 0], gate_up[:, 1]))  # [R, block]
            own = start + jnp.arange(R) < starts[e + 1]
            added = jax.lax.dynamic_slice_in_dim(out, start, R) + jnp.where(own[:, None], _dot(down, hidden), 0)
            return jax.lax.dynamic_update_slice_in_dim(out, added, start, axis=0)

        start = starts[e]
        for R in tiles[:-1]:
            count = (starts[e + 1] - start) // R
            out = jax.lax.fori_loop(0, count, lambda tile, out, start=start, R=R: multiply(start + tile * R, R, out), out)
            start += count * R
        R = tiles[-1]
        return jax.lax.fori_loop(0, -(-(starts[e + 1] - start) // R), lambda tile, out: multiply(start + tile * R, R, out), out)

    out = jnp.zeros((T * k, D), jnp.float32) if b_out is None else b_out[expert].astype(jnp.float32)
    out = jax.lax.fori_loop(0, jnp.sum(counts > 0) * blocks, step, jnp.pad(out, ((0, slack), (0, 0))))
    return _combine(out, order, indices, weights, E).astype(x.dtype)


def _parts(w):
    return w.parts if isinstance(w, JoinedArray) else (w,)


def _is_tiled(w):
    return all(isinstance(part, TiledArray) for part in _parts(w))


def _untransposed(w):
    if isinstance(w, JoinedArray):
        return dataclasses.replace(w, parts=tuple(map(_untransposed, w.parts)))
    return w.untransposed() if isinstance(w, TransposedArray) else w


def _slice(w, start, shape):
    """A dynamic slice of weights; of packed ones always an expert's whole matrices, widened. The CPU backend widens bf16 before it slices;
    the barrier keeps that inside the loop, where it is one pass over the slice, instead of one over all E experts ahead of the loop."""
    w, start = jax.lax.optimization_barrier((w, start))
    if isinstance(w, JoinedArray):
        return JoinedArray(tuple(_expert(part, start[0]) for part in w.parts), w.axis).widen()
    return _expert(w, start[0]).widen() if is_packed(w) else jax.lax.dynamic_slice(w, start, shape)


def _expert(w, e):
    """w [E, ...] -> [1, ...]."""
    one = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=e, slice_size=1)
    if isinstance(w, TiledArray):
        return jax.tree.map(one, w.replace(order=None, input_scales=None)).replace(order=w.order, input_scales=w.input_scales)
    return w.map_rows(one) if isinstance(w, QuantArray) else one(w)


def _dot(w, x):
    """x [R, I] times w [O, I] -> f32 [R, O]. The weight is the left operand, and kept there, for the reasons given in kernels.matmul."""
    out = jax.lax.dot_general(w, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return jax.lax.optimization_barrier(out).T


def _tiles(T, k, E):
    """Rows per product. One row takes a matrix-vector loop, at the speed of memory; up to eight cost the same; 64 come near the FLOP
    limit, and the last few of an expert's rows would fill them badly."""
    if T == 1 or T * k < E:  # few experts get a second row
        return (1,)
    return (8,) if T * k < 64 else (64, 8)


def _block(F, D):
    """Hidden units per step: F, or the largest divisor of F with which a matrix's block is no more than `_BLOCK` weights."""
    fits = (F // count for count in range(1, F // _MIN_UNITS + 1) if F % count == 0 and F // count * D <= _BLOCK)
    return next(fits, F)


def _by_expert(indices, E):
    """The choices (t * k + j) sorted by expert, those of no expert last.

    Returns:
      expert: int32 [T*k], the expert of each place; E - 1 where there is none.
      order: int32 [T*k], the choice at each place.
      starts: int32 [E + 1], each expert's first place, and the end of the last one's.
    """
    expert = jnp.where(_chosen(indices, E), indices, E).reshape(-1)
    order = jnp.argsort(expert, stable=True)
    starts = jnp.searchsorted(expert[order], jnp.arange(E + 1), method="compare_all")
    return jnp.minimum(expert[order], E - 1), order, starts.astype(jnp.int32)


def _combine(out, order, indices, weights, E):
    """Each token's weighted sum, f32 [T, D], of what stands at its choices' places in `out`."""
    places = jnp.zeros_like(order).at[order].set(jnp.arange(len(order), dtype=order.dtype)).reshape(indices.shape)
    return jnp.where(_chosen(indices, E)[..., None], weights[..., None] * out[places], 0).sum(1)


def _chosen(indices, E):
    return (indices >= 0) & (indices < E)
