"""kernels.experts with tiled weights: grouped products in C++, against f64 and to the bit against the products of one expert alone."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import JoinedArray, QuantArray, cpu, experts
from kernels.experts import experts_reference
from kernels.native_matmul import native_grouped_matmul, native_matmul
from kernels.tiled_array import TiledArray, can_tile, tile
from tests.kernels.packed import F16, I8, KINDS, SUPER, U8, Kind, random_weights
from tests.kernels.test_native_matmul import ROUNDS, SETS, expected, instructions
from tests.kernels.test_tiled_array import same

pytestmark = pytest.mark.skipif(cpu.instruction_set() is None, reason=f"no native kernels here: {cpu.reason()}")

E = 6
grouped = jax.jit(native_grouped_matmul, static_argnames="gate")
alone = jax.jit(native_matmul, static_argnames="gate")
tile_all = jax.jit(tile, static_argnames=("rounds", "lead"))
SIZES = {
    1: [(0, 0, 1, 0, 0, 0), (0, 0, 0, 0, 0, 0)],
    3: [(3, 0, 0, 0, 0, 0), (1, 0, 0, 1, 0, 1), (0, 0, 0, 0, 0, 2)],
    64: [(0, 64, 0, 0, 0, 0), (20, 0, 1, 7, 36, 0), (11, 5, 9, 2, 30, 3)],
}


def matrices(kind: Kind) -> list[QuantArray]:
    return [random_weights(kind, seed) for seed in range(E)]


def stacked(each: list) -> QuantArray:
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *each)


@functools.cache
def tiled_once(kind: Kind) -> TiledArray:
    return tile_all(stacked(matrices(kind)), lead=1)


def tiled(kind: Kind, rounds: int) -> TiledArray:
    return tiled_once(kind).replace(rounds=rounds)


def matrix(w: TiledArray, e: int) -> TiledArray:
    return jax.tree.map(lambda array: array[e], w)


def check_groups(x: np.ndarray, kind: Kind, rounds: int, sizes: tuple[int, ...]) -> None:
    got = grouped(x, tiled(kind, rounds), jnp.asarray(sizes, jnp.int32))
    assert got.shape == (len(x), *kind.outs) and got.dtype == jnp.float32
    got, row = np.asarray(got, np.float64).reshape(len(x), -1), 0
    for seed, size in enumerate(sizes):
        if size == 0:
            continue
        want, bound = expected(x[row : row + size], kind, rounds, seed)
        assert (np.abs(got[row : row + size] - want) <= bound).all()
        row += size
    assert not got[row:].any()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_matrix_of_each_expert_is_tiled_as_it_is_alone(kind):
    each = matrices(kind)
    rng = np.random.default_rng(0)
    more = {"order": jnp.asarray(rng.permutation(kind.inputs), jnp.int32), "input_scales": jnp.ones(kind.inputs, jnp.float16)}
    w = stacked(each).replace(**more)
    got = tile_all(w, rounds=15, lead=1)
    assert got.shape == w.shape and got.outs == kind.outs and len(got) == E and got.rounds == 15
    for e in (0, E - 1):
        one = matrix(got.replace(order=None, input_scales=None), e)
        same(one, tile_all(each[e], rounds=15))
    back = jax.jit(TiledArray.untiled)(got)
    same(back, w)
    np.testing.assert_array_equal(got.widen(), w.widen())


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_rows_meet_their_own_experts_matrix(kind, rounds, name):
    rng = np.random.default_rng(0)
    with instructions(name):
        for count, some in SIZES.items():
            for sizes in some:
                check_groups(rng.normal(size=(count, kind.inputs)).astype(np.float32), kind, rounds, sizes)


@pytest.mark.parametrize("kind", [KINDS[3], KINDS[7], KINDS[10], KINDS[12]], ids=str)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_sizes_give_the_bits_of_each_experts_own_product(kind, data):
    rounds, count = data.draw(st.sampled_from(ROUNDS)), data.draw(st.sampled_from(sorted(SIZES)))
    cuts = sorted(data.draw(st.lists(st.integers(0, count), min_size=E, max_size=E)))
    sizes = np.diff([0, *cuts])
    x = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1))).normal(size=(count, kind.inputs)).astype(np.float32)
    for name in SETS:
        with contextlib.suppress(pytest.skip.Exception), instructions(name):
            got = np.asarray(grouped(x, tiled(kind, rounds), jnp.asarray(sizes, jnp.int32)))
            for e in range(E):  # padded to one shape, so that one program serves all sizes
                own = np.zeros_like(x)
                own[: sizes[e]] = x[cuts[e] - sizes[e] : cuts[e]]
                want = alone(own, matrix(tiled(kind, rounds), e))
                np.testing.assert_array_equal(got[cuts[e] - sizes[e] : cuts[e]], want[: sizes[e]])
            assert not got[cuts[-1] :].any()


GATED = [
    Kind("uint4", (2, 48), 96, 32, zero=8),
    Kind("uint6", (2, 16), 256, 16, zero=32, has=("super_scales",), scales=I8),
    Kind("uint5", (2, 32), 256, 32, has=SUPER, scales=U8),
    Kind("int8", (2, 48), 96, 32),
]


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
def test_gates_are_those_of_each_experts_own_product(gate, rounds, name):
    sizes = (20, 0, 1, 7, 30, 0)
    with instructions(name):
        for kind in GATED:
            x = np.random.default_rng(0).normal(size=(64, kind.inputs)).astype(np.float32)
            got, row = np.asarray(grouped(x, tiled(kind, rounds), jnp.asarray(sizes, jnp.int32), gate=gate)), 0
            assert got.shape == (64, kind.outs[1])
            for e, size in enumerate(sizes):
                want = np.asarray(alone(x, matrix(tiled(kind, rounds), e), gate=gate))
                np.testing.assert_array_equal(got[row : row + size], want[row : row + size])
                row += size
            assert not got[row:].any()


def poisoned(w: TiledArray, hit: set[int]) -> TiledArray:
    """With scales that are no numbers for the experts that are not hit."""
    keep = np.isin(np.arange(len(w)), list(hit)).reshape(-1, 1, 1, 1)
    return w.replace(scales=jnp.where(keep, w.scales, jnp.nan))


@pytest.mark.parametrize("rounds", ROUNDS)
def test_weights_of_experts_that_are_not_hit_and_rows_of_none_do_not_matter(rounds):
    kind, sizes = KINDS[1], (0, 9, 0, 5, 1, 0)
    x = np.random.default_rng(0).normal(size=(20, kind.inputs)).astype(np.float32)
    want = grouped(x, tiled(kind, rounds), jnp.asarray(sizes, jnp.int32))
    x[sum(sizes) :] = np.nan
    got = grouped(x, poisoned(tiled(kind, rounds), {1, 3, 4}), jnp.asarray(sizes, jnp.int32))
    assert np.isfinite(got).all()
    np.testing.assert_array_equal(got, want)


def test_sizes_that_do_not_fit_are_refused():
    kind = KINDS[0]
    x, w = np.ones((4, kind.inputs), np.float32), tiled(kind, 0)
    for sizes, said in [
        (jnp.asarray([5, 0, 0, 0, 0, 0], jnp.int32), "sizes do not fit"),
        (jnp.asarray([2, 0, 0, 0, 0, 3], jnp.int32), "sizes do not fit"),
        (jnp.asarray([-1, 1, 0, 0, 0, 0], jnp.int32), "sizes do not fit"),
        (jnp.asarray([2**31 - 1] * E, jnp.int32), "sizes do not fit"),
        (jnp.asarray([1, 1, 1, 1, 0], jnp.int32), "a plane's size"),
        (jnp.asarray([1, 1, 1, 0, 0, 0, 0], jnp.int32), "a plane's size"),
        (jnp.asarray([1, 1, 1, 0, 0, 0], jnp.float32), "sizes are not int32"),
        (jnp.zeros(0, jnp.int32), "sizes are not int32, or none"),
    ]:
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=said):
            grouped(x, w, sizes).block_until_ready()
    check_groups(x, kind, 0, (1, 0, 3, 0, 0, 0))  # and the next is served


D, F = 64, 96
FORMATS = {
    "q4": (Kind("uint4", (2, F), D, 32, has=("offsets",)), Kind("uint4", (D,), F, 32, zero=8)),
    "k": (Kind("uint5", (2, F), D, 32, zero=16), Kind("int8", (D,), F, 32)),
    "float4": (Kind("float4", (2, F), D, 32, scales=F16), Kind("uint4", (D,), F, 16, has=("zeros", "offsets"))),
}
ACTIVATIONS = {
    "silu": lambda gate, up: jax.nn.silu(gate) * up,
    "gelu_tanh": lambda gate, up: jax.nn.gelu(gate, approximate=True) * up,
    "clamped": lambda gate, up: jnp.minimum(gate, 1) * jax.nn.sigmoid(gate) * (up + 1),
}


def scaled_weights(kind: Kind, seeds: range = range(E)) -> QuantArray:
    """[E, ...], of a size at which what goes through a layer stays near 1."""
    w = stacked([random_weights(kind, seed) for seed in seeds])
    factor = 0.5 / (np.asarray(w.widen()).std() * kind.inputs**0.5)
    changes = {name: getattr(w, name) * w.scales.dtype.type(factor) for name in ("scales", "offsets") if getattr(w, name) is not None}
    return w.replace(**changes)


def mixture(T: int, k: int, dtype: str, seed: int, spread: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x, indices and weights; some choices are of no expert."""
    rng = np.random.default_rng(seed)
    match spread:
        case "one":
            indices = np.full((T, k), 4)
        case "few":
            indices = rng.integers(1, 3, (T, k))
        case "uneven":
            indices = np.minimum(rng.geometric(0.4, (T, k)) - 1, E - 1)
        case "none":
            indices = np.full((T, k), -1)
    indices = np.where(rng.random((T, k)) < 0.2, rng.choice([-1, E]), indices)
    return (
        jnp.asarray(rng.normal(size=(T, D)), dtype),
        jnp.asarray(indices, jnp.int32),
        jnp.asarray(rng.random((T, k)), jnp.float32),
    )


run = jax.jit(lambda *arrays, name: experts(*arrays[:5], ACTIVATIONS[name], *arrays[5:], gate=name), static_argnames="name")
reference = jax.jit(lambda *arrays, name: experts_reference(*arrays[:5], ACTIVATIONS[name], *arrays[5:]), static_argnames="name")


def off(got: jax.Array, want: jax.Array) -> float:
    """The largest difference, as a part of the largest number."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return np.abs(got - want).max() / max(np.abs(want).max(), 1e-30)


# Two layers of sums of at most D or F terms, each off by a rounding of a sum of sizes that is at most sqrt(F) times the result's own.
WITHIN = 2 * (F + 8) * F**0.5 * 2.0**-24
# Steps of 1 / 127 of the largest of 32, about 3 of the standard deviation: off by 3 / (127 * sqrt(12)) for each activation, 0.7 %, in two
# layers, of which the first passes a gate with a slope of 1.1; the largest of many such errors is five standard deviations, and the
# result's own 3. Products of one layer are held to bounds for each number above.
ROUNDED = {0: WITHIN, 15: 2 * 1.1 * 5 / 3 * 0.007 / 128 + WITHIN, 8: 2 * 1.1 * 5 / 3 * 0.007}


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("rounds", ROUNDS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("form", FORMATS)
def test_mixtures_are_those_of_widened_weights(form, activation, rounds, name):
    w_in, w_out = map(scaled_weights, FORMATS[form])
    native = [tile_all(w, lead=1).replace(rounds=rounds) for w in (w_in, w_out)]
    with instructions(name):
        for T in (1, 3, 64):
            for spread in ("one", "few", "uneven", "none"):
                x, indices, shares = mixture(T, 2, "float32", T, spread)
                got = run(x, indices, shares, *native, name=activation)
                assert got.shape == x.shape and got.dtype == x.dtype
                want = reference(x, indices, shares, w_in.widen(), w_out.widen(), name=activation)
                assert off(got, want) <= ROUNDED[rounds]


@pytest.mark.parametrize("activation", ["silu", "clamped"])
def test_biases_are_added_and_parts_of_different_formats_are_joined(activation):
    rng = np.random.default_rng(0)
    one, other = Kind("uint4", (1, F), D, 32, has=("offsets",)), Kind("int8", (1, F), D, 32)
    joined = JoinedArray((scaled_weights(one), scaled_weights(other, range(E, 2 * E))), 1)
    for w_in in (joined, scaled_weights(FORMATS["q4"][0])):
        w_out = scaled_weights(FORMATS["q4"][1])
        native = [jax.tree.map(lambda w: tile_all(w, lead=1), w, is_leaf=lambda w: isinstance(w, QuantArray)) for w in (w_in, w_out)]
        biases = jnp.asarray(rng.normal(size=(E, 2, F)), jnp.float32), jnp.asarray(rng.normal(size=(E, D)), jnp.float32)
        for more in ((), biases):
            arrays = mixture(33, 3, "float32", 1, "uneven")
            got = run(*arrays, *native, *more, name=activation)
            assert off(got, reference(*arrays, w_in.widen(), w_out.widen(), *more, name=activation)) <= WITHIN


@pytest.mark.parametrize("which", [0, 1])
def test_where_one_matrix_is_tiled_the_mixture_is_the_same(which):
    pair = [scaled_weights(kind) for kind in FORMATS["k"]]
    mixed = [tile_all(w, lead=1) if at == which else w for at, w in enumerate(pair)]
    for T in (1, 40):
        arrays = mixture(T, 2, "float32", 2, "uneven")
        want = reference(*arrays, *(w.widen() for w in pair), name="silu")
        assert off(run(*arrays, *mixed, name="silu"), want) <= WITHIN


def test_bfloats_go_in_and_come_out():
    w_in, w_out = map(scaled_weights, FORMATS["q4"])
    arrays = mixture(40, 2, "bfloat16", 3, "uneven")
    got = run(*arrays, *(tile_all(w, lead=1) for w in (w_in, w_out)), name="silu")
    assert got.dtype == jnp.bfloat16
    wide = reference(arrays[0].astype(jnp.float32), *arrays[1:], w_in.widen(), w_out.widen(), name="silu")
    assert off(got, wide) <= 2 * 2.0**-8 * 2  # the hidden units and the result are rounded to bf16


def test_experts_that_are_not_hit_are_not_read():
    w_in, w_out = (tile_all(scaled_weights(kind), rounds=15, lead=1) for kind in FORMATS["q4"])
    arrays = mixture(20, 2, "float32", 4, "few")  # experts 1 and 2
    want = run(*arrays, w_in, w_out, name="silu")
    got = run(*arrays, poisoned(w_in, {1, 2}), poisoned(w_out, {1, 2}), name="silu")
    assert np.isfinite(got).all() and np.abs(got).max() > 0
    np.testing.assert_array_equal(got, want)


def test_experts_are_tiled_where_their_matrices_can_be():
    assert can_tile(scaled_weights(FORMATS["q4"][0]))
    assert not can_tile(stacked([random_weights(Kind("uint3", (16,), 64, 32), seed) for seed in range(2)]))
