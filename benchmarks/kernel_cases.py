"""What `benchmarks/kernels.py` times: single operations at the shapes of SmolLM2-135M and Gemma 3 270M, each with what it must move and do.

Where a decode step would find its weights or its cache in main memory, an operation goes from one copy to the next of as many as don't fit
into the last level's cache: one that is measured again and again on the same array reads it from there.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import machine
from benchmarks.rounds import seconds
from kernels import QuantArray, append, cpu, experts, matmul, rms_norm, tile
from kernels.norm import Normed
from model.config import MLPConfig
from model.mlp import activate
from runtime import platform
from sampling.options import SamplingOptions, SamplingParams
from sampling.sample import sample
from tests.kernels.packed import Kind, random_weights

MATRICES = {  # [outputs, inputs] of what a layer multiplies with, and of the head
    "SmolLM2": {"qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536), "head": (49_152, 576)},
    "Gemma 3": {"qkv": (1536, 640), "o": (640, 1024), "gate_up": (4096, 640), "down": (640, 2048), "head": (262_144, 640)},
}
CODES = {  # with a scale for every 32 weights, as GGUF's Q4_1, Q5_0 and Q8_0 and MXFP4 have them, and of 6 bits for every 16, as Q6_K
    "u4": {"code": "uint4", "group": 32, "has": ("offsets",)},
    "u5": {"code": "uint5", "group": 32, "zero": 16},
    "u6": {"code": "uint6", "group": 16, "zero": 32},
    "u8": {"code": "int8", "group": 32},
    "f4": {"code": "float4", "group": 32, "scales": np.dtype(jnp.float8_e8m0fnu)},
}
ROWS = (1, 8, 32, 128, 512)
DECODE_ROWS = 32  # up to so many, weights are cold; the head is multiplied with no more
BITS = 8  # of activations: what native products round to unless told otherwise
UNROLLED = {
    "native": 16,
    "xla": 4,
}  # products of a program with different weights, so that its dispatch is shared; XLA's take long to compile


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One operation at one shape.

    Attributes:
      op: the operation.
      shape: its shape, for people.
      calls: "native" and "xla", what runs here of them -> a call that returns the seconds of one operation.
      bytes: that one operation must move.
      flops: that it must do.
    """

    op: str
    shape: str
    calls: Mapping[str, Callable[[], float]]
    bytes: float
    flops: float


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Cases that share their arrays; made when their turn comes, and dropped after it."""

    op: str
    name: str
    make: Callable[[], Sequence[Case]]


def kernels_here(op_has_native: bool = True) -> tuple[str, ...]:
    """What can be timed on this platform."""
    return ("native", "xla") if op_has_native and platform() == "cpu" and cpu.instruction_set() is not None else ("xla",)


def counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def copies_of(nbytes: int) -> int:
    """As many arrays of so many bytes as don't fit into the last level's cache, twice over."""
    return max(1, math.ceil(2 * machine.cache_bytes() / nbytes))


def cycled(program: Callable[..., Any], arguments: Sequence[tuple], operations: int, dispatches: int = 1) -> Callable[[], float]:
    """Seconds of one operation of a program that does `operations`, called `dispatches` times with one set of arguments after the other."""
    turn = itertools.cycle(arguments)
    return lambda: seconds(lambda: [program(*next(turn)) for _ in range(dispatches)]) / (operations * dispatches)


def packed(outs: int, inputs: int, code: str) -> QuantArray:
    """Random weights [outs, inputs]."""
    return random_weights(Kind(outs=(outs,), inputs=inputs, **CODES[code]))


def weights(outs: int, inputs: int, code: str) -> dict[str, list[Any]]:
    """Enough copies of a matrix as each of the kernels reads it."""
    w = packed(outs, inputs, code)
    made = {"xla": w} | ({"native": jax.jit(tile, static_argnums=1)(w, BITS)} if "native" in kernels_here() else {})
    return {name: [jax.tree.map(jnp.array, each) for _ in range(copies_of(each.nbytes))] for name, each in made.items()}


def multiply(name: str, copies: Sequence[Any], x: jax.Array, *more: jax.Array) -> Callable[[], float]:
    """Seconds of `matmul(x, w)`; with `more`, a norm's scale and a residual [R, O], of the product that norms x and adds to the latter."""
    many = min(UNROLLED[name], len(copies)) if len(x) <= DECODE_ROWS else 1

    @jax.jit
    def program(ws: Sequence[Any], x: jax.Array, *more: jax.Array) -> list[jax.Array]:
        scale, residual = more or (None, None)
        return [matmul(x if scale is None else Normed(x, scale, 1e-6), w, residual=residual) for w in ws]

    sets = [(copies[start : start + many], x, *more) for start in range(0, len(copies) - many + 1, many)]
    return cycled(program, sets, many, dispatches=4 if len(x) <= DECODE_ROWS and many > 1 else 1)


def products(model: str, matrix: str, code: str, rows: Sequence[int] = ROWS, op: str = "matmul") -> list[Case]:
    """The product with packed weights; as `fused`, with its input's norm and its output's sum, which native ones do themselves."""
    outs, inputs = MATRICES[model][matrix]
    copies, rng = weights(outs, inputs, code), np.random.default_rng(0)
    cases = []
    for count in rows:
        if matrix == "head" and count > DECODE_ROWS:
            continue
        x = jnp.asarray(rng.normal(size=(count, inputs)).astype(np.float32))
        more = (jnp.ones((inputs,)), jnp.asarray(rng.normal(size=(count, outs)).astype(np.float32))) if op == "fused" else ()
        calls = {name: multiply(name, each, x, *more) for name, each in copies.items()}
        moved = next(iter(copies.values()))[0].nbytes + 4 * count * (inputs + outs) + sum(each.nbytes for each in more)
        cases.append(Case(op, f"{model} {matrix} {code}, {counted(count, 'row')}", calls, moved, 2.0 * count * inputs * outs))
    return cases


def norms(width: int, rows: Sequence[int] = ROWS) -> list[Case]:
    """The sum with a residual and its norm, by themselves: what a layer without native products does between two of them."""

    @jax.jit
    def program(x: jax.Array, y: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = x + y
        return total, rms_norm(total, scale, 1e-6)

    cases = []
    for count in rows:
        x = jnp.asarray(np.random.default_rng(0).normal(size=(count, width)).astype(np.float32))
        call = cycled(program, [(x, x, jnp.ones((width,)))], 1, dispatches=16)
        cases.append(Case("norm", f"width {width}, {counted(count, 'row')}", {"xla": call}, 4.0 * 4 * count * width, 6.0 * count * width))
    return cases


def appends(slots: int, tokens: Sequence[int] = (1, 512)) -> list[Case]:
    """New rows of keys into a dense cache, in place: SmolLM2's 3 heads of 64."""
    order, heads, width = ("KSH" if platform() == "cpu" else "SKH"), 3, 64
    size = {"S": slots, "K": heads, "H": width}
    row = 4 * slots * heads * width
    layers = copies_of(row)

    def case(count: int) -> Case:
        new, one = jnp.ones((1, count, heads, width)), jnp.full((1,), count, jnp.int32)

        @functools.partial(jax.jit, donate_argnums=0)
        def program(buffer: jax.Array, start: jax.Array) -> jax.Array:
            return jax.lax.fori_loop(0, layers, lambda layer, buffer: append(buffer, new, layer, None, start, one, order), buffer)

        state = [jnp.zeros((layers, 1, *(size[axis] for axis in order)))]

        def call() -> float:
            def run() -> jax.Array:
                state.append(program(state.pop(), jnp.full((1,), slots // 2 - 1, jnp.int32)))
                return state[0]

            return seconds(run) / layers

        return Case("append", f"{counted(count, 'token')} of 3 heads of 64", {"xla": call}, 2.0 * new.nbytes, 0.0)

    return [case(count) for count in tokens]


def samplings(vocabulary: int, rows: Sequence[int] = (1, 8, 32), steps: int = 4) -> list[Case]:
    """A token per row of logits, `steps` times in a program as a decode loop does it."""
    options = {
        "greedy": SamplingOptions(seed=0),
        "temperature": SamplingOptions(temperature=1.0, seed=0),
        "top-k 40": SamplingOptions(temperature=1.0, top_k=40, seed=0),
        "top-p 0.9": SamplingOptions(temperature=1.0, top_p=0.9, seed=0),
        "top-k 40, top-p 0.9": SamplingOptions(temperature=1.0, top_k=40, top_p=0.9, seed=0),
    }

    @jax.jit
    def program(logits: jax.Array, params: SamplingParams, seen: jax.Array, counts: jax.Array) -> jax.Array:
        def step(position: jax.Array, tokens: jax.Array) -> jax.Array:
            changed = logits + 0.0 * tokens[:, None]  # of this step, for all that the compiler knows
            return sample(changed, params, jnp.broadcast_to(position, tokens.shape), seen, counts)

        return jax.lax.fori_loop(0, steps, step, jnp.zeros((logits.shape[0],), jnp.int32))

    cases = []
    for count in rows:
        shape = count, vocabulary
        logits = jnp.asarray(3 * np.random.default_rng(0).normal(size=shape).astype(np.float32))
        state = jnp.zeros(shape, bool), jnp.zeros(shape, jnp.int32)
        for name, option in options.items():
            params = jax.device_put(SamplingParams.stack([option] * count, ()))
            call = cycled(program, [(logits, params, *state)], steps)
            cases.append(
                Case("sampling", f"{vocabulary:,} tokens, {name}, {counted(count, 'row')}", {"xla": call}, float(logits.nbytes), 0.0)
            )
    return cases


TOP_K = 2  # experts of a token


def mixture(tokens: int, count: int, width: int, hidden: int) -> Callable[[], jax.Array]:
    """A jitted call of `experts` with random weights, a different choice in every call."""
    rng = np.random.default_rng(0)
    w_in = jnp.asarray(rng.standard_normal((count, 2, hidden, width), np.float32))
    w_out = jnp.asarray(rng.standard_normal((count, width, hidden), np.float32))
    x = jnp.asarray(rng.standard_normal((tokens, width), np.float32))
    shares = jnp.full((tokens, TOP_K), 0.5)
    activation = functools.partial(activate, MLPConfig(hidden=hidden))
    call = jax.jit(lambda chosen: experts(x, chosen, shares, w_in, w_out, activation))

    def run() -> jax.Array:
        chosen = np.stack([rng.permutation(count)[:TOP_K] for _ in range(tokens)]).astype(np.int32)
        return call(chosen)

    return run


def mixtures(count: int, width: int, hidden: int, tokens: Sequence[int] = (1, 16, 512)) -> list[Case]:
    """A mixture of experts; it must read those that some token chose, on average."""
    cases = []
    for T in tokens:
        call = functools.partial(seconds, mixture(T, count, width, hidden))
        one = 3 * width * hidden  # weights of an expert
        hit = count * (1 - (1 - TOP_K / count) ** T)
        shape = f"{counted(T, 'token')}, {TOP_K} of {count} experts of {width} x {hidden}"
        cases.append(Case("experts", shape, {"xla": call}, 4 * (hit * one + 2 * T * width), 2.0 * T * TOP_K * one))
    return cases
