"""kernels.native_matmul against the same products in f64, within what f32 sums may be off by."""

import contextlib
import functools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import cpu
from kernels.native_matmul import can_gate, native_matmul
from kernels.norm import Normed
from kernels.tiled_array import BLOCK, TiledArray, tile
from tests.kernels.packed import KINDS, Kind, numbers, random_weights

pytestmark = pytest.mark.skipif(cpu.instruction_set() is None, reason=f"no native kernels here: {cpu.reason()}")

SETS = ["avx512", "avx2"]
ROWS = [1, 5, 40]  # alone; not all that are multiplied at once; many
ROUNDS = [0, 8, 15]
ROUNDING = 2.0**-24  # of f32, relative
SMALLEST = 2.0**-126  # XLA's threads take smaller f32 for 0
OUTLIER = 14.5  # times a row's mean size: numbers that share a scale with a larger one have 15 bits
LEAST = 2.0**-111  # rounds are rounded to 0 where none of those that share a scale is larger


@contextlib.contextmanager
def instructions(name: str):
    cpu.native.use_avx2_only(name == "avx2")
    try:
        if cpu.native.instruction_set() != name:
            pytest.skip(f"this CPU has no {name}")
        yield
    finally:
        cpu.native.use_avx2_only(False)


@functools.cache
def tiled(kind: Kind, rounds: int, seed: int = 0) -> TiledArray:
    return tile(random_weights(kind, seed), rounds)


multiply = jax.jit(native_matmul)


def rounded(x: np.ndarray, bits: int) -> np.ndarray:
    """f64, x in steps of 1 / 127 (15 bits: 1 / (127 * 128)) of the largest of each 32 neighbours, as f32 arithmetic finds them. Of 8 bits,
    outliers and those beside them have 15 too."""
    parts = x.reshape(len(x), -1, BLOCK)
    largest = np.abs(parts).max(-1, keepdims=True)
    wide = (bits == 15) | (largest > np.float32(OUTLIER) * np.abs(x).mean(-1, dtype=np.float32)[:, None, None])
    most = np.where(wide, np.float32(127 * 128), np.float32(127))
    usable = largest >= np.float32(LEAST)
    codes = np.rint(parts * (most / np.where(usable, largest, np.float32(1))))
    scales = np.where(usable, largest / most, np.float32(0))
    return (codes.astype(np.float64) * scales).reshape(x.shape)


def expected(x: np.ndarray, kind: Kind, rounds: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """The product [rows, O] in f64, and how far f32 may be from it: each of the terms that are added one after another is off by a
    rounding of the sum of all, and by three or four of its own."""
    wide, magnitudes = numbers(kind, seed)
    if rounds:
        x = rounded(x, rounds)
    sums = np.abs(x).astype(np.float64) @ magnitudes.T
    return x.astype(np.float64) @ wide.T, (kind.inputs + 8) * (ROUNDING * sums + SMALLEST * (magnitudes.sum(-1) + 1))


def close(got: jax.Array, x: np.ndarray, kind: Kind, rounds: int) -> None:
    want, bound = expected(x, kind, rounds)
    assert got.shape == (len(x), *kind.outs) and got.dtype == jnp.float32
    off = np.abs(np.asarray(got, np.float64).reshape(want.shape) - want)
    assert (off <= bound).all(), f"off by {(off / bound).max():.1f} times what is allowed"


def draw_rows(data: st.DataObject, kind: Kind) -> np.ndarray:
    """Rows that are ordinary, or in one of the ways in which a row can be extreme."""
    count = data.draw(st.sampled_from(ROWS))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    x = rng.normal(size=(count, kind.inputs)).astype(np.float32)
    for row in range(count):
        match data.draw(st.sampled_from(["normal", "zero", "huge", "tiny", "smallest", "mixed", "ties", "outliers"])):
            case "zero":
                x[row] = 0
            case "huge":
                x[row, rng.integers(kind.inputs)] = -1e30
            case "tiny":
                x[row] *= np.float32(1e-37)
            case "smallest":
                x[row] = np.float32(1e-45) * rng.integers(-9, 9, kind.inputs).astype(np.float32)
            case "mixed":
                x[row] *= np.exp2(rng.integers(-130, 60, kind.inputs)).astype(np.float32)
            case "outliers":
                x[row, rng.integers(kind.inputs, size=2)] *= 30
            case "ties":
                x[row] = rng.integers(-254, 255, kind.inputs) / np.float32(2)
                x[row, ::BLOCK] = 127  # a scale of 1: halves are rounded to the even
    return x


@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_products_are_those_of_the_formula_with_either_instruction_set(kind, rounds, data):
    x, w = draw_rows(data, kind), tiled(kind, rounds)
    for name in SETS:
        with contextlib.suppress(pytest.skip.Exception), instructions(name):
            close(multiply(x, w), x, kind, rounds)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("rounds", ROUNDS)
def test_a_row_alone_is_the_row_in_company_to_the_bit(rounds, name):
    with instructions(name):
        for kind in KINDS:
            rng = np.random.default_rng(0)
            x = rng.normal(size=(max(ROWS), kind.inputs)).astype(np.float32)
            x[rng.random(x.shape) < 0.02] *= 30  # outliers: beside them a row of 8 bits is multiplied in another way, with the same result
            together = np.asarray(multiply(x, tiled(kind, rounds)))
            for row in (0, 7, 39):
                np.testing.assert_array_equal(multiply(x[row : row + 1], tiled(kind, rounds))[0], together[row])


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("rounds", ROUNDS)
def test_a_number_that_is_none_makes_its_row_so_and_no_other(rounds, name):
    kind = KINDS[1]
    for bad in (np.nan, np.inf, -np.inf):
        x = np.ones((5, kind.inputs), np.float32)
        x[2, 40] = bad
        with instructions(name):
            got = np.asarray(multiply(x, tiled(kind, rounds)))
        assert not np.isfinite(got[2]).any() and np.isfinite(np.delete(got, 2, 0)).all()


@pytest.mark.parametrize("rounds", ROUNDS)
def test_no_rows_give_none(rounds):
    for kind in KINDS[:1] + KINDS[10:11]:
        assert multiply(np.zeros((0, kind.inputs), np.float32), tiled(kind, rounds)).shape == (0, *kind.outs)


def test_leading_axes_orders_and_input_scales_are_as_with_any_weight():
    kind, rng = KINDS[2], np.random.default_rng(3)
    order, scales = rng.permutation(kind.inputs).astype(np.int32), rng.normal(size=kind.inputs).astype(np.float32)
    w = tiled(kind, 0).replace(order=jnp.asarray(order), input_scales=jnp.asarray(scales))
    x = rng.normal(size=(2, 3, kind.inputs)).astype(np.float32)
    got = multiply(x, w)
    assert got.shape == (2, 3, *kind.outs)
    close(got.reshape(6, -1), (x * scales)[..., order].reshape(6, -1), kind, 0)
    assert multiply(x.astype(jnp.bfloat16), w).dtype == jnp.bfloat16


GATED = [
    Kind("uint4", (2, 32), 96, 32, has=("offsets",)),
    Kind("uint6", (2, 16), 256, 16, zero=32, has=("super_scales",), scales=np.dtype(np.int8)),
    Kind("int8", (2, 48), 160, 160, scales=np.dtype(np.float32)),
]


EXPONENTS = {"silu": lambda x: -x, "gelu_tanh": lambda x: -2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)}  # either is x / (1 + e^this)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("gate", EXPONENTS)
def test_a_gated_product_is_the_activated_first_half_times_the_second(gate, rounds, name):
    gated = jax.jit(native_matmul, static_argnames="gate")
    for kind in GATED:
        w = tiled(kind, rounds)
        assert can_gate(w, gate) and not can_gate(w, "relu") and not can_gate(tiled(KINDS[0], 0).replace(outs=(2, 24)), gate)
        x = np.random.default_rng(0).normal(size=(5, kind.inputs)).astype(np.float32)
        x *= np.float32([[1e-6], [1e-3], [0.01], [1], [100]])
        with instructions(name), np.errstate(over="ignore"):
            got = np.asarray(gated(x, w, gate=gate), np.float64)
            both = np.asarray(multiply(x, w), np.float64)
            gates, ups = both[:, 0], both[:, 1]
            exponent = EXPONENTS[gate](gates)
            want = gates / (1 + np.exp(exponent)) * ups
            # Four roundings of the exponent and a few of all else; less than 1e-35 of the gate is taken for about that.
            bound = ROUNDING * (8 + 4 * np.minimum(np.abs(exponent), 88)) * np.abs(want) + 1e-35 * np.abs(gates * ups) + SMALLEST
            assert (np.abs(got - want) <= bound).all()


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("rounds", ROUNDS)
def test_a_residual_is_added_once(rounds, name):
    for kind in (KINDS[1], KINDS[4], KINDS[10]):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(5, kind.inputs)).astype(np.float32)
        residual = rng.normal(size=(5, *kind.outs)).astype(np.float32)
        with instructions(name):
            got = multiply(x, tiled(kind, rounds), residual)
            np.testing.assert_array_equal(got, np.asarray(multiply(x, tiled(kind, rounds))) + residual)


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("rounds", ROUNDS)
def test_a_norm_that_is_left_to_the_product_is_done_before_it(rounds, name):
    for kind in (KINDS[1], KINDS[7], KINDS[10]):
        rng, eps = np.random.default_rng(0), 1e-5
        x = rng.normal(size=(5, kind.inputs)).astype(np.float32) * np.float32([[1e-4], [0.01], [1], [30], [1e4]])
        scale = rng.normal(size=kind.inputs).astype(np.float32)
        wide = x.astype(np.float64)
        normed = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + eps) * scale
        with instructions(name):
            got = multiply(Normed(jnp.asarray(x), jnp.asarray(scale), eps), tiled(kind, rounds))
        want, bound = expected(normed.astype(np.float32), kind, rounds)
        bound = 2 * bound  # the norm is a sum of as many terms itself
        if rounds:  # where it is off, one activation or two may be rounded the other way
            bound += 2 * np.abs(normed).max(-1, keepdims=True) / 127 * np.abs(numbers(kind)[0]).max()
        assert (np.abs(np.asarray(got, np.float64).reshape(want.shape) - want) <= bound).all()


def test_calls_that_do_not_fit_are_refused():
    kind, good = KINDS[6], {"code": 41, "zero": 0, "present": 14, "bits": 0, "gate": 0, "eps": 0.0}
    w = tiled(kind, 0)
    arrays = [np.ones((2, kind.inputs), np.float32), *w.planes, w.scales, w.offsets, w.super_scales, w.super_offsets]
    shape = (2, *kind.outs)

    def call(arrays, shape, **changes):
        out = jax.ShapeDtypeStruct(shape, jnp.float32)
        return cpu.call("diptych_matmul", out, *map(jnp.asarray, arrays), **{**good, **changes}).block_until_ready()

    def with_array(at, array):
        return [*arrays[:at], array, *arrays[at + 1 :]]

    assert call(arrays, shape).shape == shape
    for wrong, said in [
        (lambda: call(with_array(0, arrays[0][:, :32]), shape), "a plane's size"),
        (lambda: call(with_array(0, arrays[0][:, :33]), shape), "multiple of 32"),
        (lambda: call(with_array(0, arrays[0][:1]), shape), "as many rows"),
        (lambda: call(with_array(0, arrays[0][:, :0]), shape), "no inputs"),
        (lambda: call(arrays, (2, 100)), "a plane's size"),
        (lambda: call(arrays, (2, 4, 10)), "two axes"),
        (lambda: call(arrays, shape, code=7), "code 7"),
        (lambda: call(arrays, shape, code=4), "takes 5 arrays"),
        (lambda: call(arrays[:-1], shape), "takes 6 arrays"),
        (lambda: call(with_array(1, w.planes[0][:2]), shape), "a plane's size"),
        (lambda: call(with_array(2, w.planes[1][:, :, :32]), shape), "a plane's size"),
        (lambda: call(with_array(2, w.planes[1].astype(jnp.int32)), shape), "a plane's type"),
        (lambda: call(with_array(3, w.scales[:, :3]), shape), "scales do not fit"),
        (lambda: call(with_array(3, w.scales.astype(jnp.int32)), shape), "scales do not fit"),
        (lambda: call(with_array(4, w.offsets[:, :4]), shape), "scales do not fit"),
        (lambda: call(with_array(5, w.super_scales[:0]), shape), "scales do not fit"),
        (lambda: call([arrays[0].astype(np.float16), *arrays[1:]], shape), "buffer dtype"),
    ]:
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=said):
            wrong()
    assert call(arrays, shape).shape == shape  # and the next is served


def test_many_python_threads_may_call_at_once():
    kinds = [KINDS[1], KINDS[3], KINDS[9], KINDS[10]]
    x = {kind: np.random.default_rng(0).normal(size=(5, kind.inputs)).astype(np.float32) for kind in kinds}
    calls = [(kind, rounds) for kind in kinds for rounds in ROUNDS]
    want = {call: np.asarray(multiply(x[call[0]], tiled(*call))) for call in calls}

    def work(turn: int) -> list[bool]:
        return [np.array_equal(multiply(x[kind], tiled(kind, act)), want[kind, act]) for kind, act in calls[turn:] + calls[:turn]]

    with ThreadPoolExecutor(8) as pool:
        assert all(all(equal) for equal in pool.map(work, list(range(len(calls))) * 8))


def test_scanned_layers_are_the_layers_one_after_another():
    kind = Kind("uint4", (128,), 128, 32, has=("offsets",))
    layers = [tiled(kind, 15, seed) for seed in range(4)]
    stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *layers)
    x = np.random.default_rng(0).normal(size=(3, 128)).astype(np.float32)

    def step(x, w):
        return jnp.tanh(native_matmul(x, w)), None

    want = x
    for w in layers:
        want = jax.jit(lambda x, w: step(x, w)[0])(want, w)
    got, _ = jax.jit(lambda x, w: jax.lax.scan(step, x, w))(x, stacked)
    np.testing.assert_array_equal(got, want)


def test_eight_devices_of_one_process_may_call_at_once():
    root = Path(__file__).parents[2]
    told = {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu", "NPROC": "32", "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "tests.kernels.native_devices"]
    done = subprocess.run(command, cwd=root, env={**os.environ, **told}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "8 devices agree"
