"""The Pallas kernels for packed weights, interpreted, against float64 products with the same weights.

Tolerances are derived. With f32 operands: a weight has six roundings at most, a sum of I products I of them, each of 2^-24 of the terms'
absolute values (`numbers`' second result). With bf16 operands weights are rounded to 2^-9 of themselves once more.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import JoinedArray, QuantArray, TransposedArray, experts, matmul, transpose
from kernels.experts import experts_reference
from kernels.grouped_matmul import visits
from kernels.mosaic_matmul import mosaic_matmul
from kernels.pallas_widen import widen_codes, widen_numbers
from kernels.quant_array import EXPONENTS, pack
from kernels.triton_matmul import triton_matmul
from quantization import SCHEMES, Scheme, quantize
from tests.kernels.packed import KINDS, SUPER, U8, Kind, numbers, random_weights

F32 = np.dtype(np.float32)
MORE = [
    Kind("float8", (70,), 256, 128),
    Kind("float8", (20,), 160, 160, scales=F32),
    Kind("uint2", (20,), 256, 16, has=SUPER, scales=U8),
    Kind("uint3", (20,), 288, 32, zero=4),
    Kind("uint4", (300,), 1280, 64, has=("zeros",)),  # two strips of outputs, two blocks of inputs
    Kind("uint4", (9,), 4096, 2048, has=("zeros",)),  # a group of two blocks
]
KERNELS = {"mosaic": mosaic_matmul, "triton": triton_matmul}
BOTH = [KINDS[3], KINDS[7], MORE[0], MORE[4]]


def products(kernel, x, w: TransposedArray, sizes, rows=16):
    """f32 [M, O], as `grouped_matmul` asks for it."""
    padded = jnp.pad(x, ((0, -len(x) % rows), (0, w.blocks * w.span - w.inputs)))
    with jax.default_matmul_precision("highest"):
        return KERNELS[kernel](padded, w, visits(jnp.asarray(sizes, jnp.int32), len(padded), rows), rows, True)[: len(x)]


def one(w: QuantArray) -> TransposedArray:
    return jax.tree.map(lambda array: array[None], transpose(w))


def check(kernel: str, kind: Kind, rows: int, dtype=jnp.float32, scale: float = 1.0, seed: int = 0) -> None:
    x = jnp.asarray(np.random.default_rng(seed).normal(size=(rows, kind.inputs)) * scale, dtype)
    got = np.asarray(products(kernel, x, one(random_weights(kind, seed)), [rows]), np.float64)
    w, terms = numbers(kind, seed)
    wide = np.asarray(x, np.float64)
    bound = (kind.inputs + 6) * 2.0**-24 * (np.abs(wide) @ terms.T)
    if dtype == jnp.bfloat16:
        bound += (2.0**-9 + 2.0**-16) * (np.abs(wide) @ np.abs(w).T)
    assert (np.abs(got - wide @ w.T) <= bound).all()


def slow_but(quick, *case):
    return pytest.param(*case, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(
    ("kernel", "kind"), [slow_but(name == "mosaic" or kind in BOTH, name, kind) for name in KERNELS for kind in KINDS + MORE], ids=str
)
def test_every_code_and_scale_format_gives_its_product(kernel, kind):
    check(kernel, kind, rows=3)


@pytest.mark.parametrize(
    ("kernel", "kind", "rows"),
    [slow_but(rows == 200 and kind is MORE[4], name, kind, rows) for name in KERNELS for kind in BOTH for rows in (1, 8, 200)],
    ids=str,
)
def test_any_number_of_rows(kernel, kind, rows):
    check(kernel, kind, rows)


@pytest.mark.parametrize(("kernel", "kind"), [slow_but(kind is BOTH[0], name, kind) for name in KERNELS for kind in BOTH], ids=str)
def test_bf16_activations_meet_weights_rounded_to_bf16(kernel, kind):
    check(kernel, kind, 8, jnp.bfloat16)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_scale_of_all_inputs_leaves_codes_unrounded_for_bf16(kernel):
    """It multiplies the sums: bf16 holds a code of 8 bits, and no error but f32's is left."""
    kind = Kind("int8", (3, 11), 160, 160, scales=F32)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 160)), jnp.bfloat16)
    w, terms = numbers(kind)
    wide = np.asarray(x, np.float64)
    assert (np.abs(products(kernel, x, one(random_weights(kind)), [5]) - wide @ w.T) <= 166 * 2.0**-24 * (np.abs(wide) @ terms.T)).all()


@settings(max_examples=5, deadline=None)
@given(st.data())
def test_outputs_and_inputs_that_fill_no_block(data):
    kernel = data.draw(st.sampled_from([*KERNELS]))
    group = data.draw(st.sampled_from([16, 32, 64, 128]))
    inputs = data.draw(st.integers(1, 1500 // group)) * max(group, 32)
    outs = data.draw(st.integers(1, 600))
    code, has = data.draw(st.sampled_from([("uint4", ("zeros",)), ("uint6", ("offsets",)), ("int8", ())]))
    rows, scale = data.draw(st.sampled_from([1, 3, 8, 33])), data.draw(st.sampled_from([1e-12, 1.0, 1e12]))
    check(kernel, Kind(code, (outs,), inputs, group, has=has), rows, scale=scale, seed=data.draw(st.integers(0, 9)))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("top", [6e-8, 3e-5, 6e4])
def test_subnormal_and_large_scales(kernel, top):
    """f16's own subnormals, down to the least, are no f32 ones, and are not flushed."""
    w = random_weights(Kind("uint4", (40,), 128, 32, zero=8))
    scales = jnp.asarray(np.random.default_rng(2).uniform(-top, top, w.scales.shape), jnp.float16).at[0].set(np.float16(top))
    x = np.random.default_rng(3).normal(size=(4, 128)).astype(np.float32)
    w = w.replace(scales=scales)
    wide = np.asarray(w.widen(), np.float64)
    bound = 134 * 2.0**-24 * (np.abs(x).astype(np.float64) @ np.abs(wide).T)
    assert np.abs(wide[0]).max() > 0
    assert (np.abs(products(kernel, jnp.asarray(x), one(w), [4]) - x.astype(np.float64) @ wide.T) <= bound).all()


def test_every_small_float_is_widened_exactly():
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    got = widen_numbers(jnp.asarray(halves.view(np.int16)), "float16")
    finite = np.isfinite(halves)
    np.testing.assert_array_equal(np.asarray(got)[finite], halves[finite].astype(np.float32))
    codes = np.array([code for code in range(256) if code & 0x7F != 0x7F], np.uint8)  # NaN
    np.testing.assert_array_equal(
        widen_codes(jnp.asarray(codes, jnp.int32), "float8"), codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    )
    powers = np.arange(255, dtype=np.uint8)
    np.testing.assert_array_equal(widen_numbers(jnp.asarray(powers), EXPONENTS.name), powers.view(EXPONENTS).astype(np.float32))


def test_a_visit_is_a_tile_and_an_expert_that_meet_there():
    np.testing.assert_array_equal(visits(jnp.asarray([3, 0, 5]), 8, 4), [[0, 2, 2, 2], [0, 0, 1, 1], [0, 3, 0, 0], [3, 4, 4, 0]])


@settings(max_examples=200, deadline=None)
@given(sizes=st.lists(st.sampled_from([0, 0, 1, 2, 5, 16, 40]), min_size=4, max_size=4), rows=st.sampled_from([1, 4, 16]))
def test_every_row_is_visited_once_with_its_own_expert(sizes, rows):
    seen = np.full(160, -1)
    for expert, tile, first, last in np.asarray(_visits(jnp.asarray(sizes, jnp.int32), 160, rows)).T:
        assert 0 <= expert < 4 and 0 <= tile < 160 // rows
        assert (seen[tile * rows + first : tile * rows + last] == -1).all()
        seen[tile * rows + first : tile * rows + last] = expert
    np.testing.assert_array_equal(seen, [*np.repeat(np.arange(4), sizes), *[-1] * (160 - sum(sizes))])


_visits = jax.jit(visits, static_argnums=(1, 2))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    "sizes", [(3, 0, 17, 4), slow_but(False, (0, 0, 0, 0)), slow_but(False, (0, 33, 0, 0)), slow_but(False, (1, 0, 0, 1))]
)
def test_rows_meet_their_own_expert_and_no_other(kernel, sizes):
    """Rows past the last expert's are NaN, and so are the weights of experts without rows: nothing is multiplied with them."""
    kind = Kind("uint4", (4, 50), 96, 32, has=("zeros",))
    w, terms = (array.reshape(4, 50, 96) for array in numbers(kind))
    x = np.random.default_rng(0).normal(size=(sum(sizes) + 3, 96)).astype(np.float32)
    x[sum(sizes) :] = np.nan
    turned = transpose(random_weights(kind), lead=1)
    nothing = jnp.asarray(np.float16(np.nan)).view(jnp.int16)
    turned = turned.replace(scales=jnp.where(jnp.asarray(sizes).reshape(-1, 1, 1, 1) > 0, turned.scales, nothing))
    got = products(kernel, jnp.asarray(x), turned, sizes)
    for row, expert in enumerate(np.repeat(np.arange(4), sizes)):
        wide = x[row].astype(np.float64)
        bound = 102 * 2.0**-24 * (terms[expert] @ np.abs(wide))
        assert (np.abs(np.asarray(got[row], np.float64) - w[expert] @ wide) <= bound).all()


def test_matmul_takes_transposed_weights_with_an_order_and_scales_of_their_inputs():
    rng, kind = np.random.default_rng(0), Kind("uint4", (3, 5), 96, 32, has=("zeros",))
    order, scales = jnp.asarray(rng.permutation(96), jnp.int32), jnp.asarray(rng.normal(size=96), jnp.float32)
    w = random_weights(kind).replace(order=order, input_scales=scales)
    x = jnp.asarray(rng.normal(size=(2, 3, 96)), jnp.float32)
    want = np.einsum("bti,kgi->btkg", np.asarray(x, np.float64), np.asarray(w.widen(), np.float64))
    for turned in (transpose(w, interpret=True), transpose(w)):
        got = jax.jit(matmul)(x, turned)
        assert got.shape == (2, 3, 3, 5)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("interpret", [True, False])
@pytest.mark.parametrize("joined", [False, True])
def test_experts_take_transposed_weights(joined, interpret):
    """Some choices are no expert's, and one expert has none; parts of a weight may be of another format, or plain."""
    E, F, D, T, k = 4, 32, 96, 9, 2
    rng, scheme = np.random.default_rng(0), Scheme("uint4", 32)
    halves = [jnp.asarray(rng.normal(size=(E, 1, F, D)), jnp.float32) for _ in range(2)]
    turn = functools.partial(transpose, lead=1, interpret=interpret)
    w_in = quantize(jnp.concatenate(halves, 1), scheme)
    turned = turn(w_in)
    if joined:
        w_in = JoinedArray((quantize(halves[0], SCHEMES["int8"]), halves[1]), 1)
        turned = JoinedArray((turn(w_in.parts[0]), halves[1]), 1)
    w_out = quantize(jnp.asarray(rng.normal(size=(E, D, F)), jnp.float32), scheme)
    x, shares = jnp.asarray(rng.normal(size=(T, D)), jnp.float32), jnp.asarray(rng.random((T, k)), jnp.float32)
    indices = jnp.asarray(rng.integers(-1, E - 1, (T, k)), jnp.int32)

    def activation(gate, up):
        return jax.nn.silu(gate) * up

    want = experts_reference(x, indices, shares, w_in.widen(), w_out.widen(), activation)
    with jax.default_matmul_precision("highest"):
        got = experts(x, indices, shares, turned, turn(w_out), activation)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("code", ["uint2", "uint3", "uint4", "uint5", "uint6", "float4"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_unit_vector_reads_its_input_s_codes(kernel, code):
    """Exactly: every place of a chunk, whatever shares its byte."""
    codes = (np.arange(256)[None] * np.array([[1], [3], [7]]) % (16 if code == "float4" else 2 ** int(code[-1]))).astype(np.uint8)
    w = QuantArray(tuple(map(jnp.asarray, pack(codes, code))), jnp.ones((3, 1)), code=code)
    np.testing.assert_array_equal(products(kernel, jnp.eye(256), one(w), [256]).T, w.widen())
