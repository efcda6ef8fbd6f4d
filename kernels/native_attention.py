"""`attend_cache`: new rows into a cache and answers out of it, in C++ (`kernels/cpu/attention.inc`)."""

import jax
import jax.numpy as jnp

from kernels import cpu
from kernels.attention import Scoring
from kernels.heads import Heads

LAYOUTS = ("dense", "ring", "paged")
SCALES = 16  # arguments in front of them


def attend_cache(
    q: jax.Array | Heads,
    new: tuple[jax.Array, jax.Array] | None,
    keys: tuple[jax.Array, ...],
    values: tuple[jax.Array, ...],
    layer: jax.Array | int,
    rows: jax.Array | None,
    table: jax.Array | None,
    start: jax.Array,
    count: jax.Array,
    limit: jax.Array,
    scoring: Scoring,
    layout: str,
    after: bool,
    rounded: bool = False,
) -> tuple[jax.Array, tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """Writes a call's keys and values in place, and answers its queries.

    Args:
      q: [B, T, N, H]; or queries, keys and values in one, which are split, normed (by scales [H]) and rotated here. Those are written, and
        `after` must be set.
      new: keys [B, T', K, H] and values [B, T', K, V], or None to read only, or with `Heads`.
      keys: [L, X, K, H, S], f32 or the bits of bf16 as uint16; X rows or pages. Or int8 and, as uint16, the bits of f16 scales
        [L, X, K, H / C, S], each of C channels, a multiple of 16; see `kv.codec`.
      values: [L, X, K, S, V], likewise; scales are [L, X, K, S, V / C].
      layer: which of the L.
      rows: int32 [B], the cache's row of each; None: row b is row b.
      table: int32 [B, M], the pages of each row; None: rows have slots of their own.
      start, count: int32 [B], tokens held before and new ones.
      limit: int32 [B, T], the last position that each query sees; below 0: none.
      scoring: without `allowed` and `spread`.
      layout: "dense", "ring" or "paged".
      after: the queries see the new rows in the cache; False: beside it, since they may take the place of what is seen. Either way as they
        are stored.
      rounded: queries (scaled ones) are rounded to bf16, and so are the weights that values are added up with; sums are f32.

    Returns:
      [B, T, N, V] in q's dtype, 0 where a query sees nothing; keys; values.
    """
    f32, i32 = jnp.float32, jnp.int32
    (_, _, K, H, _), V = keys[0].shape, values[0].shape[-1]
    heads = q if isinstance(q, Heads) else Heads(q, None, None, None, 0.0)
    q = heads.qkv
    B, T, *_ = q.shape
    N = q.shape[2] if q.ndim == 4 else K * (q.shape[3] - 2)
    q_norm, k_norm = (jnp.zeros((0,), f32) if norm is None else norm.astype(f32) for norm in (heads.q_norm, heads.k_norm))
    cos, sin = (jnp.zeros((B, T, 0), f32),) * 2 if heads.table is None else (each[:, :, 0] for each in heads.table)
    new_keys, new_values = (jnp.zeros((B, 0, K, H), f32), jnp.zeros((B, 0, K, V), f32)) if new is None else new
    rows = jnp.arange(B, dtype=i32) if rows is None else rows
    table = jnp.zeros((B, 0), i32) if table is None else table
    sinks = jnp.zeros((0,), f32) if scoring.sinks is None else scoring.sinks.reshape(-1).astype(f32)
    held, scales = (keys[0], values[0]), (*keys[1:], *values[1:])
    written = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (*held, *scales)]
    out, *written = cpu.call(
        "diptych_attend",
        (jax.ShapeDtypeStruct((B, T, N, V), f32), *written),
        *held,
        q.astype(f32),
        new_keys.astype(f32),
        new_values.astype(f32),
        q_norm,
        k_norm,
        cos,
        sin,
        jnp.asarray(layer, i32).reshape(1),
        rows,
        table,
        start,
        count,
        limit,
        sinks,
        *scales,
        aliases={0: 1, 1: 2} | {SCALES + i: 3 + i for i in range(len(scales))},
        layout=LAYOUTS.index(layout),
        window=scoring.window or 0,
        scale=float(scoring.scale),
        softcap=float(scoring.softcap or 0.0),
        eps=float(heads.eps),
        after=int(after),
        rounded=int(rounded),
    )
    return out.astype(q.dtype), tuple(written[::2]), tuple(written[1::2])
