"""Pagers of a split cache: rows have pages of their own part, in numbers of the whole pool, and prefixes are of a part."""

import jax.numpy as jnp
import numpy as np
import pytest

import kv
from tests.kv.test_cache import Layers

ROWS, CAPACITY, PAGE, PARTS = 4, 32, 4, 2
WIDE = kv.LayerSpec(num_kv_heads=2, key_dim=4, value_dim=4)


@pytest.fixture
def made():
    config, format = Layers((WIDE,)), kv.Format(page_size=PAGE)
    pools = [pool * PARTS for pool in kv.pool_sizes(config, ROWS // PARTS, CAPACITY, format, None)]
    return kv.SplitPager(config, ROWS, CAPACITY, format, pools, PARTS), kv.init(config, ROWS, CAPACITY, format, pools), pools[0]


def pages_of(cache, row):
    table = np.asarray(cache.tables[0])[row]
    return table[table < cache.stores[0].num_pages].tolist()


def test_rows_have_pages_of_their_own_part(made):
    pager, cache, total = made
    for row in range(ROWS):
        assert pager.reserve(row, 0, 9) == 9
    cache = pager.apply(cache)
    held = [pages_of(cache, row) for row in range(ROWS)]
    assert all(len(pages) == 3 for pages in held) and len({page for pages in held for page in pages}) == 12
    for row, pages in enumerate(held):
        assert all(page // (total // PARTS) == row // (ROWS // PARTS) for page in pages)
    assert pager.pools()[0].used == 12 and pager.pools()[0].total == total
    pager.release(3)
    assert pages_of(pager.apply(cache), 3) == [] and pager.pools()[0].used == 9


def test_a_prefix_is_found_by_rows_of_the_same_part(made):
    pager, cache, _ = made
    prompt = list(range(10))
    assert pager.start(2, prompt) == 0 and pager.reserve(2, 0, 10) == 10
    pager.commit(2, prompt)
    assert pager.start(3, prompt) == 8  # two whole pages
    assert pager.start(0, prompt) == 0
    cache = pager.apply(cache)
    assert pages_of(cache, 3) == pages_of(cache, 2)[:2] and pages_of(cache, 0) == []
    assert np.asarray(cache.lengths).tolist() == [0, 0, 0, 8]
    assert (pager.counters().lookups, pager.counters().hit_tokens) == (3, 8)


def test_a_shared_page_is_copied_before_it_is_written_to_in_its_own_part(made):
    pager, cache, total = made
    prompt = list(range(8))
    assert pager.reserve(2, 0, 8) == 8
    pager.commit(2, prompt)
    cache = pager.apply(cache)
    first = pages_of(cache, 2)
    marked = cache.stores[0].tensors["k"].parts[0].at[:, first[0]].set(7.0)
    tensors = {**cache.stores[0].tensors, "k": cache.stores[0].tensors["k"].replace(parts=(marked,))}
    cache = cache.replace(stores=(cache.stores[0].replace(tensors=tensors),))
    assert pager.reserve(2, 0, 4) == 4  # the tree holds the page as well
    cache = pager.apply(cache)
    new = pages_of(cache, 2)
    assert new[0] != first[0] and new[0] // (total // PARTS) == 1 and new[1] == first[1]
    assert jnp.all(cache.stores[0].tensors["k"].parts[0][:, new[0]] == 7.0)
