"""kernels.tiled_array: where a code lies in a tile, and that tiling loses nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import QuantArray, take_rows
from kernels.quant_array import pack
from kernels.tiled_array import TiledArray, can_tile, tile
from tests.kernels.packed import KINDS, Kind, random_weights


def weights(kind: Kind) -> QuantArray:
    """With input scales and an order of their own, for every other kind."""
    rng, w = np.random.default_rng(1), random_weights(kind)
    if KINDS.index(kind) % 2:
        return w
    order = jnp.asarray(rng.permutation(kind.inputs), jnp.int32)
    return w.replace(order=order, input_scales=jnp.asarray(rng.normal(size=kind.inputs), jnp.float16), activations="int8")


def same(got: QuantArray, want: QuantArray) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_untiled_is_what_was_tiled_to_the_bit(kind):
    w = weights(kind)
    assert can_tile(w)
    tiled = jax.jit(tile)(w)
    assert isinstance(tiled, TiledArray) and tiled.shape == w.shape and tiled.size == w.size
    same(jax.jit(TiledArray.untiled)(tiled), w)
    np.testing.assert_array_equal(tiled.widen(), w.widen())


def test_that_products_round_is_the_tiles_own():
    w = random_weights(KINDS[0])
    assert tile(w, 15).rounds == 15 and tile(w).rounds == 0 and tile(w.replace(activations="int8"), 15).rounds == 8
    assert tile(w, 15).untiled().activations is None


@pytest.mark.parametrize("kind", [kind for kind in KINDS if len(kind.outs) == 1], ids=str)
def test_rows_are_the_quant_arrays_own(kind):
    w = weights(kind)
    last = kind.outs[0] - 1
    indices = jnp.asarray([[0, last, last // 2], [last + 1, 10**6, min(16, last)]])  # those past the end are the last
    got = jax.jit(take_rows, static_argnums=2)(tile(w), indices, jnp.float32)
    np.testing.assert_array_equal(got, take_rows(w, indices, jnp.float32))


def test_codes_lie_as_documented():
    codes = np.zeros((20, 64), np.uint8)
    codes[17, 32 + 4 * 3 + 2] = 5  # the second tile's row 1, the second block's vector 3, its input 2
    scales = jnp.arange(40, dtype=jnp.float32).reshape(20, 2)
    whole = tile(QuantArray((jnp.asarray(codes.view(np.int8)),), scales, code="int8"))
    plane = np.asarray(whole.planes[0]) ^ 0x80  # [tiles, blocks, 8 vectors of 64]
    assert plane.shape == (2, 2, 512) and plane[1, 1, 3 * 64 + 4 * 1 + 2] == 5
    assert (plane[0] == 0).all() and (plane[1] != 0).sum() == 1 + 2 * 12 * 32  # and 12 rows of filling, stored as 0
    np.testing.assert_array_equal(whole.scales[1, :, 1], scales[17])
    halves = tile(QuantArray(pack(codes, "uint4"), scales, code="uint4"))
    plane = np.asarray(halves.planes[0])  # vectors 2 and 3 share bytes, the latter in the high halves
    assert plane.shape == (2, 2, 256) and plane[1, 1, 1 * 64 + 4 * 1 + 2] == 5 << 4 and (plane != 0).sum() == 1


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (Kind("uint3", (16,), 64, 32), {}),
        (Kind("float8", (16,), 64, 32), {}),
        (Kind("int8", (16,), 40, 40), {}),  # no whole blocks
        (Kind("uint4", (16,), 64, 8), {}),  # groups of less than half a block
        (Kind("int8", (16,), 96, 48), {}),  # and of one and a half
        (KINDS[0], {"spread": True}),
    ],
    ids=str,
)
def test_what_the_kernels_do_not_read_is_not_tiled(kind, change):
    assert not can_tile(random_weights(kind).replace(**change))
