"""Huge pages under arrays that are read over and over: a walk through 4 KiB pages costs a decode step a twentieth of its time."""

import ctypes
import sys
from typing import Any

import jax

WINDOW = 2**21  # bytes of a huge page of x86-64
COLLAPSE = 25  # MADV_COLLAPSE of Linux 6.1 on (madvise(2)): moves what is there, now, whatever the system's setting for new memory is


def use_huge_pages(tree: Any) -> int:
    """Moves a tree's arrays into huge pages where the kernel can; what they hold, and where they seem to lie, stays.

    A huge page serves whatever lies beside an array in its 2 MiB too, so that small arrays profit as well.

    Args:
      tree: arrays on CPU devices; others are left alone.

    Returns:
      How many huge pages lie under them now; 0 where there are none to be had.
    """
    if sys.platform != "linux":
        return 0
    windows = set()
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            if shard.device.platform == "cpu" and shard.data.nbytes > 0:
                start = shard.data.unsafe_buffer_pointer()
                windows.update(range(start // WINDOW, -(-(start + shard.data.nbytes) // WINDOW)))
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return sum(madvise(window * WINDOW, WINDOW, COLLAPSE) == 0 for window in windows)
