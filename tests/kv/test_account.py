"""kv.account: bytes from the config alone, against the arrays, published figures and what is computed by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kv
from kv.codec import FP8, INT4, INT8

KIB, MIB, GIB = 2**10, 2**20, 2**30


@dataclasses.dataclass(frozen=True)
class Layers:
    cache_layers: tuple[kv.LayerSpec | kv.LatentSpec, ...]


def gemma3(layers: int, heads: int, head_dim: int, window: int) -> Layers:
    """Five layers with a window, then one without, and so on (Gemma 3 2025, arXiv 2503.19786)."""
    return Layers(tuple(kv.LayerSpec(heads, head_dim, head_dim, window=window if number % 6 < 5 else None) for number in range(layers)))


MIXED = Layers(
    (
        kv.LayerSpec(num_kv_heads=4, key_dim=8, value_dim=4, window=6),
        kv.LayerSpec(num_kv_heads=1, key_dim=8, value_dim=8),
        kv.LatentSpec(latent_dim=12, rope_dim=4, index_dim=8),
        kv.LayerSpec(num_kv_heads=1, key_dim=8, value_dim=8),
    )
)
BF16 = kv.Format(np.dtype(jnp.bfloat16))
LLAMA2_13B = Layers((kv.LayerSpec(40, 128, 128),) * 40)
LLAMA3_8B = Layers((kv.LayerSpec(8, 128, 128),) * 32)
DEEPSEEK_V3 = Layers((kv.LatentSpec(latent_dim=512, rope_dim=64),) * 61)
DEEPSEEK_V32 = Layers((kv.LatentSpec(latent_dim=512, rope_dim=64, index_dim=128),) * 61)
GEMMA3_270M, GEMMA3_27B = gemma3(18, 1, 256, 512), gemma3(62, 16, 128, 1024)


@pytest.mark.parametrize("orders", [("SKH", "SKH"), pytest.param(("KHS", "KSH"), marks=pytest.mark.slow)])
@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(jnp.bfloat16), INT8, INT4, FP8], ids=str)
def test_the_byte_count_is_that_of_the_live_arrays(dtype, page_size, orders):
    format = kv.Format(dtype, *orders, as_bits=orders[0] == "KHS", group=4, page_size=page_size, margin=2)
    for pages in (None, (7, 3)) if page_size else (None,):
        cache = kv.init(MIXED, 3, 17, format, pages)
        assert sum(leaf.nbytes for leaf in jax.tree.leaves(cache)) == kv.nbytes(MIXED, 3, 17, format, pages)
        assert sum(store.reserved for store in kv.stores(cache)) == sum(leaf.nbytes for leaf in jax.tree.leaves(cache.stores))


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), INT8, INT4, FP8], ids=str)
def test_one_more_token_of_capacity_costs_what_the_account_says(dtype):
    format = kv.Format(dtype, group=4, margin=100)  # so large that the window's layer is dense, too
    more = kv.nbytes(MIXED, 1, 18, format) - kv.nbytes(MIXED, 1, 17, format)
    assert kv.bytes_per_token(MIXED, format) == more


def test_published_figures_come_out():
    assert kv.bytes_per_token(LLAMA2_13B, BF16) == 819_200  # f16 or bf16: 0.78 MiB
    assert round(4096 * kv.bytes_per_token(LLAMA2_13B, BF16) / GIB, 1) == 3.1
    assert kv.bytes_per_token(LLAMA3_8B, BF16) == 128 * KIB
    assert 4 * kv.bytes_per_token(LLAMA3_8B, BF16) == kv.bytes_per_token(Layers((kv.LayerSpec(32, 128, 128),) * 32), BF16)  # MHA
    assert kv.bytes_per_token(DEEPSEEK_V3, BF16) == 61 * 576 * 2 == 70_272
    assert kv.bytes_per_token(DEEPSEEK_V32, BF16) == 61 * (576 + 128) * 2 == 85_888


@pytest.mark.parametrize(
    ("config", "capacity", "local", "everywhere", "saved"),
    [
        # 15 layers of 512 + 64 slots and 3 of all, a slot being 2 * 256 numbers.
        (GEMMA3_270M, 32 * KIB, 15 * 576 * KIB, 3 * 32 * MIB, 5.5),
        # 52 layers of 1024 + 64 slots and 10 of all, a slot being 2 * 16 * 128 numbers.
        (GEMMA3_27B, 32 * KIB, 52 * 1088 * 8 * KIB, 10 * 256 * MIB, 5.3),
        (GEMMA3_27B, 128 * KIB, 52 * 1088 * 8 * KIB, 10 * GIB, 5.9),
    ],
)
def test_windows_save_what_is_computed_by_hand(config, capacity, local, everywhere, saved):
    lengths = 4
    got = kv.nbytes(config, 1, capacity, BF16)
    assert got == local + everywhere + lengths
    whole = kv.nbytes(Layers(tuple(dataclasses.replace(spec, window=None) for spec in config.cache_layers)), 1, capacity, BF16)
    assert round(whole / got, 1) == saved
    assert kv.held_bytes(config, capacity, BF16) == local * (1 - 64 / (config.cache_layers[0].window + 64)) + everywhere


@pytest.mark.parametrize("config", [Layers((kv.LayerSpec(3, 64, 64),) * 30), Layers((kv.LayerSpec(8, 64, 64),) * 16)])
def test_quantized_caches_of_heads_of_64_take_about_a_half_and_a_quarter_with_their_scales(config):
    size = {dtype: kv.nbytes(config, 4, 2048, kv.Format(dtype)) / kv.nbytes(config, 4, 2048, BF16) for dtype in (INT8, FP8, INT4)}
    assert 0.5 < size[INT8] == size[FP8] <= 0.54
    assert 0.25 < size[INT4] <= 0.32


def test_what_a_row_holds_grows_up_to_the_window():
    f32 = kv.Format()
    for tokens in (0, 3, 6, 50):
        window, plain, latent = 4 * (8 + 4) * 4, (8 + 8) * 4, (16 + 8) * 4
        assert kv.held_bytes(MIXED, tokens, f32) == min(tokens, 6) * window + tokens * (2 * plain + latent)


def test_the_report_of_a_known_cache():
    cache = kv.init(MIXED, 2, 1024, kv.Format(np.dtype(jnp.bfloat16), margin=10)).replace(lengths=jnp.asarray([256, 4]))
    # A ring of 16 slots: 2 * 16 * 4 * 12 numbers, of which 16 + 4 of 32 slots are held; 260 of 2048 slots of the others.
    assert kv.report(cache).splitlines() == [
        "layers  kind                    format             reserved          used   waste",
        "     1  ring, window 6: k, v    bfloat16           0.00 MiB      0.00 MiB   37.5%",
        "     2  dense: k, v             bfloat16           0.12 MiB      0.02 MiB   87.3%",
        "     1  dense: latent, index_k  bfloat16           0.09 MiB      0.01 MiB   87.3%",
        "     4  all                                        0.22 MiB      0.03 MiB   86.6%",
    ]
    ring, dense, latent = kv.stores(cache)
    assert (ring.reserved, ring.used) == (2 * 16 * 4 * 12 * 2, 20 * 4 * 12 * 2)
    assert (dense.reserved, dense.used) == (2 * 2 * 1024 * 16 * 2, 2 * 260 * 16 * 2)
    assert (latent.reserved, latent.used) == (2 * 1024 * 24 * 2, 260 * 24 * 2)


def test_a_page_that_two_rows_share_is_counted_once():
    layers = Layers((kv.LayerSpec(1, 8, 8),))
    cache = kv.init(layers, 3, 16, kv.Format(page_size=4), pages=[6])
    tables = jnp.asarray([[5, 0, 6, 6], [5, 2, 3, 6], [6, 6, 6, 6]])
    (store,) = kv.stores(cache.replace(tables=(tables,), lengths=jnp.asarray([6, 9, 0])))
    slot = 2 * 8 * 4
    assert store.reserved == 6 * 4 * slot
    assert store.used == (4 + 2 + 4 + 1) * slot  # page 5, then 2 of page 0, 4 of page 2 and 1 of page 3
    assert store.waste == pytest.approx(13 / 24)
    assert "paged: k, v" in kv.report(cache)


def test_pages_that_a_window_has_left_behind_are_not_counted():
    layers = Layers((kv.LayerSpec(1, 8, 8, window=4),))
    cache = kv.init(layers, 1, 32, kv.Format(page_size=4, margin=2), pages=[6])
    tables = jnp.asarray([[6, 6, 3, 1, 6, 6, 6, 6]])
    (store,) = kv.stores(cache.replace(tables=(tables,), lengths=jnp.asarray([14])))
    assert store.used == (4 + 2) * 2 * 8 * 4
