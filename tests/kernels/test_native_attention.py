"""kernels.attend_cache against what JAX compiles: the same bits written, the same answers, in every layout and number format."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kv
from kernels import Heads, Scoring, attend_cache, cpu
from kv import AttentionSpec, KeyValue, Query, Step
from tests.kernels.test_native_matmul import instructions

pytestmark = pytest.mark.skipif(cpu.instruction_set() is None, reason=f"no native kernels here: {cpu.reason()}")

BATCH, CAPACITY, PAGE = 3, 300, 16
TOLERANCE = 2e-6  # sums of some hundred f32 terms that are weights in [0, 1] times values of a normal distribution


@dataclasses.dataclass(frozen=True)
class Case:
    layout: str
    dtype: Any
    heads: tuple[int, int, int]  # N, K, H
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    rounded: bool = False
    group: int = 32

    @property
    def layers(self) -> Any:
        _, K, H = self.heads

        @dataclasses.dataclass(frozen=True)
        class Layers:
            cache_layers: tuple[Any, ...] = (kv.LayerSpec(num_kv_heads=K, key_dim=H, value_dim=H, window=self.window),) * 2

        return Layers()

    def cache(self, kernels: str) -> kv.Cache:
        """Of nan, wherever nothing was written."""
        more = {"page_size": PAGE} if self.layout == "paged" else {}
        more["group"] = self.group
        more["round_queries"] = self.rounded and kernels == "native"
        format = kv.Format.for_platform("cpu", np.dtype(self.dtype), margin=8, kernels=kernels, **more)
        width = -(-CAPACITY // PAGE)
        pools = [BATCH * width + 1 for _ in kv.page_groups(self.layers, CAPACITY, format)]
        cache = kv.init(self.layers, BATCH, CAPACITY, format, pools or None)
        rng = np.random.default_rng(1)
        tables = tuple(jnp.asarray(rng.permutation(pool)[: BATCH * width].reshape(BATCH, width), jnp.int32) for pool in pools)
        bits = {jnp.uint16: 0x7FC0, jnp.int8: -128}  # of bf16 and of f16 a nan
        poison = jax.tree.map(lambda a: jnp.full_like(a, bits.get(a.dtype.type, jnp.nan)), cache.stores)
        return cache.replace(stores=poison, tables=tables)

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(scale=self.heads[2] ** -0.5, window=self.window, softcap=self.softcap)


CASES = {
    "dense": Case("dense", np.float32, (6, 2, 64)),
    "dense, bf16, sinks": Case("dense", jnp.bfloat16, (9, 3, 64), sinks=True),
    "ring, soft cap": Case("dense", np.float32, (4, 1, 80), window=20, softcap=30.0),
    "ring, bf16": Case("dense", jnp.bfloat16, (4, 1, 256), window=20),
    "pages": Case("paged", np.float32, (6, 2, 24)),
    "dense, int8": Case("dense", jnp.int8, (9, 3, 64)),
    "dense, int8, one group, sinks": Case("dense", jnp.int8, (4, 2, 128), sinks=True, group=128),
    "ring, int8": Case("dense", jnp.int8, (5, 1, 80), window=20, group=16),
    "pages, int8, soft cap": Case("paged", jnp.int8, (7, 1, 64), softcap=30.0, group=16),
    "pages, int8, window": Case("paged", jnp.int8, (6, 2, 192), window=20, group=64),
    "pages, window, bf16, all": Case("paged", jnp.bfloat16, (6, 2, 64), window=20, softcap=5.0, sinks=True),
}


@functools.partial(jax.jit, static_argnames=("spec",), donate_argnames="cache")
def attend(cache: kv.Cache, q: jax.Array, k: jax.Array, v: jax.Array, step: Step, spec: AttentionSpec, sinks: Any) -> Any:
    out, view = cache.layer(1).attend(Query(q), KeyValue(k, v), step, spec, sinks)
    return out, cache.with_layer(1, view)


def course(case: Case, lengths: list[int], kernels: str) -> list[tuple[np.ndarray, list[np.ndarray]]]:
    """The answers of calls of these lengths, the second row having three tokens less, and the caches' bits after each."""
    N, K, H = case.heads
    rng = np.random.default_rng(0)
    sinks = jnp.asarray(rng.normal(size=(K, N // K)), jnp.float32) if case.sinks else None
    cache, held, found = case.cache(kernels), np.zeros(BATCH, np.int32), []
    for T in lengths:
        count = np.asarray([T, max(0, T - 3), T], np.int32)
        q, k, v = (jnp.asarray(rng.normal(size=(BATCH, T, heads, H)), jnp.float32) for heads in (N, K, K))
        if case.rounded and kernels == "xla":  # which does not round; the scale is a power of two
            q = (q * case.spec.scale).astype(jnp.bfloat16).astype(jnp.float32) / case.spec.scale
        step = Step(rows=None, start=jnp.asarray(held), count=jnp.asarray(count), tables=tuple(map(jnp.copy, cache.tables)))
        with jax.default_matmul_precision("highest"):
            out, cache = attend(cache, q, k, v, step, case.spec, sinks)
        found.append((np.asarray(out), [np.array(leaf).view(np.uint8) for leaf in jax.tree.leaves(cache.stores)]))
        held = held + count
    return found


@pytest.mark.parametrize("name", ["avx512", "avx2"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_it_writes_the_same_bits_and_answers_alike(case, name):
    lengths = [7, 1, 70, 1, 1, 130, 9, 1]
    with instructions(name):
        native = course(case, lengths, "native")
    for (out, bits), (wanted, wanted_bits) in zip(native, course(case, lengths, "xla"), strict=True):
        assert np.isfinite(out).all()
        np.testing.assert_allclose(out, wanted, atol=TOLERANCE * max(1.0, np.abs(wanted).max()) * 4)
        for a, b in zip(bits, wanted_bits, strict=True):
            np.testing.assert_array_equal(a, b)


ROUNDED = {
    "dense, sinks": Case("dense", jnp.bfloat16, (9, 3, 64), sinks=True, rounded=True),
    "ring": Case("dense", jnp.bfloat16, (4, 1, 256), window=20, rounded=True),
    "window, soft cap, pages": Case("paged", jnp.bfloat16, (6, 2, 64), window=90, softcap=5.0, rounded=True),
    "a width for no pairs": Case("dense", jnp.bfloat16, (6, 2, 4), rounded=True),
}


@pytest.mark.parametrize("name", ["avx512", "avx2"])
@pytest.mark.parametrize("case", ROUNDED.values(), ids=ROUNDED)
def test_rounded_queries_and_weights_answer_as_exactly_as_bf16_is(case, name):
    """A weight and the sum of weights are each off by 2^-9 of themselves at most, an answer by 2^-8 of the largest value, and by chance by
    much less: errors of many weights are as often above as below."""
    with instructions(name):
        native = course(case, [7, 1, 70, 1, 130, 9, 1], "native")
    for (out, bits), (wanted, wanted_bits) in zip(native, course(case, [7, 1, 70, 1, 130, 9, 1], "xla"), strict=True):
        assert np.abs(out - wanted).max() <= 2**-8 * 4  # of values of a normal distribution
        assert 0 < np.sqrt(np.mean((out - wanted) ** 2)) <= 2**-9
        for a, b in zip(bits, wanted_bits, strict=True):
            np.testing.assert_array_equal(a, b)


def test_only_native_kernels_with_a_bf16_cache_round_queries():
    for kernels, dtype in (("xla", jnp.bfloat16), ("native", np.float32)):
        with pytest.raises(ValueError, match="round_queries is of native kernels with bf16 keys and values, not of "):
            kv.Format.for_platform("cpu", np.dtype(dtype), kernels=kernels, round_queries=True)


@settings(deadline=None, max_examples=25)
@given(st.lists(st.sampled_from([1, 7, 70]), min_size=1, max_size=6), st.sampled_from(sorted(CASES)))
def test_any_course_of_calls_answers_alike(lengths, name):
    for (out, _), (wanted, _) in zip(course(CASES[name], lengths, "native"), course(CASES[name], lengths, "xla"), strict=True):
        np.testing.assert_allclose(out, wanted, atol=TOLERANCE * max(1.0, np.abs(wanted).max()) * 4)


def test_the_positions_of_one_query_are_split_over_threads_without_changing_the_answer():
    case = dataclasses.replace(CASES["dense, bf16, sinks"])
    lengths = [256, 1]  # the last call reads more than a part, and has few heads
    (_, (out, _)), (_, (wanted, _)) = course(case, lengths, "native"), course(case, lengths, "xla")
    np.testing.assert_allclose(out, wanted, atol=TOLERANCE * 4)


def test_a_donated_cache_is_written_in_place():
    case = CASES["dense"]
    cache = case.cache("native")
    before = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache.stores)]
    N, K, H = case.heads
    q, k = jnp.ones((BATCH, 1, N, H)), jnp.ones((BATCH, 1, K, H))
    step = Step(rows=None, start=jnp.zeros((BATCH,), jnp.int32), count=jnp.ones((BATCH,), jnp.int32))
    _, cache = attend(cache, q, k, k, step, case.spec, None)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache.stores)] == before


def test_rows_that_are_not_of_the_cache_are_refused():
    case = CASES["dense"]
    N, K, H = case.heads
    q, k = jnp.ones((1, 1, N, H)), jnp.ones((1, 1, K, H))
    step = Step(rows=jnp.asarray([BATCH]), start=jnp.zeros((1,), jnp.int32), count=jnp.ones((1,), jnp.int32), batch=BATCH)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="row 3 is not of the cache"):
        jax.block_until_ready(attend(case.cache("native"), q, k, k, step, case.spec, None))


@dataclasses.dataclass(frozen=True)
class Joined:
    """Queries, keys and values in one array."""

    case: Case
    dim: int  # elements that are rotated
    norms: bool

    def heads(self, rng: np.random.Generator, count: np.ndarray, T: int) -> Heads:
        """At random, and nan where there is no token. The two angles of a pair differ, so that none can stand for the other."""
        N, K, H = self.case.heads

        def padded(*shape: int) -> jax.Array:
            some = rng.normal(size=(BATCH, T, *shape)).astype(np.float32)
            some[np.arange(T) >= count[:, None]] = np.nan
            return jnp.asarray(some)

        qkv = padded(K, N // K + 2, H)
        norms = [jnp.asarray(1 + 0.2 * rng.normal(size=H), jnp.float32) if self.norms else None for _ in range(2)]
        return Heads(qkv, *norms, (padded(1, self.dim), padded(1, self.dim)) if self.dim else None, eps=0.1)


JOINED = {
    "dense, norms": Joined(Case("dense", np.float32, (6, 2, 64)), 64, norms=True),
    "dense, bf16, sinks": Joined(Case("dense", jnp.bfloat16, (9, 3, 64), sinks=True), 64, norms=False),
    "ring, a part is rotated": Joined(Case("dense", np.float32, (4, 1, 80), window=20, softcap=30.0), 24, norms=True),
    "ring, nothing is rotated": Joined(Case("dense", np.float32, (4, 2, 40), window=20), 0, norms=True),
    "pages, odd sizes": Joined(Case("paged", np.float32, (6, 2, 37)), 22, norms=True),
    "pages, one query a key, bf16": Joined(Case("paged", jnp.bfloat16, (3, 3, 128), window=20), 128, norms=True),
    "dense, norms, int8": Joined(Case("dense", jnp.int8, (6, 2, 64)), 64, norms=True),
    "pages, int8": Joined(Case("paged", jnp.int8, (3, 1, 96), window=20, group=16), 48, norms=False),
    "nothing but split": Joined(Case("dense", np.float32, (5, 1, 24)), 0, norms=False),
}


@functools.partial(jax.jit, static_argnames=("spec",), donate_argnames="cache")
def attend_joined(cache: kv.Cache, heads: Heads, step: Step, spec: AttentionSpec, sinks: Any) -> Any:
    out, view = kv.attend_heads(cache.layer(1), heads, step, spec, sinks)
    return out, cache.with_layer(1, view)


@functools.partial(jax.jit, static_argnames=("spec",))
def read_again(cache: kv.Cache, heads: Heads, step: Step, spec: AttentionSpec, sinks: Any) -> jax.Array:
    return cache.layer(1).attend(Query(heads.split()[0]), None, step, spec, sinks)[0]


def joined_course(joined: Joined, calls: list[tuple[int, list[int]]], kernels: str) -> list[tuple[np.ndarray, Any, list[np.ndarray]]]:
    """Of calls of T tokens, of which each row has so many: the answers, those that XLA gives from the same cache of bf16 or int8 after it,
    and what the cache holds then."""
    case = joined.case
    N, K, _ = case.heads
    rng = np.random.default_rng(0)
    sinks = jnp.asarray(rng.normal(size=(K, N // K)), jnp.float32) if case.sinks else None
    cache, held, found = case.cache(kernels), np.zeros(BATCH, np.int32), []
    for T, counts in calls:
        count = np.minimum(counts, T).astype(np.int32)
        step = Step(rows=None, start=jnp.asarray(held), count=jnp.asarray(count), tables=tuple(map(jnp.copy, cache.tables)))
        heads = joined.heads(rng, count, T)
        if kernels == "native" and (case.window is None or case.layout == "paged" or T <= 9):
            assert cache.layer(1).takes(heads, step)
        with jax.default_matmul_precision("highest"):
            out, cache = attend_joined(cache, heads, step, case.spec, sinks)
        again, stored = None, jax.tree.leaves(cache.stores)
        if kernels == "native" and case.dtype != np.float32:
            as_xla = jax.tree.unflatten(jax.tree.structure(case.cache("xla")), jax.tree.leaves(cache))
            with jax.default_matmul_precision("highest"):
                again = np.asarray(read_again(as_xla, heads, step, case.spec, sinks))
        as_number = jnp.float16 if case.dtype == jnp.int8 else jnp.bfloat16
        found.append((np.asarray(out), again, [np.array(x.view(as_number) if x.dtype == jnp.uint16 else x, np.float32) for x in stored]))
        held = held + count
    return found


COUNTS = st.lists(st.integers(0, 30), min_size=BATCH, max_size=BATCH)


@pytest.mark.parametrize("name", ["avx512", "avx2"])
@pytest.mark.parametrize("joined", JOINED.values(), ids=JOINED)
@settings(deadline=None, max_examples=6)
@example([(9, [9, 0, 6]), (1, [1, 1, 0]), (30, [30, 7, 30]), (1, [1, 1, 1])])
@given(st.lists(st.tuples(st.sampled_from([1, 9, 30]), COUNTS), min_size=1, max_size=5))
def test_joined_queries_keys_and_values_are_split_normed_and_rotated_alike(joined, name, calls):
    """In bf16 and int8 the noise of f32 can turn the rounding of a key the other way, so answers are compared with those from the same
    cache."""
    with instructions(name):
        native = joined_course(joined, calls, "native")
    for (out, again, held), (wanted, _, wanted_held) in zip(native, joined_course(joined, calls, "xla"), strict=True):
        wanted = wanted if again is None else again
        np.testing.assert_allclose(out, wanted, atol=TOLERANCE * max(1.0, np.abs(wanted).max()) * 4)
        for a, b in zip(held, wanted_held, strict=True):
            code = joined.case.dtype == jnp.int8 and np.abs(b[np.isfinite(b)]).max(initial=0) > 100  # a scale is small
            np.testing.assert_allclose(a, b, atol=1 if code else 1e-6, rtol=1e-6 if again is None or code else 2**-7)
            assert np.mean(~np.isclose(a, b, atol=1e-6, rtol=1e-6, equal_nan=True)) < 1e-3


GOOD = {"qkv": (2, 3, 2, 5, 8), "q_norm": (8,), "k_norm": (8,), "cos": (2, 3, 1, 6), "sin": (2, 3, 1, 6), "values": (1, 2, 2, 4, 8)}
BAD = {
    "a norm of queries": ({"q_norm": (9,)}, "a norm does not fit the heads"),
    "a norm of keys": ({"k_norm": (2, 8)}, "a norm does not fit the heads"),
    "angles of other tokens": ({"cos": (2, 4, 1, 6), "sin": (2, 4, 1, 6)}, "angles do not fit the queries"),
    "angles of other rows": ({"cos": (1, 3, 1, 6), "sin": (1, 3, 1, 6)}, "angles do not fit the queries"),
    "angles of no pairs": ({"cos": (2, 3, 1, 5), "sin": (2, 3, 1, 5)}, "angles do not fit the queries"),
    "more angles than elements": ({"cos": (2, 3, 1, 10), "sin": (2, 3, 1, 10)}, "angles do not fit the queries"),
    "cosines without sines": ({"sin": (2, 3, 1, 0)}, "angles do not fit the queries"),
    "other KV heads": ({"qkv": (2, 3, 1, 5, 8)}, "queries, keys and values in one do not fit the cache"),
    "values of another width": ({"values": (1, 2, 2, 4, 7)}, "queries, keys and values in one do not fit the cache"),
    "another width": ({"qkv": (2, 3, 2, 5, 9)}, "attention's sizes do not fit one another"),
    "no queries": ({"qkv": (2, 3, 2, 2, 8)}, "attention's sizes do not fit one another"),
    "rows of another batch": ({"qkv": (3, 3, 2, 5, 8)}, "attention's sizes do not fit one another"),
    "separate queries": ({"qkv": (2, 3, 6, 8)}, "only joined queries and keys are normed and rotated"),
    "rows that are seen beside the cache": ({"after": False}, "queries, keys and values in one do not fit the cache"),
    "keys and values besides": ({"new": (jnp.ones((2, 3, 2, 8)),) * 2}, "queries, keys and values in one do not fit the cache"),
}


def attend_sizes(new: Any = None, after: bool = True, **sizes: tuple[int, ...]) -> None:
    """A call with arrays of `GOOD` sizes but these."""
    qkv, q_norm, k_norm, cos, sin, values = (jnp.ones(size) for size in (GOOD | sizes).values())
    each, limit = jnp.ones((2,), jnp.int32), jnp.zeros((2, 3), jnp.int32)
    heads, keys = Heads(qkv, q_norm, k_norm, (cos, sin), 1e-5), jnp.ones((1, 2, 2, 8, 4))
    call = jax.jit(
        lambda keys, values: attend_cache(heads, new, (keys,), (values,), 0, None, None, each, each, limit, Scoring(1.0), "dense", after)
    )
    jax.block_until_ready(call(keys, values))


def test_joined_arrays_that_do_not_fit_are_refused():
    attend_sizes()
    for changed, message in BAD.values():
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=message):
            attend_sizes(**changed)


GOOD_INT8 = {
    "k": ((1, 2, 2, 32, 4), "i1"),
    "k_scales": ((1, 2, 2, 2, 4), "u2"),
    "v": ((1, 2, 2, 4, 48), "i1"),
    "v_scales": ((1, 2, 2, 4, 3), "u2"),
}
BAD_INT8 = {
    "scales of other slots": ({"k_scales": ((1, 2, 2, 2, 5), "u2")}, "scales do not fit the keys and values"),
    "scales of other rows": ({"v_scales": ((1, 3, 2, 4, 3), "u2")}, "scales do not fit the keys and values"),
    "scales of no axes": ({"v_scales": ((4, 3), "u2")}, "scales do not fit the keys and values"),
    "no scale": ({"k_scales": ((1, 2, 2, 0, 4), "u2")}, "scales do not fit the keys and values"),
    "groups of 8": ({"k_scales": ((1, 2, 2, 4, 4), "u2")}, "a scale is of a multiple of 16 channels"),
    "more scales than channels": ({"k_scales": ((1, 2, 2, 64, 4), "u2")}, "a scale is of a multiple of 16 channels"),
    "other groups of values": ({"v_scales": ((1, 2, 2, 4, 1), "u2")}, "a scale is of a multiple of 16 channels"),
    "scales in f32": ({"v_scales": ((1, 2, 2, 4, 3), "f4")}, "scales are the bits of f16"),
    "scales of floats": (
        {"k": ((1, 2, 2, 32, 4), "f4"), "v": ((1, 2, 2, 4, 48), "f4")},
        "keys and values of int8 have scales, others none",
    ),
    "values in f32": ({"v": ((1, 2, 2, 4, 48), "f4")}, "keys and values are of different formats"),
    "codes without a sign": (
        {"k": ((1, 2, 2, 32, 4), "u1"), "v": ((1, 2, 2, 4, 48), "u1")},
        "attention reads caches of f32, of bf16's bits or",
    ),
}


def test_scales_that_do_not_fit_are_refused():
    each, limit = jnp.ones((2,), jnp.int32), jnp.zeros((2, 3), jnp.int32)

    def attend_arrays(scales: bool = True, **changed: Any) -> None:
        k, k_scales, v, v_scales = (jnp.zeros(*array) for array in (GOOD_INT8 | changed).values())
        keys, values = ((k, k_scales), (v, v_scales)) if scales else ((k,), (v,))
        q = jnp.ones((2, 3, 4, 32))
        call = jax.jit(lambda k, v: attend_cache(q, None, k, v, 0, None, None, each, each, limit, Scoring(1.0), "dense", after=True))
        jax.block_until_ready(call(keys, values))

    attend_arrays()
    for changed, message in (*BAD_INT8.values(), ({"scales": False}, "keys and values of int8 have scales, others none")):
        with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=message):
            attend_arrays(**changed)


def ties(rng: np.random.Generator, rows: int, group: int) -> np.ndarray:
    """Numbers halfway between two codes, and largest ones around those that lie halfway between two f16 scales."""
    scales = rng.integers(1, 0x7BFE, rows).astype(np.uint16)
    low, high = (each.view(np.float16).astype(np.float64) for each in (scales, scales + np.uint16(1)))
    largest = (127 * np.where(rng.random(rows) < 0.5, low, (low + high) / 2)).astype(np.float32)
    largest = np.nextafter(largest, largest * rng.choice([0.5, 1, 2], rows).astype(np.float32))
    some = (rng.integers(-127, 127, (rows, group)) + 0.5) * low[:, None]
    some[:, 3] = largest
    return some.astype(np.float32)


NUMBERS = {
    "normal": lambda rng, rows, group: rng.normal(size=(rows, group)) * np.exp(3 * rng.normal(size=(rows, 1))),
    "ties": ties,
    "zeros": lambda rng, rows, group: np.where(rng.random((rows, group)) < 0.5, 0.0, -0.0),
    "denormal": lambda rng, rows, group: rng.normal(size=(rows, group)) * 10.0 ** -rng.integers(38, 45, (rows, 1)),
    "scales that are denormal or 0": lambda rng, rows, group: rng.normal(size=(rows, group)) * 10.0 ** -rng.integers(4, 9, (rows, 1)),
    "huge": lambda rng, rows, group: np.clip(rng.normal(size=(rows, group)) * 10.0 ** rng.integers(5, 38, (rows, 1)), -3e38, 3e38),
    "infinite": lambda rng, rows, group: np.where(rng.random((rows, group)) < 0.1, rng.choice([-np.inf, np.inf], (rows, group)), 3.0),
}


@pytest.mark.parametrize("after", [True, False], ids=["read from the cache", "read beside it"])
@pytest.mark.parametrize("name", ["avx512", "avx2"])
@pytest.mark.parametrize("numbers", NUMBERS)
def test_rows_are_quantized_bit_for_bit_as_the_codec_does(numbers, name, after):
    rng = np.random.default_rng(0)
    K, T, group, width = 2, 70, 32, 96
    codec = kv.Format.for_platform("cpu", np.dtype(np.int8), group=group).codec
    new = [jnp.asarray(NUMBERS[numbers](rng, T * K * width // group, group).astype(np.float32).reshape(1, T, K, width)) for _ in range(2)]
    held = [
        jnp.zeros((1, 1, K, *shape), dtype) for shape, dtype in (((width, T), "i1"), ((3, T), "u2"), ((T, width), "i1"), ((T, 3), "u2"))
    ]
    start, count, limit = jnp.zeros((1,), jnp.int32), jnp.full((1,), T, jnp.int32), jnp.arange(T)[None].astype(jnp.int32)
    q = jnp.zeros((1, T, K, width))
    with instructions(name):
        call = jax.jit(lambda k, v: attend_cache(q, new, k, v, 0, None, None, start, count, limit, Scoring(1.0), "dense", after=after))
        out, keys, values = jax.block_until_ready(call(tuple(held[:2]), tuple(held[2:])))
    wanted = [jax.jit(codec.encode)(each) for each in new]
    for got, want in ((keys, wanted[0]), (values, wanted[1])):
        for a, b in zip(got, want, strict=True):
            a = np.asarray(a)[0, 0].transpose((2, 0, 1) if got is keys else (1, 0, 2))
            np.testing.assert_array_equal(a, b[0])
    if numbers in ("normal", "ties", "zeros"):  # queries of 0 weigh all that they see alike
        mean = np.cumsum(codec.decode(wanted[1], -1)[0], axis=0) / np.arange(1, T + 1)[:, None, None]
        np.testing.assert_allclose(out[0], mean, atol=TOLERANCE * np.abs(new[1]).max())


@pytest.mark.parametrize("name", ["avx512", "avx2"])
def test_a_nan_makes_its_groups_scale_one_and_no_other(name):
    """Of what XLA's code of the codec makes of it the scale depends on the size of the array."""
    x = np.full((1, 1, 1, 64), 12.7, np.float32)
    x[..., 40] = np.nan
    held = [jnp.zeros((1, 1, 1, *shape), dtype) for shape, dtype in (((64, 1), "i1"), ((2, 1), "u2"), ((1, 64), "i1"), ((1, 2), "u2"))]
    start, count, limit = jnp.zeros((1,), jnp.int32), jnp.ones((1,), jnp.int32), jnp.zeros((1, 1), jnp.int32)
    new = (jnp.asarray(x),) * 2
    with instructions(name):
        call = jax.jit(lambda k, v: attend_cache(new[0], new, k, v, 0, None, None, start, count, limit, Scoring(1.0), "dense", after=True))
        _, *written = call(tuple(held[:2]), tuple(held[2:]))
    for codes, scales in written:
        np.testing.assert_array_equal(np.asarray(codes).ravel(), np.where(np.isnan(x.ravel()), 0, np.where(np.arange(64) < 32, 127, 13)))
        np.testing.assert_array_equal(np.asarray(scales).ravel().view(np.float16), np.asarray([0.1, np.nan], np.float16))


@pytest.mark.parametrize("name", ["avx512", "avx2"])
@pytest.mark.parametrize("window", [None, 1500])
@pytest.mark.parametrize("rows", [1, 3, 6, 7])
@pytest.mark.parametrize("dtype", [np.float32, jnp.int8])
def test_thousands_of_tokens_are_read_in_parts_and_long_runs_without_changing_the_answer(dtype, rows, window, name):
    rng = np.random.default_rng(rows)
    K, H, V, S, held = 2, 32, 48, 2620, 2571
    format = kv.Format.for_platform("cpu", np.dtype(dtype), group=16)
    k, v = (jnp.asarray(rng.normal(size=(K, S, width)), jnp.float32) for width in (H, V))
    keys, values = format.codec.encode(k), format.codec.encode(v)
    k, v = (np.asarray(format.codec.decode(each, -1), np.float64)[:, :held] for each in (keys, values))
    keys = [each.swapaxes(1, 2).at[:, :, held:].set(each.dtype.type(0x7E00) if each.dtype == jnp.uint16 else 99) for each in keys]
    values = [each.at[:, held:].set(each.dtype.type(0x7E00) if each.dtype == jnp.uint16 else 99) for each in values]
    q = rng.normal(size=(1, 1, K * rows, H)).astype(np.float32)
    scores = q[0, 0].reshape(K, rows, H) @ k.swapaxes(1, 2)
    if window:
        scores[..., : held - window] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = (weights @ v) / weights.sum(-1, keepdims=True)
    none, count, limit = jnp.zeros((1,), jnp.int32), jnp.full((1,), held, jnp.int32), jnp.full((1, 1), held - 1, jnp.int32)
    scoring = Scoring(1.0, window=window)
    with instructions(name):
        call = jax.jit(
            lambda k, v: attend_cache(jnp.asarray(q), None, k, v, 0, None, None, count, none, limit, scoring, "dense", after=True)
        )
        out, *_ = call(tuple(each[None, None] for each in keys), tuple(each[None, None] for each in values))
    np.testing.assert_allclose(np.asarray(out).reshape(K, rows, V), wanted, atol=TOLERANCE * np.abs(v).max())
