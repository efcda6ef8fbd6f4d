"""GPTQ (Frantar et al. 2022, arXiv 2210.17323): columns are rounded one after the other, and those that are left make up for the error.

With H = sum of x x^T over the tokens of a text, the output of a product changes by tr(dW H dW^T). Once column i is rounded, the change of
the columns after it that undoes most of the damage is, for every row,

    dw_j = -(w_i - rounded_i) / U_ii * U_ij        with U^T U = H^-1, U upper triangular.

Rows don't depend on one another, so that all of them take a step at once.
"""

import functools
import math

import jax
import jax.numpy as jnp

from kernels import QuantArray
from quantization.clipping import best_shrink
from quantization.schemes import Scheme, assemble, decode, encode, fit_grid
from runtime import UserError

BLOCK = 128  # columns between two updates of all that follow, where a row has one scale; else a group


def gptq(w: jax.Array, hessian: jax.Array, scheme: Scheme, *, act_order: bool = False, damping: float = 0.01) -> QuantArray:
    """Rounds a matrix so that its products with a text's activations change little.

    Args:
      w: [O..., I], any float dtype.
      hessian: f32 [I, I]: sum of x x^T over the text's tokens. An input that is always 0 gets weights of 0.
      scheme: each group's scale is fitted when its turn comes, to the weights as the columns before have changed them.
      act_order: inputs with large activations first; groups are of neighbours in that order, which the result keeps as `order`.
      damping: added to the Hessian's diagonal, as a part of its mean.

    Raises:
      UserError: the scheme does not fit the width, or the Hessian is not positive definite.
    """
    width = w.shape[-1]
    if hessian.shape != (width, width):
        raise ValueError(f"a Hessian of shape {hessian.shape} is not of {width} inputs")
    scheme.check(width, "the matrix")
    importance = jnp.diagonal(hessian)
    order = jnp.argsort(-importance, stable=True).astype(jnp.int32) if act_order else None
    flat = jnp.where(importance > 0, w.astype(jnp.float32).reshape(-1, width), 0)
    if order is not None:
        flat, hessian, importance = flat[:, order], hessian[order][:, order], importance[order]
    factor = inverse_factor(hessian, jnp.float32(damping))
    if not bool(jnp.isfinite(factor).all()):
        raise UserError(f"the Hessian of {width} inputs is not positive definite with damping {damping:g}: give more text, or more damping")
    rounded = _round(flat, factor, importance, scheme)
    return rounded.map_rows(lambda array: array.reshape(*w.shape[:-1], array.shape[-1])).replace(order=order)


@jax.jit
def inverse_factor(hessian: jax.Array, damping: jax.Array) -> jax.Array:
    """f32 [I, I], the U above of the damped Hessian; nan if that is not positive definite.

    The Cholesky factor of the Hessian read backwards is U^-1 read backwards: nothing is inverted but a triangle, which f32 stands well.
    """
    diagonal = jnp.diagonal(hessian)
    damped = hessian + jnp.diag(jnp.where(diagonal > 0, 0, 1) + damping * jnp.mean(diagonal))
    backwards = jnp.linalg.cholesky(damped[::-1, ::-1])
    inverse = jax.scipy.linalg.solve_triangular(backwards, jnp.eye(len(hessian), dtype=hessian.dtype), lower=True)
    return inverse[::-1, ::-1]


@functools.partial(jax.jit, static_argnames=("scheme",))
def _round(w: jax.Array, factor: jax.Array, importance: jax.Array, scheme: Scheme) -> QuantArray:
    """Of f32 [O, I]. Columns are rows here, so that each lies in one piece."""
    outs, width = w.shape
    block = math.gcd(width, BLOCK) if scheme.group is None else scheme.group
    whole = _grid(w, importance, scheme) if scheme.group is None else None

    def turn(left: jax.Array, first: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array | None]]:
        part = jax.lax.dynamic_slice_in_dim(left, first, block)  # [block, O]
        rows = jax.lax.dynamic_slice_in_dim(factor, first, block)  # [block, I]
        corner = jax.lax.dynamic_slice_in_dim(rows, first, block, axis=1)
        weighted = jax.lax.dynamic_slice_in_dim(importance, first, block)
        scales, zeros = _grid(part.T, weighted, scheme) if whole is None else whole  # [O, 1]

        def column(part: jax.Array, number: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            values = part[number][:, None, None]
            code = encode(values, scales, zeros, scheme).astype(jnp.float32)
            error = (values - decode(code, scales, zeros, scheme))[:, 0, 0] / corner[number, number]
            return part - corner[number][:, None] * error, (code[:, 0, 0], error)

        _, (codes, errors) = jax.lax.scan(column, part, jnp.arange(block))
        ahead = jnp.where(jnp.arange(width) < first + block, 0, rows)
        return left - jnp.matmul(ahead.T, errors, precision="highest"), (codes, scales, zeros)

    _, (codes, scales, zeros) = jax.lax.scan(turn, w.T, jnp.arange(0, width, block))
    if whole is None:
        scales, zeros = jax.tree.map(lambda grids: grids[:, :, 0].T, (scales, zeros))  # [groups, O, 1] -> [O, groups]
    else:
        scales, zeros = whole
    return assemble(codes.reshape(width, outs).T, scales, zeros, scheme, (outs, width))


def _grid(w: jax.Array, importance: jax.Array, scheme: Scheme) -> tuple[jax.Array, jax.Array | None]:
    """Of one group [O, n], fitted to weights that count as their inputs do: scales and zeros [O, 1]."""
    grouped = w[:, None]
    return fit_grid(grouped, scheme, best_shrink(grouped, importance[None], scheme))
