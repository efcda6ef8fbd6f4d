"""Attention over packed rows on a TPU, where heads stand side by side in the lanes of a row: the head's part of a block is a slice of whole
tiles, and costs nothing.

With heads of 64 numbers two slots share a head's 128 lanes. Queries then come twice, each time with zeros in the other slot's place, so
that one product gives the scores of the even and one those of the odd slots; the products of weights and values are kept apart by lanes
until the end.

The grid is a list of work: for each block of queries the blocks of slots that it sees, one after another, made before the kernel starts and
as long as what is held. So the next row's first block is fetched while the last one of this row is multiplied, and there is no step that
does nothing, however large the cache. A v5e or v6e has one core: a long row needs no other split.

Sizes: a block of queries is at most 1024 rows (queries of a head, over some heads); while it is multiplied each block of keys is used
1024 / heads times, above the 240 (v5e) to 560 (v6e) operations per byte where products take as long as memory. A block of slots is 4 MiB
with its values and twice over, which takes 2.5 to 5 us to fetch beside some 0.35 us that a step costs. Queries, answers, sums and scores of
1024 rows take up to 10 MiB beside it; of a v5e's vector memory of 128 MiB the kernel may take 48.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels.attention import Scoring
from kernels.pallas_attention import NOTHING, Held, cells

ROWS = 1024  # of a block of queries, over its heads
FETCHED = 4 << 20  # bytes of a block of keys and values, twice
SLOTS = 1024  # of a block, at most
PAGES = 16  # of a block, at most: each is an operand of its own
ITEMS = 1 << 15  # of work, at most: lists of them lie in the scalar memory, of 1 MiB
TABLE = 1 << 16  # entries of page tables, likewise
VMEM = 48 << 20
LANES = 128


def fits(shape: tuple[int, ...], held: Held) -> bool:
    """Whether the lists for queries of this shape fit the scalar memory; if not, other code must answer."""
    plan = _Plan(shape, held)
    return plan.items <= ITEMS and (held.table is None or held.table.size <= TABLE)


class _Plan:
    """Sizes of a call; static."""

    def __init__(self, shape: tuple[int, ...], held: Held):
        self.B, self.T, N, _ = shape
        self.K, (self.H, self.V), self.n = held.heads, held.widths, held.packings[0].slots
        self.G = N // self.K
        self.tokens = min(self.T, max(1, ROWS // (self.n * self.G)))  # of a block of queries
        self.rows = -(-self.tokens * self.G // 8) * 8
        self.J = -(-self.T // self.tokens)
        self.heads = max(each for each in range(1, self.K + 1) if self.K % each == 0 and (each == 1 or each * self.n * self.rows <= ROWS))
        bytes_per_slot = 2 * self.heads * (self.H + self.V) * held.keys.dtype.itemsize
        most = max(8 * self.n * 4, min(SLOTS, 1 << int(math.log2(FETCHED / bytes_per_slot))))
        if held.table is None:
            self.pages, self.slots = 1, min(most, held.page)
        else:
            self.pages = min(max(1, most // held.page), PAGES, held.table.shape[1])
            self.slots = self.pages * held.page
        self.blocks = -(-held.slots // self.slots)
        self.items = self.B * self.J * self.blocks


def attend_packed(
    q: jax.Array, held: Held, first: jax.Array, queries: jax.Array, scoring: Scoring, partial: bool, interpret: bool
) -> tuple[jax.Array, jax.Array | None]:
    """As of `kernels.pallas_attention`, whose scale is in q already; with `partial` answers are f32 beside f32 [B, T, N], the logarithms of
    the sums of weights.

    Raises:
      ValueError: slots of which keys and values do not share rows alike, or lists that do not fit (`fits`).
    """
    keys, values = held.packings
    if keys.slots != values.slots or any(each.tile > 1 or each.slots * each.width % LANES for each in held.packings):
        raise ValueError(
            f"rows of {keys} and {values} can't be read: both need the same slots, and heads of whole tiles of {LANES} numbers"
        )
    if not fits(q.shape, held):
        raise ValueError(f"{q.shape[0]} rows of {held.slots} slots in blocks are more than the {ITEMS} items that a list of work takes")
    p = _Plan(q.shape, held)
    work, total = _work(p, held, first, queries, scoring)
    table = jnp.zeros((1,), jnp.int32) if held.table is None else jnp.clip(held.table, 0, held.keys.shape[1] - 1).reshape(-1)
    scalars = (
        jnp.stack([jnp.asarray(held.layer, jnp.int32), jnp.asarray(held.stripe, jnp.int32)]),
        *(x.astype(jnp.int32) for x in (held.rows, first, queries, held.base, held.end)),
        *work,
        table,
    )

    def at_cell(h, i, ids, rows, first, queries, base, end, low, high, cell, block, fetch, table):
        return cell[i] // p.J, cell[i] % p.J, h, 0, 0

    def at_block(h, i, ids, rows, first, queries, base, end, low, high, cell, block, fetch, table, page=0):
        c, b = cell[fetch[i]], jnp.maximum(block[fetch[i]], 0)
        if held.table is None:
            return ids[0], rows[c // p.J], 0, b, h
        lowest, last, number = low[c] // held.page, jnp.maximum(high[c], 0) // held.page, b * p.pages + page
        # Past the last page that is seen, what is there already stays, so that nothing is fetched.
        before = jnp.where(b > low[c] // p.slots, number - p.pages, last)
        number = jnp.where(number > last, before, jnp.maximum(number, lowest))
        return ids[0], table[c // p.J * held.table.shape[1] + number], 0, 0, h

    def blocks(width):
        shape = (None, None, None, p.slots // p.pages // p.n, p.heads * p.n * width)
        return [pl.BlockSpec(shape, functools.partial(at_block, page=page)) for page in range(p.pages)]

    def of_cell(rows, width):
        return pl.BlockSpec((None, None, p.heads, rows, width), at_cell)

    out = [jax.ShapeDtypeStruct((p.B, p.J, p.K, p.rows, p.n * p.V), jnp.float32 if partial else q.dtype)]
    if partial:
        out.append(jax.ShapeDtypeStruct((p.B, p.J, p.K, p.rows, LANES), jnp.float32))
    answer, *logs = pl.pallas_call(
        functools.partial(_kernel, p=p, scoring=scoring, ring=held.page if held.ring else 0, stripes=held.stripes, partial=partial),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(p.K // p.heads, total),
            in_specs=[of_cell(p.n * p.rows, p.n * p.H), *blocks(p.H), *blocks(p.V)],
            out_specs=[of_cell(each.shape[3], each.shape[4]) for each in out],
            scratch_shapes=[
                pltpu.VMEM((p.heads, p.rows, LANES), jnp.float32),
                pltpu.VMEM((p.heads, p.rows, LANES), jnp.float32),
                pltpu.VMEM((p.heads, p.rows, p.n * p.V), jnp.float32),
            ],
        ),
        out_shape=out,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=VMEM),
        interpret=interpret,
        name="attend_packed",
    )(*scalars, _queries(q, p), *[held.keys] * p.pages, *[held.values] * p.pages)
    answer = _by_token(answer[..., : p.V], p)
    return answer, _by_token(logs[0][..., :1], p)[..., 0] if partial else None


def _queries(q, p):
    """[B, T, N, H] -> [B, J, K, n * rows, n * H]: rows of a block, once for each slot of a row, zeros in the others' lanes."""
    q = jnp.pad(q, ((0, 0), (0, p.J * p.tokens - p.T), (0, 0), (0, 0)))
    q = q.reshape(p.B, p.J, p.tokens, p.K, p.G, p.H).transpose(0, 1, 3, 2, 4, 5).reshape(p.B, p.J, p.K, p.tokens * p.G, p.H)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, 0), (0, p.rows - p.tokens * p.G), (0, 0)))
    if p.n == 1:
        return q
    return jnp.concatenate([jnp.pad(q, ((0, 0),) * 4 + ((i * p.H, (p.n - 1 - i) * p.H),)) for i in range(p.n)], axis=3)


def _by_token(x, p):
    """[B, J, K, rows, W] -> [B, T, N, W]."""
    x = x[:, :, :, : p.tokens * p.G].reshape(p.B, p.J, p.K, p.tokens, p.G, -1).transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(p.B, p.J * p.tokens, p.K * p.G, -1)[:, : p.T]


def _work(p, held, first, queries, scoring):
    """Which blocks of slots each block of queries (a cell) reads, as one list; a cell that sees nothing is in it once.

    With B = 2 rows of 5 and 0 tokens, one query each and blocks of 2 slots:

        item   0 1 2 3
        cell   0 0 0 1 2    (2: the list's end)
        block  0 1 2 -1     -1: nothing is seen, nothing is read
        fetch  0 1 2 2      the item whose block is in place: 3 needs none

    Returns:
      low, high: int32 [cells], the slots that a cell sees; cell, block, fetch: int32 [items]; the list's length, int32.
    """
    low, high = (x.reshape(-1) for x in cells(held, first, queries, scoring.window, p.T, p.tokens))
    count = jnp.where(high >= low, high // p.slots - low // p.slots + 1, 0)
    offset = jnp.cumsum(jnp.maximum(count, 1))
    begin = offset - jnp.maximum(count, 1)
    cell = jnp.cumsum(jnp.zeros((p.items + 1,), jnp.int32).at[offset].add(1, mode="drop"))
    item = jnp.arange(p.items + 1, dtype=jnp.int32)
    of = jnp.minimum(cell, count.shape[0] - 1)
    block = jnp.where(count[of] > 0, low[of] // p.slots + item - begin[of], -1)
    fetch = jnp.maximum(jax.lax.cummax(jnp.where(block >= 0, item, -1)), 0)
    return (low, high, cell, block, fetch), offset[-1]


def _kernel(ids, rows, first, queries, base, end, low, high, cell, block, fetch, table, q, *rest, p, scoring, ring, stripes, partial):
    keys, values, (out, *logs, tops, totals, sums) = rest[: p.pages], rest[p.pages : 2 * p.pages], rest[2 * p.pages :]
    i = pl.program_id(1)
    c, index = cell[i], block[i]
    b, begin = c // p.J, c % p.J * p.tokens
    opens = (i == 0) | (cell[jnp.maximum(i - 1, 0)] != c)

    @pl.when(opens)
    def _():
        tops[...] = jnp.full(tops.shape, NOTHING, jnp.float32)
        totals[...] = jnp.zeros(totals.shape, jnp.float32)
        sums[...] = jnp.zeros(sums.shape, jnp.float32)

    # Where the block's slots stand, and whether every query sees all of them: then nothing is masked.
    slot = index * p.slots
    last = slot + p.slots - 1
    tip = (end[b] - 1) % ring if ring else 0  # the slot of a ring's last token
    zero = end[b] - 1 - tip if ring else base[b]  # the number of slot 0's token
    shift = jnp.where(slot > tip, ring, 0) if ring else 0
    least, most = ((zero + x - shift) * stripes + ids[1] for x in (slot, last))
    until = jnp.minimum(begin + p.tokens, p.T) - 1  # the last query
    plain = (slot >= low[c]) & (last <= high[c]) & (until < queries[b]) & (most <= first[b] + begin)
    if ring:
        plain &= (slot > tip) | (last <= tip)
    if scoring.window is not None:
        plain &= least > first[b] + until - scoring.window

    def block_of(refs):
        return refs[0][...] if len(refs) == 1 else jnp.concatenate([ref[...] for ref in refs], axis=0)

    def numbers(slots):  # of slots' tokens, as positions
        number = zero + slots - (jnp.where(slots > tip, ring, 0) if ring else 0)
        return number * stripes + ids[1]

    def is_there(slots):
        return (slots >= low[c]) & (slots <= high[c])

    def seen():
        """bool [n * rows, slots / n]."""
        row = jax.lax.broadcasted_iota(jnp.int32, (p.rows, 1), 0)
        token = begin + _quotient(row, p.G)
        limit = jnp.where(token < queries[b], first[b] + token, -1)
        each = []
        for j in range(p.n):
            slots = slot + p.n * jax.lax.broadcasted_iota(jnp.int32, (1, p.slots // p.n), 1) + j
            position = jnp.where(is_there(slots), numbers(slots), jnp.iinfo(jnp.int32).max)
            each.append(scoring.seen(position, limit))
        return jnp.concatenate(each, axis=0)

    def there(width):
        """bool [slots / n, n * width]."""
        size = p.slots // p.n, p.n * width
        lane = jax.lax.broadcasted_iota(jnp.int32, size, 1)
        return is_there(slot + p.n * jax.lax.broadcasted_iota(jnp.int32, size, 0) + _quotient(lane, width))

    def step(masked):
        k, v = block_of(keys), block_of(values)
        seeing, held_k, held_v = (seen(), there(p.H) if p.n > 1 else None, there(p.V)) if masked else (None, None, None)
        for h in range(p.heads):
            key, value = k[:, h * p.n * p.H : (h + 1) * p.n * p.H], v[:, h * p.n * p.V : (h + 1) * p.n * p.V]
            if masked:  # 0 * nan would leak: through a product with values, and with keys whose neighbour in the row is seen
                key = jnp.where(held_k, key.astype(jnp.float32), 0.0) if p.n > 1 else key
                value = jnp.where(held_v, value.astype(jnp.float32), 0.0)
            scores = scoring.score(_dot(q[h], key.astype(q.dtype), 1))  # [n * rows, slots / n]
            if masked:
                scores = jnp.where(seeing, scores, NOTHING)
            top = tops[h][:, :1]
            new_top = functools.reduce(jnp.maximum, _split(jnp.max(scores, axis=1, keepdims=True), p), top)
            weights = jnp.exp(scores - _repeated(new_top, p))
            if masked:
                weights = jnp.where(seeing, weights, 0.0)
            shrink = jnp.exp(top - new_top)
            total = sum(_split(jnp.sum(weights, axis=1, keepdims=True), p), totals[h][:, :1] * shrink)
            mixed = _split(_dot(weights.astype(q.dtype), value.astype(q.dtype), 0), p)
            if p.n > 1:
                group = _quotient(jax.lax.broadcasted_iota(jnp.int32, (p.rows, p.n * p.V), 1), p.V)
                mixed = [jnp.where(group == j, part, 0.0) for j, part in enumerate(mixed)]
            sums[h] = sum(mixed, sums[h] * shrink)
            tops[h] = jnp.broadcast_to(new_top, tops.shape[1:])
            totals[h] = jnp.broadcast_to(total, totals.shape[1:])

    pl.when((index >= 0) & plain)(lambda: step(masked=False))
    pl.when((index >= 0) & ~plain)(lambda: step(masked=True))

    @pl.when(cell[i + 1] != c)
    def _():
        for h in range(p.heads):
            total = totals[h][:, :1]
            both = sums[h]
            for j in range(1, p.n):  # the sum of what stands in the lanes of each slot, in all of them
                both += pltpu.roll(sums[h], j * p.V, 1)
            out[h] = (both / jnp.maximum(total, 1e-30)).astype(out.dtype)
            if partial:
                log = jnp.where(totals[h] > 0, tops[h] + jnp.log(jnp.maximum(totals[h], 1e-30)), NOTHING)
                logs[0][h] = log


def _dot(x, y, axis):
    # Products of bf16 are exact in f32: Mosaic refuses to be asked for it.
    precision = jax.lax.Precision.DEFAULT if x.dtype == jnp.bfloat16 else None
    return jax.lax.dot_general(x, y, (((1,), (axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)


def _split(x, p):
    """[n * rows, ...] -> n of [rows, ...]."""
    return [x[j * p.rows : (j + 1) * p.rows] for j in range(p.n)]


def _repeated(x, p):
    return x if p.n == 1 else jnp.concatenate([x] * p.n, axis=0)


def _quotient(x, by):
    """x // by, for small x: a TPU divides no vectors of integers."""
    if by & (by - 1) == 0:
        return x >> (by.bit_length() - 1)
    return ((x.astype(jnp.float32) + 0.5) * (1.0 / by)).astype(jnp.int32)
