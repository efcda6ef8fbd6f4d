"""What the loader needs of weights, wherever they come from."""

from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from kernels import QuantArray

Box = tuple[slice, ...]  # of a tensor's axes, from the first on: start and stop of each; () is all


class Packing(NamedTuple):
    """How a tensor is stored packed.

    Attributes:
      name: of the format: tensors of one name can be one weight.
      unit: inputs that can't be parted: columns are cut at multiples of it.
      group: inputs that share a scale; None: all.
    """

    name: str
    unit: int
    group: int | None


class Source(Protocol):
    """Named tensors that are read one at a time, so that the host never holds more than the one in hand.

    Names are logical: a weight that is stored in pieces (codes, scales, ...) has one name, and its shape is that of its values.
    """

    @property
    def path(self) -> Path:
        """Where the weights lie, for messages."""

    def names(self) -> set[str]:
        """The names of all tensors."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape, row-major: a weight matrix is (out, in)."""

    def read(self, name: str, box: Box = ()) -> np.ndarray:
        """The tensor, or a box of it: float32, bfloat16 or float16 (integers and booleans as they are), read-only where it is a view of the
        file. Of a box, only what is needed is read: its rows, and of packed ones its columns by whole blocks."""

    def packing(self, name: str) -> Packing | None:
        """How the tensor is stored, if a `QuantArray` holds just that; else None."""

    def packed(self, name: str, box: Box = ()) -> QuantArray:
        """A tensor that has a `packing`, or a box of it, as it is stored: numpy arrays."""
