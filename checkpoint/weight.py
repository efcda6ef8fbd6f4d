"""How a weight of the parameter tree, or a part of it, is made of a checkpoint's tensors."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from checkpoint.source import Box, Source

Place = tuple[str, ...]  # of a weight in the parameter tree
Parts = Sequence[np.ndarray]  # each is read when it is asked for
Index = tuple[tuple[int, int], ...]  # start and stop along each of a weight's axes


@dataclasses.dataclass(frozen=True)
class Weight:
    """How one weight of the tree, or a part of it, is made.

    Attributes:
      place: where it stands.
      shape: of the whole weight.
      parts: names of the tensors, and the shapes that they must have.
      reads: an index -> which boxes of which tensors make that part of the weight.
      make: what was read, and the index -> the part.
      axes: of those axes, a part can be made of a part of the tensors; along others all is made.
    """

    place: Place
    shape: tuple[int, ...]
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    reads: Callable[[Index], list[tuple[str, Box]]]
    make: Callable[[Parts, Index], np.ndarray]
    axes: frozenset[int]

    def cut(self, source: Source, index: Index) -> np.ndarray:
        """A part of the weight, of which nothing else is read that can be told apart."""
        wanted = tuple(part if axis in self.axes else (0, size) for axis, (part, size) in enumerate(zip(index, self.shape, strict=True)))
        value = self.make(_Parts(source, self.reads(wanted)), wanted)
        rest = tuple(slice(None) if axis in self.axes else slice(*part) for axis, part in enumerate(index))
        return value[rest] if rest else value


class _Parts(Sequence):
    """What makes a weight, each tensor (or box of one) read when it is asked for."""

    def __init__(self, source: Source, reads: Sequence[tuple[str, Box]]):
        self._source, self._reads = source, reads

    def __len__(self) -> int:
        return len(self._reads)

    def __getitem__(self, number: int) -> np.ndarray:
        return self._source.read(*self._reads[number])


def one(
    place: Place,
    name: str,
    shape: tuple[int, ...],
    into: tuple[int, ...] | None = None,
    change: Callable[[np.ndarray], np.ndarray] | None = None,
) -> Weight:
    """A weight that is a tensor, perhaps in another shape: each axis of the tensor is one or several neighbouring ones of the weight.

    Args:
      change: of the values, in the weight's shape; it must leave the axes along which the tensor is cut as they are.
    """
    into = shape if into is None else into
    groups = _groups(shape, into)

    def reads(index: Index) -> list[tuple[str, Box]]:
        return [
            (
                name,
                tuple(slice(*(bound * (size // into[first]) for bound in index[first])) for size, first in zip(shape, groups, strict=True)),
            )
        ]

    def make(parts: Parts, index: Index) -> np.ndarray:
        value = parts[0].reshape([stop - start for start, stop in index])
        return value if change is None else change(value)

    return Weight(place, into, ((name, shape),), reads, make, frozenset(groups))


def _groups(shape: tuple[int, ...], into: tuple[int, ...]) -> list[int]:
    """Of each axis of `shape`, the first of those of `into` that it is split into."""
    firsts, at = [], 0
    for size in shape:
        firsts.append(at)
        product = 1
        while product < size or at == firsts[-1]:
            product *= into[at]
            at += 1
    return firsts


def padded(weight: Weight, rows: int) -> Weight:
    """With as many rows of zeros at the end that no tensor has."""
    held = weight.shape[0]

    def known(index: Index) -> Index:
        return ((min(index[0][0], held), min(index[0][1], held)), *index[1:])

    def make(parts: Parts, index: Index) -> np.ndarray:
        value = weight.make(parts, known(index))
        missing = index[0][1] - index[0][0] - len(value)
        return value if not missing else np.concatenate([value, np.zeros((missing, *value.shape[1:]), value.dtype)])

    shape = (held + rows, *weight.shape[1:])
    return Weight(weight.place, shape, weight.parts, lambda index: weight.reads(known(index)), make, weight.axes) if rows else weight


def copied(weight: Weight, copies: int) -> Weight:
    """With each entry along the first axis as often as `copies` says."""
    shape = (weight.shape[0] * copies, *weight.shape[1:])

    def own(index: Index) -> Index:
        return ((index[0][0] // copies, -(-index[0][1] // copies)), *index[1:])

    def make(parts: Parts, index: Index) -> np.ndarray:
        return weight.make(parts, own(index))[np.arange(*index[0]) // copies - index[0][0] // copies]

    return Weight(weight.place, shape, weight.parts, lambda index: weight.reads(own(index)), make, weight.axes) if copies > 1 else weight


def whole_rows(weight: Weight) -> Weight:
    """Not to be cut along its first axis, whose entries change places."""
    return dataclasses.replace(weight, axes=weight.axes - {0})


def stacked(parts: Parts) -> np.ndarray:
    """Like `np.stack`, one part at a time: they are read when they are asked for."""
    first = parts[0]
    out = np.empty((len(parts), *first.shape), first.dtype)
    out[0] = first
    del first
    for number in range(1, len(parts)):
        out[number] = parts[number]
    return out
