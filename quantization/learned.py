"""Rounding that is learned: which way each weight goes, and how much of each group's range is kept, by gradient descent.

What is made to agree is the output of a whole block of a model, its attention and MLP with their norms (BRECQ: Li et al. 2021, arXiv
2102.05426). As in SignRound (Cheng et al. 2023, arXiv 2309.05516), a weight w of a group with scale s is stored as

    round(w / (s c) + v)        -1/2 <= v <= 1/2 of its own, c of its group

where v and c follow the signs of their gradients, at a rate that falls to 0, and rounding passes gradients as they are. Then the codes are
kept, and scales alone follow theirs: of them the loss is smooth, so that this still helps where turning weights one by one does not.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from kernels import QuantArray, widen
from quantization.schemes import Scheme, assemble, decode, stored_scale
from runtime import UserError

STEPS = 200
SCALE_RATE = 0.003  # of the second phase's first step
BATCH = 4  # windows a step
RANGE = (0.5, 1.2)  # of c
INSIDE = 0.35  # how far from its code a weight may begin, in steps of the grid: at the edge, half of GPTQ's would turn at the first step

Free = tuple[jax.Array, jax.Array]  # v [O, groups, n] and c [O, groups]
Apply = Callable[[dict[str, jax.Array], Any, jax.Array], jax.Array]


def learn(
    apply: Apply,
    weights: Mapping[str, jax.Array],
    starts: Sequence[Mapping[str, QuantArray]],
    scheme: Scheme,
    inputs: jax.Array,
    targets: jax.Array,
    *,
    held: Any = None,
    steps: int = STEPS,
    rate: float | None = None,
    batch: int = BATCH,
    seed: int = 0,
) -> dict[str, QuantArray]:
    """Rounds a block's matrices so that its outputs are near the targets.

    Args:
      apply: (matrices by name, each [O, I]; `held`; inputs [b, T, D]) -> outputs [b, T, D], differentiable in the matrices. Static: equal
        blocks should give equal functions, which then share an executable.
      weights: the matrices [O, I] as they are, by name.
      starts: roundings of them to begin with, of which the best is taken; all with the same scheme.
      scheme: of integer codes.
      inputs: f32 [n, T, D], what the block reads: n windows of a text.
      targets: f32 [n, T, D], what it should give.
      held: the block's other weights.
      steps: of each of the two phases, with `batch` windows a step.
      rate: of the first phase's first step; None: 0.5 / steps, with which v can go a quarter in all.
      seed: of the choice of windows.

    Returns:
      By name, no worse on these windows than the best start.

    Raises:
      UserError: codes that are floats.
    """
    if scheme.code.startswith("float"):
        raise UserError(f"the rounding of {scheme.code} is not learned, whose steps differ: use codes that are integers, or --method=gptq")

    def loss(rounded: Mapping[str, QuantArray]) -> float:
        dense = {name: widen(array, jnp.float32) for name, array in rounded.items()}
        return sum(float(_loss(apply, dense, held, inputs[n : n + 1], targets[n : n + 1])) for n in range(len(inputs)))

    starts = [dict(start) for start in starts]
    losses = [loss(start) for start in starts]
    best = min(range(len(starts)), key=losses.__getitem__)
    found, least = starts[best], losses[best]
    random = np.random.default_rng(seed)

    def descend(step: Callable[..., Any], free: Any, begin: float) -> Any:
        for number in range(steps):
            chosen = random.choice(len(inputs), min(batch, len(inputs)), replace=False)
            free = step(apply, free, held, inputs[chosen], targets[chosen], jnp.float32(begin * (1 - number / steps)), scheme)
        return free

    grids = {name: _grid(weights[name], array) for name, array in found.items()}
    free = {name: (jnp.zeros_like(grid.weights), jnp.ones(grid.start.scales.shape, jnp.float32)) for name, grid in grids.items()}
    free = descend(functools.partial(_step, grids), free, 0.5 / steps if rate is None else rate)
    turned = {name: _store(grid, free[name], scheme) for name, grid in grids.items()}
    if (now := loss(turned)) < least:
        found, least = turned, now
    ranges = {name: jnp.ones(array.scales.shape, jnp.float32) for name, array in found.items()}
    ranges = descend(functools.partial(_scale_step, found), ranges, SCALE_RATE)
    scaled = {name: _rescaled(array, ranges[name], scheme) for name, array in found.items()}
    scaled = {name: array.replace(scales=stored_scale(array.scales, scheme)) for name, array in scaled.items()}
    return scaled if loss(scaled) < least else found


def relative_loss(out: jax.Array, target: jax.Array) -> jax.Array:
    """The squared error of each token [..., D] as a part of the target's square, averaged: a few tokens of a stream are hundreds of times
    as large as others, which the next norm takes back."""
    return jnp.mean(jnp.sum((out - target) ** 2, axis=-1) / (jnp.sum(target**2, axis=-1) + 1e-12))


@functools.partial(jax.jit, static_argnames=("apply",))
def _loss(apply: Apply, dense: dict[str, jax.Array], held: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
    return relative_loss(apply(dense, held, inputs), targets)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Grid:
    """A matrix as its start stores it: columns in their stored order, input scales divided out.

    Attributes:
      weights: f32 [O, groups, n], moved as little as brings each within `INSIDE` steps of the start's code.
      start: whose scales and zeros these are.
    """

    weights: jax.Array
    start: QuantArray


@jax.jit
def _grid(w: jax.Array, start: QuantArray) -> _Grid:
    w = w.astype(jnp.float32)
    w = w if start.input_scales is None else w / start.input_scales
    w = w if start.order is None else w[:, start.order]
    stored = start.replace(order=None, input_scales=None).widen()
    scales = start.scales.astype(jnp.float32)
    grouped, stored = (array.reshape(*scales.shape, -1) for array in (w, stored))
    room = INSIDE * jnp.abs(scales)[..., None]
    return _Grid(jnp.clip(grouped, stored - room, stored + room), start)


@functools.partial(jax.jit, static_argnames=("apply", "scheme"), donate_argnames="free")
def _step(
    grids: dict[str, _Grid],
    apply: Apply,
    free: dict[str, Free],
    held: Any,
    inputs: jax.Array,
    targets: jax.Array,
    rate: jax.Array,
    scheme: Scheme,
) -> dict[str, Free]:
    """One step of roundings and ranges."""

    def loss(free: dict[str, Free]) -> jax.Array:
        dense = {name: _dense(grid, free[name], scheme) for name, grid in grids.items()}
        return relative_loss(apply(dense, held, inputs), targets)

    moved = _against(jax.grad(loss)(free), free, rate)
    return {name: (jnp.clip(v, -0.5, 0.5), jnp.clip(c, *RANGE)) for name, (v, c) in moved.items()}


@functools.partial(jax.jit, static_argnames=("apply", "scheme"), donate_argnames="free")
def _scale_step(
    packed: dict[str, QuantArray],
    apply: Apply,
    free: dict[str, jax.Array],
    held: Any,
    inputs: jax.Array,
    targets: jax.Array,
    rate: jax.Array,
    scheme: Scheme,
) -> dict[str, jax.Array]:
    """One step of scales, whose codes stay."""

    def loss(free: dict[str, jax.Array]) -> jax.Array:
        dense = {name: _rescaled(array, free[name], scheme).widen() for name, array in packed.items()}
        return relative_loss(apply(dense, held, inputs), targets)

    return _against(jax.grad(loss)(free), free, rate)


def _against(gradients: Any, free: Any, rate: jax.Array) -> Any:
    optimizer = optax.sign_sgd(rate)
    return optax.apply_updates(free, optimizer.update(gradients, optimizer.init(free))[0])


def _rescaled(array: QuantArray, factors: jax.Array, scheme: Scheme) -> QuantArray:
    """With scales times `factors`, f32 but of values that can be stored."""
    wide = array.scales.astype(jnp.float32) * factors
    return array.replace(scales=_passing(lambda value: stored_scale(value, scheme).astype(jnp.float32), wide))


def _rounded(grid: _Grid, free: Free, scheme: Scheme) -> tuple[jax.Array, jax.Array]:
    """f32 codes [O, groups, n] and scales [O, groups], as they are stored but differentiable in v and c."""
    v, c = free
    wide = grid.start.scales.astype(jnp.float32) * c
    scales = _passing(lambda value: stored_scale(value, scheme).astype(jnp.float32), wide)
    steps = grid.weights / jnp.where(scales == 0, 1, scales)[..., None] + v
    if scheme.code == "int8":
        return jnp.clip(_passing(jnp.round, steps), -127, 127), scales
    zeros = grid.start.zero if grid.start.zeros is None else grid.start.zeros[..., None].astype(jnp.float32)
    return jnp.clip(_passing(jnp.round, steps) + zeros, 0, 2**scheme.bits - 1), scales


def _passing(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """function(x), with the gradient of x."""
    return x + jax.lax.stop_gradient(function(x) - x)


def _dense(grid: _Grid, free: Free, scheme: Scheme) -> jax.Array:
    """f32 [O, I]."""
    codes, scales = _rounded(grid, free, scheme)
    start = grid.start
    dense = decode(codes, scales, start.zeros, scheme).reshape(len(codes), -1)
    dense = dense if start.order is None else jnp.zeros_like(dense).at[:, start.order].set(dense)
    return dense if start.input_scales is None else dense * start.input_scales


@functools.partial(jax.jit, static_argnames=("scheme",))
def _store(grid: _Grid, free: Free, scheme: Scheme) -> QuantArray:
    codes, scales = _rounded(grid, free, scheme)
    shape = (len(codes), grid.start.shape[-1])
    stored = assemble(jnp.round(codes), stored_scale(scales, scheme), grid.start.zeros, scheme, shape)
    return stored.replace(order=grid.start.order, input_scales=grid.start.input_scales)
