"""kernels.transposed_array: where a code lies, and that transposing loses nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import QuantArray, TransposedArray, can_transpose, transpose
from kernels.quant_array import pack
from tests.kernels.packed import KINDS, Kind, random_weights
from tests.kernels.test_tiled_array import same


@pytest.mark.parametrize(
    "kind", [kind if KINDS.index(kind) in (3, 7) else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS], ids=str
)
def test_what_is_transposed_comes_back_to_the_bit(kind):
    rng = np.random.default_rng(1)
    order, scales = jnp.asarray(rng.permutation(kind.inputs), jnp.int32), jnp.asarray(rng.normal(size=kind.inputs), jnp.float16)
    w = random_weights(kind).replace(order=order, input_scales=scales)
    assert can_transpose(w)
    turned = jax.jit(transpose)(w)
    assert isinstance(turned, TransposedArray) and turned.shape == w.shape and turned.ndim == w.ndim
    same(jax.jit(TransposedArray.untransposed)(turned), w)
    np.testing.assert_array_equal(turned.widen(), w.widen())


def test_experts_keep_their_axis():
    w = random_weights(Kind("uint5", (3, 2, 7), 96, 32, zero=16))
    turned = transpose(w, lead=1)
    assert turned.planes[0].shape == (3, 1, 64, 14) and turned.outs == (2, 7) and len(turned) == 3
    same(turned.untransposed(), w)


def test_codes_of_a_byte_are_apart_by_whole_rows():
    """Input 16 b p + j of a chunk is at row j, bits p b and up, of a plane of b bits."""
    codes = (np.arange(256) * 7 % 64).astype(np.uint8)[None]
    w = QuantArray(tuple(map(jnp.asarray, pack(codes, "uint6"))), jnp.ones((1, 1)), code="uint6")
    low, high = (np.asarray(plane)[0, :, 0] for plane in transpose(w).planes)
    for chunk, p, j in ((0, 0, 5), (0, 1, 63), (1, 1, 0)):
        assert (low[64 * chunk + j] >> 4 * p) & 15 == codes[0, 128 * chunk + 64 * p + j] & 15
    for chunk, p, j in ((0, 3, 31), (1, 2, 0)):
        assert (high[32 * chunk + j] >> 2 * p) & 3 == codes[0, 128 * chunk + 32 * p + j] >> 4


@pytest.mark.parametrize(
    ("inputs", "group", "span"),
    [(96, 32, 128), (96, 96, 128), (2048, 64, 1024), (2880, 32, 1024), (1536, 256, 768), (11_008, 128, 1024), (4096, 2048, 1024)],
)
def test_a_block_is_whole_groups_or_a_part_of_one(inputs, group, span):
    assert transpose(random_weights(Kind("uint4", (1,), inputs, group))).span == span


@pytest.mark.parametrize(
    "w",
    [
        random_weights(Kind("uint4", (3,), 192, 48)),  # groups that are no parts of 128, nor made of them
        random_weights(Kind("uint4", (3,), 3072, 1536)),  # longer than a block, and not made of them
        random_weights(Kind("int8", (3,), 128, 128)).replace(activations="int8"),
        random_weights(Kind("int8", (3,), 128, 128)).replace(spread=True),
    ],
)
def test_what_is_left_to_xla(w):
    assert not can_transpose(w)
