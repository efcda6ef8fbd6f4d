"""The laws (1 to 7) for every kind of cache: rings, pages, latent rows, and fewer bits.

"Equal" is: logits within 1e-4 of their scale, in f32 at matmul precision "highest". Kinds that round what they store are compared with the
full forward over rows that are rounded likewise. There, noise of f32 can turn a rounding the other way, and one number of one token then
differs by a step of the format: such logits may be off by `kinds.FLIP` of their scale, and most must be equal.
"""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kv
import kv.layout
from model import Transformer, abstract_params, decode_step, prefill
from tests.hlo import whole_copies
from tests.model.kinds import BF16, CAPACITY, FP8, INT4, INT8, KINDS, MARGIN, WINDOW, B, Course, Pages, T

pytestmark = pytest.mark.usefixtures("short_blocks")
QUICK = ("gqa-ring", "gqa-paged", "gqa-ring-int8")  # what is new in the others is in these, or in the tests of kv and of kernels, too


def every(names=KINDS, quick=QUICK):
    return pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names])


LOSSY = [name for name, kind in KINDS.items() if not kind.exact]
PAGED = [name for name, kind in KINDS.items() if kind.format.page_size]


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(7).integers(0, 101, (B, T)).astype(np.int32)


CALLS = st.tuples(st.sampled_from(["chunk", "chunk", "short", "step", "step", "rewind"]), st.tuples(*[st.integers(0, 8)] * B))


@every(quick=("gqa-paged", "gqa-ring-int8"))
@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(calls=st.lists(CALLS, min_size=4, max_size=14), seed=st.integers(0, 99))
def test_any_course_of_chunks_steps_and_rewinds_gives_the_full_forwards_logits(name, tokens, calls, seed):
    """Laws 1, 2, 3, 4 and 7: any cut, ragged rows in any order, idle rows, slots and pages that are used again."""
    course = Course(KINDS[name], tokens, seed)
    order = np.random.default_rng(seed).permutation(B)
    for call, numbers in calls:
        numbers = np.asarray(numbers)
        if call == "rewind":
            course.rewind(numbers)
        elif call == "step":
            course.step(numbers > 2)
        else:
            course.chunk(8 if call == "chunk" else MARGIN + 1, numbers, order)  # as many as a ring may write before it is read


@every(quick=("gqa-ring",))
def test_one_call_for_all_and_steps_after_it_give_the_full_forwards_logits(name, tokens):
    """A prompt of several windows at once, and a rewind by just the margin."""
    course = Course(KINDS[name], tokens)
    course.chunk(T, np.asarray([22, 1, 13]), None)
    for _ in range(2):
        course.step(np.ones(B, bool))
    np.testing.assert_array_equal(course.held, [24, 3, 15])
    course.rewind(np.asarray([MARGIN, 8, MARGIN]))
    np.testing.assert_array_equal(course.held, [24 - MARGIN, 0, 15 - MARGIN])
    for _ in range(MARGIN):
        course.step(np.ones(B, bool))
    assert course.comparison.equal == 1 or not KINDS[name].exact


@every(LOSSY)
def test_a_prompt_in_chunks_of_any_cut_is_rounded_as_in_one(name, tokens):
    """Law 4 for kinds that round: also inside a chunk, rounded rows are what is read. So almost all is equal."""
    for seed, cuts in enumerate(([8, 8, 8], [3, 8, 1, 8, 4], [1, 2, 8, 8, 5])):
        course = Course(KINDS[name], tokens, seed)
        for cut in cuts:
            course.chunk(8, np.full(B, cut), np.arange(B))
        assert course.held.min() == T
        assert course.comparison.equal >= 0.6


@every(LOSSY)
def test_rounding_moves_the_logits_by_no_more_than_it_must(name, tokens):
    """Law 3. Of numbers of spread 1, a format is off by a spread of

        int8: step / sqrt(12), the step being amax / 127, with amax < 2 in small groups; int4: likewise, the step being range / 15
        floats: up to half a step, evenly spread: 2^-4 / sqrt(3) of a number for e4m3, 2^-8 / sqrt(3) for bf16

    Keys move scores of spread about 1, hence weights, by as much, and values move outputs by less. Both do so in two layers, and errors add
    up as squares do: twice the spread.
    """
    kind = KINDS[name]
    exact, rounded = kind.full(tokens, read_back=False), kind.full(tokens)
    spread = {BF16: 2**-8 / 3**0.5, FP8: 2**-4 / 3**0.5, INT8: 2 / 127 / 12**0.5, INT4: 4 / 15 / 12**0.5}[kind.format.dtype]
    error = np.sqrt(np.mean((rounded - exact) ** 2) / np.mean(exact**2))
    assert 0.1 * spread < error < 2 * spread


@every()
def test_in_one_executable_a_row_is_bit_equal_in_any_company_and_place(name, tokens):
    """Law 2, for calls of eight tokens and for steps."""
    kind, outs = KINDS[name], []
    for rows, counts in (((0, 1, 2), (8, 3, 5)), ((2, 0, 1), (8, 0, 0)), ((1, 0, 2), (8, 8, 1))):
        pages = Pages(kind, seed=counts[1])
        for row, count in zip(rows, counts, strict=True):
            pages.grow(row, 0, 0, count + 1)
        part = np.stack([tokens[0, :8], tokens[1, :8], tokens[2, :8]])
        logits, cache = kind.prefill(pages.into(kind.empty()), part, counts, rows)
        feed = np.full(B, -1)
        feed[rows[0]] = tokens[0, 8]
        after, _ = kind.decode(cache, feed)
        outs.append((logits[0], after[rows[0]]))
    for logits, after in outs[1:]:
        np.testing.assert_array_equal(logits, outs[0][0])
        np.testing.assert_array_equal(after, outs[0][1])


@every(quick=())
def test_a_row_alone_equals_the_same_row_in_a_batch_and_touches_no_other(name, tokens):
    """Law 2, for a prefill of one row into a running batch."""
    course = Course(KINDS[name], tokens)
    course.chunk(8, np.asarray([8, 2, 7]), np.arange(B))
    course.chunk(8, np.asarray([6, 0, 7]), np.arange(B))
    course.pages.grow(1, 2, 2, 8)
    cache = course.pages.into(course.cache)
    before = jax.tree.map(np.array, cache.stores)
    logits, cache = course.kind.prefill(cache, tokens[1:2, 2:10], [8], [1])
    for t in range(8):
        course.comparison.add(1, 2 + t, logits[0, t])
    np.testing.assert_array_equal(cache.lengths, [14, 10, 14])
    for number, (store, old) in enumerate(zip(cache.stores, before, strict=True)):
        pairs = zip(jax.tree.leaves(store), jax.tree.leaves(old), strict=True)
        changed = [np.any(np.asarray(x).view(np.uint8) != y.view(np.uint8), axis=(0, 2, 3, 4)) for x, y in pairs]  # bits: nan is equal
        own = [1] if not course.pages.tables else course.pages.tables[cache.stores[number].layout.group][1]
        for each in changed:
            assert set(np.flatnonzero(each)) <= set(own)
            assert each.any()
    course.cache, course.held = cache, np.asarray(cache.lengths).astype(int)
    course.most = np.maximum(course.most, course.held)
    course.step(np.ones(B, bool))


@every()
def test_donated_caches_stay_where_they_are_in_memory(name, tokens):
    """Law 6, as far as the CPU shows it."""
    kind, pages = KINDS[name], Pages(KINDS[name])
    for row in range(B):
        pages.grow(row, 0, 0, 12)
    cache = pages.into(kind.empty())

    def places(cache):
        return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((cache.stores, cache.lengths))]

    before = places(cache)
    _, cache = kind.prefill(cache, tokens[:, :8], [8, 3, 5], np.arange(B))
    assert places(cache)[:-1] == before[:-1]
    _, cache = kind.decode(cache, [1, 2, -1])
    assert places(cache)[:-1] == before[:-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LOSSY if not name.endswith("tpu")])
def test_on_cpu_no_program_widens_a_whole_array_of_fewer_bits(name):
    """Rings have more slots here than a block, which is widened."""
    kind = KINDS[name]
    if "ring" in name:
        kind = dataclasses.replace(kind, format=dataclasses.replace(kind.format, margin=30))
    cache, zeros = kind.empty(), jnp.zeros((B,), jnp.int32)
    part = jnp.zeros((B, 8), jnp.int32)
    for lowered in (decode_step.lower(kind.model, kind.params, cache, zeros), prefill.lower(kind.model, kind.params, cache, part, zeros)):
        text = lowered.compile().as_text()
        for array in jax.tree.leaves(cache.stores):
            shape = ",".join(map(str, array.shape))
            assert f"[{shape}]" in text
            assert not any(f"{wide}[{shape}]" in text for wide in ("f32", "f16", "bf16", "s32", "f8e4m3fn"))


@every([name for name, kind in KINDS.items() if kind.format.key_order == "KHS" and name[:3] not in ("mqa", "mha")], quick=("gqa-ring",))
@pytest.mark.parametrize(("rows", "capacity"), [(1, 7), (1, 16), (2, 37)])
def test_on_cpu_no_program_copies_a_whole_array_of_the_cache(name, rows, capacity):
    """Law 6, with less than a block of 16 slots, with one, and with more. What one block holds could be read ahead of the loop over blocks,
    together with the write: for one row, each layer then copied an array of f32. Three layers share it: one layer's part is no whole."""
    kind = KINDS[name]
    config = dataclasses.replace(kind.config, layers=kind.config.layers * 3)
    model, params = Transformer(config), nn.meta.unbox(abstract_params(config))
    cache = jax.eval_shape(lambda: kv.init(config, rows, capacity, kind.format))
    each, chunk = jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((rows, 5), jnp.int32)
    for lowered in (decode_step.lower(model, params, cache, each), prefill.lower(model, params, cache, chunk, each)):
        assert whole_copies(lowered.compile().as_text(), cache.stores) == []


@every(PAGED)
def test_rows_may_share_the_pages_of_a_common_beginning(name, tokens):
    """Each goes on in pages of its own, and both answer as if they held all."""
    kind, size = KINDS[name], KINDS[name].format.page_size
    shared = 16
    tokens = tokens.copy()
    tokens[1, :shared] = tokens[0, :shared]
    course = Course(kind, tokens)
    for width in (8, 8):
        course.chunk(8, np.asarray([width, 0, 3]), np.arange(B))
    course.pages.grow(0, shared, shared, 0)  # what the window has left behind is not there to be shared, and not missed
    for table in course.pages.tables:
        table[1, : shared // size] = table[0, : shared // size]
    course.cache = course.cache.replace(lengths=course.cache.lengths.at[1].set(shared))
    course.held[1] = course.most[1] = shared
    for seen in (8, 0):  # both rows, then steps
        if seen:
            course.pages._release = lambda *args: None  # a shared page is not one row's to give away
            course.chunk(8, np.asarray([5, 7, 0]), np.asarray([1, 0, 2]))
        else:
            course.step(np.ones(B, bool))
    np.testing.assert_array_equal(course.held, [22, 24, 7])


@every(PAGED)
def test_tokens_past_a_rows_pages_are_dropped_and_not_counted(name, tokens):
    kind, size = KINDS[name], KINDS[name].format.page_size
    course, whole = Course(kind, tokens), -(-8 // size) * size
    course.chunk(8, np.asarray([8, 8, 5]), np.arange(B))
    np.testing.assert_array_equal(course.cache.room, [whole, whole, -(-5 // size) * size])
    if whole == 8:
        before = jax.tree.map(np.array, course.cache.stores)
        _, cache = kind.decode(course.cache, [1, 2, -1])
        np.testing.assert_array_equal(cache.lengths, [8, 8, 5])  # both stand still
        jax.tree.map(np.testing.assert_array_equal, cache.stores, before)
        course.cache = cache
    logits, cache = kind.prefill(course.cache, np.stack([tokens[2, 5:13]] + [tokens[0, :8]] * 2), [8, 0, 0], [2, 0, 1])
    dropped = min(8, -(-5 // size) * size - 5)
    np.testing.assert_array_equal(cache.lengths, [8, 8, 5 + dropped])
    for t in range(dropped):
        course.comparison.add(2, 5 + t, logits[0, t])


@contextlib.contextmanager
def counted_reads(layout):
    """The block indices that are read of the keys, in a list."""
    reads, make = [], layout.reader

    def counting(self, step, after):
        reader = make(self, step, after)

        def take(array, index, layer, order):
            if order == "KHS":  # the keys'
                jax.debug.callback(lambda i: reads.append(int(i)), index)
            return reader.take(array, index, layer, order)

        return dataclasses.replace(reader, take=take)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "reader", counting)
        yield reads


@pytest.mark.parametrize(
    ("layout", "window", "held", "blocks"),
    [
        (kv.layout.Dense, None, [2, 33, 17], [0, 1, 2]),  # rows share a loop, as long as the longest
        (kv.layout.Dense, None, [15, 0, 7], [0]),
        (kv.layout.Paged, None, [2, 33, 17], [0, 0, 0, 1, 1, 2]),  # each as much as it holds: 1, 3 and 2
        (kv.layout.Paged, None, [15, 0, 16], [0, 0, 0, 1]),
        (kv.layout.Paged, 5, [2, 37, 17], [0, 0, 1, 2]),  # slots 0..2, 33..37 and 13..17
        (kv.layout.Ring, 40, [2, 33, 17], [0, 1, 2]),
        (kv.layout.Ring, 40, [1000, 5000, 2], [0, 1, 2]),  # 48 slots, whatever was held
        (kv.layout.Ring, 5, [1000, 5000, 2], [0]),
        (kv.layout.Ring, 40, [2, 15, 7], [0]),
    ],
)
def test_a_step_reads_no_more_blocks_than_what_is_held_takes(layout, window, held, blocks):
    """Law 5."""
    paged = layout is kv.layout.Paged

    @dataclasses.dataclass(frozen=True)
    class Layers:
        cache_layers = (kv.LayerSpec(2, 8, 8, window=window),)

    format = kv.Format(margin=8 if window == 40 else 3, page_size=4 if paged else None)
    cache = kv.init(Layers(), B, 64 if layout is not kv.layout.Ring else 8192, format, pages=[48] if paged else None)
    tables = (jnp.arange(48, dtype=jnp.int32).reshape(B, 16),) if paged else ()
    step = kv.Step(rows=None, start=jnp.asarray(held), count=jnp.ones(B, jnp.int32), tables=tables)
    ones, spec = jnp.ones((B, 1, 2, 8)), kv.AttentionSpec(scale=0.3, window=window)
    assert isinstance(cache.stores[0].layout, layout)
    with counted_reads(layout) as reads:
        jax.block_until_ready(
            jax.jit(lambda view, step: view.attend(kv.Query(ones), kv.KeyValue(ones, ones), step, spec))(cache.layer(0), step)
        )
        jax.effects_barrier()
    assert sorted(reads) == blocks


def test_the_kinds_are_what_they_are_called():
    for name, kind in KINDS.items():
        shapes = jax.eval_shape(lambda kind=kind: kv.init(kind.config, B, CAPACITY, kind.format, kind.pools))
        found = {store.layout.kind for store in shapes.stores}
        wanted = name.split("-")[1].removesuffix("16")
        assert found == ({"ring", "dense"} if wanted == "ring" else {wanted})
        assert all(getattr(store, "kernels", "xla") == kind.format.kernels for store in shapes.stores)
    assert WINDOW + MARGIN < T < CAPACITY
