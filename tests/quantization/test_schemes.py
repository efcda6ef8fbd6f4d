"""Rounding to the nearest, in every scheme."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from quantization import SCHEMES, Scheme, quantize
from quantization.schemes import _float4_bits
from runtime import UserError

rng = np.random.default_rng(0)
W = jnp.asarray(rng.normal(size=(6, 8, 256)) * np.exp(rng.normal(size=(6, 8, 1))), jnp.float32)


@pytest.mark.parametrize(
    ("scheme", "step"),
    [
        (SCHEMES["int8"], 1 / 254),  # of a row's largest weight: half a step
        (Scheme("int8", 64), 1 / 254),
        (Scheme("uint4", 64), 1 / 8),  # the side that the largest weight is not on ends a step before it
        (Scheme("uint3", 64), 1 / 4),
        (Scheme("uint4", 64, symmetric=False), 1 / 15),  # the range is at most twice the largest weight
    ],
    ids=str,
)
def test_no_weight_moves_by_more_than_its_step(scheme, step):
    group = scheme.group or 256
    error = np.abs(np.asarray(quantize(W, scheme).widen() - W)).reshape(6, 8, -1, group).max(-1)
    largest = np.abs(np.asarray(W)).reshape(6, 8, -1, group).max(-1)
    assert (error <= largest * step * 1.01 + 1e-6).all()  # scales of f16 are off by 2^-11
    assert error.max() > largest.max() * step / 16  # and it is not something finer


def test_floats_are_rounded_to_the_nearest_float8():
    q = quantize(W, SCHEMES["fp8"])
    scales = np.abs(np.asarray(W)).max(-1, keepdims=True) / np.float32(448)
    want = (np.asarray(W) / scales).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales
    np.testing.assert_allclose(q.widen(), want, rtol=1e-6)


def test_rows_of_a_block_share_their_scale():
    q = quantize(W, Scheme("float8", group=128, rows=16))
    scales = np.asarray(q.scales).reshape(48, 2)
    assert scales.shape == (48, 2)
    for block in range(3):
        rows = scales[block * 16 : block * 16 + 16]
        assert (rows == rows[0]).all()
        top = np.abs(np.asarray(W)).reshape(3, 16, 2, 128)[block].max((0, 2))
        np.testing.assert_allclose(rows[0], (top / 448).astype(np.float16), rtol=2**-10)


def test_the_nearest_float4_has_its_bits():
    steps = np.concatenate([rng.uniform(-7, 7, 500), [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 9.0, -0.25, -5.0, 0.0]])
    want = np.clip(steps, -6, 6).astype(np.float32).astype(ml_dtypes.float4_e2m1fn)
    got = np.asarray(_float4_bits(jnp.asarray(steps, jnp.float32))).view(ml_dtypes.float4_e2m1fn)
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))


def test_mxfp4_has_the_scale_of_its_specification():
    """OCP MX 1.0, 6.3: the power of two below the largest weight, over that below the largest code (4)."""
    scales = np.asarray(quantize(W, SCHEMES["mxfp4"]).scales).astype(np.float32)
    largest = np.abs(np.asarray(W)).reshape(6, 8, 8, 32).max(-1)
    np.testing.assert_array_equal(scales, 2.0 ** (np.floor(np.log2(largest)) - 2))


@pytest.mark.parametrize("scheme", [*(s for s in SCHEMES.values()), Scheme("uint4", 32), Scheme("uint3", 64)], ids=str)
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-6, 1e30])
def test_weights_of_any_size_stay_finite(scheme, scale):
    q = quantize(W * scale, scheme)
    wide = np.asarray(q.widen())
    assert np.isfinite(wide).all()
    if scale == 0:
        assert not wide.any()
    if scale <= 1e-6:
        assert np.abs(wide).max() <= np.abs(np.asarray(W)).max() * max(scale, 1e-4)


@pytest.mark.parametrize(
    ("scheme", "width", "line"),
    [
        (Scheme("uint4", 128), 576, "a group of 128 does not divide the 576 inputs of w: give one of 32, 64"),
        (Scheme("uint4", 64), 100, "a group of 64 does not divide the 100 inputs of w: use --weights=int8"),
        (Scheme("uint4", None), 40, "w has 40 inputs, no multiple of the 32 that share bytes at 4 bits: use --weights=int8"),
    ],
)
def test_what_does_not_divide_is_refused(scheme, width, line):
    with pytest.raises(UserError, match=line):
        scheme.check(width, "w")
    SCHEMES["int8"].check(width, "w")


def test_bytes_per_weight():
    """Bits of the code, and those of the scales (and zeros) over their group."""
    for scheme, bits in (
        (SCHEMES["int8"], 8 + 32 / 256),
        (SCHEMES["int4"], 4 + 24 / 64),
        (Scheme("uint4", 128), 4 + 16 / 128),
        (Scheme("uint3", 64), 3 + 16 / 64),
        (SCHEMES["fp8"], 8 + 32 / 256),
        (SCHEMES["fp8_block"], 8 + 16 / 128),
        (SCHEMES["mxfp4"], 4 + 8 / 32),
    ):
        assert quantize(W, scheme).nbytes * 8 == W.size * bits
