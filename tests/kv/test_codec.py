"""kv.codec: what comes back of numbers that were stored, and how far off it may be."""

import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kv
from kv.codec import FP8, INT4, INT8, QUANTIZED, Plain, Quantized
from runtime import UserError

BF16, F16, F32 = (np.dtype(each) for each in (jnp.bfloat16, np.float16, np.float32))
TOP_SCALE = 65504.0  # the largest f16
WIDTH = 64


@functools.cache
def programs(codec):
    encode = jax.jit(codec.encode)
    decode = jax.jit(codec.decode, static_argnums=1)
    return encode, decode


def round_trip(codec, x):
    encode, decode = programs(codec)
    return np.asarray(decode(encode(x), -1))


def bound(dtype, group, x):
    """How far each number of [..., H] may be from what comes back, from the formats' own precision.

    A scale S = amax / largest is stored in f16 as s, within d = max(S 2^-11, 2^-25) of it (half a step of 11 bits, or of what is below
    2^-14). Then x / s is rounded: int8 and int4 to whole numbers, so x is off by s / 2; e4m3 to 4 bits, so by x 2^-4, or, below 2^-6,
    by s 2^-10. Where s is smaller than S, the largest numbers are cut off, which takes at most `largest` times d. The minimum of int4 is
    rounded to f16 as well, and S is the range from there; numbers below it are cut off.
    """
    largest = QUANTIZED[dtype]
    grouped = x.astype(np.float64).reshape(*x.shape[:-1], -1, group)
    reach, cut = np.abs(grouped).max(-1, keepdims=True), 0.0
    if dtype == INT4:
        least = grouped.min(-1, keepdims=True)
        cut = np.repeat(np.maximum(np.abs(least) * 2**-11, 2.0**-25), group, axis=-1).reshape(x.shape)
        reach = grouped.max(-1, keepdims=True) - least
    S = np.repeat(reach / largest, group, axis=-1).reshape(x.shape) + cut / largest
    d = np.maximum(S * 2**-11, 2.0**-25)
    rounding = np.maximum(np.abs(x) * 2.0**-4, (S + d) * 2.0**-10) if dtype == FP8 else (S + d) / 2
    f32 = 2**-20 * np.abs(x)  # of the subtraction, the division and the sum
    return np.maximum(np.maximum(rounding, largest * d), cut) * (1 + 2**-20) + (f32 if dtype == INT4 else 0)


@pytest.mark.parametrize("group", [4, 32])
@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), exponent=st.floats(-9, 5), spread=st.floats(0, 6))
def test_no_number_is_further_off_than_its_groups_largest_allows(dtype, group, seed, exponent, spread):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(16, WIDTH)) * 10.0 ** (exponent + spread * rng.uniform(-1, 0, (16, WIDTH)))
    x = np.where(rng.random(x.shape) < 0.1, 0, np.clip(x, -6e4, 6e4)).astype(np.float32)
    got = round_trip(Quantized(dtype, group, as_bits=True), x)
    assert got.dtype == np.float32
    assert (np.abs(got - x.astype(np.float64)) <= bound(dtype, group, x)).all()


def test_the_bound_is_the_one_that_a_reader_expects():
    """Within amax/127/2, (max-min)/15/2 or x/16 for scales that f16 holds with all its bits; and it is not far from what happens."""
    x = np.random.default_rng(0).normal(size=(4096, WIDTH)).astype(np.float32)
    groups = x.reshape(4096, -1, 32)
    amax, span = (each.repeat(32, axis=-1).reshape(x.shape) for each in (np.abs(groups).max(-1), np.ptp(groups, axis=-1)))
    for dtype, limit in ((INT8, amax / 127 / 2), (INT4, span / 15 / 2), (FP8, np.maximum(np.abs(x) / 16, amax / 448 / 1024))):
        error = np.abs(round_trip(Quantized(dtype, 32), x) - x)
        assert (error <= limit * (1 + 2**-10)).all()
        assert (error / limit).max() > 0.95


@pytest.mark.parametrize("group", [2, 16, 64])
@pytest.mark.parametrize("as_bits", [False, True])
@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_numbers_that_the_format_has_come_back_exactly(dtype, as_bits, group):
    rng = np.random.default_rng(1)
    if dtype == FP8:
        values = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        values = rng.choice(values[np.isfinite(values)], (8, WIDTH // group, group))
    else:
        values = rng.integers(-QUANTIZED[dtype] * (dtype == INT8), QUANTIZED[dtype] + 1, (8, WIDTH // group, group)).astype(np.float32)
    values[..., -1] = QUANTIZED[dtype] * (1 if dtype == INT4 else rng.choice([-1, 1], values.shape[:-1]))
    if dtype == INT4:
        values[..., 0] = 0
        values += rng.integers(-20, 5, (8, WIDTH // group, 1))  # the minimum, in units of the scale
    scale = 2.0 ** rng.integers(-14, 9, (8, WIDTH // group, 1)) * rng.integers(1, 9, (8, WIDTH // group, 1))
    x = (values * scale).reshape(8, WIDTH).astype(np.float32)
    np.testing.assert_array_equal(round_trip(Quantized(dtype, group, as_bits), x), x)


@pytest.mark.parametrize(("dtype", "as_bits"), [(F32, False), (F32, True), (F16, True), (BF16, False), (BF16, True)])
def test_a_plain_format_rounds_to_its_dtype_and_nothing_else(dtype, as_bits):
    x = np.random.default_rng(2).normal(size=(5, WIDTH)).astype(np.float32)
    (stored,) = programs(Plain(dtype, as_bits))[0](x)
    assert stored.dtype == (np.uint16 if as_bits and dtype.itemsize == 2 else dtype)
    np.testing.assert_array_equal(round_trip(Plain(dtype, as_bits), x), x.astype(dtype))


def test_every_code_of_e4m3_is_read_from_its_bits():
    codes = np.arange(256, dtype=np.uint8)
    scales = np.ones((1, 4), np.float16).view(np.uint16)
    got = np.asarray(Quantized(FP8, 64, as_bits=True).decode((codes[None], scales), -1))[0]
    want = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    real = np.isfinite(want)
    assert real.sum() == 254
    np.testing.assert_array_equal(got[real], want[real])
    np.testing.assert_array_equal(np.signbit(got[real]), np.signbit(want[real]))


def test_e4m3_codes_are_the_nearest_ones():
    x = np.concatenate([np.linspace(-448, 448, 4095), np.linspace(-0.05, 0.05, 4000), [448.0]]).astype(np.float32)  # the scale is 1
    codes, scales = programs(Quantized(FP8, x.size, as_bits=True))[0](x)
    assert np.asarray(scales).view(np.float16) == 1
    np.testing.assert_array_equal(codes, x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_bits_and_numbers_are_the_same(dtype):
    x = np.random.default_rng(3).normal(size=(7, WIDTH)).astype(np.float32)
    (plain, scales), (bits, scale_bits) = (programs(Quantized(dtype, 16, as_bits))[0](x) for as_bits in (False, True))
    assert bits.dtype == (np.int8 if dtype == INT8 else np.uint8)
    assert scales.dtype == np.float16 and scale_bits.dtype == np.uint16
    np.testing.assert_array_equal(np.asarray(bits).view(np.uint8), np.asarray(plain).view(np.uint8))
    np.testing.assert_array_equal(scale_bits, np.asarray(scales).view(np.uint16))
    np.testing.assert_array_equal(*(round_trip(Quantized(dtype, 16, as_bits), x) for as_bits in (False, True)))


def test_two_int4_share_a_byte_the_first_half_of_a_group_in_the_low_bits():
    x = np.asarray([[1, -7, 8, 0, 20, 5, 6, 13]], np.float32)
    values, numbers = programs(Quantized(INT4, 4))[0](x)
    # Groups are 1 -7 | 8 0 and 20 5 | 6 13, with scale 1 and the minima -7 and 5.
    np.testing.assert_array_equal(values, [[8 | 15 << 4, 0 | 7 << 4, 15 | 1 << 4, 0 | 8 << 4]])
    np.testing.assert_array_equal(numbers, [[1, 1, -7, 5]])


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_zeros_stay_zeros_and_neighbours_do_not_matter(dtype):
    codec = Quantized(dtype, 16)
    assert not round_trip(codec, np.zeros((2, WIDTH), np.float32)).any()
    x = np.random.default_rng(4).normal(size=(6, WIDTH)).astype(np.float32)
    changed = x.copy()
    changed[2] *= 1e3  # another token
    changed[4, :16] = 0  # another group
    got, want = round_trip(codec, changed), round_trip(codec, x)
    np.testing.assert_array_equal(got[[0, 1, 3, 5]], want[[0, 1, 3, 5]])
    np.testing.assert_array_equal(got[4, 16:], want[4, 16:])


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_numbers_out_of_the_scales_range_become_the_largest_or_nothing(dtype):
    x = np.asarray([[1e30, -1e30, 1.0, 0.0], [1e-8, -1e-9, 0.0, 0.0], [3e38, -3e38, 3e38, 1e30]], np.float32)
    got = round_trip(Quantized(dtype, 4), x)
    least, largest = -QUANTIZED[dtype] * TOP_SCALE, QUANTIZED[dtype] * TOP_SCALE
    if dtype == INT4:
        least, largest = -TOP_SCALE, 14 * TOP_SCALE
    np.testing.assert_array_equal(got[0], [largest, least, 0.0, 0.0])
    np.testing.assert_array_equal(got[1], np.zeros(4))  # 1e-8 / 448 and even 1e-8 / 15 are below half of 6e-8
    np.testing.assert_array_equal(got[2], [largest, least, largest, largest])


@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_a_nan_is_not_hidden(dtype):
    x = np.ones((1, 8), np.float32)
    x[0, 5] = np.nan
    got = round_trip(Quantized(dtype, 4, as_bits=True), x)
    assert np.isnan(got[0, 5]) and np.isfinite(got[0, :4]).all()


@pytest.mark.parametrize("order", ["SKH", "KSH", "KHS"])
@pytest.mark.parametrize("dtype", QUANTIZED, ids=str)
def test_a_rows_numbers_may_lie_along_any_axis(dtype, order):
    codec = Quantized(dtype, 4, as_bits=True)
    rows = np.random.default_rng(5).normal(size=(2, 5, 3, 16)).astype(np.float32)  # [B, S, K, H]
    parts = programs(codec)[0](rows)
    moved = tuple(part.transpose(0, *(1 + "SKH".index(axis) for axis in order)) for part in parts)
    got = programs(codec)[1](moved, 1 + order.index("H")).transpose(0, *(1 + order.index(axis) for axis in "SKH"))
    np.testing.assert_array_equal(got, round_trip(codec, rows))


@pytest.mark.parametrize(
    ("codec", "row"),
    [
        (Plain(F32), 4 * 64),
        (Plain(BF16, as_bits=True), 2 * 64),
        (Quantized(INT8, 32), 64 + 2 * 2),
        (Quantized(FP8, 16, as_bits=True), 64 + 4 * 2),
        (Quantized(INT4, 32), 32 + 2 * 2 * 2),
    ],
    ids=str,
)
def test_a_row_takes_its_values_and_its_scales(codec, row):
    assert sum(width * dtype.itemsize for width, dtype in codec.parts(WIDTH)) == row
    stored = jax.eval_shape(codec.encode, jax.ShapeDtypeStruct((3, WIDTH), F32))
    assert [(part.shape, part.dtype) for part in stored] == [((3, width), dtype) for width, dtype in codec.parts(WIDTH)]
    assert sum(math.prod(part.shape) * part.dtype.itemsize for part in stored) == 3 * row


@pytest.mark.parametrize(
    ("width", "group", "remedy"),
    [
        (48, 32, r"give a group of 16 \(--kv_group=16\) or --kv=bf16"),
        (80, 64, "give a group of 16 "),
        (12, 8, "give a group of 4 "),
        (33, 32, ": use --kv=bf16"),
    ],
)
def test_heads_that_can_not_be_grouped_are_refused_with_a_remedy(width, group, remedy):
    with pytest.raises(UserError, match=f"heads of {width} channels can't be split into the groups of {group} .*{remedy}"):
        Quantized(INT8, group).parts(width)


def test_a_cache_of_heads_that_can_not_be_grouped_is_refused():
    class Layers:
        cache_layers = (kv.LayerSpec(2, 48, 48),)

    with pytest.raises(UserError, match="heads of 48 channels"):
        kv.init(Layers(), 1, 8, kv.Format(INT8))
