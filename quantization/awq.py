"""AWQ (Lin et al. 2023, arXiv 2306.00978): weights of inputs with large activations are made larger before rounding, and so lose less.

All is measured by tr(dW H dW^T), with H = sum of x x^T over a text's tokens: the squared change of the product's output, summed over them.
"""

import functools

import jax
import jax.numpy as jnp

from kernels import QuantArray
from quantization.clipping import best_shrink
from quantization.schemes import Scheme, assemble, decode, encode, fit_grid, grouped_weights

EXPONENTS = 20  # tried: 0, 1/20 ... 19/20
LEAST_MEAN = 1e-4  # of an input's activations, lest one that is always 0 gets no weight


def awq(w: jax.Array, hessian: jax.Array, mean_abs: jax.Array, scheme: Scheme) -> QuantArray:
    """Rounds a matrix with scales for its inputs, then clips its groups; both are searched for.

    The scales stay with the matrix, as `input_scales`, so that nothing else in the model changes.

    Args:
      w: [O..., I], any float dtype.
      hessian: f32 [I, I]: sum of x x^T over the text's tokens.
      mean_abs: f32 [I]: mean of |x| over them.
      scheme: the scales are mean_abs ^ alpha, with the alpha of 20 that is best under it.

    Raises:
      UserError: the scheme does not fit the width.
    """
    width = w.shape[-1]
    if hessian.shape != (width, width) or mean_abs.shape != (width,):
        raise ValueError(f"statistics of shapes {hessian.shape} and {mean_abs.shape} are not of {width} inputs")
    scheme.check(width, "the matrix")
    return _awq(w, hessian, mean_abs, scheme)


def input_scales(mean_abs: jax.Array, alpha: jax.Array) -> jax.Array:
    """What weights are multiplied with, [I]: around 1, so that they stay within the range of scales."""
    scales = jnp.maximum(mean_abs, LEAST_MEAN) ** alpha
    return scales / jnp.sqrt(scales.max() * scales.min())


@functools.partial(jax.jit, static_argnames=("scheme",))
def _awq(w: jax.Array, hessian: jax.Array, mean_abs: jax.Array, scheme: Scheme) -> QuantArray:
    width = w.shape[-1]
    flat = w.astype(jnp.float32).reshape(-1, width)

    def error(alpha: jax.Array) -> jax.Array:
        scales = input_scales(mean_abs, alpha)
        grouped = grouped_weights(flat * scales, scheme)
        grid = fit_grid(grouped, scheme)
        change = decode(encode(grouped, *grid, scheme), *grid, scheme).reshape(flat.shape) / scales - flat
        return jnp.sum(jnp.matmul(change, hessian, precision="highest") * change)

    alphas = jnp.arange(EXPONENTS) / EXPONENTS
    scales = input_scales(mean_abs, alphas[jnp.argmin(jax.lax.map(error, alphas))])
    grouped = grouped_weights(flat * scales, scheme)  # [O, groups, n]
    groups, size = grouped.shape[1:]
    square = (hessian / scales / scales[:, None]).reshape(groups, size, groups, size)
    blocks = square[jnp.arange(groups), :, jnp.arange(groups)]  # [groups, n, n]
    grid = fit_grid(grouped, scheme, best_shrink(grouped, blocks, scheme))
    rounded = assemble(encode(grouped, *grid, scheme), *grid, scheme, flat.shape)
    return rounded.map_rows(lambda array: array.reshape(*w.shape[:-1], array.shape[-1])).replace(input_scales=1 / scales)
