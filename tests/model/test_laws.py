"""The laws of prefill, decode and the cache (1, 2, 3, 4 and 7), on a tiny model, and on one of each kind that the families add.

"Equal" is: logits within 1e-4 of their scale, in f32 at matmul precision "highest".
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kv
from model import ModelConfig, Transformer, decode_step, init_params, prefill
from tests.model.hybrids import CONFIGS, random_params

pytestmark = pytest.mark.usefixtures("short_blocks")
B, CAPACITY, T = 3, 40, 24


@pytest.fixture(scope="module")
def model(tiny_config):
    return Transformer(tiny_config)


@pytest.fixture(scope="module")
def tokens(tiny_config):
    return jax.random.randint(jax.random.key(7), (B, T), 0, tiny_config.vocab_size)


@pytest.fixture(scope="module")
def full(model, tiny_params, tiny_config, tokens):
    """Logits of the full forward: the same model over the kind that stores nothing. f32 [B, T, V]."""
    return prefill(model, tiny_params, kv.fresh(tiny_config, B), tokens, jnp.full((B,), T), logits="all")[0]


def assert_equal(got, want):
    scale = float(jnp.abs(want).max())
    np.testing.assert_allclose(got, want, atol=1e-4 * scale, rtol=0)


def empty(config, platform="cpu", batch=B, capacity=CAPACITY, dtype=jnp.float32):
    return kv.init(config, batch, capacity, kv.Format.for_platform(platform, np.dtype(dtype)))


@pytest.mark.parametrize("platform", ["cpu", pytest.param("tpu", marks=pytest.mark.slow)])  # memory orders; both run here
def test_prefill_and_decode_equal_the_full_forward(model, tiny_params, tiny_config, tokens, full, platform):
    lengths = jnp.asarray([24, 1, 13])
    logits, cache = prefill(model, tiny_params, empty(tiny_config, platform), tokens, lengths)
    assert_equal(logits, full[jnp.arange(B), lengths - 1])
    while int(cache.lengths.min()) < T:
        position = np.asarray(cache.lengths)
        feed = jnp.where(position < T, tokens[jnp.arange(B), jnp.minimum(position, T - 1)], -1)
        logits, cache = decode_step(model, tiny_params, cache, feed)
        rows = np.flatnonzero(position < T)
        assert_equal(logits[rows], full[rows, position[rows]])
    np.testing.assert_array_equal(cache.lengths, [T] * B)


@pytest.mark.slow  # as chunks of any cut show them, too
def test_all_logits_of_a_prefill_equal_the_full_forward(model, tiny_params, tiny_config, tokens, full):
    logits, _ = prefill(model, tiny_params, empty(tiny_config), tokens, jnp.asarray([24, 9, 13]), logits="all")
    for row, length in enumerate((24, 9, 13)):
        assert_equal(logits[row, :length], full[row, :length])


def test_a_row_alone_equals_the_same_row_in_a_batch(model, tiny_params, tiny_config, tokens):
    lengths = [20, 3, 11]
    together, cache = prefill(model, tiny_params, empty(tiny_config), tokens, jnp.asarray(lengths))
    next_together, _ = decode_step(model, tiny_params, cache, jnp.asarray([1, 2, 3]))
    for row, length in enumerate(lengths):
        alone, cache = prefill(model, tiny_params, empty(tiny_config, batch=1), tokens[row : row + 1], jnp.asarray([length]))
        assert_equal(alone[0], together[row])
        next_alone, _ = decode_step(model, tiny_params, cache, jnp.asarray([row + 1]))
        assert_equal(next_alone[0], next_together[row])


def test_in_one_executable_a_row_is_bit_equal_in_any_company_and_slot(model, tiny_params, tiny_config, tokens):
    first, _ = prefill(model, tiny_params, empty(tiny_config), tokens, jnp.asarray([20, 3, 11]))
    moved, _ = prefill(model, tiny_params, empty(tiny_config), tokens[jnp.asarray([2, 2, 0])], jnp.asarray([24, 1, 20]))
    np.testing.assert_array_equal(first[0], moved[2])


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_any_cut_of_a_chunked_prefill_equals_one_call(model, tiny_params, tiny_config, tokens, full, data):
    cache = empty(tiny_config)
    while True:
        held = np.asarray(cache.lengths)
        if held.min() == T:
            break
        counts = np.asarray([data.draw(st.integers(0, min(8, T - length))) for length in held], np.int32)
        if counts.sum() == 0:
            counts = np.minimum(8, T - held).astype(np.int32)
        part = np.zeros((B, 8), np.int32)  # always eight wide: one compiled shape for all cuts
        for row in range(B):
            part[row, : counts[row]] = tokens[row, held[row] : held[row] + counts[row]]
        logits, cache = prefill(model, tiny_params, cache, part, counts, jnp.arange(B), logits="all")
        for row in np.flatnonzero(counts):
            assert_equal(logits[row, : counts[row]], full[row, held[row] : held[row] + counts[row]])


def test_one_row_is_prefilled_into_a_running_batch_without_touching_the_others(model, tiny_params, tiny_config, tokens, full):
    _, cache = prefill(model, tiny_params, empty(tiny_config), tokens[:, :8], jnp.asarray([8, 0, 5]))
    before = jax.tree.map(np.asarray, cache)
    logits, cache = prefill(model, tiny_params, cache, tokens[1:2, :16], jnp.asarray([16]), jnp.asarray([1]))
    assert_equal(logits[0], full[1, 15])
    np.testing.assert_array_equal(cache.lengths, [8, 16, 5])
    for old, new in zip(jax.tree.leaves(before.stores), jax.tree.leaves(cache.stores), strict=True):
        np.testing.assert_array_equal(old[:, [0, 2]], new[:, [0, 2]])


def test_an_idle_row_keeps_its_length_and_its_bits(model, tiny_params, tiny_config, tokens):
    _, cache = prefill(model, tiny_params, empty(tiny_config), tokens, jnp.asarray([8, 24, 5]))
    before = jax.tree.map(np.asarray, cache)
    _, cache = decode_step(model, tiny_params, cache, jnp.asarray([3, -1, 4]))
    np.testing.assert_array_equal(cache.lengths, [9, 24, 6])
    for old, new in zip(jax.tree.leaves(before.stores), jax.tree.leaves(cache.stores), strict=True):
        np.testing.assert_array_equal(old[:, 1], new[:, 1])


def test_rewinding_gives_the_cache_as_it_was_then(model, tiny_params, tiny_config, tokens, full):
    _, cache = prefill(model, tiny_params, empty(tiny_config), tokens, jnp.full((B,), T))
    cache = cache.rewind(jnp.asarray([10, 0, 23]))
    np.testing.assert_array_equal(cache.lengths, [10, 0, 23])
    for _ in range(3):
        at = np.minimum(np.asarray(cache.lengths), T - 1)
        active = np.asarray(cache.lengths) < T
        logits, cache = decode_step(model, tiny_params, cache, jnp.where(active, tokens[jnp.arange(B), at], -1))
        assert_equal(logits[active], full[np.arange(B)[active], at[active]])


def test_a_rewind_never_lengthens_a_row(tiny_config):
    cache = empty(tiny_config).replace(lengths=jnp.asarray([4, 5, 6]))
    np.testing.assert_array_equal(cache.rewind(jnp.asarray([9, 5, 0])).lengths, [4, 5, 0])


def test_tokens_past_the_capacity_are_dropped_and_not_counted(model, tiny_params, tiny_config, tokens, full):
    logits, cache = prefill(model, tiny_params, empty(tiny_config, capacity=10), tokens, jnp.asarray([24, 10, 4]), logits="all")
    np.testing.assert_array_equal(cache.lengths, [10, 10, 4])
    assert_equal(logits[1, :10], full[1, :10])
    before = jax.tree.map(np.asarray, cache)
    _, cache = decode_step(model, tiny_params, cache, jnp.asarray([1, 1, -1]))
    np.testing.assert_array_equal(cache.lengths, [10, 10, 4])
    for old, new in zip(jax.tree.leaves(before.stores), jax.tree.leaves(cache.stores), strict=True):
        np.testing.assert_array_equal(old, new)


def test_compute_in_bf16_stays_near_f32(model, tiny_params, tiny_config, tokens, full):
    low = Transformer(tiny_config, dtype=jnp.dtype(jnp.bfloat16))
    logits, _ = prefill(
        low, tiny_params, kv.init(tiny_config, B, CAPACITY, kv.Format(dtype=jnp.dtype(jnp.bfloat16))), tokens, jnp.full((B,), T)
    )
    # Each of the 3 layers adds two rounded branches and rounds the stream twice: about 12 roundings of 2^-9 relative to the scale.
    scale = float(jnp.abs(full[:, -1]).max())
    assert float(jnp.abs(logits - full[:, -1]).max()) < 12 * 2**-9 * scale


def test_an_unknown_kind_of_logits_is_refused(model, tiny_params, tiny_config, tokens):
    with pytest.raises(ValueError, match="'last' or 'all'"):
        prefill(model, tiny_params, empty(tiny_config), tokens, jnp.full((B,), T), logits="first")


def test_donated_caches_stay_where_they_are_in_memory(model, tiny_params, tiny_config, tokens):
    cache = empty(tiny_config)
    places = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache.stores)]
    _, cache = prefill(model, tiny_params, cache, tokens, jnp.asarray([20, 3, 11]))
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache.stores)] == places
    _, cache = decode_step(model, tiny_params, cache, jnp.asarray([1, 2, 3]))
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache.stores)] == places


def test_a_row_may_keep_a_part_of_what_it_holds(model, tiny_params, tiny_config, tokens, full):
    _, cache = prefill(model, tiny_params, empty(tiny_config), tokens, jnp.full((B,), T))
    rows, held, counts = jnp.asarray([2, 0]), jnp.asarray([10, 0]), jnp.asarray([8, 8])
    part = jnp.stack([tokens[2, 10:18], tokens[0, :8]])
    logits, cache = prefill(model, tiny_params, cache, part, counts, rows, held)
    assert_equal(logits, jnp.stack([full[2, 17], full[0, 7]]))
    np.testing.assert_array_equal(cache.lengths, [8, T, 18])


@pytest.mark.slow
def test_on_cpu_no_program_widens_the_whole_bf16_cache(tiny_config):
    dtype = jnp.dtype(jnp.bfloat16)
    cache, params = empty(tiny_config, dtype=dtype), init_params(tiny_config, dtype=dtype)
    model, zeros = Transformer(tiny_config, dtype), jnp.zeros((B,), jnp.int32)
    programs = decode_step.lower(model, params, cache, zeros), prefill.lower(model, params, cache, jnp.zeros((B, 8), jnp.int32), zeros)
    for program in programs:
        text = program.compile().as_text()
        for array in jax.tree.leaves(cache.stores[0].tensors):
            shape = ",".join(map(str, array.shape))
            assert f"u16[{shape}]" in text
            assert f"f32[{shape}]" not in text


@dataclasses.dataclass(frozen=True, eq=False)
class Hybrid:
    """A model of some family's kind, and what its full forward says. All its laws share four compiled shapes and two of one row."""

    config: ModelConfig
    params: Any
    full: np.ndarray  # f32 [B, T, V]

    @property
    def model(self):
        return Transformer(self.config)

    def feed(self, tokens, cache):
        """One step for the rows that hold fewer than T tokens, compared with the full forward."""
        held = np.asarray(cache.lengths)
        rows = np.flatnonzero(held < T)
        logits, cache = decode_step(self.model, self.params, cache, jnp.where(held < T, tokens[jnp.arange(B), np.minimum(held, T - 1)], -1))
        assert_equal(logits[rows], self.full[rows, held[rows]])
        return cache


def some(quick, names=tuple(CONFIGS)):
    """Models of these names; what is new in those that are not `quick` is in these or in the parity tests, too: they are slow tests."""
    params = [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]
    return pytest.mark.parametrize("hybrid", params, indirect=True, scope="module")


@pytest.fixture(scope="module")
def hybrid(request, tokens):
    config = CONFIGS[request.param]
    params = random_params(config, seed=2)
    logits, _ = prefill(Transformer(config), params, kv.fresh(config, B), tokens, jnp.full((B,), T), logits="all")
    return Hybrid(config, params, np.asarray(logits))


@some(quick=["gpt_oss"])
def test_hybrid_prefill_decode_and_rewind_equal_the_full_forward(hybrid, tokens):
    lengths = jnp.asarray([20, 1, 13])
    logits, cache = prefill(hybrid.model, hybrid.params, empty(hybrid.config), tokens, lengths)
    assert_equal(logits, hybrid.full[np.arange(B), lengths - 1])
    for _ in range(5):
        cache = hybrid.feed(tokens, cache)
    np.testing.assert_array_equal(cache.lengths, [T, 6, 18])
    cache = cache.rewind(jnp.asarray([9, 0, 17]))
    for _ in range(3):
        cache = hybrid.feed(tokens, cache)


@some(quick=["gpt_oss"])
def test_hybrid_chunks_of_any_cut_equal_one_call(hybrid, tokens):
    rng = np.random.default_rng(5)
    cache = empty(hybrid.config)
    while (held := np.asarray(cache.lengths)).min() < T:
        counts = np.minimum(rng.integers(0, 9, B), T - held).astype(np.int32)
        order = rng.permutation(B)  # rows may come in any order
        part = np.zeros((B, 8), np.int32)
        for place, row in enumerate(order):
            part[place, : counts[row]] = tokens[row, held[row] : held[row] + counts[row]]
        logits, cache = prefill(hybrid.model, hybrid.params, cache, part, counts[order], jnp.asarray(order), logits="all")
        for place, row in enumerate(order):
            if counts[row]:
                assert_equal(logits[place, : counts[row]], hybrid.full[row, held[row] : held[row] + counts[row]])


@some(quick=["gpt_oss"], names=["gpt_oss", "deepseek"])  # those with experts
def test_hybrid_row_alone_equals_the_same_row_in_any_company(hybrid, tokens):
    """In particular padding and other rows change nothing of a token's experts."""
    together, cache = prefill(hybrid.model, hybrid.params, empty(hybrid.config), tokens, jnp.asarray([20, 3, 11]))
    next_together, _ = decode_step(hybrid.model, hybrid.params, cache, jnp.asarray([1, -1, 3]))
    alone, cache = prefill(hybrid.model, hybrid.params, empty(hybrid.config, batch=1), tokens[2:], jnp.asarray([11]))
    next_alone, _ = decode_step(hybrid.model, hybrid.params, cache, jnp.asarray([3]))
    assert_equal(alone[0], together[2])
    assert_equal(next_alone[0], next_together[2])
    moved, _ = prefill(hybrid.model, hybrid.params, empty(hybrid.config), tokens[jnp.asarray([1, 2, 2])], jnp.asarray([24, 7, 11]))
    np.testing.assert_array_equal(moved[2], together[2])  # one executable: bit for bit


@some(quick=[], names=["gpt_oss", "deepseek"])  # between them, every product there is
def test_a_hybrid_in_bf16_stays_near_f32(hybrid, tokens):
    low = Transformer(hybrid.config, dtype=jnp.dtype(jnp.bfloat16))
    cache = kv.init(hybrid.config, B, CAPACITY, kv.Format.for_platform("cpu", np.dtype(jnp.bfloat16)))
    errors = []
    for position in range(6):
        logits, cache = decode_step(low, hybrid.params, cache, tokens[:, position])
        want = hybrid.full[:, position]
        errors.append(np.sqrt(np.mean((logits - want) ** 2, axis=-1) / np.mean(want**2, axis=-1)))
    assert np.isfinite(errors).all()
    # Two layers, each rounding about ten values to 2^-9 of their size on the way; errors add up as squares do. The median, since rounding
    # may turn one token's close choice of an expert or of a slot into another.
    assert np.median(errors) < 20**0.5 * 2**-8
