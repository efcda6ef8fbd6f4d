"""Attention over a cache [L, X, S, K, H] on a GPU, by Triton.

A program answers a block of queries of one KV head, from the slots that it sees or from a part of them. Addresses are made for each slot:
pages need no more than a look into the table, and slots that nobody sees are not loaded.

Sizes: a block of queries is 16 rows in a decode step, the least that the tensor cores take, and up to 128 in a prefill, where each number
of a key is used 128 times: with the second-level cache between programs, more than an H200's 206 operations per byte. A block of slots is
32 KiB of keys and 32 KiB of values in a decode step, and half of it beside more queries; two stages of them fit in the 227 KiB of shared
memory of a multiprocessor. A decode step of few rows would keep few of the 132 multiprocessors busy: each row's blocks are then split over
as many programs as fill them twice, whose partial answers are joined by the logarithms of their weights (Flash-Decoding, Dao et al. 2023).
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels.attention import Scoring
from kernels.pallas_attention import NOTHING, Held, cells, joined

ROWS = 128  # of a block of queries, at most
LEAST = 16  # what a product takes on tensor cores
BLOCK = 32 << 10  # bytes of a block of keys, for few queries
PROGRAMS = 2 * 132  # that fill a GPU


class _Plan:
    """Sizes of a call; static."""

    def __init__(self, shape: tuple[int, ...], held: Held):
        self.B, self.T, self.N, self.H = shape
        self.K, self.V = held.heads, held.widths[1]
        self.G = self.N // self.K
        self.rows = _power(max(min(self.T * self.G, ROWS), self.G))
        self.tokens = self.rows // self.G  # of a block of queries
        self.J = -(-self.T // self.tokens)
        self.lanes, self.lanes_v = _power(self.H), _power(self.V)
        nbytes = max(self.lanes, self.lanes_v) * held.keys.dtype.itemsize
        self.slots = min(128, max(LEAST, (BLOCK if self.rows == LEAST else BLOCK // 2) // nbytes))
        blocks = -(-held.slots // self.slots)
        self.splits = 1 << int(math.log2(max(1, min(PROGRAMS // (self.B * self.K * self.J), blocks // 4))))


def attend_plain(
    q: jax.Array, held: Held, first: jax.Array, queries: jax.Array, scoring: Scoring, partial: bool, interpret: bool
) -> tuple[jax.Array, jax.Array | None]:
    """As of `kernels.pallas_attention`, whose scale is in q already; with `partial` answers are f32 beside f32 [B, T, N], the logarithms of
    the sums of weights."""
    p = _Plan(q.shape, held)
    partial_kernel = partial or p.splits > 1
    low, high = (x.reshape(-1) for x in cells(held, first, queries, scoring.window, p.T, p.tokens))
    table = jnp.zeros((1,), jnp.int32) if held.table is None else jnp.clip(held.table, 0, held.keys.shape[1] - 1).reshape(-1)
    scalars = (
        jnp.stack([jnp.asarray(held.layer, jnp.int32), jnp.asarray(held.stripe, jnp.int32)]),
        *(x.astype(jnp.int32) for x in (held.rows, first, queries, held.base, held.end, low, high, table)),
    )
    out = [jax.ShapeDtypeStruct((p.splits, p.B, p.T, p.N, p.V), jnp.float32 if partial_kernel else q.dtype)]
    if partial_kernel:
        out.append(jax.ShapeDtypeStruct((p.splits, p.B, p.T, p.N), jnp.float32))
    answer, *logs = pl.pallas_call(
        functools.partial(
            _kernel, p=p, scoring=scoring, size=held.page, pages=0 if held.table is None else held.table.shape[1], ring=held.ring,
            stripes=held.stripes,
        ),
        grid=(p.B * p.K, p.J, p.splits),
        out_shape=out,
        compiler_params=plgpu.CompilerParams(num_warps=4 if p.rows <= 64 else 8, num_stages=2),
        interpret=interpret,
        name="attend_plain",
    )(*scalars, q, held.keys, held.values)  # fmt: skip
    if p.splits > 1:
        answer, log = joined(answer, logs[0])
        return (answer, log) if partial else (answer.astype(q.dtype), None)
    return answer[0], logs[0][0] if partial else None


def _kernel(ids, rows, first, queries, base, end, low, high, table, q, keys, values, out, *logs, p, scoring, size, pages, ring, stripes):
    b, h = jax.lax.div(pl.program_id(0), p.K), jax.lax.rem(pl.program_id(0), p.K)
    j, split = pl.program_id(1), pl.program_id(2)
    layer, stripe = ids[0], ids[1]
    c = b * p.J + j
    lowest, highest, began, held_to = low[c], high[c], first[b], end[b]
    row = jnp.arange(p.rows)
    token, head = j * p.tokens + jax.lax.div(row, p.G), h * p.G + jax.lax.rem(row, p.G)
    is_row = (row < p.tokens * p.G) & (token < p.T)
    limit = jnp.where(is_row & (token < queries[b]), began + token, -1)[:, None]
    lane, lane_v = jnp.arange(p.lanes), jnp.arange(p.lanes_v)
    query = plgpu.load(
        q.at[b, token[:, None], head[:, None], lane[None]], mask=is_row[:, None] & (lane < p.H)[None], other=0.0
    )  # [rows, lanes]
    tip = jax.lax.rem(held_to - 1, size) if ring else 0  # the slot of a ring's last token
    zero = held_to - 1 - tip if ring else base[b]  # the number of slot 0's token

    def step(block, state):
        top, total, mixed = state
        slot = block * p.slots + jnp.arange(p.slots)
        there = (slot >= lowest) & (slot <= highest)
        if pages:
            at = plgpu.load(table.at[b * pages + jax.lax.div(slot, size)], mask=there, other=0)[:, None], jax.lax.rem(slot, size)[:, None]
        else:
            at = rows[b], slot[:, None]
        k = plgpu.load(keys.at[layer, *at, h, lane[None]], mask=there[:, None] & (lane < p.H)[None], other=0.0)
        number = zero + slot - (jnp.where(slot > tip, size, 0) if ring else 0)
        seen = there[None] & scoring.seen((number * stripes + stripe)[None], limit)
        scores = jnp.where(seen, scoring.score(plgpu.dot(query, k.astype(query.dtype), trans_b=True)), NOTHING)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        weights = jnp.where(seen, jnp.exp(scores - new_top[:, None]), 0.0)
        shrink = jnp.exp(top - new_top)
        # What nobody sees may be nan, and 0 * nan would leak: it is not loaded.
        v = plgpu.load(values.at[layer, *at, h, lane_v[None]], mask=there[:, None] & (lane_v < p.V)[None], other=0.0)
        mixed = mixed * shrink[:, None] + plgpu.dot(weights.astype(query.dtype), v.astype(query.dtype))
        return new_top, total * shrink + jnp.sum(weights, axis=1), mixed

    begin = jax.lax.div(lowest, p.slots)
    count = jnp.where(highest >= lowest, jax.lax.div(highest, p.slots) + 1 - begin, 0)
    each = jax.lax.div(count + p.splits - 1, p.splits)
    state = jnp.full((p.rows,), NOTHING, jnp.float32), jnp.zeros((p.rows,), jnp.float32), jnp.zeros((p.rows, p.lanes_v), jnp.float32)
    part = begin + jnp.minimum(split * each, count), begin + jnp.minimum((split + 1) * each, count)
    top, total, mixed = jax.lax.fori_loop(*part, step, state)
    answer = mixed / jnp.maximum(total, 1e-30)[:, None]
    where = out.at[split, b, token[:, None], head[:, None], lane_v[None]]
    plgpu.store(where, answer.astype(out.dtype), mask=is_row[:, None] & (lane_v < p.V)[None])
    if logs:
        log = jnp.where(total > 0, top + jnp.log(jnp.maximum(total, 1e-30)), NOTHING)
        plgpu.store(logs[0].at[split, b, token, head], log, mask=is_row)


def _power(size: int) -> int:
    """The next power of two that a product takes."""
    return max(LEAST, 1 << (size - 1).bit_length())
