"""kernels.attention: the reference and the block loop against one query at a time in float64, and what they may read."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import Blocks, Scoring, attention, blockwise_attention

B, K, G, H, S, BLOCK = 2, 2, 3, 8, 40, 16  # the last block of 40 slots starts at 24: it gives slots 24..31 a second time


def source(k, v, block, on_read=lambda index: None):
    """Blocks of [B, S, K, H] arrays, the last one moved back so that it ends at the last slot: what it repeats has no position."""

    def read(index):
        on_read(index)
        first = jnp.minimum(index * block, k.shape[1] - block)
        k_part, v_part = (jax.lax.dynamic_slice_in_dim(x, first, block, axis=1) for x in (k, v))
        at = first + jnp.arange(block, dtype=jnp.int32)
        return k_part.transpose(0, 2, 3, 1), v_part.swapaxes(1, 2), jnp.where(at >= index * block, at, -1)[None]

    return Blocks(read, lambda first, last: (jnp.min(first) // block, (jnp.max(last) + block) // block))


@dataclasses.dataclass(frozen=True)
class Case:
    """What a compiled shape depends on; limits, sinks and allowed slots are data."""

    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    allowed: bool = False

    def scoring(self, sinks, allowed):
        return Scoring(0.3, self.window, self.softcap, sinks if self.sinks else None, allowed if self.allowed else None)


PLAIN = Case()
CASES = {
    "plain": PLAIN,
    "own_slot_only": Case(window=1),
    "window_and_sinks": Case(window=5, sinks=True),
    "window_of_more_than_all": Case(window=100),
    "softcap": Case(softcap=2.0),
    "allowed": Case(allowed=True),
    "all": Case(window=20, softcap=2.0, sinks=True, allowed=True),
}


@pytest.fixture(scope="module")
def blockwise():
    """Compiled once per case and T."""
    programs = {
        case: jax.jit(
            lambda q, k, v, limit, sinks, allowed, case=case: blockwise_attention(
                q, [source(k, v, BLOCK)], limit, case.scoring(sinks, allowed)
            )
        )
        for case in CASES.values()
    }
    return lambda case, *arrays: programs[case](*arrays)


def random_case(seed, T):
    """q, k, v, limit, sinks and allowed. One query in ten sees no slot that is allowed."""
    rng = np.random.default_rng(seed)
    q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in ((B, T, K * G, H), (B, S, K, H), (B, S, K, H)))
    limit = rng.integers(-1, S, (B, T)).astype(np.int32)
    allowed = (rng.random((B, T, S)) < 0.4) & (rng.random((B, T, 1)) < 0.9)
    return q, k, v, limit, rng.normal(size=K * G).astype(np.float32), allowed


def one_by_one(case, q, k, v, limit, sinks, allowed):
    """[B, T, N, Hv] in float64, from the definition."""
    q, k, v, sinks = (np.asarray(x, np.float64) for x in (q, k, v, sinks))
    out = np.zeros((*q.shape[:3], v.shape[3]))
    for b, t, n in np.ndindex(q.shape[:3]):
        last, group = limit[b, t], n // (q.shape[2] // k.shape[2])
        first = 0 if case.window is None else max(last - case.window + 1, 0)
        slots = [s for s in range(first, last + 1) if not case.allowed or allowed[b, t, s]]
        scores = np.asarray([0.3 * q[b, t, n] @ k[b, s, group] for s in slots])
        if case.softcap is not None:
            scores = case.softcap * np.tanh(scores / case.softcap)
        weights, rest = np.exp(scores), np.exp(sinks[n]) if case.sinks else 0.0
        if slots:
            out[b, t, n] = weights @ v[b, slots, group] / (weights.sum() + rest)
    return out


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**31), T=st.sampled_from([1, 5]))
def test_both_forms_equal_the_definition_for_any_limits(blockwise, name, seed, T):
    case, (q, k, v, limit, sinks, allowed) = CASES[name], random_case(seed, T)
    exact = one_by_one(case, q, k, v, limit, sinks, allowed)
    np.testing.assert_allclose(attention(q, k, v, limit, case.scoring(sinks, allowed)), exact, atol=3e-6)  # f32, precision highest
    np.testing.assert_allclose(blockwise(case, q, k, v, limit, sinks, allowed), exact, atol=3e-6)


@pytest.mark.parametrize(
    ("case", "value_dim"),
    [(PLAIN, H), (PLAIN, 5), (PLAIN, 11), (Case(window=40, sinks=True), 5), (Case(window=3, softcap=2.0, allowed=True), 11)],
)
def test_more_queries_than_one_query_block_equal_the_reference(case, value_dim):
    T = 300
    rng = np.random.default_rng(0)
    shapes = (1, T, K * G, H), (1, T, K, H), (1, T, K, value_dim)
    q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    limit = np.where(np.arange(T) < 290, np.arange(T), -1)[None].astype(np.int32)
    scoring = case.scoring(rng.normal(size=K * G).astype(np.float32), rng.random((1, T, T)) < 0.5)
    got = blockwise_attention(q, [source(k, v, 64)], limit, scoring)
    np.testing.assert_allclose(got, attention(q, k, v, limit, scoring), atol=3e-6)


def test_one_query_over_two_slots_is_the_softmax_written_out():
    q = jnp.ones((1, 1, 1, 1))
    k = jnp.asarray([0.0, 1.0, 9.0]).reshape(1, 3, 1, 1)
    v = jnp.asarray([10.0, 20.0, 99.0]).reshape(1, 3, 1, 1)
    expected = (10 + 20 * np.e) / (1 + np.e)  # slot 2 is past the limit
    for out in (
        attention(q, k, v, jnp.asarray([[1]]), Scoring(1.0)),
        blockwise_attention(q, [source(k, v, 2)], jnp.asarray([[1]]), Scoring(1.0)),
    ):
        np.testing.assert_allclose(out[0, 0, 0, 0], expected, rtol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_a_query_that_sees_nothing_returns_zero(blockwise, name):
    case, (q, k, v, limit, sinks, allowed) = CASES[name], random_case(0, 5)
    limit[0, 2] = limit[1, 0] = -1
    limit[1, 3], allowed[1, 3] = 30, False  # it might see slots, but none is allowed
    scoring = case.scoring(sinks, allowed)
    for out in (attention(q, k, v, limit, scoring), blockwise(case, q, k, v, limit, sinks, allowed)):
        assert np.all(np.asarray(out)[0, 2] == 0)
        assert np.all(np.asarray(out)[1, 0] == 0)
        assert np.all(np.asarray(out)[1, 3] == 0) == case.allowed


def test_a_nan_that_a_query_sees_is_not_hidden(blockwise):
    q, k, v, limit, *rest = random_case(1, 5)
    k[0, 0] = np.nan
    assert np.isnan(blockwise(PLAIN, q, k, v, np.maximum(limit, 0), *rest)[0]).all()


@pytest.mark.parametrize("name", CASES)
def test_garbage_outside_what_a_row_sees_does_not_matter(blockwise, name):
    case, (q, k, v, limit, *rest) = CASES[name], random_case(3, 5)
    limit = np.clip(limit, [[18], [3]], [[22], [9]])  # the first row's window starts within a block
    clean = blockwise(case, q, k, v, limit, *rest)
    for row in range(B):
        first = 0 if case.window is None else max(limit[row].min() - case.window + 1, 0)
        for array in (k, v):
            array[row, :first] = array[row, limit[row].max() + 1 :] = np.nan
    np.testing.assert_array_equal(blockwise(case, q, k, v, limit, *rest), clean)


def blocks_read(limit, window=None, T=1):
    q, k, v, *_ = random_case(4, T)
    blocks = []
    blocked = source(k, v, BLOCK, on_read=lambda index: jax.debug.callback(lambda i: blocks.append(int(i)), index))
    jax.block_until_ready(blockwise_attention(q, [blocked], np.asarray(limit, np.int32), Scoring(0.3, window)))
    jax.effects_barrier()
    return sorted(blocks)


@pytest.mark.parametrize("longest", [0, 15, 16, 39])
def test_blocks_past_the_longest_row_are_never_read(longest):
    assert blocks_read([[min(longest, 2)], [longest]]) == list(range(longest // BLOCK + 1))


@pytest.mark.parametrize(
    ("limit", "window", "blocks"),
    [
        ([[39], [36]], 5, [2]),  # slots 32..36 and 35..39
        ([[39], [35]], 5, [1, 2]),  # slot 31 is in block 1
        ([[39], [-1]], 5, [2]),  # an idle row asks for nothing
        ([[39], [2]], 5, [0, 1, 2]),  # rows share a loop: the shortest row's window starts it
        ([[20], [20]], 100, [0, 1]),
        ([[16], [16]], 1, [1]),
        ([[-1], [-1]], 5, []),
    ],
)
def test_blocks_before_a_window_are_never_read(limit, window, blocks):
    assert blocks_read(limit, window) == blocks


def test_a_chunk_with_padding_reads_from_its_first_window_on():
    assert blocks_read([[33, 34, 35, -1, -1], [36, 37, 38, 39, -1]], window=2, T=5) == [2]


@pytest.mark.parametrize("name", CASES)
def test_extreme_scores_stay_finite(blockwise, name):
    q, k, v, limit, *rest = random_case(5, 5)
    out = blockwise(CASES[name], q * 1e4, k * 1e4, v, np.maximum(limit, 0), *rest)
    assert np.all(np.isfinite(out))


@pytest.mark.parametrize("sink", [-100.0, 100.0])
def test_a_sink_far_from_the_scores_takes_nothing_or_all(blockwise, sink):
    case, (q, k, v, limit, _, allowed) = CASES["window_and_sinks"], random_case(6, 5)
    got = blockwise(case, q, k, v, limit, np.full(K * G, sink, np.float32), allowed)
    without = attention(q, k, v, limit, Scoring(0.3, case.window))
    np.testing.assert_allclose(got, without if sink < 0 else np.zeros_like(without), atol=3e-6)


def test_bf16_operands_are_rounded_and_nothing_else(blockwise):
    case, (q, k, v, limit, sinks, allowed) = CASES["all"], random_case(7, 5)
    low = [jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)]
    got = blockwise(case, *low, limit, sinks, allowed)
    assert got.dtype == jnp.bfloat16
    exact = one_by_one(case, *low, limit, sinks, allowed)
    # Scaled queries, weights and the result are rounded once each, to 2^-9 of their size; scores are below 2 in size.
    np.testing.assert_allclose(np.asarray(got, np.float64), exact, atol=5 * 2**-9 * np.abs(v).max())


def scattered(rng, k, v, first, last, slots):
    """Positions first[b]..last[b] - 1 of [B, S, K, H] arrays in any slots of a block, which differ by row: k, v and positions int32
    [B, slots]. What the other slots hold is nan, and their position negative."""
    held_k, held_v = (np.full((B, slots, *x.shape[2:]), np.nan, np.float32) for x in (k, v))
    positions = np.full((B, slots), -1, np.int32)
    for b in range(B):
        held = np.arange(first[b], last[b])
        there = rng.permutation(slots)[: len(held)]
        held_k[b, there], held_v[b, there], positions[b, there] = k[b, held], v[b, held], held
    return held_k, held_v, positions


@pytest.fixture(scope="module")
def from_two_sources():
    """Attention over a first source of two blocks and a second of one, with positions of each row's own. Compiled once per case."""

    def blocks(k, v, positions):
        def read(index):
            parts = (jax.lax.dynamic_slice_in_dim(x, index * BLOCK, BLOCK, axis=1) for x in (k, v, positions))
            k_part, v_part, where = parts
            return k_part.transpose(0, 2, 3, 1), v_part.swapaxes(1, 2), where

        return Blocks(read, lambda first, last: (0, k.shape[1] // BLOCK))

    return {
        case: jax.jit(
            lambda q, old, new, limit, sinks, allowed, case=case: blockwise_attention(
                q, [blocks(*old), blocks(*new)], limit, case.scoring(sinks, allowed)
            )
        )
        for case in CASES.values()
    }


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 2**31), cut=st.tuples(st.integers(0, 32), st.integers(0, 32)))
def test_two_sources_with_positions_of_each_rows_own_equal_the_definition(from_two_sources, name, seed, cut):
    case, (q, k, v, limit, sinks, allowed) = CASES[name], random_case(seed, 5)
    rng = np.random.default_rng(seed)
    end = np.minimum(np.asarray(cut) + rng.integers(0, BLOCK + 1, B), S)  # a row holds 0..end - 1, from `cut` on in the second source
    limit = np.minimum(limit, end[:, None] - 1).astype(np.int32)
    old, new = scattered(rng, k, v, (0, 0), cut, 2 * BLOCK), scattered(rng, k, v, cut, end, BLOCK)
    got = from_two_sources[case](q, old, new, limit, sinks, allowed)
    np.testing.assert_allclose(got, one_by_one(case, q, k, v, limit, sinks, allowed), atol=3e-6)


@pytest.mark.parametrize(("name", "T"), [("plain", 300), ("window_and_sinks", 300)])
def test_query_blocks_read_every_source(name, T):
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(1, T, heads, H)).astype(np.float32) for heads in (K * G, K, K))
    limit, scoring = np.arange(T, dtype=np.int32)[None], CASES[name].scoring(rng.normal(size=K * G).astype(np.float32), None)
    parts = [source(x, y, 50) for x, y in ((k[:, :200], v[:, :200]), (k[:, 200:], v[:, 200:]))]

    def moved(index):
        *both, where = parts[1].read(index)
        return *both, where + 200

    later = Blocks(moved, lambda first, last: (jnp.maximum(jnp.min(first) - 200, 0) // 50, (jnp.max(last) - 200 + 50) // 50))
    got = blockwise_attention(q, [parts[0], later], limit, scoring, query_block=64)
    np.testing.assert_allclose(got, attention(q, k, v, limit, scoring), atol=3e-6)
