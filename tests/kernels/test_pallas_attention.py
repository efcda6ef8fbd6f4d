"""kernels.pallas_attention, both kernels run step by step, against the reference: every slot that holds nothing is nan."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import Held, Packing, Scoring, attention, pallas_attention, pallas_attention_gpu, pallas_attention_tpu
from runtime import UserError

ROWS, PAGE = 3, 16
EPSILON = 2.0**-24  # of f32


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    """So that a few hundred slots are many blocks, and some ten queries too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pallas_attention_tpu, "SLOTS", 64)
        patch.setattr(pallas_attention_tpu, "ROWS", 64)
        patch.setattr(pallas_attention_gpu, "BLOCK", 16 << 10)
        patch.setattr(pallas_attention_gpu, "ROWS", 32)
        yield


@dataclasses.dataclass(frozen=True)
class Case:
    """Static sizes of a call.

    Attributes:
      heads: N, K, H.
      queries: T.
      slots: of each row, S.
    """

    heads: tuple[int, int, int]
    queries: int
    slots: int
    layout: str = "dense"
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dtype: Any = jnp.float32
    stripes: int = 1

    @property
    def packing(self) -> Packing:
        _, K, H = self.heads
        return Packing.per_head(128, K, H, 4, 64)


CASES = {
    "decode": Case((8, 2, 128), 1, 300),
    "decode, heads of 64, sinks, stripes": Case((6, 3, 64), 1, 300, sinks=True, stripes=3),
    "some queries, pages, heads of 32": Case((6, 2, 32), 5, 320, "paged", softcap=3.0),
    "a window over pages": Case((4, 1, 128), 9, 320, "paged", window=40),
    "a ring": Case((6, 2, 64), 4, 72, "ring", window=64, sinks=True),
    "many queries": Case((6, 2, 128), 70, 320, window=100),
    "bf16": Case((8, 2, 64), 33, 300, softcap=5.0, dtype=jnp.bfloat16),
}

QUICK = {
    ("decode, heads of 64, sinks, stripes", "tpu"),
    ("some queries, pages, heads of 32", "tpu"),
    ("a ring", "gpu"),
    ("a window over pages", "gpu"),
    ("bf16", "tpu"),
}


def placed(case: Case, chip: str, k: np.ndarray, v: np.ndarray, held: np.ndarray, rng: np.random.Generator) -> Any:
    """Keys and values [B, positions, K, H] of the last `held` [B] positions as arrays of a cache of two layers, of which the second one is
    meant; the rows' places, and the table."""
    B, _, K, H = k.shape
    rows, X = rng.permutation(B + 1)[:B].astype(np.int32), B + 1  # there is a row more, of nan
    flat = np.full((2, 2, X, case.slots, K, H), np.nan, np.float32)
    for b in range(B):
        for position in range(max(0, held[b] - case.slots), held[b]):
            slot = position % case.slots
            flat[:, 1, rows[b], slot] = k[b, position], v[b, position]
    table = None
    if case.layout == "paged":
        pages = case.slots // PAGE
        numbers = rng.permutation(X * pages).reshape(X, pages)
        pooled = np.empty((2, 2, X * pages, PAGE, K, H), np.float32)
        pooled[:, :, numbers.reshape(-1)] = flat.reshape(2, 2, X * pages, PAGE, K, H)
        used = np.arange(pages) * PAGE < held[:, None]
        flat, table = pooled, np.where(used, numbers[rows], rng.choice([-1, X * pages]))
    arrays = jnp.asarray(flat, case.dtype)
    both = (case.packing.pack(each) if chip == "tpu" else each for each in arrays)
    return *both, rows, table


@functools.partial(jax.jit, static_argnames=("case", "chip"))
def answers(case, chip, q, keys, values, rows, table, held, first, queries, sinks, stripe, scale):
    H = case.heads[2]
    scoring = Scoring(scale=H**-0.5, window=case.window, softcap=case.softcap, sinks=sinks)
    packings = (case.packing, case.packing) if chip == "tpu" else None
    more = {"ring": case.layout == "ring", "table": table, "stripe": stripe, "stripes": case.stripes}
    source = Held(keys, values, packings, 1, rows, jnp.zeros_like(held), held, **more)
    return pallas_attention(q * scale, [source], first, queries, scoring, interpret=True)


def compare(case: Case, chip: str, seed: int, held: list[int], queries: list[int], scale: float = 1.0) -> None:
    """Rows that hold `held` tokens, `queries` of which ask."""
    N, K, H = case.heads
    rng = np.random.default_rng(seed)
    held, queries = np.asarray(held, np.int32), np.minimum(np.asarray(queries, np.int32), held)
    longest = max(case.slots, held.max())
    q = jnp.asarray(rng.normal(size=(ROWS, case.queries, N, H)), case.dtype)
    k, v = (np.asarray(jnp.asarray(rng.normal(size=(ROWS, longest, K, H)), case.dtype), np.float32) for _ in range(2))
    sinks = jnp.asarray(rng.normal(size=N), jnp.float32) if case.sinks else None
    stripe = int(rng.integers(case.stripes))
    arrays = placed(case, chip, k, v, held, rng)
    position = np.arange(longest) * case.stripes + stripe  # of each token
    last = np.where(held > 0, (held - 1) * case.stripes + stripe, -1)
    first = last - queries + 1
    token = np.arange(case.queries)
    limit = np.where(token < queries[:, None], first[:, None] + token, -1)
    with jax.default_matmul_precision("highest"):
        out = answers(case, chip, q, *arrays, held, first, queries, sinks, stripe, jnp.asarray(scale, case.dtype))
        # The reference knows positions 0, 1, 2, ...: those of other stripes are not allowed.
        spread = [np.zeros((ROWS, longest * case.stripes, K, H), np.float32) for _ in range(2)]
        spread[0][:, position], spread[1][:, position] = k, v
        allowed = np.zeros((ROWS, case.queries, longest * case.stripes), bool)
        allowed[:, :, position] = True
        scoring = Scoring(scale=H**-0.5, window=case.window, softcap=case.softcap, sinks=sinks, allowed=jnp.asarray(allowed))
        want = attention(q.astype(jnp.float32) * scale, *map(jnp.asarray, spread), jnp.asarray(limit), scoring)
    out = np.asarray(out, np.float32)
    assert np.isfinite(out).all()
    assert (out[limit < 0] == 0).all()
    # A score is off by some roundings of its terms, a weight by as much as its score and in bf16 by half of 2^-8, as the answer is.
    largest = float(jnp.abs(q).max()) * scale * np.abs(k).max() * H**0.5
    rounding = 8 * EPSILON * (4 + largest) + (2.0**-8 if case.dtype == jnp.bfloat16 else 0.0)
    np.testing.assert_allclose(out, want, atol=rounding * np.abs(v).max())


@pytest.mark.parametrize(
    ("name", "chip"),
    [
        pytest.param(name, chip, marks=() if (name, chip) in QUICK else pytest.mark.slow, id=f"{name}-{chip}")
        for name in CASES
        for chip in ("tpu", "gpu")
    ],
)
@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_it_answers_as_the_reference_does(name, chip, data):
    case = CASES[name]
    most = 3 * case.slots if case.layout == "ring" else case.slots
    lengths = st.sampled_from([0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, case.slots - 1, most]) | st.integers(0, most)
    rows = {"min_size": ROWS, "max_size": ROWS}
    held, queries = data.draw(st.lists(lengths, **rows)), data.draw(st.lists(st.integers(0, case.queries), **rows))
    scale = 1.0 if case.dtype == jnp.bfloat16 else data.draw(st.sampled_from([1e-3, 1.0, 8.0]))
    compare(case, chip, data.draw(st.integers(0, 99)), held, queries, scale)


@pytest.mark.parametrize("chip", ["tpu", "gpu"])
def test_new_rows_beside_a_cache_are_joined_to_it(chip):
    """What a ring does with more tokens than it may overwrite: the cache, and the rows as a cache whose slot 0 stands at `base`."""
    N, K, H, T, held = 4, 2, 64, 20, np.asarray([0, 7, 50], np.int32)
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(ROWS, size, heads, H)), jnp.float32) for size, heads in ((T, N), (80, K), (80, K)))
    sinks = jnp.asarray(rng.normal(size=N), jnp.float32)
    scoring, count = Scoring(scale=H**-0.5, window=30, sinks=sinks), np.asarray([T, 3, T], np.int32)
    packing = Packing.per_head(128, K, H, 4, 64)

    def source(first, size, base, end):
        def arranged(x):
            part = jnp.stack([x[b, first[b] : first[b] + size] for b in range(ROWS)])
            part = jnp.where((np.arange(size) < (end - base)[:, None])[..., None, None], part, jnp.nan)
            return (packing.pack(part) if chip == "tpu" else part)[None]

        return Held(arranged(k), arranged(v), (packing,) * 2 if chip == "tpu" else None, 0, jnp.arange(ROWS), base, end)

    cache = source(np.zeros(ROWS, int), 60, np.zeros(ROWS, np.int32), held)
    new = source(held, T, held, held + count)
    limit = np.where(np.arange(T) < count[:, None], held[:, None] + np.arange(T), -1)
    with jax.default_matmul_precision("highest"):
        out = pallas_attention(q, [cache, new], held, count, scoring, interpret=True)
        want = attention(q, k, v, jnp.asarray(limit), scoring)
    np.testing.assert_allclose(out, want, atol=1e-5)


def test_a_list_of_work_is_as_long_as_what_is_held():
    """The example of its docstring, with a third row that holds nothing."""
    packing = Packing(1, 1, 128)
    held = jnp.asarray([5 * 32, 0, 33], jnp.int32)
    keys = jnp.zeros((1, ROWS, *packing.shape(1024)))
    source = Held(keys, keys, (packing, packing), 0, jnp.arange(ROWS), jnp.zeros(ROWS, jnp.int32), held)
    plan = pallas_attention_tpu._Plan((ROWS, 1, 1, 128), source)
    assert (plan.slots, plan.items) == (64, ROWS * 16)
    (low, high, *work), total = pallas_attention_tpu._work(plan, source, held - 1, jnp.minimum(held, 1), Scoring(1.0))
    assert total == 5
    np.testing.assert_array_equal(high, [159, -1, 32])
    np.testing.assert_array_equal(low, [0, 0, 0])
    for given_list, want in zip(work, ([0, 0, 0, 1, 2, 3], [0, 1, 2, -1, 0], [0, 1, 2, 2, 4]), strict=True):
        np.testing.assert_array_equal(given_list[: len(want)], want)
    (low, high, *work), total = pallas_attention_tpu._work(plan, source, held - 1, jnp.minimum(held, 1), Scoring(1.0, window=40))
    assert total == 4  # of the first row blocks 1 and 2
    np.testing.assert_array_equal(low, [120, 0, 0])
    np.testing.assert_array_equal(work[1][:4], [1, 2, -1, 0])


def test_a_long_row_is_split_over_programs_of_a_gpu_and_many_rows_are_not():
    def splits(rows, slots):
        keys = jax.ShapeDtypeStruct((1, rows, slots, 8, 128), jnp.bfloat16)
        return pallas_attention_gpu._Plan((rows, 1, 32, 128), Held(keys, keys, None, 0, None, None, None)).splits

    assert [splits(1, 131072), splits(1, 1024), splits(16, 131072), splits(64, 131072)] == [32, 4, 2, 1]


@pytest.mark.parametrize("name", ["decode", *(pytest.param(name, marks=pytest.mark.slow) for name in CASES if name != "decode")])
def test_the_simulator_of_a_tpu_finds_no_race_and_no_read_out_of_bounds(name, monkeypatch):
    from jax.experimental.pallas import tpu as pltpu

    case, params = CASES[name], pltpu.InterpretParams(detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan")
    real = pallas_attention_tpu.pl.pallas_call
    monkeypatch.setattr(pallas_attention_tpu.pl, "pallas_call", lambda *args, **more: real(*args, **more | {"interpret": params}))
    jax.clear_caches()
    compare(case, "tpu", 3, [case.slots, 0, case.slots // 2 + 1], [case.queries] * ROWS)
    jax.clear_caches()


def test_what_the_kernels_do_not_read_is_refused():
    packing = Packing(1, 2, 64)
    keys, row = jnp.zeros((1, 1, *packing.shape(32))), jnp.zeros((1,), jnp.int32)
    q = jnp.zeros((1, 1, 4, 64))
    with pytest.raises(ValueError, match="heads of whole tiles of 128 numbers"):
        pallas_attention(q, [Held(keys, keys, (packing, packing), 0, row, row, row)], row, row, Scoring(1.0))
    with pytest.raises(UserError, match="Pallas kernels read f32 and bf16, not int8: use --kv=bf16, or --kernels=xla"):
        pallas_attention(q, [Held(keys.astype(jnp.int8), keys, (packing, packing), 0, row, row, row)], row, row, Scoring(1.0))
    with pytest.raises(ValueError, match="no mask `allowed`"):
        pallas_attention(q, [], row, row, Scoring(1.0, allowed=jnp.ones((1, 1, 32), bool)))
