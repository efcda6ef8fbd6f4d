"""kv.prefix by example; `test_prefix_laws.py` compares it with a model."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv import PageAllocator, PageGroup, PrefixTree
from kv.residency import Parked


def make(page_size=2, windows=(None,), num_pages=16, on_evict=None):
    pools = [PageAllocator(num_pages) for _ in windows]
    return PrefixTree(page_size, [PageGroup(*each) for each in zip(pools, windows, strict=True)], on_evict), pools


def store(tree, pools, tokens, namespace="a"):
    """Inserts with pages of their own, which only the tree holds afterwards."""
    pages = [pool.alloc(len(tokens) // tree.page_size) for pool in pools]
    tree.insert(namespace, tokens, pages)
    drop(pools, pages)
    return pages


def drop(pools, pages):
    for pool, row in zip(pools, pages, strict=True):
        for page in row:
            if page is not None:
                pool.release(page)


def found(tree, pools, tokens, namespace="a", **options):
    """The pages that match, of which nothing is kept."""
    match = tree.match(namespace, tokens, **options)
    drop(pools, match.pages)
    tree.release(match)
    return match.pages


@given(page_size=st.sampled_from([1, 2, 4, 16]), window=st.one_of(st.none(), st.integers(1, 70)), pages=st.integers(0, 20))
def test_the_pages_needed_are_those_of_the_positions_that_the_next_query_sees(page_size, window, pages):
    query = pages * page_size
    seen = {position // page_size for position in range(query) if window is None or query - position < window}
    assert list(range(PageGroup(PageAllocator(1), window).first_needed(pages, page_size), pages)) == sorted(seen)


def test_prompts_share_the_pages_that_they_have_in_common():
    tree, pools = make()
    (first,) = store(tree, pools, [1, 2, 3, 4, 5, 6])
    assert found(tree, pools, [1, 2, 3, 4, 5, 6, 7]) == [first]
    assert found(tree, pools, [1, 2, 3, 4, 5, 7]) == [first[:2]]
    assert found(tree, pools, [1, 2, 3]) == [first[:1]]
    assert found(tree, pools, [2, 2, 3, 4]) == [[]]
    (second,) = store(tree, pools, [1, 2, 3, 4, 7, 8])
    assert found(tree, pools, [1, 2, 3, 4, 7, 8]) == [[*first[:2], second[2]]]
    assert found(tree, pools, [1, 2, 3, 4, 5, 6]) == [first]
    assert pools[0].num_used == 4  # the second prompt's copies of the first two pages are free again


def test_the_caller_gets_a_reference_to_every_page_and_the_tree_keeps_its_own():
    tree, pools = make()
    (pages,) = store(tree, pools, [1, 2, 3, 4])
    match = tree.match("a", np.array([1, 2, 3, 4], np.int32))
    assert [pools[0].count(page) for page in pages] == [2, 2]
    tree.release(match)
    assert [pools[0].count(page) for page in pages] == [2, 2]
    assert tree.evict(0, 2) == 0  # what a row holds isn't freed by evicting it, so it stays
    drop(pools, match.pages)
    assert all(pools[0].count(page) == 1 for page in pages)


def test_a_limit_leaves_tokens_and_a_grid_cuts_at_its_multiples():
    tree, pools = make()
    (pages,) = store(tree, pools, list(range(10)))
    assert found(tree, pools, list(range(10)), limit=9) == [pages[:4]]
    assert found(tree, pools, list(range(10)), limit=0) == [[]]
    assert found(tree, pools, list(range(10)), grid=2) == [pages[:4]]
    assert found(tree, pools, list(range(10)), grid=3) == [pages[:3]]


def test_namespaces_never_match_each_other():
    tree, pools = make()
    ours, theirs = (store(tree, pools, [1, 2, 3, 4], namespace) for namespace in ("ours", ("theirs", 1)))
    assert found(tree, pools, [1, 2, 3, 4], "ours") == ours
    assert found(tree, pools, [1, 2, 3, 4], ("theirs", 1)) == theirs
    assert found(tree, pools, [1, 2, 3, 4], "nobody") == [[]]
    tree.clear("ours")
    assert found(tree, pools, [1, 2, 3, 4], "ours") == [[]]
    assert found(tree, pools, [1, 2, 3, 4], ("theirs", 1)) == theirs
    assert pools[0].num_used == 2


def test_a_window_needs_only_its_own_pages_and_a_gap_shortens_the_match():
    tree, pools = make(windows=(None, 4))
    pages = [pools[0].alloc(5), [None, None, None, *pools[1].alloc(2)]]
    tree.insert("a", list(range(10)), pages)
    assert found(tree, pools, list(range(10))) == [pages[0], [None] * 3 + pages[1][3:]]  # 7, 8, 9 of the query's 7..10
    assert found(tree, pools, list(range(8))) == [[], []]  # 5, 6, 7 are wanted, 5 is in a page that was given back
    earlier = [pages[0][:3], [None, *pools[1].alloc(2)]]
    assert tree.insert("a", list(range(6)), earlier) == 2
    assert found(tree, pools, list(range(8))) == [pages[0][:4], [None, None, earlier[1][2], pages[1][3]]]
    assert found(tree, pools, [*range(6), 0]) == [pages[0][:3], earlier[1]]


def test_the_end_of_the_least_recent_prompt_goes_first():
    tree, pools = make()
    store(tree, pools, [1, 2, 3, 4, 5, 6])
    store(tree, pools, [1, 2, 7, 8])
    found(tree, pools, [1, 2, 3, 4])
    assert tree.evict(0, 1) == 1  # [5 6]: not used by that match
    assert [len(found(tree, pools, tokens)[0]) for tokens in ([1, 2, 7, 8], [1, 2, 3, 4, 5, 6])] == [2, 2]
    assert tree.evict(0, 1) == 1  # [7 8], then [3 4], and [1 2] last
    assert [len(found(tree, pools, tokens)[0]) for tokens in ([1, 2, 7, 8], [1, 2, 3, 4])] == [1, 2]
    assert tree.evict(0, 5) == 2
    assert pools[0].num_used == tree.num_resident(0) == 0


def test_a_window_group_gives_up_pages_in_the_middle_and_keeps_the_rest():
    tree, pools = make(windows=(None, 3))
    store(tree, pools, list(range(8)))
    assert tree.evict(1, 3) == 3  # the last page alone is within the window of the prompt's end
    assert [len(pages) for pages in found(tree, pools, list(range(8)))] == [4, 4]
    assert [len(pages) for pages in found(tree, pools, list(range(6)))] == [0, 0]
    assert (tree.num_resident(0), tree.num_resident(1)) == (4, 1)
    assert tree.evict(0, 1) == 1  # and nothing can be found after a page that the other group dropped
    assert (tree.num_resident(0), tree.num_resident(1)) == (3, 0)


def test_a_pinned_path_is_not_evicted_even_when_no_row_holds_its_pages():
    tree, pools = make()
    store(tree, pools, [1, 2, 3, 4, 5, 6])
    match = tree.match("a", [1, 2, 3, 4])
    drop(pools, match.pages)
    assert tree.evict(0, 3) == 1
    with pytest.raises(ValueError, match=r"1 matches of namespace 'a' are not released"):
        tree.clear("a")
    tree.release(match)
    assert tree.evict(0, 3) == 2
    with pytest.raises(ValueError, match="a match of 2 pages was released already"):
        tree.release(match)


def test_a_path_that_holds_nothing_stays_while_it_is_pinned():
    tree, pools = make(windows=(1,))  # a query that sees only itself needs no page, but the path has to be known
    (page,) = pools[0].alloc(1)
    tree.insert("a", [1, 2, 3, 4], [[None, page]])
    drop(pools, [[page]])
    match = tree.match("a", [1, 2])
    assert (match.num_pages, match.pages) == (1, [[None]])
    assert tree.evict(0, 1) == 1
    assert found(tree, pools, [1, 2, 3, 4]) == [[None]]
    tree.release(match)
    assert found(tree, pools, [1, 2, 3, 4]) == [[]]


def test_pages_that_a_row_holds_are_parked_in_the_order_in_which_they_can_be_dropped():
    tree, pools = make(on_evict=lambda group, pages: pages)
    twin = pools[0].alloc(1)
    store(tree, pools, [1, 2])
    running = [*twin, *pools[0].alloc(3)]
    tree.insert("a", [1, 2, 3, 4], [running[:2]])
    tree.insert("a", [1, 2, 3, 4, 5, 6, 7, 8], [running])
    assert tree.evict(0, 1) == 1
    assert tree.num_parked(0) == 4
    for left in (3, 2, 1, 0):
        assert tree.evict_parked(0, 1) == 1
        match = tree.match("a", [1, 2, 3, 4, 5, 6, 7, 8])
        assert match.num_pages == left
        tree.release(match)


def test_pages_before_one_that_a_row_holds_are_freed_when_nothing_else_is_left():
    tree, pools = make()
    twin = pools[0].alloc(2)
    store(tree, pools, [1, 2, 3, 4])
    store(tree, pools, [8, 9])
    running = [*twin, *pools[0].alloc(1)]  # of a row that computed the same, and went on
    tree.insert("a", [1, 2, 3, 4, 5, 6], [running])
    assert tree.evict(0, 1) == 1
    assert found(tree, pools, [8, 9]) == [[]]
    assert tree.num_resident(0) == 3  # [8 9] went, though it was used later than [1 2 3 4]
    assert tree.evict(0, 1) == 1
    assert tree.num_resident(0) == 1  # [3 4] is freed, and [5 6] had to go with it
    assert pools[0].count(running[2]) == 1


def test_parked_pages_come_back_where_they_were():
    kept = []
    tree, pools = make(num_pages=4, on_evict=lambda group, pages: kept.append((group, pages)) or [f"copy of {page}" for page in pages])
    (pages,) = store(tree, pools, [1, 2, 3, 4, 5, 6])
    assert tree.evict(0, 2) == 2
    assert kept == [(0, [pages[2], pages[1]])]
    assert (tree.num_resident(0), tree.num_parked(0), pools[0].num_used) == (1, 2, 1)

    match, other = (tree.match("a", [1, 2, 3, 4, 5, 6]) for _ in range(2))
    assert match.pages[0][0] == pages[0]
    assert [parked.handle for parked in match.parked[0]] == [f"copy of {page}" for page in pages[1:]]
    assert tree.evict_parked(0, 2) == 0  # pinned
    fresh = pools[0].alloc(2)
    for wrong in ([fresh[:1]], [[fresh[0], None]], [[fresh[0], fresh[0]]], [[fresh[0], pages[0]]], [[fresh[0], 4]], []):
        with pytest.raises(ValueError):
            tree.restore(match, wrong)
    tree.restore(match, [fresh])
    assert match.pages == [[pages[0], *fresh]]
    assert [pools[0].count(page) for page in fresh] == [2, 2]

    drop(pools, [fresh])
    (again,) = pools[0].alloc(1)  # the other match didn't know, and has room for one of two
    assert [isinstance(page, Parked) for page in other.pages[0]] == [False, True, True]
    with pytest.raises(ValueError, match=r"\[1\] pages for a match with \[2\] parked ones"):
        tree.restore(other, [[again]])
    assert found(tree, pools, [1, 2, 3, 4, 5, 6]) == [[pages[0], *fresh]]


def test_parked_pages_are_dropped_least_recent_first_and_with_what_follows():
    tree, pools = make(on_evict=lambda group, pages: pages)
    store(tree, pools, [1, 2, 3, 4])
    store(tree, pools, [5, 6])
    tree.evict(0, 3)
    assert tree.evict_parked(0, 1) == 1
    match = tree.match("a", [1, 2, 3, 4])
    assert (match.num_pages, tree.num_parked(0)) == (1, 2)
    tree.release(match)
    assert tree.evict_parked(0, 1) == 1  # [5 6]: the match was later
    assert tree.match("a", [5, 6]).num_pages == 0
    assert tree.evict_parked(0, 9) == 1


def test_a_hook_that_forgets_a_page_is_an_error_and_nothing_is_evicted():
    tree, pools = make(on_evict=lambda group, pages: [])
    store(tree, pools, [1, 2])
    with pytest.raises(ValueError, match="on_evict gave 0 handles for 1 pages"):
        tree.evict(0, 1)
    assert tree.num_resident(0) == pools[0].num_used == 1


def test_counters_add_up():
    tree, pools = make(windows=(None, 3), on_evict=lambda group, pages: [page if page % 2 else None for page in pages])
    store(tree, pools, list(range(8)))
    found(tree, pools, [*range(8), 9])
    found(tree, pools, [5, 6, 7])
    tree.evict(1, 4)  # of 0, 1, 2, 3 the odd ones are parked
    assert dataclasses.asdict(tree.counters) == {
        "lookups": 2,
        "hit_tokens": 8,
        "missed_tokens": 4,
        "hit_pages": 5,
        "inserted_pages": 8,
        "parked_pages": 2,
        "restored_pages": 0,
        "evicted_pages": 4,
    }


@pytest.mark.parametrize("tokens", [[1.0, 2.0], [2**31, 0], [[1, 2]], [True, False], np.array([2**32 + 1, 2], np.int64), ["1", "2"]])
def test_tokens_that_would_have_to_be_cut_are_an_error(tokens):
    tree, pools = make()
    store(tree, pools, [1, 2])
    with pytest.raises(ValueError, match="give a sequence of ids that are int32"):
        tree.match("a", tokens)


def test_pages_that_can_not_be_stored_are_an_error_and_change_nothing():
    tree, pools = make(windows=(None, 4))
    (first, second), (third, fourth) = store(tree, pools, [1, 2, 3, 4])
    free = 9
    for pages, message in [
        ([[first, second]], r"\[2\] pages for 2 whole pages of tokens in each of 2 groups"),
        ([[first], [third]], r"\[1, 1\] pages for 2 whole pages"),
        ([[first, None], [third, None]], "None among the pages of group 0, which has no window"),
        ([[first, free], [third, fourth]], "page 9 of group 0 has 0 references"),
        ([[first, 16], [third, fourth]], r"page 16 is outside the pool's 0\.\.15"),
        ([[first, second], [third, third]], "page 0 of group 1 would stand for 2 prefixes"),
        ([[second, first], [third, fourth]], "page 1 of group 0 would stand for 2 prefixes"),
    ]:
        with pytest.raises(ValueError, match=message):
            tree.insert("a", [1, 2, 3, 4], pages)
    with pytest.raises(ValueError, match="page 0 of group 0 would stand for 2 prefixes: a page is stored once"):
        tree.insert("b", [1, 2, 3, 4], [[first, second], [third, fourth]])
    assert found(tree, pools, [1, 2, 3, 4], "b") == [[], []]
    assert [pool.num_used for pool in pools] == [2, 2]
    assert [pool.num_shared for pool in pools] == [0, 0]
    assert found(tree, pools, [1, 2, 3, 4]) == [[first, second], [third, fourth]]


@pytest.mark.parametrize(
    "page_size, windows, error", [(3, [None], "size 3"), (0, [None], "size 0"), (2, [], "0 page"), (2, [0], "window 0")]
)
def test_a_tree_that_can_not_be_is_an_error(page_size, windows, error):
    with pytest.raises(ValueError, match=error):
        make(page_size, windows)


@pytest.mark.parametrize("options", [{"limit": -1}, {"grid": 0}])
def test_a_match_within_nothing_is_an_error(options):
    with pytest.raises(ValueError, match="give at least 0 tokens and 1 page"):
        make()[0].match("a", [1, 2], **options)
