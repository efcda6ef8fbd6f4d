"""What a compiled program does to whole arrays, as its text says."""

import re
from collections.abc import Iterable
from typing import Any

import jax


def whole_copies(text: str, arrays: Any) -> list[str]:
    """Instructions that copy, turn over, widen or reshape all of an array of one of these shapes, wherever to.

    Moves of an array to a TPU's vector memory and back ("copy-start") are left out: the compiler may keep small ones there.

    Args:
      text: of a compiled program, `executable.as_text()`.
      arrays: a tree of arrays or of their shapes and dtypes; order and sizes of 1 are not told apart.
    """
    sizes = {_sizes(leaf.shape) for leaf in jax.tree.leaves(arrays)}
    found = re.findall(r"^ *(?:ROOT )?%?\S+ = (\w+\[([\d,]+)\]\S* (?:copy|transpose|convert|reshape)\(.*)$", text, re.MULTILINE)
    return [line[:200] for line, shape in found if _sizes(map(int, shape.split(","))) in sizes]


def _sizes(shape: Iterable[int]) -> tuple[int, ...]:
    """In no order, and without those of 1."""
    return tuple(sorted(size for size in shape if size > 1))
