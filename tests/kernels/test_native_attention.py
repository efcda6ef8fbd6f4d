"""kernels.attend_cache against what JAX compiles: the same bits written, the same answers, in every layout and number format."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kv
from kernels import cpu
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
        more["round_queries"] = self.rounded and kernels == "native"
        format = kv.Format.for_platform("cpu", np.dtype(self.dtype), margin=8, kernels=kernels, **more)
        width = -(-CAPACITY // PAGE)
        pools = [BATCH * width + 1 for _ in kv.page_groups(self.layers, CAPACITY, format)]
        cache = kv.init(self.layers, BATCH, CAPACITY, format, pools or None)
        rng = np.random.default_rng(1)
        tables = tuple(jnp.asarray(rng.permutation(pool)[: BATCH * width].reshape(BATCH, width), jnp.int32) for pool in pools)
        poison = jax.tree.map(lambda a: jnp.full_like(a, 0x7FC0 if a.dtype == jnp.uint16 else jnp.nan), cache.stores)
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
