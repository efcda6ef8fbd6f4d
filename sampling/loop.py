"""The decode loop: up to `steps` tokens per row in one dispatch, with cache and state as the loop's carry."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

import kv
from model import Transformer
from model.steps import decode_step_
from runtime import program
from sampling.options import SamplingParams
from sampling.sample import sample
from sharding import Placement, axes

RUNNING, STOP, LENGTH, CAPACITY = 0, 1, 2, 3  # why a row ended: an end-of-sequence token, max_new_tokens, a full cache row


class DecodeState(struct.PyTreeNode):
    """What decoding needs to know of every row besides its cache."""

    tokens: jax.Array  # int32 [B], sampled but not in the cache yet
    finish: jax.Array  # int32 [B], RUNNING or why the row ended; rows without a request have ended
    remaining: jax.Array  # int32 [B], tokens that it may still sample
    seen: jax.Array  # bool [B, V], tokens of its prompt
    counts: jax.Array  # int32 [B, V], tokens of its answer
    placement: Placement | None = struct.field(pytree_node=False, default=None)  # over a mesh

    @classmethod
    def init(cls, batch: int, vocab_size: int, placement: Placement | None = None) -> "DecodeState":
        """No row has a request. Over a mesh, every device has some of the rows' vocabularies, and all of what is small."""
        state = cls(
            tokens=jnp.zeros((batch,), jnp.int32),
            finish=jnp.full((batch,), STOP, jnp.int32),
            remaining=jnp.zeros((batch,), jnp.int32),
            seen=jnp.zeros((batch, vocab_size), bool),
            counts=jnp.zeros((batch, vocab_size), jnp.int32),
            placement=placement,
        )
        return state if placement is None else placement.put(state, state.logical_axes())

    def logical_axes(self) -> "DecodeState":
        """The same tree with the names of each array's axes in its place; rows that can't be split evenly are whole."""
        split = self.counts.shape[0] % self.placement.shards(axes.SAMPLED) == 0
        small, rows = (None,), (axes.SAMPLED if split else None, None)
        return self.replace(tokens=small, finish=small, remaining=small, seen=rows, counts=rows)

    def constrained(self) -> "DecodeState":
        """Inside jit: the state where it belongs."""
        return self if self.placement is None else self.placement.constrain_tree(self, self.logical_axes())


class Sampled(struct.PyTreeNode):
    """What a dispatch sampled. `n` is the static `logprobs`; the last three are None where it is None."""

    tokens: jax.Array  # int32 [steps, B], -1 once a row has ended
    finish: jax.Array  # int32 [steps, B], as in `DecodeState`, after this token
    logprobs: jax.Array | None = None  # f32 [steps, B], of the chosen token
    top_tokens: jax.Array | None = None  # int32 [steps, B, n], likeliest first
    top_logprobs: jax.Array | None = None  # f32 [steps, B, n]


@program(static=("logprobs",), donated=("state",))
def first_token(
    state: DecodeState,
    sampling: SamplingParams,
    logits: jax.Array,
    row: jax.Array,
    seen: jax.Array,
    remaining: jax.Array,
    position: jax.Array,
    capacity: jax.Array,
    logprobs: int | None = None,
) -> tuple[Sampled, DecodeState]:
    """Starts a request in `row`: samples its first token from what `prefill` returned.

    Args:
      state: donated.
      sampling: of all B rows.
      logits: f32 [1, V], at the prompt's last token.
      row: int32 scalar.
      seen: bool [V], tokens of the whole prompt, whether prefilled now or held from before.
      remaining: int32 scalar, max_new_tokens.
      position: int32 scalar, the tokens that the row holds.
      capacity: int32 scalar, of the cache.
      logprobs: static; how many of the likeliest tokens to report, None reports no log-probabilities.

    Returns:
      `Sampled` with steps == 1, B == 1, and the state.
    """
    alone = jax.tree.map(lambda leaf: leaf[row][None], sampling)
    one = DecodeState.init(1, logits.shape[1]).replace(finish=jnp.zeros((1,), jnp.int32), seen=seen[None], remaining=remaining[None])
    token = sample(logits, alone, position[None], one.seen, one.counts)
    one = _advance(one, token, alone, position[None] >= capacity)
    state = jax.tree.map(lambda all_rows, new: all_rows.at[row].set(new[0]), state, one.replace(placement=state.placement))
    return jax.tree.map(lambda leaf: leaf[None], _sampled(token, one, logits, logprobs)), state.constrained()


@program(static=("model", "steps", "logprobs"), donated=("cache", "state"), weights=("params",))
def decode(
    model: Transformer,
    params: Any,
    cache: kv.Cache,
    state: DecodeState,
    sampling: SamplingParams,
    steps: int,
    logprobs: int | None = None,
) -> tuple[Sampled, DecodeState, kv.Cache]:
    """Up to `steps` tokens per row. Rows that end on the way are idle for the rest: they write nothing.

    Args:
      model: static.
      params: the parameter tree.
      cache: donated; state: donated.
      sampling: per row.
      steps: static; tokens per dispatch.
      logprobs: static; how many of the likeliest tokens to report, None reports no log-probabilities.

    Returns:
      What was sampled, the state, and the cache.
    """

    def step(state: DecodeState, cache: kv.Cache) -> tuple[DecodeState, kv.Cache, Sampled]:
        running = state.finish == RUNNING
        logits, cache = decode_step_(model, params, cache, jnp.where(running, state.tokens, -1))
        token = _sample(logits, sampling, cache.lengths, state)
        token = _whole(jnp.where(running, token, -1), state.placement)
        state = _advance(state, token, sampling, cache.lengths >= cache.room)
        return state.constrained(), cache, _sampled(token, state, logits, logprobs)

    # A while loop and not a scan: it ends with the last row, so that a dispatch that was sent ahead of the tokens that end a batch
    # costs nothing. (A `lax.cond` around a scanned step would copy the cache: its branches do not share the carry's buffers.)
    def more(carry: tuple[jax.Array, DecodeState, kv.Cache, Sampled]) -> jax.Array:
        index, state, _, _ = carry
        return (index < steps) & jnp.any(state.finish == RUNNING)

    def body(carry: tuple[jax.Array, DecodeState, kv.Cache, Sampled]) -> tuple[jax.Array, DecodeState, kv.Cache, Sampled]:
        index, state, cache, sampled = carry
        state, cache, one = step(state, cache)
        return index + 1, state, cache, jax.tree.map(lambda rows, new: rows.at[index].set(new), sampled, one)

    idle = jnp.full(state.tokens.shape, -1, jnp.int32)
    nothing = jax.eval_shape(lambda: _sampled(idle, state, jnp.zeros(state.seen.shape, jnp.float32), logprobs))
    sampled = jax.tree.map(lambda leaf: jnp.zeros((steps, *leaf.shape), leaf.dtype), nothing)
    sampled = sampled.replace(tokens=jnp.full((steps, *idle.shape), -1, jnp.int32))
    ran, state, cache, sampled = jax.lax.while_loop(more, body, (0, state, cache, sampled))
    sampled = sampled.replace(finish=jnp.where((jnp.arange(steps) < ran)[:, None], sampled.finish, state.finish))
    return _whole(sampled, state.placement), state.constrained(), cache.constrained()


@program(donated=("state",))
def stop_rows(state: DecodeState, rows: jax.Array) -> DecodeState:
    """Ends the rows that are true in `rows` (bool [B]) and still run: for ends that only the host sees, such as stop strings."""
    return state.replace(finish=jnp.where(rows & (state.finish == RUNNING), STOP, state.finish)).constrained()


def _sample(logits: jax.Array, sampling: SamplingParams, positions: jax.Array, state: DecodeState) -> jax.Array:
    """`sample`; over a mesh each device for its own rows, with branches of its own."""
    arguments = logits, sampling, positions, state.seen, state.counts
    if state.placement is None:
        return sample(*arguments)
    rows = state.placement.spec(state.logical_axes().counts[:1])
    return state.placement.shard_map(sample, in_specs=rows, out_specs=rows)(*arguments)


def _whole(tree: Any, placement: Placement | None) -> Any:
    """All of it on every device."""
    return tree if placement is None else jax.tree.map(placement.constrain, tree)


def _advance(state: DecodeState, token: jax.Array, sampling: SamplingParams, full: jax.Array) -> DecodeState:
    """The state after every running row sampled `token` (-1 in the others)."""
    running = state.finish == RUNNING
    remaining = state.remaining - running
    ends = jnp.any(token[:, None] == sampling.stop_tokens, axis=-1)
    reason = jnp.where(ends, STOP, jnp.where(remaining <= 0, LENGTH, jnp.where(full, CAPACITY, RUNNING)))
    at = jnp.where(running, token, state.counts.shape[1])  # rows that have ended count nothing
    return state.replace(
        tokens=jnp.where(running, token, state.tokens),
        finish=jnp.where(running, reason, state.finish),
        remaining=remaining,
        counts=state.counts.at[jnp.arange(token.shape[0]), at].add(1, mode="drop"),
    )


def _sampled(token: jax.Array, state: DecodeState, logits: jax.Array, logprobs: int | None) -> Sampled:
    if logprobs is None:
        return Sampled(tokens=token, finish=state.finish)
    all_logprobs = jax.nn.log_softmax(logits, axis=-1)  # [B, V]
    chosen = jnp.take_along_axis(all_logprobs, jnp.maximum(token, 0)[:, None], axis=-1)[:, 0]
    top_logprobs, top_tokens = jax.lax.top_k(all_logprobs, logprobs)
    return Sampled(tokens=token, finish=state.finish, logprobs=chosen, top_tokens=top_tokens.astype(jnp.int32), top_logprobs=top_logprobs)
