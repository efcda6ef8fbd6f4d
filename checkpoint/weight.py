"""How a weight of the parameter tree, or a part of it, is made of a checkpoint's tensors."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from checkpoint.source import Box, Packing, Source
from kernels import QuantArray
from runtime import UserError

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
      make: what was read, and the index -> the part. It does the same to all inputs: so the arrays of packed tensors, which have fewer
        numbers per row, can be given to it one by one, with an index whose last axis is as long as theirs.
      axes: of those axes, a part can be made of a part of the tensors; along others all is made.
      inputs: how many of the last axes are inputs of a product, and one axis of the tensors.
      side_by_side: the axis, and what follows one another along it.
      turned: `reads` and `make` of packed tensors, if those have their rows of inputs last where others have them first.
    """

    place: Place
    shape: tuple[int, ...]
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    reads: Callable[[Index], list[tuple[str, Box]]]
    make: Callable[[Parts, Index], np.ndarray]
    axes: frozenset[int]
    inputs: int = 1
    side_by_side: tuple[int, tuple["Weight", ...]] | None = None
    turned: tuple[Callable[[Index], list[tuple[str, Box]]], Callable[[Parts, Index], np.ndarray]] | None = None

    def cut(self, source: Source, index: Index) -> np.ndarray:
        """A part of the weight, of which nothing else is read that can be told apart."""
        wanted = self._made(index)
        value = self.make(_Parts(source, self.reads(wanted)), wanted)
        rest = self._rest(index)
        return value[rest] if rest else value

    def packing(self, source: Source) -> Packing | None:
        """How all its tensors are stored packed; None if they are not, or not all in the same way."""
        found = {source.packing(name) for name, _ in self.parts}
        return found.pop() if len(found) == 1 else None

    def cut_packed(self, source: Source, index: Index) -> QuantArray:
        """`cut`, as the file stores it: a weight that has a `packing`, with its inputs in one axis.

        Raises:
          UserError: its tensors can't be read in that part, or their inputs are in different orders.
        """
        wanted, rows = self._made(index), len(self.shape) - self.inputs
        reads, make = self.turned or (self.reads, self.make)
        found = [source.packed(*read) for read in reads(wanted)]
        orders = [each.order for each in found]
        if any(order is not None for order in orders):
            if not all(order is not None and np.array_equal(order, orders[0]) for order in orders):
                raise UserError(
                    f"{source.path}: the tensors of {'.'.join(self.place)} order their inputs in different ways, and can't be one packed "
                    "weight: use --weights=bf16"
                )
            found = [each.replace(order=None) for each in found]
        rest = self._rest(index)[:rows]

        def made(*arrays: np.ndarray) -> np.ndarray:
            value = make(arrays, (*wanted[:rows], (0, arrays[0].shape[-1])))
            return np.ascontiguousarray(value[rest] if rest else value)

        return jax.tree.map(made, *found).replace(order=orders[0])

    def _made(self, index: Index) -> Index:
        return tuple(part if axis in self.axes else (0, size) for axis, (part, size) in enumerate(zip(index, self.shape, strict=True)))

    def _rest(self, index: Index) -> tuple[slice, ...]:
        return tuple(slice(None) if axis in self.axes else slice(*part) for axis, part in enumerate(index))


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
    inputs: int = 1,
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

    return Weight(place, into, ((name, shape),), reads, make, frozenset(groups), inputs)


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
    return dataclasses.replace(weight, shape=shape, reads=lambda index: weight.reads(known(index)), make=make) if rows else weight


def copied(weight: Weight, copies: int) -> Weight:
    """With each entry along the first axis as often as `copies` says."""
    shape = (weight.shape[0] * copies, *weight.shape[1:])

    def own(index: Index) -> Index:
        return ((index[0][0] // copies, -(-index[0][1] // copies)), *index[1:])

    def make(parts: Parts, index: Index) -> np.ndarray:
        return weight.make(parts, own(index))[np.arange(*index[0]) // copies - index[0][0] // copies]

    return dataclasses.replace(weight, shape=shape, reads=lambda index: weight.reads(own(index)), make=make) if copies > 1 else weight


def whole_rows(weight: Weight) -> Weight:
    """Not to be cut along its first axis, whose entries change places."""
    return dataclasses.replace(weight, axes=weight.axes - {0})


def side_by_side(axis: int, weights: Sequence[Weight]) -> Weight:
    """One weight of several that follow one another along `axis`, along which it is not cut."""
    first, sizes = weights[0], [weight.shape[axis] for weight in weights]
    shape = (*first.shape[:axis], sum(sizes), *first.shape[axis + 1 :])

    def own(index: Index, number: int) -> Index:
        return (*index[:axis], (0, sizes[number]), *index[axis + 1 :])

    def reads(index: Index) -> list[tuple[str, Box]]:
        return [read for number, weight in enumerate(weights) for read in weight.reads(own(index, number))]

    def make(parts: Parts, index: Index) -> np.ndarray:
        out, read, at = None, 0, [slice(None)] * axis
        for number, weight in enumerate(weights):  # one after the other: they are read when they are asked for
            count, start = len(weight.reads(own(index, number))), sum(sizes[:number])
            value = weight.make(_Some(parts, read, count), own(index, number))
            if out is None:
                out = np.empty((*value.shape[:axis], sum(sizes), *value.shape[axis + 1 :]), value.dtype)
            out[(*at, slice(start, start + sizes[number]))] = value
            read += count
            del value
        return out

    tensors = tuple(dict.fromkeys(part for weight in weights for part in weight.parts))
    return Weight(first.place, shape, tensors, reads, make, first.axes - {axis}, first.inputs, (axis, tuple(weights)))


class _Some(Sequence):
    """Some of the parts, not read yet."""

    def __init__(self, parts: Parts, first: int, count: int):
        self._parts, self._first, self._count = parts, first, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> np.ndarray:
        return self._parts[self._first + range(self._count)[number]]


def stacked(parts: Parts) -> np.ndarray:
    """Like `np.stack`, one part at a time: they are read when they are asked for."""
    first = parts[0]
    out = np.empty((len(parts), *first.shape), first.dtype)
    out[0] = first
    del first
    for number in range(1, len(parts)):
        out[number] = parts[number]
    return out
