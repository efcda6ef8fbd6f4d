"""kv.pages: reference counts against a dictionary of holders."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kv import OutOfPages, PageAllocator
from runtime import UserError


def test_a_fresh_pool_hands_out_pages_in_order_and_then_the_one_freed_last():
    pool = PageAllocator(5)
    assert pool.alloc(3) == [0, 1, 2]
    for page in (0, 2, 1):
        assert pool.release(page)
    assert pool.alloc(4) == [1, 2, 0, 3]


def test_a_page_is_freed_by_its_last_holder_and_writable_for_the_only_one():
    pool = PageAllocator(2)
    (page,) = pool.alloc(1)
    assert pool.writable(page)
    pool.share(page)
    assert not pool.writable(page)
    assert (pool.num_free, pool.num_used, pool.num_shared, pool.count(page)) == (1, 1, 1, 2)
    assert not pool.release(page)
    assert pool.writable(page)
    assert pool.release(page)
    assert (pool.num_free, pool.num_used, pool.num_shared, pool.count(page)) == (2, 0, 0, 0)
    assert not pool.writable(page)


def test_too_many_pages_take_none_and_the_error_says_how_many_are_free():
    pool = PageAllocator(4)
    pool.alloc(1)
    with pytest.raises(OutOfPages, match=r"4 pages are needed, 3 of 4 are free: evict") as error:
        pool.alloc(4)
    assert (error.value.requested, error.value.free) == (4, 3)
    assert pool.num_free == 3
    assert pool.alloc(3) == [1, 2, 3]


@pytest.mark.parametrize("page", [-1, 3, 100])
@pytest.mark.parametrize("method", ["share", "release", "count", "writable"])
def test_a_page_outside_the_pool_is_an_error(method, page):
    with pytest.raises(ValueError, match=rf"page {page} is outside the pool's 0\.\.2"):
        getattr(PageAllocator(3), method)(page)


@pytest.mark.parametrize("method", ["share", "release"])
def test_a_free_page_is_neither_shared_nor_released(method):
    pool = PageAllocator(3)
    pool.release(*pool.alloc(1))
    with pytest.raises(ValueError, match=f"can't {method} page 0: it has 0 references"):
        getattr(pool, method)(0)
    assert pool.num_free == 3


def test_no_pool_is_empty_and_no_allocation_negative():
    with pytest.raises(UserError, match="a pool of 0 pages is below 1"):
        PageAllocator(0)
    with pytest.raises(ValueError, match="can't allocate -1 pages"):
        PageAllocator(1).alloc(-1)
    assert PageAllocator(1).alloc(0) == []


class Holders(RuleBasedStateMachine):
    """Every reference is one item of `held`; freed pages are a stack."""

    @initialize(num_pages=st.integers(1, 9))
    def start(self, num_pages):
        self.pool = PageAllocator(num_pages)
        self.held: list[int] = []
        self.free = list(range(num_pages))[::-1]

    @rule(count=st.integers(0, 5))
    def alloc(self, count):
        if count > len(self.free):
            with pytest.raises(OutOfPages):
                self.pool.alloc(count)
            return
        expected = [self.free.pop() for _ in range(count)]
        assert self.pool.alloc(count) == expected
        self.held += expected

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data):
        page = data.draw(st.sampled_from(self.held))
        self.pool.share(page)
        self.held.append(page)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        page = data.draw(st.sampled_from(self.held))
        self.held.remove(page)
        last = page not in self.held
        assert self.pool.release(page) == last
        if last:
            self.free.append(page)

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def misuse(self, data):
        page = data.draw(st.sampled_from(self.free))
        for method in (self.pool.share, self.pool.release):
            with pytest.raises(ValueError):
                method(page)

    @invariant()
    def counts_are_those_of_the_holders(self):
        counts = Counter(self.held)
        assert [self.pool.count(page) for page in range(self.pool.num_pages)] == [counts[page] for page in range(self.pool.num_pages)]
        assert [page for page in range(self.pool.num_pages) if self.pool.writable(page)] == sorted(p for p in counts if counts[p] == 1)
        assert self.pool.num_shared == sum(count > 1 for count in counts.values())
        assert (self.pool.num_used, self.pool.num_free) == (len(counts), len(self.free))


TestHolders = Holders.TestCase
TestHolders.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
