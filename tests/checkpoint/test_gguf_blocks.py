"""GGUF's blocks as packed weights: bit for bit what the gguf package dequantizes."""

import gguf
import numpy as np
import pytest

from checkpoint.gguf_blocks import BLOCKS, blocks, packing

FLOATS = {  # where a block has its f16 numbers
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "MXFP4": (),
}  # fmt: skip


def random_blocks(kind, *shape):
    """Bytes of anything, but for the scales, which are numbers."""
    rng, size = np.random.default_rng(int(kind)), gguf.GGML_QUANT_SIZES[kind][1]
    raw = rng.integers(0, 256, (*shape, size)).astype(np.uint8)
    for at in FLOATS[kind.name]:
        raw[..., at : at + 2] = rng.normal(size=shape).astype("<f2")[..., None].view(np.uint8)
    if kind.name == "MXFP4":
        raw[..., 0] = rng.integers(1, 250, shape)  # 255 is not a number
    return raw.reshape(*shape[:-1], -1)


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_every_bit_is_kept(kind):
    raw = random_blocks(kind, 3, 4, 5)
    packed = blocks(raw, kind)
    np.testing.assert_array_equal(packed.widen(), gguf.quants.dequantize(raw, kind))
    extra = {"Q4_K": 4, "Q5_K": 4}.get(kind.name, 0)  # their 6-bit scales and offsets take a byte each
    assert packed.nbytes == raw.nbytes + 3 * 4 * 5 * extra
    assert packing(kind).unit == gguf.GGML_QUANT_SIZES[kind][0]


def test_other_types_are_not_held():
    assert packing(gguf.GGMLQuantizationType.IQ4_NL) is None and packing(gguf.GGMLQuantizationType.F16) is None
