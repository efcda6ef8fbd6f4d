"""Where the token at position p of a row lies: in slot p (dense), in slot p mod R (ring), or in slot p mod C of a page (paged).

A row that holds positions 0..9, as a ring of R = 8 slots and as pages of C = 4:

    ring   slot      0 1 2 3 4 5 6 7        paged  table of the row     2 0 5
           position  8 9 2 3 4 5 6 7               page 2 holds 0..3, page 0 holds 4..7, page 5 holds 8 9 . .

A layout is static; what changes from call to call (lengths, page tables) is in the step. It writes the rows of a call, and reads blocks of
slots with the position that each holds.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from kernels import Packing, append, append_pages, append_ring, row_major
from kv.types import Step

BLOCK = 256  # slots read at a time: long enough to amortise a loop step, short enough to stay in the second-level cache


@dataclasses.dataclass(frozen=True, eq=False)
class Reader:
    """Blocks of what the rows of a step hold.

    Attributes:
      size: C, slots per block.
      take: (array [L, B or P, ...], block index, layer, order, n = 1) -> [B', ...], the rest in the same order; n slots per step along S.
      positions: block index -> int32 [1, C] or [B', C], as of `kernels.Blocks`.
      span: as of `kernels.Blocks`.
    """

    size: int
    take: Callable[..., jax.Array]
    positions: Callable[[jax.Array], jax.Array]
    span: Callable[[jax.Array, jax.Array], tuple[jax.Array | int, jax.Array | int]]

    def of(self, step: Step) -> "Reader":
        """The reader of a stripe's tokens by their numbers, as one by their positions."""
        if step.stripes == 1:
            return self

        def positions(index):
            number = self.positions(index)
            return jnp.where(number >= 0, number * step.stripes + step.stripe, -1)

        def span(first, last):
            return self.span(step.kept_limit(first - 1) + 1, step.kept_limit(last))

        return dataclasses.replace(self, positions=positions, span=span)


@dataclasses.dataclass(frozen=True)
class Dense:
    """Every row has a slot for each of its tokens."""

    capacity: int
    unit: int = 1  # slots come in multiples of it, and blocks too

    kind = "dense"
    row_by_row = False

    def shape(self, batch: int, pages: int | None) -> tuple[int, int]:
        """Rows (or pages) of each array, and slots of each."""
        return batch, self.capacity

    def reads_back(self, length: int) -> bool:
        """Whether all that the queries of a call of `length` tokens see is there once its tokens are written."""
        return True

    def write(
        self, array: jax.Array, new: jax.Array, layer: jax.Array | int, step: Step, order: str, packing: Packing | None = None
    ) -> jax.Array:
        """The array [L, B or P, ...] with the rows new [B', T, K, H] written."""
        return append(array, new, layer, step.rows, step.start, step.count, order, packing)

    def read(self, array: jax.Array, step: Step, size: int, order: str) -> jax.Array:
        """What an array holds of the step's first row from its start on: [L, ...], the rest in the array's order, S being `size` tokens.

        They are positions below the capacity; where the row holds none it is anything.
        """
        return _slots_of_row(array, step.rows[0], order, step.start[0], size)

    def striped(self, n: int) -> "Dense":
        """The layout of one of n stripes."""
        return Dense(self.capacity // n, self.unit // n)

    def in_steps_of(self, n: int) -> "Dense":
        """The layout of arrays in which n slots share a row."""
        return Dense(self.capacity // n)

    def steps_for(self, start: jax.Array, size: int, n: int) -> tuple[jax.Array, int]:
        """Which steps of n slots have `size` tokens from position `start` on: the first, and how many; none past what the layout has."""
        most = self.capacity // n
        steps = min(-(-size // n) + 1, most)
        return jnp.minimum(start // n, most - steps), steps

    def reader(self, step: Step, after: bool) -> Reader:
        """Blocks of what is held after the step's tokens are written, or before."""
        size = min(_rounded(BLOCK, self.unit), self.capacity)

        def first(index):
            return jnp.minimum(index * size, self.capacity - size)

        def positions(index):
            at = first(index) + jnp.arange(size, dtype=jnp.int32)
            return jnp.where(at >= index * size, at, -1)[None]  # the last block begins early: what it repeats does not count

        return Reader(size, _taker(step, first, size), positions, _consecutive(size))

    def gather(
        self, array: jax.Array, layer: jax.Array | int, order: str, step: Step, positions: jax.Array, packing: Packing | None = None
    ) -> jax.Array:
        """What an array of one head holds for the positions int32 [B', J]: [B', J, numbers per row]."""
        rows = jnp.arange(positions.shape[0]) if step.rows is None else step.rows
        return _gather(array, layer, order, rows[:, None], positions, packing)


@dataclasses.dataclass(frozen=True)
class Ring:
    """Every row has R slots, R being the window and the margin: older tokens are overwritten."""

    slots: int
    window: int
    unit: int = 1

    kind = "ring"
    row_by_row = False

    def shape(self, batch: int, pages: int | None) -> tuple[int, int]:
        return batch, self.slots

    def reads_back(self, length: int) -> bool:
        return length <= self.slots - self.window + 1  # more would overwrite what the first query sees

    def write(
        self, array: jax.Array, new: jax.Array, layer: jax.Array | int, step: Step, order: str, packing: Packing | None = None
    ) -> jax.Array:
        return append_ring(array, new, layer, step.rows, step.start, step.count, order, packing)

    def read(self, array: jax.Array, step: Step, size: int, order: str) -> jax.Array:
        """As of `Dense`; at most R tokens."""
        axis = 1 + order.index("S")
        held = _slots_of_row(array, step.rows[0], order, 0, self.slots)
        return jax.lax.slice_in_dim(jnp.roll(held, -(step.start[0] % self.slots), axis=axis), 0, size, axis=axis)

    def striped(self, n: int) -> "Ring":
        """As of `Dense`."""
        return Ring(self.slots // n, self.window, self.unit // n)

    def in_steps_of(self, n: int) -> "Ring":
        """As of `Dense`."""
        return Ring(self.slots // n, self.window)

    def steps_for(self, start: jax.Array, size: int, n: int) -> tuple[jax.Array, int]:
        """As of `Dense`; with all steps, the last one goes on in the first."""
        return start // n, min(-(-size // n) + 1, self.slots // n)

    def reader(self, step: Step, after: bool) -> Reader:
        size = _rounded(BLOCK, self.unit)
        count = -(-self.slots // size)
        size = self.slots // count if self.slots % (count * self.unit) == 0 else size
        end = step.start + step.count if after else step.start  # [B'], tokens held

        def first(index):
            return jnp.minimum(index * size, self.slots - size)

        def positions(index):
            slot = first(index) + jnp.arange(size, dtype=jnp.int32)
            behind = (end[:, None] - 1 - slot) % self.slots  # how far the slot's token is behind the last one
            return jnp.where((behind < end[:, None]) & (slot >= index * size), end[:, None] - 1 - behind, -1)

        def span(first_seen, last_seen):
            return 0, (jnp.minimum(jnp.max(end), self.slots) + size - 1) // size

        return Reader(size, _taker(step, first, size), positions, span)


@dataclasses.dataclass(frozen=True)
class Paged:
    """Rows hold pages of a pool, by a table; layers with the same window share the tables of a page group."""

    page_size: int
    group: int

    kind = "paged"
    row_by_row = True  # rows are answered one after another, so that the cost is the sum of what they hold

    def shape(self, batch: int, pages: int | None) -> tuple[int, int]:
        return pages, self.page_size

    def reads_back(self, length: int) -> bool:
        return True

    def write(
        self, array: jax.Array, new: jax.Array, layer: jax.Array | int, step: Step, order: str, packing: Packing | None = None
    ) -> jax.Array:
        return append_pages(array, new, layer, step.tables[self.group], step.start, step.count, order, packing)

    def read(self, array: jax.Array, step: Step, size: int, order: str) -> jax.Array:
        """As of `Dense`."""
        table, at = step.tables[self.group][0], order.index("S")
        touched = -(-(size - 1) // self.page_size) + 1
        number = jnp.minimum(step.start[0] // self.page_size + jnp.arange(touched), table.shape[0] - 1)
        pages = jnp.minimum(table[number], array.shape[1] - 1)
        # A gather takes the CPU six times as long.
        parts = jax.lax.map(lambda page: jax.lax.dynamic_index_in_dim(array, page, axis=1, keepdims=False), pages)
        parts = jnp.moveaxis(parts, 0, 1 + at)  # [L, ...], the pages before their slots
        joined = parts.reshape(array.shape[0], *(-1 if axis == "S" else array.shape[2 + i] for i, axis in enumerate(order)))
        return jax.lax.dynamic_slice_in_dim(joined, step.start[0] % self.page_size, size, axis=1 + at)

    def striped(self, n: int) -> "Paged":
        """As of `Dense`."""
        return Paged(self.page_size // n, self.group)

    def in_steps_of(self, n: int) -> "Paged":
        """As of `Dense`."""
        return Paged(self.page_size // n, self.group)

    def steps_for(self, start: jax.Array, size: int, n: int) -> tuple[jax.Array, int]:
        """As of `Dense`."""
        return start // n, -(-size // n) + 1

    def reader(self, step: Step, after: bool) -> Reader:
        table = step.tables[self.group]  # [B', M]
        pages = min(max(1, BLOCK // self.page_size), table.shape[1])
        size = pages * self.page_size

        def first(index):  # page of the table
            return jnp.minimum(index * pages, table.shape[1] - pages)

        def take(array, index, layer, order, n=1):  # pages are read whole, however many slots share a row
            numbers = jax.lax.dynamic_slice_in_dim(table, first(index), pages, axis=1)
            return _pages(array, layer, jnp.minimum(numbers, array.shape[1] - 1), order)

        def positions(index):
            at = first(index) * self.page_size + jnp.arange(size, dtype=jnp.int32)
            return jnp.where(at >= index * size, at, -1)[None]

        return Reader(size, take, positions, _consecutive(size))

    def gather(
        self, array: jax.Array, layer: jax.Array | int, order: str, step: Step, positions: jax.Array, packing: Packing | None = None
    ) -> jax.Array:
        """As of `Dense`."""
        pages = jnp.take_along_axis(step.tables[self.group], positions // self.page_size, axis=1)
        return _gather(array, layer, order, jnp.minimum(pages, array.shape[1] - 1), positions % self.page_size, packing)


Layout = Dense | Ring | Paged


def new_rows(step: Step, length: int) -> Reader:
    """Blocks of the `length` rows that a step brings, before they are written; `take` is (rows [B', T, K, H], index) -> [B', C, K, H]."""
    size = min(BLOCK, length)

    def first(index):
        return jnp.minimum(index * size, length - size)

    def take(rows, index):
        return jax.lax.dynamic_slice_in_dim(rows, first(index), size, axis=1)

    def positions(index):
        token = first(index) + jnp.arange(size, dtype=jnp.int32)
        return jnp.where((token < step.count[:, None]) & (token >= index * size), step.start[:, None] + token, -1)

    def span(first_seen, last_seen):
        return jnp.maximum(jnp.min(first_seen - step.start), 0) // size, (jnp.max(last_seen - step.start) + size) // size

    return Reader(size, take, positions, span)


def _consecutive(size: int) -> Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """The span of blocks that hold positions in order: from the first one that is seen to the last one."""
    return lambda first, last: (jnp.min(first) // size, (jnp.max(last) + size) // size)


def _rounded(slots: int, unit: int) -> int:
    return -(-slots // unit) * unit


def _gather(array, layer, order, rows, slots, packing):
    rows, slots = jnp.broadcast_arrays(rows, slots)
    if packing is not None:
        several = packing.unpack_rows(array[layer, rows, *packing.at(slots)][..., None, :])  # [B', J, n, 1, W]
        return jnp.take_along_axis(several, (slots % packing.slots)[..., None, None, None], axis=2)[:, :, 0, 0]
    where = {"S": slots, "K": 0, "H": slice(None)}
    return array[layer, rows, *(where[axis] for axis in order)]


def _taker(step: Step, first: Callable[[jax.Array], jax.Array], size: int) -> Callable[..., jax.Array]:
    return lambda array, index, layer, order, n=1: _slots(array, layer, step.rows, order, first(index) // n, size // n)


def _slots(array: jax.Array, layer: jax.Array | int, rows: jax.Array | None, order: str, first: jax.Array, size: int) -> jax.Array:
    """Slots first..first+size of the given rows: [B', ...], the rest in the array's order."""
    slot_axis = 2 + order.index("S")

    def part(array: jax.Array, row: jax.Array | int, count: int = 1) -> jax.Array:
        corner = [layer, row, 0, 0, 0]
        corner[slot_axis] = first
        sizes = [1, count, *array.shape[2:]]
        sizes[slot_axis] = size
        return jax.lax.dynamic_slice(array, corner, sizes)[0]

    if rows is None:
        return row_major(part(array, 0, array.shape[1]))

    def one_by_one(array: jax.Array, rows: jax.Array) -> jax.Array:
        return jnp.concatenate([row_major(part(array, rows[b])) for b in range(rows.shape[0])])

    def gathered(array: jax.Array, rows: jax.Array) -> jax.Array:
        return jax.vmap(lambda row: part(array, row)[0])(rows)

    if rows.shape[0] == 1:
        return one_by_one(array, rows)
    return jax.lax.platform_dependent(array, rows, tpu=one_by_one, default=gathered)


def _slots_of_row(array: jax.Array, row: jax.Array, order: str, first: jax.Array | int, size: int) -> jax.Array:
    """Slots first..first+size of one row, of all layers: [L, ...], the rest in the array's order."""
    corner, sizes = [0, row, 0, 0, 0], [array.shape[0], 1, *array.shape[2:]]
    corner[2 + order.index("S")], sizes[2 + order.index("S")] = first, size
    return jax.lax.dynamic_slice(array, corner, sizes)[:, 0]


def _pages(pool: jax.Array, layer: jax.Array | int, numbers: jax.Array, order: str) -> jax.Array:
    """The pages int32 [B', n] of a pool, joined along the slots: [B', ...], the rest in the pool's order."""

    def page(pool: jax.Array, number: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice(pool, [layer, number, 0, 0, 0], (1, 1, *pool.shape[2:]))[0, 0]

    def joined(pool: jax.Array, numbers: jax.Array) -> jax.Array:
        return jnp.concatenate([page(pool, numbers[0, i]) for i in range(n)], axis=at)[None]

    def gathered(pool: jax.Array, numbers: jax.Array) -> jax.Array:
        parts = jnp.moveaxis(pool[layer, numbers], 1, 1 + at)  # [B', ...], the pages before their slots
        return parts.reshape(B, *(n * pool.shape[2 + i] if i == at else pool.shape[2 + i] for i in range(3)))

    B, n = numbers.shape
    at = order.index("S")
    if B > 1:
        return gathered(pool, numbers)
    # The CPU backend gathers slowly. A TPU's compiler turns the whole pool over to suit what is joined.
    return jax.lax.platform_dependent(pool, numbers, cpu=joined, default=gathered)
