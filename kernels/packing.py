"""Several slots side by side in one row of an array, so that the row fills the lanes of a TPU's tiles.

A TPU lays the last two axes of an array out in tiles of 8 x 128 numbers, and pads them to whole ones. An array whose last axis is narrow,
such as a scale array with 4 numbers per head, is therefore stored by its compiler with another axis last, the slots if they are many; and
then it can't be written slot by slot: each program turns the whole array over and back. n slots of K heads of W numbers as one row of
K * n * W, a whole number of 128, stay as they are and cost no padding.
"""

import dataclasses

import jax
import jax.numpy as jnp

TILE = 8  # rows of a tile


@dataclasses.dataclass(frozen=True)
class Packing:
    """How n slots share a row; for n = 2, K = 2 and W = 3 the row is

        slot  a a a b b b a a a b b b
        head  0 0 0 0 0 0 1 1 1 1 1 1

    An array of R = S / n rows is [L, B, 1, R, lanes], or [L, B, R / 8, 8, lanes] with tiles of 8 rows as an axis of their own.

    Attributes:
      slots: n.
      heads: K; one after another, so that the row can be split by heads.
      width: W.
      padding: numbers at the row's end that mean nothing.
      tile: rows per tile, if tiles are an axis of their own, else 1.
    """

    slots: int
    heads: int
    width: int
    padding: int = 0
    tile: int = 1

    @classmethod
    def to_fill(cls, lanes: int, heads: int, width: int, itemsize: int, most: int) -> "Packing | None":
        """The fewest slots, a power of two, that fill rows of a multiple of `lanes` numbers; None if the heads of one fill tiles.

        Args:
          itemsize: bytes of a number. The TPU's compiler stores rows of bytes in tiles of 32 rows, if there are so many, but writes single
            ones to tiles of 8 only: those get an axis of their own.
          most: slots that may be joined, a power of two: where rows need more, they are padded.
        """
        if width % lanes == 0 and heads % TILE == 0:
            return None
        slots, most_in_row = 1, max(1, most // TILE) if itemsize == 1 else most
        while slots < most_in_row and slots * heads * width % lanes:
            slots *= 2
        return cls(slots, heads, width, -slots * heads * width % lanes, min(TILE, most // slots) if itemsize == 1 else 1)

    @classmethod
    def per_head(cls, lanes: int, heads: int, width: int, itemsize: int, most: int) -> "Packing | None":
        """The fewest slots, at most 4, with which each head fills a multiple of `lanes` numbers by itself, as Pallas kernels read them.

        Args: as of `to_fill`. None if there is no such number of slots, or if `most` slots make less than a tile of rows.
        """
        slots = next((slots for slots in (1, 2, 4) if slots * width % lanes == 0), None)
        return None if slots is None or itemsize == 1 or slots * TILE > most else cls(slots, heads, width)

    @property
    def lanes(self) -> int:
        """Numbers per row."""
        return self.heads * self.slots * self.width + self.padding

    @property
    def order(self) -> str:
        """Of the array's last axes, S being those of rows or of tiles."""
        return "KSH" if self.tile == 1 else "SKH"

    @property
    def span(self) -> int:
        """Slots per step along S."""
        return self.slots * self.tile

    def shape(self, slots: int) -> tuple[int, int, int]:
        """The last axes of an array of `slots` slots, which `span` must divide."""
        steps = slots // self.span
        return (1, steps, self.lanes) if self.tile == 1 else (steps, self.tile, self.lanes)

    def at(self, slot: jax.Array) -> tuple[jax.Array | int, jax.Array | int]:
        """Index of a slot's row: of the last axes but one."""
        row = slot // self.slots
        return (0, row) if self.tile == 1 else (row // self.tile, row % self.tile)

    def pack(self, x: jax.Array) -> jax.Array:
        """[..., S, K, W] -> [..., *shape(S)]."""
        lead, slots = x.shape[:-3], x.shape[-3]
        x = x.reshape(*lead, -1, self.slots, self.heads, self.width).swapaxes(-3, -2)
        x = x.reshape(*lead, slots // self.slots, -1)
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, self.padding)]) if self.padding else x
        return x.reshape(*lead, *self.shape(slots))

    def unpack(self, x: jax.Array) -> jax.Array:
        """[..., *shape(S)] -> [..., S, K, W]."""
        return self.unpack_rows(x.reshape(*x.shape[:-3], -1, self.lanes))

    def pack_row(self, x: jax.Array) -> jax.Array:
        """[..., n, K, W] -> [..., lanes]."""
        return dataclasses.replace(self, tile=1).pack(x)[..., 0, 0, :]

    def unpack_rows(self, x: jax.Array) -> jax.Array:
        """[..., R, lanes] -> [..., R * n, K, W]."""
        lead, rows = x.shape[:-2], x.shape[-2]
        x = x[..., : self.lanes - self.padding].reshape(*lead, rows, self.heads, self.slots, self.width).swapaxes(-3, -2)
        return x.reshape(*lead, rows * self.slots, self.heads, self.width)
