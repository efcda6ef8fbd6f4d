"""The two programs. Both are pure: parameters and a cache in, logits and the next cache out.

`prefill` reads many tokens of a row at once: its matrix products have as many rows as tokens, so it is bound by arithmetic
and decides the time to first token. `decode_step` reads one token per row: it reads every weight to use it once, so it is
bound by memory bandwidth and decides the time between tokens.
"""

from typing import Any

import jax
import jax.numpy as jnp

import kv
from model.transformer import Transformer
from runtime import program


@program(static=("model", "logits"), donated=("cache",), weights=("params",))
def prefill(
    model: Transformer,
    params: Any,
    cache: kv.Cache,
    tokens: jax.Array,
    counts: jax.Array,
    rows: jax.Array | None = None,
    held: jax.Array | None = None,
    logits: str = "last",
) -> tuple[jax.Array, kv.Cache]:
    """Reads new tokens into cache rows, after what those rows already hold.

    A chunked prefill is this call again on the same rows: any cut gives what one call gives.

    Args:
      model: static.
      params: the parameter tree.
      cache: donated.
      tokens: int32 [B', T]; a row's new tokens come first, the tail is padding. T is part of the compiled shape: keep to a few.
      counts: int32 [B'], new tokens of each row; 0 leaves a row as it is. The caller sees to it that held + new <= capacity;
        tokens past the capacity are dropped and not counted.
      rows: int32 [B'], the cache row of each, no row twice; None: row b is cache row b, and B' == B.
      held: int32 [B'], how many of its tokens each row keeps, counted from the first; None keeps all. 0 starts a row anew.
      logits: static; "last" (at each row's last new token) or "all".

    Returns:
      f32 [B', V] or [B', T, V], and the cache.
    """
    if logits not in ("last", "all"):
        raise ValueError(f"logits={logits!r} is not known: use 'last' or 'all'")
    start = cache.lengths if rows is None else cache.lengths[rows]
    if held is not None:
        start = jnp.minimum(start, held)
    counts = jnp.clip(counts, 0, tokens.shape[1])
    if (room := cache.room) is not None:
        room = room if rows is None or not cache.tables else room[rows]
        counts = jnp.minimum(counts, jnp.maximum(room - start, 0))
    step = kv.Step(
        rows=rows,
        start=start,
        count=counts,
        tables=cache.tables if rows is None else tuple(table[rows] for table in cache.tables),
        batch=cache.batch,
    )
    out, cache = model.apply({"params": params}, tokens, step, cache, logits)
    lengths = start + counts
    return out, cache.replace(lengths=lengths if rows is None else cache.lengths.at[rows].set(lengths)).constrained()


def decode_step_(model: Transformer, params: Any, cache: kv.Cache, tokens: jax.Array) -> tuple[jax.Array, kv.Cache]:
    """`decode_step` without jit, for a loop that is itself jitted."""
    logits, cache = prefill.function(model, params, cache, tokens[:, None], (tokens >= 0).astype(jnp.int32))
    return logits, cache


@program(static=("model",), donated=("cache",), weights=("params",))
def decode_step(model: Transformer, params: Any, cache: kv.Cache, tokens: jax.Array) -> tuple[jax.Array, kv.Cache]:
    """One token per row.

    Args:
      model: static.
      params: the parameter tree.
      cache: donated.
      tokens: int32 [B]; a negative token marks an idle row: nothing is written, its length stays, its logits mean nothing.

    Returns:
      f32 [B, V], and the cache. A row that holds its whole capacity is treated as idle.
    """
    return decode_step_(model, params, cache, tokens)
