"""Several slots side by side in one row of an array, so that the row fills the lanes of a TPU's tiles.

A TPU lays the last two axes of an array out in tiles of 8 x 128 numbers, and pads them to whole ones. An array whose last axis is narrow,
such as a scale array with 4 numbers per head, is therefore stored by its compiler with another axis last, the slots if they are many; and
then it can't be written slot by slot: each program turns the whole array over and back. n slots of K heads of W numbers as one row of
K * n * W, a whole number of 128, stay as they are and cost no padding.
"""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Packing:
    """How n slots share a row; for n = 2, K = 2 and W = 3 the row is

        slot  a a a b b b a a a b b b
        head  0 0 0 0 0 0 1 1 1 1 1 1

    Attributes:
      slots: n.
      heads: K; one after another, so that the row can be split by heads.
      width: W.
      padding: numbers at the row's end that mean nothing.
    """

    slots: int
    heads: int
    width: int
    padding: int = 0

    @classmethod
    def to_fill(cls, lanes: int, heads: int, width: int, most: int) -> "Packing | None":
        """The fewest slots, a power of two, that fill rows of a multiple of `lanes` numbers; None if a head does.

        Args:
          most: slots that may share a row at most, a power of two: where more would be needed, rows are padded.
        """
        if width % lanes == 0:
            return None
        slots = 1
        while slots < most and slots * heads * width % lanes:
            slots *= 2
        return cls(slots, heads, width, -slots * heads * width % lanes)

    @property
    def lanes(self) -> int:
        """Numbers per row."""
        return self.heads * self.slots * self.width + self.padding

    def pack(self, x: jax.Array) -> jax.Array:
        """[..., R * n, K, W] -> [..., R, 1, lanes]."""
        lead = x.shape[:-3]
        x = x.reshape(*lead, -1, self.slots, self.heads, self.width).swapaxes(-3, -2)
        x = x.reshape(*lead, x.shape[-4], 1, -1)
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, self.padding)]) if self.padding else x

    def unpack(self, x: jax.Array) -> jax.Array:
        """[..., R, 1, lanes] -> [..., R * n, K, W]."""
        lead, rows = x.shape[:-3], x.shape[-3]
        x = x[..., : self.lanes - self.padding].reshape(*lead, rows, self.heads, self.slots, self.width).swapaxes(-3, -2)
        return x.reshape(*lead, rows * self.slots, self.heads, self.width)
