"""Pages to host memory and back, copies of pages, and the store of what is off the device: every bit, and every byte counted."""

import collections
import gc
import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kv
import kv.offload
from kv.host_store import Handle, HostStore
from runtime import LEDGER, UserError
from tests.kv import caches
from tests.kv.caches import CODECS, LATENT, WINDOWED, addresses, filled, format_of, page_bytes, same_bits

SLOW = pytest.mark.slow


@pytest.fixture(autouse=True, scope="module")
def short_calls():
    """A few pages are moved in several calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv.offload, "LARGEST", 4)
        yield


KINDS = [
    pytest.param(
        layers, layout, codec, pinned, id=f"{name} {codec} {layout} pinned={pinned}", marks=[SLOW] * ((name, layout, pinned) not in often)
    )
    for name, layers in (("windows", WINDOWED), ("latent", LATENT))
    for layout in ("pages of 4", "pages of 16, as on TPU")
    for codec in CODECS
    for pinned in (False, True)
    for often in (
        [("windows", "pages of 4", codec == "int8")]
        + [("latent", "pages of 4", False), ("windows", "pages of 16, as on TPU", False)] * (codec == "int8"),
    )
]


def pools(cache: kv.Cache, group: int) -> list[np.ndarray]:
    """The arrays of a page group, [L, P, ...], as copies of their bits."""
    arrays = [np.array(array) for store in cache.stores if store.layout.group == group for array in jax.tree.leaves(store)]
    return [array.view(f"u{array.dtype.itemsize}") for array in arrays]


def check_pools(cache: kv.Cache, group: int, want: list[np.ndarray]) -> None:
    for given_array, wanted in zip(pools(cache, group), want, strict=True):
        np.testing.assert_array_equal(given_array, wanted)


@pytest.mark.parametrize(("layers", "layout", "codec", "pinned"), KINDS)
def test_pages_come_back_bit_for_bit_after_others_took_their_place(layers, layout, codec, pinned):
    cache, other = (filled(layers, format_of(layout, codec), seed=seed) for seed in (1, 2))
    for group in range(len(cache.tables)):
        away = [5, 0, 3]
        want, foreign = pools(cache, group), pools(other, group)
        host = kv.read_pages(cache, group, away, pinned=pinned)
        assert len(host) == 3
        assert host.nbytes == 3 * page_bytes(cache, group)
        kinds = {array.sharding.memory_kind if isinstance(array, jax.Array) else "numpy" for page in host.pages for array in page}
        assert kinds == {"pinned_host" if pinned else "numpy"}

        cache = kv.write_pages(cache, group, [3, 5, 0], kv.read_pages(other, group, [1, 2, 4], pinned=pinned))
        overwritten = [array.copy() for array in want]
        for array, others in zip(overwritten, foreign, strict=True):
            array[:, [3, 5, 0]] = others[:, [1, 2, 4]]
        check_pools(cache, group, overwritten)

        cache = kv.write_pages(cache, group, away, host)
        check_pools(cache, group, want)


def cached(seed: int = 1, layers=WINDOWED, layout: str = "pages of 4", codec: str = "int8") -> kv.Cache:
    return filled(layers, format_of(layout, codec), seed=seed)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_pages_are_read_written_and_copied(data):
    cache = cached()
    num_pages = cache.stores[1].num_pages
    numbers = st.lists(st.integers(0, num_pages - 1), max_size=8, unique=True)  # above LARGEST too
    source, target = data.draw(numbers), data.draw(numbers)
    count = min(len(source), len(target))
    source, target = source[:count], target[:count]
    group = cache.stores[1].layout.group
    want = pools(cache, group)
    host = kv.read_pages(cache, group, source)
    for array in want:
        array[:, target] = array[:, source]  # NumPy reads all before it writes
    by_host = data.draw(st.booleans())
    cache = kv.write_pages(cache, group, target, host) if by_host else kv.copy_pages(cache, group, source, target)
    check_pools(cache, group, want)


def test_more_pages_than_one_call_moves_are_moved():
    cache = cached()
    group, count = cache.stores[1].layout.group, 3 * kv.offload.LARGEST + 1
    want = pools(cache, group)
    host = kv.read_pages(cache, group, range(count))
    assert host.nbytes == count * page_bytes(cache, group)
    cache = kv.write_pages(cache, group, range(count)[::-1], host)
    for array in want:
        array[:, :count] = array[:, :count][:, ::-1]
    check_pools(cache, group, want)


def test_a_source_of_a_copy_may_be_the_target_of_another():
    cache = cached()
    group = cache.stores[1].layout.group
    want = pools(cache, group)
    cache = kv.copy_pages(cache, group, [0, 1, 2, 5, 6], [1, 2, 3, 6, 5])
    for array in want:
        array[:, [1, 2, 3, 6, 5]] = array[:, [0, 1, 2, 5, 6]]
    check_pools(cache, group, want)


def test_other_page_groups_keep_their_bits():
    cache = cached()
    one, two = (cache.stores[number].layout.group for number in (0, 1))
    assert one != two
    want = pools(cache, two)
    cache = kv.copy_pages(cache, one, [0], [1])
    cache = kv.write_pages(cache, one, [2], kv.read_pages(cached(seed=2), one, [4]))
    check_pools(cache, two, want)


def test_pages_of_a_new_cache_and_of_one_that_went_through_a_program_are_alike():
    format = format_of("pages of 4", "int8")
    new = kv.init(LATENT, 1, 8, format)
    host = kv.read_pages(new, 0, [0])
    cache = kv.write_pages(cached(layers=LATENT), 0, [3], host)
    for array in pools(cache, 0):
        assert not array[:, 3].any()
    kv.write_pages(new, 0, [1], kv.read_pages(cache, 0, [2]))


def test_moving_no_pages_is_no_work():
    cache = cached()
    before = addresses(cache)
    host = kv.read_pages(cache, 0, [])
    assert (len(host), host.nbytes) == (0, 0)
    cache = kv.copy_pages(kv.write_pages(cache, 0, [], host), 0, [], [])
    assert addresses(cache) == before


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("committed", [False, True])
def test_pages_are_written_and_copied_in_place_and_the_next_ones_compile_nothing(pinned, committed):
    cache = cached()
    if committed:
        cache = jax.device_put(cache, jax.devices()[0])
    cache = kv.write_pages(cache, 0, range(4), kv.read_pages(cache, 0, range(4), pinned=pinned))
    cache = kv.copy_pages(cache, 0, range(4), range(4, 8))
    assert {array.committed for array in jax.tree.leaves(cache.stores)} == {committed}
    before, old = addresses(cache), cache
    with LEDGER.sealed():
        cache = kv.write_pages(cache, 0, [7, 2, 3], kv.read_pages(cache, 0, [4, 9, 8], pinned=pinned))
        cache = kv.copy_pages(cache, 0, [1, 2, 3], [6, 5, 4])
    assert addresses(cache) == before
    assert all(array.is_deleted() for store in old.stores if store.layout.group == 0 for array in jax.tree.leaves(store))
    assert {"fetch_pages", "store_pages", "duplicate_pages"} <= {entry.name for entry in LEDGER.entries if entry.program}


def test_pages_are_split_and_joined_and_each_has_memory_of_its_own():
    cache = cached()
    host = kv.read_pages(cache, 0, [4, 1, 2])
    parts = host.split()
    assert [part.nbytes for part in parts] == [page_bytes(cache, 0)] * 3
    again = kv.HostPages.join([parts[2], parts[0]])
    want = pools(cache, 0)
    cache = kv.write_pages(cache, 0, [7, 8], again)
    for array in want:
        array[:, [7, 8]] = array[:, [2, 4]]
    check_pools(cache, 0, want)
    spans = sorted((array.ctypes.data, array.nbytes) for page in host.pages for array in page)
    assert all(start + size <= after for (start, size), (after, _) in itertools.pairwise(spans))
    with pytest.raises(ValueError, match="pages of 0 kinds can't be joined"):
        kv.HostPages.join([])
    with pytest.raises(ValueError, match="pages of 2 kinds can't be joined"):
        kv.HostPages.join([host, kv.read_pages(cache, 1, [0])])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"codec": "fp8"}, "as float8_e4m3fn in KHS: uint8.* as int8 in KHS"),
        ({"layout": "pages of 16, as on TPU"}, r"as int8 in SKH: int8\[1, 16, 2, 8\] .* as int8 in KHS: int8\[1, 2, 8, 4\]"),
        ({"layers": LATENT}, "index_k of LatentSpec.* where this group has k of LayerSpec"),
        ({"layers": caches.Layers((caches.GLOBAL,) * 2)}, r"int8\[2, 2, 8, 4\] .* int8\[1, 2, 8, 4\]"),
        ({"layers": caches.Layers((caches.GLOBAL, caches.LATENT.cache_layers[0]))}, "index_k of LatentSpec.* where this group has no more"),
    ],
)
def test_pages_of_another_kind_are_refused(other, message):
    cache = cached()
    host = kv.read_pages(cached(**other), 0, [0])
    want = pools(cache, 0)
    with pytest.raises(UserError, match=f"pages hold .*{message}.*: write them to a cache like the one") as caught:
        kv.write_pages(cache, 0, [0], host)
    assert "\n" not in str(caught.value)
    check_pools(cache, 0, want)


def test_pages_and_groups_that_there_are_not_are_refused():
    cache = cached()
    host, last = kv.read_pages(cache, 0, [0, 1]), cache.stores[1].num_pages - 1
    for pages in ([-1, 0], [0, last + 1]):
        wrong = next(page for page in pages if page)
        for call in (
            lambda pages=pages: kv.read_pages(cache, 0, pages),
            lambda pages=pages: kv.write_pages(cache, 0, pages, host),
            lambda pages=pages: kv.copy_pages(cache, 0, pages, [2, 3]),
            lambda pages=pages: kv.copy_pages(cache, 0, [2, 3], pages),
        ):
            with pytest.raises(ValueError, match=rf"page {wrong} is outside the pool's 0\.\.{last}"):
                call()
    with pytest.raises(ValueError, match="1 of 2 pages to write stand there twice"):
        kv.write_pages(cache, 0, [1, 1], host)
    with pytest.raises(ValueError, match="1 of 2 pages to write stand there twice"):
        kv.copy_pages(cache, 0, [2, 3], [1, 1])
    with pytest.raises(ValueError, match="2 pages of contents are given for 1 pages"):
        kv.write_pages(cache, 0, [1], host)
    with pytest.raises(ValueError, match="2 pages can't be copied to 1"):
        kv.copy_pages(cache, 0, [2, 3], [1])
    for group in (-1, 2):
        with pytest.raises(ValueError, match=rf"page group {group} is outside 0\.\.1"):
            kv.read_pages(cache, group, [0])
    dense = filled(WINDOWED, format_of("ring", "int8"))
    with pytest.raises(UserError, match="this cache has no pages"):
        kv.read_pages(dense, 0, [0])


def content(size: int) -> kv.HostPages:
    return kv.HostPages(((np.full(size, size, np.uint8),),), ("bytes",))


def test_the_least_recently_used_content_gives_way():
    store = HostStore(10)
    a, b = store.put(content(4)), store.put(content(5))
    assert (store.nbytes, store.free_bytes, len(store)) == (9, 1, 2)
    assert store.get(a).nbytes == 4  # b is the older one now
    c = store.put(content(3))
    assert store.get(b) is None
    assert [store.get(handle).nbytes for handle in (a, c)] == [4, 3]
    assert (store.nbytes, store.evicted, len(store)) == (7, 1, 2)
    assert store.put(content(11)) is None  # above the limit: nothing gives way
    assert store.nbytes == 7
    store.drop(a)
    store.drop(a)
    assert (store.get(a), store.nbytes, store.evicted) == (None, 3, 1)
    assert HostStore(10).get(c) is None  # a store knows its own handles only


def test_a_content_is_freed_with_its_last_handle():
    store = HostStore(100)
    freed = []

    class Watched(np.ndarray):
        def __del__(self):
            freed.append(self.nbytes)

    handle = store.put(kv.HostPages(((np.zeros(40, np.uint8).view(Watched),),), ("bytes",)))
    other = store.put(content(7))
    assert store.nbytes == 47
    del handle
    gc.collect()
    assert freed == [40]
    assert (store.nbytes, len(store)) == (7, 1)
    assert store.get(other).nbytes == 7


def test_a_store_below_nothing_is_refused():
    with pytest.raises(UserError, match="a host store of -1 bytes is below 0"):
        HostStore(-1)
    assert HostStore(0).put(content(1)) is None


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 30), st.lists(st.tuples(st.sampled_from(["put", "get", "drop", "forget"]), st.integers(0, 12)), max_size=40))
def test_the_store_is_a_queue_by_recency(limit, operations):
    store = HostStore(limit)
    handles: dict[int, Handle] = {}
    model: collections.OrderedDict[int, int] = collections.OrderedDict()  # number -> size, least recently used first
    for number, (operation, value) in enumerate(operations):
        if operation == "put":
            handle = store.put(content(value))
            assert (handle is None) == (value > limit)
            if handle is not None:
                while sum(model.values()) + value > limit:
                    model.popitem(last=False)
                model[number], handles[number] = value, handle
        elif handles:
            chosen = list(handles)[value % len(handles)]
            if operation == "get":
                found = store.get(handles[chosen])
                assert (None if found is None else found.nbytes) == model.get(chosen)
                if chosen in model:
                    model.move_to_end(chosen)
            else:
                if operation == "drop":
                    store.drop(handles[chosen])
                else:
                    del handles[chosen]
                model.pop(chosen, None)
        handle = None
        assert (store.nbytes, len(store)) == (sum(model.values()), len(model))


def test_a_prefix_that_the_tree_parked_comes_back():
    cache = cached()
    group = cache.stores[1].layout.group
    allocator = kv.PageAllocator(cache.stores[1].num_pages)
    store = HostStore(10 * page_bytes(cache, group))
    tree = kv.PrefixTree(
        4, [kv.PageGroup(allocator)], on_evict=lambda _, pages: [store.put(page) for page in kv.read_pages(cache, group, pages).split()]
    )
    pages = allocator.alloc(3)
    tree.insert(None, range(12), [pages])
    for page in pages:
        allocator.release(page)
    want = [array[:, pages] for array in pools(cache, group)]
    assert tree.evict(0, 3) == 3
    assert store.nbytes == 3 * page_bytes(cache, group)
    cache = kv.write_pages(cache, group, pages, kv.read_pages(cached(seed=2), group, pages))  # the pages are somebody else's now

    match = tree.match(None, range(12))
    (parked,) = match.parked
    back = allocator.alloc(5)[2:]
    cache = kv.write_pages(cache, group, back, kv.HostPages.join([store.get(page.handle) for page in parked]))
    tree.restore(match, [back])
    assert match.pages == [back]
    for array, wanted in zip(pools(cache, group), want, strict=True):
        np.testing.assert_array_equal(array[:, back], wanted)
    del parked
    assert store.nbytes == 0  # the tree let go of the handles


def test_host_pages_are_the_pools_numbers():
    cache = cached(codec="bf16")
    store = cache.stores[1]
    (page,) = kv.read_pages(cache, store.layout.group, [3]).pages
    same_bits(list(page), [np.asarray(array)[:, 3] for array in jax.tree.leaves(store)])
