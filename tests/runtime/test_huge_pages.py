"""runtime.use_huge_pages."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np

from runtime import use_huge_pages
from runtime.huge_pages import WINDOW


def huge() -> int:
    """Bytes of this process that lie in huge pages."""
    return int(re.search(r"AnonHugePages:\s+(\d+) kB", pathlib.Path("/proc/self/smaps_rollup").read_text())[1]) * 1024


def test_arrays_move_into_huge_pages_and_keep_what_they_hold():
    numbers = np.random.default_rng(0).integers(0, 2**31, 4 * WINDOW // 4, np.int32)
    tree = {"large": jnp.asarray(numbers) + 0, "small": jnp.arange(1000), "none": jnp.zeros((0,))}
    jax.block_until_ready(tree)
    before, pages = huge(), use_huge_pages(tree)
    assert huge() >= min(before, pages * WINDOW)  # 0 pages where the system has none
    assert pages == 0 or pages >= 3  # all windows that lie within the large one
    np.testing.assert_array_equal(tree["large"], numbers)
    np.testing.assert_array_equal(tree["small"], np.arange(1000))
    assert use_huge_pages(tree) >= pages  # again changes nothing


def test_nothing_to_move_is_no_error():
    assert use_huge_pages({}) == 0 and use_huge_pages({"none": jnp.zeros((0,))}) == 0
