"""The host's side of a running batch: it prefills rows, keeps the next dispatch in flight, and reads what came back."""

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

import kv
from model import prefill
from runtime import UserError
from sampling.language_model import LanguageModel
from sampling.loop import RUNNING, DecodeState, Sampled, decode, first_token, stop_rows
from sampling.options import MAX_LOGPROBS, SamplingOptions, SamplingParams
from sharding import axes

CHUNK = 512  # tokens per prefill call at most: enough for full arithmetic speed, and a bound on its temporaries
BUCKETS = (32, 64, 128, 256, CHUNK)  # padded lengths of a call: as many programs serve all prompts
STEPS = 8  # tokens per decode dispatch: the host's share of a token becomes an eighth of a dispatch


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A prefill call: tokens start..start+count of the prompt, padded to `bucket`."""

    start: int
    count: int
    bucket: int


def plan_chunks(length: int) -> list[Chunk]:
    """A prompt as prefill calls: full chunks, then the rest in the smallest bucket that holds it. A function of the length alone, so
    that a prompt's numbers do not depend on anything else."""
    chunks = [Chunk(start, CHUNK, CHUNK) for start in range(0, length - CHUNK + 1, CHUNK)]
    if rest := length % CHUNK:
        chunks.append(Chunk(length - rest, rest, next(bucket for bucket in BUCKETS if bucket >= rest)))
    return chunks


def plan_capacity(need: int, context_length: int) -> int:
    """Cache slots per row for `need` tokens: 512, 1,024, 2,048, ... up to the model's context, so that few shapes are compiled."""
    capacity = 512
    while capacity < need:
        capacity *= 2
    return min(capacity, context_length)


class Batch:
    """`size` rows that decode together. Rows are given requests with `start`; then `dispatch` and `read` alternate.

    Attributes:
      cache, state: the values after the last dispatch.
      pending: dispatches whose tokens were not read yet.
      pager: which pages the rows hold, where the cache is paged.
      cached_tokens: [B], of each row's prompt, those that needed no prefill.
      awaited: whether each program is waited for before the next is sent (see `sharding.Placement.awaited`).
    """

    def __init__(
        self,
        lm: LanguageModel,
        size: int,
        capacity: int,
        *,
        logprobs: int | None = None,
        steps: int = STEPS,
        pages: int | None = None,
        prefix_cache: bool = False,
    ):
        """Args:
        lm: the model.
        size: B; where rows are split over a mesh, it is rounded up to what can be.
        capacity: tokens per row.
        logprobs: None, or the most of the likeliest tokens that any request wants reported.
        steps: tokens per row and dispatch.
        pages: pages of a paged cache's pool; None: enough for all rows. A row that finds none left ends with the reason "capacity".
        prefix_cache: begin a prompt with the pages of an earlier one that begins alike. The rest is then read in other chunks, so that
          logits may differ in the last bits.

        Raises:
          UserError: steps or pages below 1, or an option for pages without a paged cache.
        """
        if steps < 1:
            raise UserError(f"steps per dispatch {steps} is below 1: give at least 1")
        self.lm = lm
        self.steps = steps
        self.capacity = capacity
        self.logprobs = MAX_LOGPROBS if logprobs else logprobs  # two programs with log-probabilities, not twenty
        self.pager: kv.Pager | kv.SplitPager | None = None
        pools, parts = None, 1 if lm.placement is None else lm.placement.shards(axes.BATCH)
        size = -(-size // parts) * parts
        if lm.kv_format.page_size is not None:
            if pages is not None and pages % parts:
                raise UserError(f"a pool of {pages} pages can't be split evenly into {parts} parts: give {-(-pages // parts) * parts}")
            own = kv.pool_sizes(lm.config, size // parts, capacity, lm.kv_format, None if pages is None else pages // parts)
            pools = tuple(parts * pool for pool in own)
            if parts == 1:
                self.pager = kv.Pager(lm.config, size, capacity, lm.kv_format, pools)
            else:
                self.pager = kv.SplitPager(lm.config, size, capacity, lm.kv_format, pools, parts)
        elif pages is not None or prefix_cache:
            name = "a pool of pages" if pages is not None else "a prefix cache"
            raise UserError(f"{name} needs a paged KV cache: add --cache=paged")
        self.prefix_cache = prefix_cache
        self.cache = kv.init(lm.config, size, capacity, lm.kv_format, pools, lm.placement)
        self.state = DecodeState.init(size, lm.config.vocab_size, lm.placement)
        self.pending: collections.deque[tuple[Sampled, np.ndarray]] = collections.deque()
        self._rows = [SamplingOptions(seed=0)] * size
        self._sampling: SamplingParams | None = None
        self._requests = np.zeros(
            (size,), np.int64
        )  # how many each row was given: tells a pending dispatch's tokens from a later request's
        self._built: set[int] = set()
        self._running = np.zeros((size,), bool)  # rows whose answer goes on, as far as is known
        self._held = np.zeros((size,), np.int64)  # tokens that each row's cache certainly holds
        self._most = np.zeros((size,), np.int64)  # tokens that each row may have held since it was empty
        self.cached_tokens = np.zeros((size,), np.int64)
        self._least = np.zeros((size,), np.int64)  # tokens of a cached prefix that each row began with
        self.awaited = lm.placement is not None and lm.placement.awaited
        self._margin = kv.rewind_margin(lm.config, capacity, lm.kv_format)

    @property
    def size(self) -> int:
        return self.cache.batch

    @property
    def running(self) -> bool:
        """Whether any row's answer goes on, as far as is known."""
        return bool(self._running.any())

    def _put(self, tree: Any) -> Any:
        """Where it is used: on the device, or whole on every device of the mesh."""
        return jax.device_put(tree) if self.lm.placement is None else self.lm.placement.put(tree)

    def _sent(self, result: Any) -> Any:
        """What a program gave, once it is there, where it must be awaited."""
        return jax.block_until_ready(result) if self.awaited else result

    def build(self, lengths: Iterable[int]) -> None:
        """Compiles every program that prompts of these lengths will need, so that what follows can be timed."""
        lm, vocab_size = self.lm, self.lm.config.vocab_size
        one, row, scalar = np.ones((1,), np.int32), np.zeros((1,), np.int32), np.int32(0)
        wanted = {chunk.bucket for length in lengths for chunk in plan_chunks(length)}
        if self.prefix_cache:  # what is left of a prompt after a hit can have any shorter length
            wanted |= {bucket for bucket in BUCKETS if bucket <= max(wanted, default=0)}
        wanted -= self._built
        for bucket in sorted(wanted):
            prefill.build(lm.model, lm.params, self.cache, np.zeros((1, bucket), np.int32), one, row, row)
        if not self._built:
            self._build_once(vocab_size, scalar)
        self._built |= wanted

    def _build_once(self, vocab_size: int, scalar: np.int32) -> None:
        lm = self.lm
        stop_rows.build(self.state, np.zeros((self.size,), bool))
        sampling = self._put(SamplingParams.stack(self._rows, ()))
        whole = None if lm.placement is None else lm.placement.sharding()
        logits = jax.ShapeDtypeStruct((1, vocab_size), np.float32, sharding=whole)
        first_token.build(
            self.state, sampling, logits, scalar, np.zeros((vocab_size,), bool), scalar, scalar, scalar, logprobs=self.logprobs
        )
        decode.build(lm.model, lm.params, self.cache, self.state, sampling, steps=self.steps, logprobs=self.logprobs)

    def keeps(self, row: int, length: int) -> int:
        """How many of its first `length` tokens a row can be started with as `held`: these, or 0 where layers with a window would have to
        go back by more than the cache's margin."""
        if self._margin is None:
            return length
        most = max(self._most[row], int(self.cache.lengths[row]))
        return length if most - length <= self._margin and length >= self._least[row] else 0

    def start(self, row: int, tokens: Sequence[int], options: SamplingOptions, *, held: Sequence[int] = ()) -> Sampled:
        """Gives `row` a request: prefills `tokens` after the first `len(held)` that it holds, and samples the first token.

        Args:
          row: which row; what it held beyond `held` is dropped.
          tokens: at least one, the part of the prompt that is not held.
          options: the request's; a seed is drawn where it has none.
          held: the part of the prompt that the row's cache holds; see `keeps`.

        Returns:
          numpy `Sampled` with one step and one row.

        Raises:
          UserError: the prompt does not fit the row's capacity or the pool's pages, or a logit bias is for no token of the vocabulary.
          ValueError: no tokens, or the row holds less than `held`, or can't go back to it.
        """
        if not len(tokens):
            raise ValueError("no tokens to prefill: the last token's logits are needed, so leave at least it out of `held`")
        if held and (holds := int(self.cache.lengths[row])) < len(held):
            raise ValueError(f"row {row} holds {holds} tokens, not the {len(held)} of `held`")
        if held and not self.keeps(row, len(held)):
            raise ValueError(f"row {row} can't go back to {len(held)} tokens, only by the cache's margin of {self._margin}: hold none")
        vocab_size = self.lm.config.vocab_size
        options.check_vocabulary(self.lm.config.num_tokens)
        length = len(held) + len(tokens)
        if length > self.capacity:
            raise UserError(
                f"the prompt has {length} tokens, but a row of the cache holds {self.capacity} (the model's context is "
                f"{self.lm.config.context_length}): shorten it or give a larger capacity"
            )
        self._rows[row] = options.seeded()
        self._requests[row] += 1
        self._sampling = self._put(SamplingParams.stack(self._rows, sorted(self.lm.tokenizer.eos_ids)))
        prompt = [*held, *tokens]
        first = self._begin(row, prompt, len(held))
        for chunk in plan_chunks(length - first):
            begin = first + chunk.start
            self._reserve(row, begin, begin + chunk.count)
            padded = np.zeros((1, chunk.bucket), np.int32)
            padded[0, : chunk.count] = prompt[begin : begin + chunk.count]
            numbers = (np.asarray([number], np.int32) for number in (chunk.count, row, begin))
            logits, self.cache = self._sent(prefill(self.lm.model, self.lm.params, self.cache, padded, *numbers))
            if self.prefix_cache:  # before pages that left a window are given back: a later prompt may part from this one here
                self.pager.commit(row, prompt[: begin + chunk.count])
            if self.pager is not None:
                self.pager.forget(row, begin + chunk.count)
        self._held[row], self._running[row] = length, True
        room = self.capacity
        if self.pager is not None:
            room = self.pager.reserve(row, length, length + 1)
        self.cached_tokens[row] = first
        seen = np.zeros((vocab_size,), bool)
        seen[prompt] = True
        scalars = (np.int32(value) for value in (min(options.max_new_tokens, 2**31 - 1), length, min(room, self.capacity)))
        remaining, position, capacity = scalars
        sampled, self.state = first_token(
            self.state, self._sampling, logits, np.int32(row), seen, remaining, position, capacity, logprobs=self.logprobs
        )
        sampled = jax.device_get(sampled)
        self._running[row] = sampled.finish[0, 0] == RUNNING
        return sampled

    def _begin(self, row: int, prompt: list[int], held: int) -> int:
        """Readies the row's cache; returns how many tokens of the prompt it holds."""
        self._running[row] = False
        if held:
            self._most[row] = max(self._most[row], int(self.cache.lengths[row]))
            if self.pager is not None:
                self.pager.keep(row, held)
            return held
        self._most[row] = self._least[row] = 0
        if self.pager is not None and self.prefix_cache:
            self._least[row] = self.pager.start(row, prompt)
        elif self.pager is not None:
            self.pager.release(row)
        return int(self._least[row])

    def _reserve(self, row: int, start: int, end: int) -> None:
        """Pages for a part of a prompt. Raises: UserError, if the pool has too few."""
        if self.pager is None:
            return
        if (reach := self.pager.reserve(row, start, end)) < end:
            self.pager.release(row)
            pool = self.pager.pools()[0]
            raise UserError(
                f"the prompt needs pages up to token {end}, but the pool of {pool.total} pages of {self.pager.page_size} tokens has none "
                f"left after token {reach}: give more with --kv_pages, or a smaller --batch_size"
            )
        self.cache = self.pager.apply(self.cache)

    def free(self, row: int) -> None:
        """Gives back what a row that has ended holds of a shared pool."""
        if self.pager is not None:
            self.pager.release(row)
            self._running[row] = False

    def dispatch(self) -> None:
        """Starts `steps` more tokens of every running row, and returns before they are there."""
        if self._sampling is None:
            raise ValueError("no row has a request: call `start` first")
        ahead = (len(self.pending) + 1) * self.steps
        if self.pager is not None:
            for row in np.flatnonzero(self._running).tolist():
                # One more than is written: a row that reaches its last page's end is taken to be full.
                self.pager.reserve(row, int(self._held[row]), int(self._held[row]) + ahead + 1)
            self.cache = self.pager.apply(self.cache)
        self._most = np.maximum(self._most, self._held + ahead)
        sampled, self.state, self.cache = self._sent(
            decode(self.lm.model, self.lm.params, self.cache, self.state, self._sampling, steps=self.steps, logprobs=self.logprobs)
        )
        self.pending.append((sampled, self._requests.copy()))

    def read(self) -> Sampled:
        """Waits for the oldest dispatch: numpy `Sampled` of `steps` steps and all rows; -1 in rows that were given a request since."""
        sampled, requests = self.pending.popleft()
        sampled = jax.device_get(sampled)
        sampled = sampled.replace(tokens=np.where(requests == self._requests, sampled.tokens, -1))
        self._held += (sampled.tokens >= 0).sum(axis=0)
        self._running &= (requests != self._requests) | (sampled.finish[-1] == RUNNING)
        if self.pager is not None:
            for row in np.flatnonzero(self._running).tolist():
                self.pager.forget(row, int(self._held[row]))
        return sampled

    def stop(self, row: int) -> None:
        """Ends a row for a reason that only the host sees, such as a stop string: later dispatches leave it idle."""
        self.state = stop_rows(self.state, np.arange(self.size) == row)
        self._running[row] = False
