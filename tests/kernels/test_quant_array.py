"""kernels.quant_array against the formula, number by number."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import JoinedArray, QuantArray, take_rows, widen
from kernels.quant_array import PLANES, pack, unpack, widen_float8

PACKED = ["uint3", "uint4", "uint5", "uint6", "float4"]


@pytest.mark.parametrize("code", PACKED)
@settings(deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_codes_come_back_from_their_planes(code, seed):
    bits = sum(PLANES[code])
    codes = np.random.default_rng(seed).integers(0, 2**bits, (3, 2, 96)).astype(np.uint8)
    planes = pack(codes, code)
    assert sum(plane.nbytes for plane in planes) * 8 == codes.size * bits
    np.testing.assert_array_equal(unpack(tuple(map(jnp.asarray, planes)), code), codes)


def test_four_bit_codes_lie_as_documented():
    codes = np.arange(64, dtype=np.uint8)[None] % 16
    (plane,) = pack(codes, "uint4")
    assert plane[0, 3] == 3 | 3 << 4  # codes 3 and 19
    codes[0, 19] = 9
    assert pack(codes, "uint4")[0][0, 3] == 3 | 9 << 4
    low, high = pack(np.full((1, 32), 0b110000, np.uint8), "uint6")
    assert not low.any() and (high == 0b11111111).all()


@pytest.mark.parametrize(
    ("code", "zero", "has"),
    [
        ("int8", 0, ()),
        ("int8", 0, ("zeros",)),
        ("uint4", 8, ()),
        ("uint4", 0, ("zeros", "offsets")),
        ("uint5", 16, ("super_scales",)),
        ("uint6", 32, ("super_scales",)),
        ("uint4", 0, ("offsets", "super_scales", "super_offsets")),
        ("uint3", 4, ("order", "input_scales")),
        ("float4", 0, ()),
        ("float8", 0, ("input_scales",)),
    ],
)
def test_weights_are_what_the_formula_says(code, zero, has):
    rng, outs, width, groups = np.random.default_rng(1), 5, 128, 8
    if code == "float8":
        codes = rng.normal(size=(outs, width)).astype(ml_dtypes.float8_e4m3fn)
        numbers = codes.astype(np.float64)
    elif code == "int8":
        codes = rng.integers(-128, 128, (outs, width)).astype(np.int8)
        numbers = codes.astype(np.float64)
    else:
        codes = rng.integers(0, 2 ** sum(PLANES[code]), (outs, width)).astype(np.uint8)
        numbers = codes.view(ml_dtypes.float4_e2m1fn).astype(np.float64) if code == "float4" else codes.astype(np.float64)
    supers = "super_scales" in has
    arrays = {
        "scales": rng.integers(1, 64, (outs, groups)).astype(np.uint8) if supers else rng.normal(size=(outs, groups)).astype(np.float16),
        "zeros": rng.integers(0, 16, (outs, groups)).astype(np.uint8),
        "offsets": rng.integers(1, 64, (outs, groups)).astype(np.uint8) if supers else rng.normal(size=(outs, groups)).astype(np.float16),
        "super_scales": rng.normal(size=(outs, 2)).astype(np.float16),
        "super_offsets": rng.normal(size=(outs, 2)).astype(np.float16),
        "order": rng.permutation(width).astype(np.int32),
        "input_scales": rng.normal(size=width).astype(np.float32),
    }
    arrays = {name: array for name, array in arrays.items() if name in ("scales", *has)}
    w = QuantArray(pack(codes, code), **arrays, code=code, zero=zero)
    want = np.zeros((outs, width))
    for o in range(outs):
        for i in range(width):
            g, G = i // (width // groups), i // (width // 2)
            scale = float(arrays["scales"][o, g]) * (float(arrays["super_scales"][o, G]) if supers else 1)
            value = (numbers[o, i] - zero - float(arrays["zeros"][o, g] if "zeros" in has else 0)) * scale
            if "offsets" in has:
                offset = float(arrays["offsets"][o, g])
                value += -offset * float(arrays["super_offsets"][o, G]) if supers else offset
            at = arrays["order"][i] if "order" in has else i
            want[o, at] = value * (float(arrays["input_scales"][at]) if "input_scales" in has else 1)
    assert w.shape == (outs, width) and w.size == outs * width
    np.testing.assert_allclose(w.widen(), want, rtol=1e-6, atol=1e-5)
    rows = take_rows(w, jnp.asarray([[3, 0], [4, 99]]), jnp.float32)
    np.testing.assert_allclose(rows, want[[[3, 0], [4, 4]]], rtol=1e-6, atol=1e-5)


def test_every_float8_is_widened_exactly():
    bits = np.array([b for b in range(256) if b & 0x7F != 0x7F], np.uint8)  # but not a number
    np.testing.assert_array_equal(widen_float8(jnp.asarray(bits)), bits.view(ml_dtypes.float8_e4m3fn).astype(np.float32))
    np.testing.assert_array_equal(widen_float8(jnp.asarray(bits.view(ml_dtypes.float8_e4m3fn))), bits.view("float8_e4m3fn").astype("f4"))


def test_parts_of_different_formats_follow_one_another():
    rng = np.random.default_rng(2)
    first = QuantArray((jnp.asarray(rng.integers(-9, 9, (2, 3, 32)), jnp.int8),), jnp.ones((2, 3, 1)))
    second = jnp.asarray(rng.normal(size=(2, 1, 32)), jnp.float32)
    joined = JoinedArray((first, second), 1)
    assert joined.shape == (2, 4, 32) and joined.size == 256 and joined.nbytes == first.nbytes + second.nbytes
    np.testing.assert_array_equal(widen(joined, jnp.float32), jnp.concatenate([first.widen(), second], 1))
    np.testing.assert_array_equal(take_rows(joined, jnp.asarray([1]), jnp.float32), widen(joined, jnp.float32)[1:])


def test_a_packed_weight_is_a_tree_of_arrays():
    w = QuantArray((jnp.zeros((4, 16), jnp.uint8),), jnp.ones((4, 1), jnp.float16), code="uint4", zero=8)
    abstract = jax.eval_shape(lambda w: w, w)
    assert abstract.shape == (4, 32) and abstract.nbytes == w.nbytes == 4 * 16 + 4 * 2
    stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), w, w)
    total, _ = jax.lax.scan(lambda total, w: (total + w.widen().sum(), None), jnp.float32(0), stacked)
    assert float(total) == 2 * 4 * 32 * -8
    donated = jax.jit(lambda w: w.map_rows(lambda array: array + 1), donate_argnums=0)(w)
    assert donated.code == "uint4" and donated.zero == 8 and int(donated.planes[0].max()) == 1
