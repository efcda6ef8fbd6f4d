"""Attention over what a cache holds, as Pallas kernels for TPU (`kernels.pallas_attention_tpu`) and GPU (`kernels.pallas_attention_gpu`).

Both are a running softmax over blocks of slots (Milakov & Gimelshein 2018, arXiv 1805.02867; Dao et al. 2022, arXiv 2205.14135) that reads
a stacked cache where it lies: the layer, the row, the page of a table and the head are picked by the addresses of a block, and nothing is
sliced out first. Only blocks with a slot that some query sees are read, so cost follows what is held; what lies in the other slots may be
nan.

The limit is memory in a decode step: (H + V) * K numbers per token that is seen, once, beside which queries and answers are little; and in
a prefill 2 * (H + V) * N operations per pair of a query and a token that it sees.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from kernels.attention import Scoring
from kernels.packing import Packing
from runtime import UserError

NOTHING = -1e30  # a logarithm of no weight at all, finite: what sees nothing must not give inf - inf


@dataclasses.dataclass(frozen=True, eq=False)
class Held:
    """Keys and values of B rows' tokens. Slot s of a row holds its token number `base + s`; of a ring of R slots that number or, past the
    last token's slot, R less. Tokens that are numbered `end` or more are not there. With stripes, token number i stands at position
    i * stripes + stripe, else at i.

    Attributes:
      keys: [L, X, S, K, H], f32 or bf16, X rows or pages; with packings [L, X, 1, S / n, n K H].
      values: [L, X, S, K, V], likewise.
      packings: of keys and values, for a TPU; each n * width is a multiple of 128. None: for a GPU.
      layer: which of the L.
      rows: int32 [B], the X of each; with a table of no meaning.
      base, end: int32 [B].
      ring: whether slots are used in turns.
      table: int32 [B, M], pages of S slots; None: rows have slots of their own. Entries outside of 0..X - 1 are no pages.
      stripe: int32 scalar; stripes: static.
    """

    keys: jax.Array
    values: jax.Array
    packings: tuple[Packing, Packing] | None
    layer: jax.Array | int
    rows: jax.Array
    base: jax.Array
    end: jax.Array
    ring: bool = False
    table: jax.Array | None = None
    stripe: jax.Array | int = 0
    stripes: int = 1

    @property
    def heads(self) -> int:
        """K."""
        return self.keys.shape[3] if self.packings is None else self.packings[0].heads

    @property
    def widths(self) -> tuple[int, int]:
        """H and V."""
        if self.packings is None:
            return self.keys.shape[4], self.values.shape[4]
        return self.packings[0].width, self.packings[1].width

    @property
    def page(self) -> int:
        """Slots of a row or page: S."""
        return self.keys.shape[2] if self.packings is None else self.keys.shape[3] * self.packings[0].slots

    @property
    def slots(self) -> int:
        """Slots of a row, all its pages together."""
        return self.page if self.table is None else self.page * self.table.shape[1]

    def seen(self, lowest: jax.Array, last: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first and the last slot to read for positions lowest..last of each row, int32 [B, J] each; the last is less if it is none.

        Of a ring these are all slots that hold something: where the window begins and ends in it, its blocks are read but for the margin.
        """
        base, end = self.base[:, None], self.end[:, None]
        if self.ring:
            any_seen = (last >= lowest) & (end > 0)
            return jnp.zeros_like(last), jnp.where(any_seen, jnp.minimum(end, self.slots) - 1, -1)
        first = (lowest + self.stripes - 1 - self.stripe) // self.stripes - base
        high = jnp.minimum((last + self.stripes - self.stripe) // self.stripes, end) - 1 - base
        return jnp.maximum(first, 0), jnp.where(last >= lowest, jnp.minimum(high, self.slots - 1), -1)


def pallas_attention(
    q: jax.Array, sources: Sequence[Held], first: jax.Array, queries: jax.Array, scoring: Scoring, interpret: bool = False
) -> jax.Array:
    """What queries see of the tokens in `sources`; a token is in one of them.

    Args:
      q: [B, T, N, H].
      sources: what is held; of each, K must divide N.
      first: int32 [B], the position of each row's query 0: query t sees its own position `first + t` and those before.
      queries: int32 [B], how many of the T are real.
      scoring: without `allowed`.
      interpret: run the kernels step by step on any platform; for tests.

    Returns:
      [B, T, N, V] in q's dtype, 0 where a query sees nothing.

    Raises:
      ValueError: `allowed`, or what the kernel of the arrays' platform says.
      UserError: numbers other than f32 and bf16.
    """
    if scoring.allowed is not None:
        raise ValueError("Pallas kernels follow positions and windows, and no mask `allowed`: use blockwise_attention")
    for array in (q, *(array for held in sources for array in (held.keys, held.values))):
        if array.dtype not in (jnp.float32, jnp.bfloat16):
            raise UserError(f"Pallas kernels read f32 and bf16, not {array.dtype.name}: use --kv=bf16, or --kernels=xla")
    whole = len(sources) == 1 and scoring.sinks is None and not scoring.spread
    q = q * jnp.asarray(scoring.scale, q.dtype)
    parts = [_attend(q, held, first, queries, scoring, not whole, interpret) for held in sources]
    if whole:
        return parts[0][0]
    out, log = joined(*(jnp.stack(each) for each in zip(*parts, strict=True)))
    if scoring.spread:
        weight = jnp.exp(log - jax.lax.pmax(log, scoring.spread))  # 1 where no device saw anything: then out is 0
        total = jax.lax.psum(weight, scoring.spread)
        out = jax.lax.psum(out * weight[..., None], scoring.spread) / total[..., None]
        log = jax.lax.pmax(log, scoring.spread) + jnp.log(total)
    if scoring.sinks is not None:  # one more position, whose value is 0
        out *= jax.nn.sigmoid(log - scoring.sinks.astype(jnp.float32).reshape(-1))[..., None]
    return out.astype(q.dtype)


def pallas_fits(shape: tuple[int, ...], held: Held) -> bool:
    """Whether a kernel answers queries of this shape [B, T, N, H]: on a TPU there are limits to rows times slots (see `fits` there)."""
    if held.packings is None:
        return True
    from kernels.pallas_attention_tpu import fits

    return fits(shape, held)


def _attend(q, held, first, queries, scoring, partial, interpret):
    """Answers, and with `partial`, in f32, beside the logarithm of their weights' sum: f32 [B, T, N]."""
    if held.packings is not None:
        from kernels.pallas_attention_tpu import attend_packed

        return attend_packed(q, held, first, queries, scoring, partial, interpret)
    from kernels.pallas_attention_gpu import attend_plain

    return attend_plain(q, held, first, queries, scoring, partial, interpret)


def joined(outs: jax.Array, logs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Partial answers f32 [P, ..., V] to the same queries, and the logarithms of the sums of their weights [P, ...], as one of each."""
    top = jnp.max(logs, axis=0)
    weights = jnp.exp(logs - top)  # 1 where nothing was seen at all: then the answers are 0
    total = jnp.sum(weights, axis=0)
    return jnp.sum(outs * weights[..., None], axis=0) / total[..., None], top + jnp.log(total)


def cells(held: Held, first: jax.Array, queries: jax.Array, window: int | None, T: int, tokens: int) -> tuple[jax.Array, jax.Array]:
    """The slots that each block of `tokens` of the T queries sees: the first and the last, int32 [B, J]; the last is less if it is none."""
    begins = jnp.arange(-(-T // tokens), dtype=jnp.int32) * tokens
    ends = jnp.minimum(begins + tokens, queries[:, None])
    lowest = first[:, None] + begins
    lowest = jnp.zeros_like(lowest) if window is None else jnp.maximum(lowest - window + 1, 0)
    low, high = held.seen(lowest, jnp.where(ends > begins, first[:, None] + ends - 1, -1))
    return low.astype(jnp.int32), high.astype(jnp.int32)
