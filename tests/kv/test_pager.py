"""kv.Pager: rows that share pages hold their own tokens, whatever is reserved, rewound, forked, cached and evicted."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import kv
import kv.pager
from kv.host_store import HostStore
from kv.offload import HostPages
from runtime import UserError

ROWS, CAPACITY, MARGIN = 3, 40, 3


@dataclasses.dataclass(frozen=True)
class Layers:
    cache_layers: tuple[kv.LayerSpec, ...]


FULL, LOCAL = kv.LayerSpec(2, 8, 8), kv.LayerSpec(2, 8, 8, window=7)
MODELS = {"full": Layers((FULL,)), "hybrid": Layers((FULL, LOCAL)), "local": Layers((LOCAL,))}


def empty(pools: tuple[int, ...], page_size: int) -> kv.Cache:
    """A cache without layers: lengths and tables are all that a pager sets."""
    tables = tuple(jnp.full((ROWS, -(-CAPACITY // page_size)), size, jnp.int32) for size in pools)
    return kv.Cache(stores=(), lengths=jnp.zeros((ROWS,), jnp.int32), places=(), capacity=CAPACITY, tables=tables)


class Rows(RuleBasedStateMachine):
    """Pools whose slots hold token ids instead of keys: what a row reads must be what it wrote."""

    @initialize(
        model=st.sampled_from(sorted(MODELS)),
        page_size=st.sampled_from([1, 2, 4, 8]),
        scarce=st.booleans(),
        host_bytes=st.sampled_from([None, 0, 2_000, 10**6]),
    )
    def begin(self, model, page_size, scarce, host_bytes):
        self.config = MODELS[model]
        self.format = kv.Format(page_size=page_size, margin=MARGIN)
        sizes = kv.default_pages(self.config, ROWS, CAPACITY, self.format, chunk=8)
        self.pools = tuple(max(4, size // 2) for size in sizes) if scarce else sizes
        self.host = None if host_bytes is None else HostStore(host_bytes)
        self.pager = kv.Pager(self.config, ROWS, CAPACITY, self.format, self.pools, self.host)
        self.windows = kv.page_groups(self.config, CAPACITY, self.format)
        self.cache = empty(self.pools, page_size)
        self.slots = [np.full((size, page_size), -1) for size in self.pools]
        self.tokens: list[list[int]] = [[] for _ in range(ROWS)]
        self.floor = [0] * ROWS  # a row that began with a prefix can't go back below it
        self.most = [0] * ROWS  # tokens that it has held: it can go back by the margin from there

    def apply(self):
        def copy(cache, group, source, target):
            self.slots[group][np.asarray(target)] = self.slots[group][np.asarray(source)]
            return cache

        def read(cache, group, pages):
            return HostPages(tuple((self.slots[group][page].copy(),) for page in pages), (str(group),))

        def write(cache, group, pages, host):
            assert host.kind == (str(group),)
            for page, (content,) in zip(pages, host.pages, strict=True):
                self.slots[group][page] = content
            return cache

        with pytest.MonkeyPatch.context() as patch:
            for name, function in (("copy_pages", copy), ("read_pages", read), ("write_pages", write)):
                patch.setattr(kv.pager, name, function)
            self.cache = self.pager.apply(self.cache)

    def write(self, row, new):
        """Reserves and writes; what does not fit is left out, as the device does. Returns how many were written."""
        held = len(self.tokens[row])
        reach = self.pager.reserve(row, held, held + len(new))
        self.apply()
        assert held <= reach <= min(held + len(new), CAPACITY) or reach == held
        for position in range(held, reach):
            for table, slots in zip(self.cache.tables, self.slots, strict=True):
                page, slot = divmod(position, self.format.page_size)
                slots[int(table[row, page]), slot] = new[position - held]
        self.tokens[row] += new[: reach - held]
        self.most[row] = max(self.most[row], len(self.tokens[row]))
        self.pager.forget(row, len(self.tokens[row]))
        return reach - held

    @rule(row=st.integers(0, ROWS - 1), prompt=st.lists(st.integers(0, 1), min_size=1, max_size=24))
    def start(self, row, prompt):
        held = self.pager.start(row, prompt)
        assert held < len(prompt)
        self.tokens[row], self.floor[row], self.most[row] = prompt[:held], held, held
        self.apply()
        assert int(self.cache.lengths[row]) == held
        while (rest := prompt[len(self.tokens[row]) :]) and self.write(row, rest[:8]):
            pass
        self.pager.commit(row, self.tokens[row])

    @rule(row=st.integers(0, ROWS - 1), new=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def go_on(self, row, new):
        self.write(row, new)

    @rule(row=st.integers(0, ROWS - 1), back=st.integers(1, MARGIN))
    def rewind(self, row, back):
        length = max(self.most[row] - back, self.floor[row])
        if length < len(self.tokens[row]):
            del self.tokens[row][length:]
            self.pager.keep(row, length)

    @rule(source=st.integers(0, ROWS - 1), to=st.integers(0, ROWS - 1))
    def fork(self, source, to):
        if source != to:
            self.pager.fork(source, to, len(self.tokens[source]))
            self.tokens[to], self.floor[to] = list(self.tokens[source]), len(self.tokens[source])
            self.most[to] = len(self.tokens[source])

    @rule(row=st.integers(0, ROWS - 1))
    def release(self, row):
        self.pager.release(row)
        self.tokens[row], self.floor[row], self.most[row] = [], 0, 0

    @precondition(lambda self: hasattr(self, "pager"))
    @invariant()
    def rows_hold_what_they_wrote(self):
        self.apply()
        for row, tokens in enumerate(self.tokens):
            for table, slots, window in zip(self.cache.tables, self.slots, self.windows, strict=True):
                first = 0 if window is None else max(0, len(tokens) - window + 1)  # what the next query sees
                for position in range(first, len(tokens)):
                    page, slot = divmod(position, self.format.page_size)
                    assert slots[int(table[row, page]), slot] == tokens[position]

    @precondition(lambda self: hasattr(self, "pager"))
    @invariant()
    def references_are_those_of_rows_and_tree(self):
        self.apply()
        for number, group in enumerate(self.pager.groups):
            table = np.asarray(self.cache.tables[number])
            held = np.bincount(table[table < self.pools[number]], minlength=self.pools[number])
            counts = np.asarray([group.allocator.count(page) for page in range(self.pools[number])])
            assert (counts >= held).all() and (counts - held <= 1).all()
            assert (counts - held).sum() == self.pager.tree.num_resident(number)

    def teardown(self):
        if hasattr(self, "pager"):
            for row in range(ROWS):
                self.pager.release(row)
            self.pager.tree.clear(None)
            assert all(pool.used == 0 for pool in self.pager.pools())
            self.apply()
            assert not self.host


TestRows = Rows.TestCase
TestRows.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


def test_a_shared_page_is_copied_before_it_is_written():
    format = kv.Format(page_size=4)
    pager = kv.Pager(MODELS["full"], ROWS, CAPACITY, format)
    assert pager.reserve(0, 0, 6) == 6
    pager.fork(0, 1, 6)
    assert [(pool.used, pool.shared) for pool in pager.pools()] == [(2, 2)]
    assert pager.reserve(1, 6, 7) == 7  # position 6 is in the second page
    assert [(pool.used, pool.shared) for pool in pager.pools()] == [(3, 1)]
    assert pager.reserve(0, 6, 7) == 7  # nobody shares it any more
    assert [(pool.used, pool.shared) for pool in pager.pools()] == [(3, 1)]


def test_when_pages_run_out_cached_prefixes_go_and_then_the_reach_says_how_far_it_got():
    format = kv.Format(page_size=4)
    pager = kv.Pager(MODELS["full"], ROWS, CAPACITY, format, pages=(3,))
    pager.reserve(0, 0, 8)
    pager.commit(0, list(range(8)))
    pager.release(0)
    assert pager.pools()[0].cached == 2
    assert pager.reserve(1, 0, 11) == 11
    assert pager.tree.counters.evicted_pages == 2
    assert pager.reserve(2, 0, 5) == 0
    assert pager.reserve(1, 11, 20) == 12


def test_what_is_evicted_comes_back_from_the_host_bit_for_bit():
    format = kv.Format(np.dtype(np.int8), page_size=4, group=4, as_bits=True, margin=MARGIN)
    host = HostStore(10**6)
    pager = kv.Pager(MODELS["hybrid"], ROWS, CAPACITY, format, pages=(3, 3), host=host)
    cache = kv.init(MODELS["hybrid"], ROWS, CAPACITY, format, pages=(3, 3))
    rng = np.random.default_rng(0)
    stores = jax.tree.map(lambda array: jnp.asarray(rng.integers(0, 100, array.shape), array.dtype), cache.stores)
    cache = cache.replace(stores=stores)
    prompt = list(range(9))
    pager.reserve(0, 0, 9)
    pager.commit(0, prompt)
    cache = pager.apply(cache)

    def pages(row):
        return [
            np.take(np.asarray(array), np.asarray(cache.tables[store.layout.group])[row, :2], axis=1)
            for store in cache.stores
            for array in jax.tree.leaves(store)
        ]

    before = pages(0)
    pager.release(0)
    assert pager.reserve(1, 0, 12) == 12  # takes every page
    cache = pager.apply(cache)
    assert len(host) == 4 and [pool.cached for pool in pager.pools()] == [0, 0]
    cache = cache.replace(stores=jax.tree.map(jnp.zeros_like, cache.stores))  # what the row writes
    pager.release(1)
    assert pager.start(2, prompt) == 8
    cache = pager.apply(cache)
    for old, new in zip(before, pages(2), strict=True):
        np.testing.assert_array_equal(new, old)
    assert pager.tree.counters.restored_pages == 4


def test_pages_that_left_the_window_and_its_margin_are_given_back():
    pager = kv.Pager(MODELS["hybrid"], ROWS, CAPACITY, kv.Format(page_size=2, margin=MARGIN))
    pager.reserve(0, 0, 20)
    pager.forget(0, 20)
    # After a rewind by the margin the next query is at 17 and sees 11..17: pages 0 to 4, which hold 0..9, are gone.
    assert [pool.used for pool in pager.pools()] == [10, 5]


def test_a_prompt_begins_with_the_pages_of_one_that_begins_alike_but_reads_at_least_one_token():
    pager = kv.Pager(MODELS["full"], ROWS, CAPACITY, kv.Format(page_size=4))
    prompt = list(range(8))
    assert pager.start(0, prompt) == 0
    pager.reserve(0, 0, 8)
    pager.commit(0, prompt)
    assert pager.start(1, prompt) == 4
    assert pager.start(2, [*prompt, 9]) == 8
    assert pager.start(1, prompt, namespace="another tenant") == 0
    assert pager.tree.counters.hit_tokens == 12


def test_a_pool_below_one_page_and_a_format_without_pages_are_refused():
    with pytest.raises(UserError, match="a pool of 0 pages is below 1"):
        kv.pool_sizes(MODELS["full"], 1, 8, kv.Format(page_size=4), 0)
    with pytest.raises(ValueError, match="has no pages"):
        kv.Pager(MODELS["full"], 1, 8, kv.Format())
