"""kernels.experts: the CPU's loop, the grouped products and the reference against float64, one choice at a time.

Small whole numbers make most comparisons exact: f32 holds every product and sum in any order, and bf16 every operand.
"""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import experts
from kernels.experts import experts_reference, grouped_experts, tiled_experts

MODULE = sys.modules["kernels.experts"]  # the name `kernels.experts` is the function's


@dataclasses.dataclass(frozen=True)
class Shape:
    T: int
    k: int
    E: int
    F: int
    dtype: str
    stored: str  # the weights' dtype
    biases: bool
    D: int = 14  # with a bias, gate and up are at most 15, and their product is below 256


SHAPES = {
    "one_token": Shape(T=1, k=2, E=8, F=24, dtype="float32", stored="float32", biases=False),
    "few_rows_per_expert": Shape(T=5, k=2, E=16, F=8, dtype="bfloat16", stored="bfloat16", biases=True),
    "decode_batch": Shape(T=7, k=3, E=3, F=20, dtype="float32", stored="bfloat16", biases=True),
    "prefill": Shape(T=90, k=2, E=4, F=24, dtype="float32", stored="float32", biases=False),
    "prefill_bf16": Shape(T=70, k=3, E=5, F=24, dtype="bfloat16", stored="float32", biases=True),
}


def relu_gate(gate, up):
    return jnp.maximum(gate, 0) * up


def silu_gate(gate, up):
    return jax.nn.silu(gate) * up


LOWERINGS = {
    name: jax.jit(function, static_argnums=5)
    for name, function in {"cpu": tiled_experts, "grouped": grouped_experts, "reference": experts_reference}.items()
}


def whole_numbers(shape, indices, seed):
    """All arguments but the activation, by name."""
    rng = np.random.default_rng(seed)

    def ones(*axes):
        return rng.integers(-1, 2, axes).astype(np.float64)

    arguments = {
        "x": ones(shape.T, shape.D),
        "indices": np.asarray(indices, np.int32),
        "weights": rng.integers(0, 9, (shape.T, shape.k)) / 8,
        "w_in": ones(shape.E, 2, shape.F, shape.D),
        "w_out": ones(shape.E, shape.D, shape.F),
    }
    return arguments | ({"b_in": ones(shape.E, 2, shape.F), "b_out": ones(shape.E, shape.D)} if shape.biases else {})


def in_formats(shape, arguments):
    """The same as jax arrays. A f32 weight for a bf16 x has something more, which its rounding to bf16 takes away."""
    more = 1 + 2.0**-12 if (shape.dtype, shape.stored) == ("bfloat16", "float32") else 1
    formats = {"x": shape.dtype, "indices": "int32", "weights": "float32"}
    return {
        name: jnp.asarray(array * more if name in ("w_in", "w_out") else array, formats.get(name, shape.stored))
        for name, array in arguments.items()
    }


def run(function, arguments, activation=relu_gate):
    a = dict(arguments)
    first = [a.pop(name) for name in ("x", "indices", "weights", "w_in", "w_out")]
    return function(*first, activation, *a.values())


def one_by_one(x, indices, weights, w_in, w_out, b_in=None, b_out=None):
    """relu_gate's result in float64."""
    out = np.zeros_like(x)
    for t, j in np.ndindex(indices.shape):
        e = indices[t, j]
        if e >= 0:
            gate, up = w_in[e] @ x[t] + (0 if b_in is None else b_in[e])
            out[t] += weights[t, j] * (w_out[e] @ (np.maximum(gate, 0) * up) + (0 if b_out is None else b_out[e]))
    return out


@st.composite
def choices(draw, shape):
    """[T, k]: from all on one expert to an even spread, an expert sometimes twice for a token, and some or all of them no expert."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    used = draw(st.integers(1, shape.E))
    indices = rng.permutation(shape.E)[rng.integers(0, used, (shape.T, shape.k))]
    return np.where(rng.random(indices.shape) < draw(st.sampled_from([0.0, 0.3, 0.9, 1.0])), -1, indices)


@pytest.mark.parametrize("name", [name if name != "prefill_bf16" else pytest.param(name, marks=pytest.mark.slow) for name in SHAPES])
@settings(max_examples=25, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_every_lowering_gives_the_exact_sum(name, data, seed):
    shape = SHAPES[name]
    arguments = whole_numbers(shape, data.draw(choices(shape)), seed)
    exact = one_by_one(**arguments)
    for lowering, function in LOWERINGS.items():
        out = run(function, in_formats(shape, arguments))
        assert out.dtype == shape.dtype
        np.testing.assert_array_equal(out, jnp.asarray(exact, shape.dtype), err_msg=lowering)


@pytest.mark.parametrize(("name", "block"), [("decode_batch", 5), ("prefill", 12)])
def test_an_expert_taken_in_blocks_gives_the_same(monkeypatch, name, block):
    shape = SHAPES[name]
    monkeypatch.setattr(MODULE, "_BLOCK", block * shape.D)
    monkeypatch.setattr(MODULE, "_MIN_UNITS", 4)
    assert MODULE._block(shape.F, shape.D) == block
    arguments = whole_numbers(shape, np.random.default_rng(0).integers(-1, shape.E, (shape.T, shape.k)), seed=1)
    blocks = jax.jit(lambda *args: tiled_experts(*args), static_argnums=5)  # not the executable of whole experts
    np.testing.assert_array_equal(run(blocks, in_formats(shape, arguments)), one_by_one(**arguments))


@pytest.mark.parametrize(
    ("F", "D", "block"),
    [
        (1024, 512, 1024),  # fits
        (14336, 4096, 256),  # 2 ** 20 weights exactly
        (2880, 2880, 360),
        (1399, 7168, 1399),  # a prime: whole
    ],
)
def test_a_block_is_a_divisor_of_the_hidden_units(F, D, block):
    assert MODULE._block(F, D) == block


@pytest.mark.parametrize("name", ["one_token", pytest.param("prefill", marks=pytest.mark.slow), "prefill_bf16"])
@pytest.mark.parametrize("lowering", LOWERINGS)
def test_real_numbers_agree_with_float64_within_the_rounding_of_their_formats(name, lowering):
    shape = SHAPES[name]
    rng = np.random.default_rng(0)
    indices = rng.integers(-1, shape.E, (shape.T, shape.k))
    arguments = in_formats(
        dataclasses.replace(shape, stored=shape.dtype),
        {key: array if key == "indices" else rng.normal(size=array.shape) for key, array in whole_numbers(shape, indices, 0).items()},
    )
    got = run(LOWERINGS[lowering], arguments, silu_gate)
    x, _, weights, w_in, w_out, *biases = (np.asarray(array, np.float64) for array in arguments.values())
    b_in, b_out = biases or (np.zeros(w_in.shape[:3]), np.zeros(w_out.shape[:2]))
    u32, u = 2.0**-24, 2.0**-9 if shape.dtype == "bfloat16" else 2.0**-24
    for t in range(shape.T):
        exact, error = np.zeros(shape.D), np.zeros(shape.D)
        for weight, e in zip(weights[t], indices[t], strict=True):
            if e < 0:
                continue
            gate, up = w_in[e] @ x[t] + b_in[e]
            d_gate, d_up = (shape.D + 1) * u32 * (np.abs(w_in[e]) @ np.abs(x[t]) + np.abs(b_in[e]))  # a sum of D products and a bias
            silu = gate / (1 + np.exp(-gate))
            # silu's slope is at most 1.1; its own rounding is a few units. Then the rounding to the format, perhaps to the other side.
            d_hidden = 1.1 * d_gate * np.abs(up) + np.abs(silu) * d_up + 8 * u32 * np.abs(silu * up) + 2 * u * np.abs(silu * up)
            exact += weight * (w_out[e] @ (silu * up) + b_out[e])
            magnitude = np.abs(w_out[e]) @ np.abs(silu * up) + np.abs(b_out[e])
            error += np.abs(weight) * (np.abs(w_out[e]) @ d_hidden + (shape.F + shape.k + 2) * u32 * magnitude)
        error += u * (np.abs(exact) + error)
        assert (np.abs(np.asarray(got[t], np.float64) - exact) <= error).all()


@pytest.mark.parametrize("lowering", ["cpu", "grouped"])
@pytest.mark.parametrize("name", ["one_token", "decode_batch", "prefill"])
def test_a_padded_token_is_zero_and_its_nan_reaches_no_other(name, lowering):
    shape = SHAPES[name]
    arguments = whole_numbers(shape, np.random.default_rng(0).integers(0, shape.E, (shape.T, shape.k)), seed=2)
    arguments["indices"][-1] = -1
    exact = one_by_one(**arguments)
    arguments["x"][-1] = np.nan
    arguments["weights"][-1] = np.nan
    assert not exact[-1].any()
    np.testing.assert_array_equal(run(LOWERINGS[lowering], in_formats(shape, arguments)), exact)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_an_index_past_the_last_expert_is_no_expert(lowering):
    shape = SHAPES["decode_batch"]
    arguments = whole_numbers(shape, np.random.default_rng(0).integers(-1, shape.E, (shape.T, shape.k)), seed=3)
    past = arguments | {"indices": np.where(arguments["indices"] < 0, shape.E, arguments["indices"])}
    np.testing.assert_array_equal(run(LOWERINGS[lowering], in_formats(shape, past)), one_by_one(**arguments))


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_temporaries_on_cpu_do_not_grow_with_the_number_of_experts(dtype):
    def temporaries(E):
        shape = Shape(T=2, k=2, E=E, D=64, F=128, dtype=dtype, stored=dtype, biases=False)
        arguments = in_formats(shape, whole_numbers(shape, np.zeros((2, 2)), seed=0))
        lowered = run(LOWERINGS["cpu"].lower, arguments)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    one_expert = 3 * 64 * 128 * 4
    assert temporaries(64) - temporaries(8) < one_expert


def test_it_runs_inside_a_scan():
    shape = SHAPES["decode_batch"]
    steps = np.random.default_rng(0).integers(-1, shape.E, (3, shape.T, shape.k)).astype(np.int32)
    arguments = whole_numbers(shape, steps[0], seed=4)
    arrays = in_formats(shape, arguments)
    _, out = jax.jit(lambda: jax.lax.scan(lambda _, i: (None, run(experts, arrays | {"indices": i})), None, jnp.asarray(steps)))()
    for indices, step in zip(steps, out, strict=True):
        np.testing.assert_array_equal(step, one_by_one(**arguments | {"indices": indices}))


@pytest.mark.parametrize(
    "sizes", [(3, 0, 9, 4), *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in ((0, 0, 0, 0), (0, 20, 0, 0), (1, 0, 0, 1)))]
)
@pytest.mark.parametrize("shape", [(20, 24, 40), (20, 1030, 8)])  # the second: two tiles, the last of them short
def test_the_tpu_kernel_interpreted_multiplies_each_row_by_its_own_expert(sizes, shape):
    count, inner, outs = shape
    rng = np.random.default_rng(0)
    x, w = rng.integers(-1, 2, (count, inner)), rng.integers(-1, 2, (len(sizes), outs, inner))
    own = np.repeat(np.arange(len(sizes)), sizes)
    exact = np.einsum("mi,moi->mo", x[: len(own)], w[own])
    arrays = jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.bfloat16), jnp.asarray(sizes, jnp.int32)
    for out in (MODULE._grouped_dot_tpu(*arrays, interpret=True), MODULE._grouped_dot_xla(*arrays)):
        assert out.shape == (count, outs)
        assert out.dtype == jnp.float32
        np.testing.assert_array_equal(out[: len(own)], exact)
