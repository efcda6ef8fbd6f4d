"""The accelerators' product with packed weights, run here, against float64 products with the same weights widened."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.parted_matmul import parted_matmul, parts_of
from kernels.quant_array import FLOAT4, PLANES, QuantArray, pack
from quantization import SCHEMES, Scheme, quantize

rng = np.random.default_rng(0)
ROUNDED = [
    *(scheme for scheme in SCHEMES.values() if scheme.activations is None),
    Scheme("uint3", 32),
    Scheme("uint4", None),
    Scheme("uint6", 16),
]


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def check(x: jax.Array, w: QuantArray) -> None:
    want = np.einsum("ri,kgi->rkg", np.asarray(x, np.float64), np.asarray(w.widen(), np.float64))
    for each in (w, w.replace(spread=True)):
        np.testing.assert_allclose(jax.jit(parted_matmul)(x, each), want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("scheme", ROUNDED, ids=str)
def test_a_product_is_that_of_the_widened_weights(scheme):
    check(normal(5, 256), quantize(normal(3, 5, 256), scheme))


@pytest.mark.parametrize("terms", ["scales", "zeros", "offsets", "super"])
@pytest.mark.parametrize("group", [64, *(pytest.param(group, marks=pytest.mark.slow) for group in (16, 32, 128))])
@pytest.mark.parametrize("code", PLANES)
def test_every_code_with_every_group_and_every_term_of_the_formula(code, group, terms):
    """Codes are drawn from all that there are; files have such formats, even if no scheme here rounds to them."""
    groups, bits = 256 // group, sum(PLANES[code])
    codes = rng.integers(0, 2**bits, (3, 5, 256)).astype(np.uint8)
    if code == "int8":
        codes = codes.view(np.int8)
    if code == "float8":
        codes = np.where(codes & 0x7F == 0x7F, 0, codes)  # NaN
    each = lambda: jnp.asarray(rng.uniform(0.5, 2.0, (3, 5, groups)), jnp.float32)  # noqa: E731
    small = lambda: jnp.asarray(rng.integers(1, 64, (3, 5, groups)), jnp.uint8)  # noqa: E731
    more = {
        "scales": {"scales": each(), "zero": 3},
        "zeros": {"scales": each(), "zeros": small()},
        "offsets": {"scales": each(), "offsets": each()},
        "super": {"scales": small(), "super_scales": each()[..., ::2], "offsets": small(), "super_offsets": each()[..., ::2]},
    }[terms]
    check(normal(2, 256), QuantArray(tuple(map(jnp.asarray, pack(codes, code))), code=code, **more))


def test_groups_that_share_bytes_are_multiplied_as_one_axis():
    w = quantize(normal(3, 5, 96), Scheme("uint4", 48, symmetric=False))
    assert parts_of(w) is None
    check(normal(2, 96), w)


def test_the_bits_of_float4_are_computed_as_its_table_says():
    w = QuantArray(
        tuple(map(jnp.asarray, pack(np.arange(32, dtype=np.uint8).reshape(1, 32) % 16, "float4"))), jnp.ones((1, 1)), code="float4"
    )
    np.testing.assert_array_equal(parted_matmul(jnp.eye(32), w)[:, 0], np.tile(FLOAT4, 2))


@pytest.mark.parametrize(
    "scheme, sizes", [(SCHEMES["fp8_block"], (2, 128)), (SCHEMES["int4"], (4, 2, 2, 16)), (SCHEMES["mxfp4"], (8, 2, 16))]
)
def test_the_inputs_stay_in_parts(scheme, sizes):
    """No array of the weights' own shape: what widens them can be fused."""
    w = quantize(normal(3, 5, 256), scheme)
    assert parts_of(w).sizes == sizes
    text = jax.jit(parted_matmul).lower(normal(2, 256), w).as_text()
    assert f"tensor<3x5x{'x'.join(map(str, sizes))}xf32>" in text
    assert "tensor<3x5x256xf32>" not in text
