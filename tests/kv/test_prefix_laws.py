"""kv.prefix against a model without a tree: hypothesis plays the requests."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.kv.prefix_model import extends
from tests.kv.prefix_rows import Rows

WINDOWS = [(None,), (None,), (5,), (None, 4), (None, 9), (1, None), (3, 7), (None, 2, 6), (1,)]
NAMESPACES = ["a", ("a", 7)]
KINDS_OF_PAGE = st.lists(st.sampled_from([0, 0, 0, 1, 2]), max_size=4)
MARGIN = st.integers(0, 3)
KEEP = st.lists(st.sampled_from([True, True, True, False]), min_size=1, max_size=3)


class Serving(RuleBasedStateMachine):
    """Requests that begin alike, over pools that are always a little too small."""

    @initialize(
        page_size=st.sampled_from([1, 2, 4, 16]),
        windows=st.sampled_from(WINDOWS),
        scale=st.booleans(),
        num_pages=st.integers(4, 14),
        parks=st.sampled_from([True, True, False]),
    )
    def start(self, page_size, windows, scale, num_pages, parks):
        if scale:  # windows of a few pages instead of a few tokens
            windows = [window and window * page_size // 2 + 1 for window in windows]
        self.page_size, self.windows = page_size, list(windows)
        self.live = Rows(page_size, self.windows, num_pages, parks)
        self.prompts = [(namespace, []) for namespace in NAMESPACES]

    def tokens(self, kinds, tail=0):
        """Pages that differ nowhere (0), in the first token (1) or in the last (2), and a few tokens more."""
        whole = [[kind == 1, *[0] * (self.page_size - 2), kind == 2][-self.page_size :] for kind in kinds]
        return [int(token) for page in whole for token in page] + [0] * min(tail, self.page_size - 1)

    def prompt(self, data, kinds, tail):
        """An earlier prompt, most often a late one, cut anywhere or not and continued."""
        namespace, earlier = data.draw(st.sampled_from(self.prompts[-6:]))
        pages = len(earlier) // self.page_size
        kept = data.draw(st.one_of(st.just(pages), st.integers(0, pages))) * self.page_size
        self.prompts.append((namespace, earlier[:kept] + self.tokens(kinds, tail)))
        return self.prompts[-1]

    def some_row(self, data, arriving=False):
        return data.draw(st.sampled_from([row for row in self.live.rows if (row.arriving is not None) == arriving]))

    def any_running(self):
        return any(row.arriving is None for row in self.live.rows)

    @rule(
        data=st.data(),
        kinds=KINDS_OF_PAGE,
        tail=st.integers(0, 3),
        limit=st.sampled_from([None, None, None, 0, 1, 3, 5, 8]),
        grid=st.sampled_from([1, 1, 1, 2, 3]),
        arrive=st.booleans(),
        then=st.sampled_from(["run", "insert", "finish", "cancel"]),
        margin=MARGIN,
    )
    def admit(self, data, kinds, tail, limit, grid, arrive, then, margin):
        row = self.live.start(*self.prompt(data, kinds, tail), limit, grid)
        if row in self.live.rows and row.arriving and arrive:
            self.live.restore(row)
        if row in self.live.rows and then == "cancel":
            self.live.finish(row)
        elif row in self.live.rows and not row.arriving and then != "run":
            self.live.give_back(row, margin)
            self.live.insert(row)
            if then == "finish":
                self.live.finish(row)

    @rule(data=st.data(), kinds=KINDS_OF_PAGE, more=KINDS_OF_PAGE, unpin=st.booleans())
    def two_compute_the_same_and_the_longer_one_runs_on(self, data, kinds, more, unpin):
        namespace, tokens = self.prompt(data, kinds, 0)
        first, second = (self.live.start(namespace, tokens, None, 1) for _ in range(2))
        if first in self.live.rows and not first.arriving:
            self.live.insert(first)
            self.live.finish(first)
        if second in self.live.rows and not second.arriving:
            for times in range(1, 3):
                self.live.grow(second, tokens + self.tokens(more) * times)
                if second not in self.live.rows:
                    return
                self.live.insert(second)
            if unpin:
                self.live.release(second)

    @rule(data=st.data(), count=st.integers(1, 8), kinds=KINDS_OF_PAGE, twice=st.booleans())
    def a_prompt_comes_back_after_its_pages_were_parked(self, data, count, kinds, twice):
        self.live.keep = [True]
        for group in range(len(self.windows)):
            self.live.evict(group, count)
        namespace, tokens = self.prompt(data, kinds, 0)
        for row in [self.live.start(namespace, tokens, None, 1) for _ in range(1 + twice)]:
            if row in self.live.rows and row.arriving:
                self.live.restore(row)

    @precondition(lambda self: any(row.arriving for row in self.live.rows))
    @rule(data=st.data())
    def restore(self, data):
        self.live.restore(self.some_row(data, arriving=True))

    @precondition(any_running)
    @rule(data=st.data(), kinds=KINDS_OF_PAGE)
    def decode(self, data, kinds):
        row = self.some_row(data)
        self.live.grow(row, row.tokens[: len(row.tokens) // self.page_size * self.page_size] + self.tokens(kinds))

    @precondition(any_running)
    @rule(data=st.data(), margin=MARGIN)
    def give_back_what_left_the_window(self, data, margin):
        self.live.give_back(self.some_row(data), margin)

    @precondition(any_running)
    @rule(data=st.data())
    def insert(self, data):
        self.live.insert(self.some_row(data))

    @precondition(any_running)
    @rule(data=st.data(), path_only=st.booleans())
    def finish(self, data, path_only):
        row = self.some_row(data)
        self.live.release(row) if path_only else self.live.finish(row)

    @precondition(lambda self: any(row.arriving for row in self.live.rows))
    @rule(data=st.data())
    def abandon(self, data):
        self.live.finish(self.some_row(data, arriving=True))

    @rule(data=st.data(), count=st.integers(0, 8), keep=KEEP)
    def evict(self, data, count, keep):
        self.live.keep = keep
        self.live.evict(data.draw(st.integers(0, len(self.windows) - 1)), count)

    @rule(data=st.data(), count=st.integers(0, 4))
    def evict_parked(self, data, count):
        group = data.draw(st.integers(0, len(self.windows) - 1))
        assert self.live.tree.evict_parked(group, count) == self.live.model.evict_parked(group, count)

    @rule(namespace=st.sampled_from(NAMESPACES))
    def clear(self, namespace):
        pins = sum(row.match is not None and row.namespace == namespace and row.match.num_pages > 0 for row in self.live.rows)
        if pins:
            with pytest.raises(ValueError, match=f"{pins} matches of namespace"):
                self.live.tree.clear(namespace)
        else:
            self.live.tree.clear(namespace)
            self.live.model.clear(namespace)

    @invariant()
    def references_are_those_of_the_rows_and_the_tree(self):
        for group, pool in enumerate(self.live.pools):
            held = self.live.model.pages(group)
            assert set(held.values()) <= {1}
            for row in self.live.rows:
                held.update(Counter(page for page in row.tables[group] if page is not None))
                held.update(Counter(row.arriving[group] if row.arriving else ()))
            assert {page: pool.count(page) for page in range(pool.num_pages) if pool.count(page)} == held
            assert pool.num_used == len(held)
            assert self.live.tree.num_resident(group) == len(self.live.model.device[group])
            assert self.live.tree.num_parked(group) == len(self.live.model.parked[group])

    @invariant()
    def handles_live_as_long_as_they_may_be_brought_back(self):
        parked = {held for entry in self.live.model.entries.values() for held in entry if held is not None and held < 0}
        matched = {page.handle.number for row in self.live.rows if row.match for pages in row.match.parked for page in pages}
        assert {handle.number for handle in self.live.handles} == parked | matched

    @invariant()
    def what_follows_goes_first_where_there_is_no_window(self):
        for group, window in enumerate(self.windows):
            for order in (self.live.model.device[group], self.live.model.parked[group]) if window is None else ():
                assert not any(extends(later, key) for index, key in enumerate(order) for later in order[index + 1 :])

    @invariant()
    def a_pinned_path_keeps_what_its_match_needs(self):
        for row in self.live.rows:
            if row.match:
                keys = self.live.model.keys(row.namespace, row.tokens, row.match.num_pages)
                for group, window in enumerate(self.windows):
                    for index in self.live.model.needed(window, row.match.num_pages):
                        assert self.live.model.entries[keys[index]][group] is not None

    def teardown(self):
        """Everything stored can be found, and without rows everything can be evicted."""
        if not hasattr(self, "live"):
            return
        self.live.match_everything()
        for row in list(self.live.rows):
            self.live.finish(row)
        self.live.keep = [False]
        for group, pool in enumerate(self.live.pools):
            self.live.tree.evict(group, pool.num_pages)
            assert pool.num_free == pool.num_pages
        for group in range(len(self.windows)):
            self.live.tree.evict_parked(group, self.live.num_handles)
            assert self.live.tree.num_resident(group) == self.live.tree.num_parked(group) == 0
        assert not self.live.handles


TestServing = Serving.TestCase
TestServing.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
