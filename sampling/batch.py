"""The host's side of a running batch: it prefills rows, keeps the next dispatch in flight, and reads what came back."""

import collections
import dataclasses
from collections.abc import Iterable, Sequence

import jax
import numpy as np

import kv
from model import prefill
from runtime import UserError
from sampling.language_model import LanguageModel
from sampling.loop import DecodeState, Sampled, decode, first_token, stop_rows
from sampling.options import MAX_LOGPROBS, SamplingOptions, SamplingParams

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
    """

    def __init__(self, lm: LanguageModel, size: int, capacity: int, *, logprobs: int | None = None, steps: int = STEPS):
        """Args:
        lm: the model.
        size: B.
        capacity: tokens per row.
        logprobs: None, or the most of the likeliest tokens that any request wants reported.
        steps: tokens per row and dispatch.
        """
        if steps < 1:
            raise UserError(f"steps per dispatch {steps} is below 1: give at least 1")
        self.lm = lm
        self.steps = steps
        self.capacity = capacity
        self.logprobs = MAX_LOGPROBS if logprobs else logprobs  # two programs with log-probabilities, not twenty
        self.cache = kv.init(lm.config, size, capacity, lm.kv_format)
        self.state = DecodeState.init(size, lm.config.vocab_size)
        self.pending: collections.deque[tuple[Sampled, np.ndarray]] = collections.deque()
        self._rows = [SamplingOptions(seed=0)] * size
        self._sampling: SamplingParams | None = None
        self._requests = np.zeros(
            (size,), np.int64
        )  # how many each row was given: tells a pending dispatch's tokens from a later request's
        self._built: set[int] = set()

    @property
    def size(self) -> int:
        return self.cache.batch

    def build(self, lengths: Iterable[int]) -> None:
        """Compiles every program that prompts of these lengths will need, so that what follows can be timed."""
        lm, vocab_size = self.lm, self.lm.config.vocab_size
        one, row, scalar = np.ones((1,), np.int32), np.zeros((1,), np.int32), np.int32(0)
        wanted = {chunk.bucket for length in lengths for chunk in plan_chunks(length)} - self._built
        for bucket in sorted(wanted):
            prefill.build(lm.model, lm.params, self.cache, np.zeros((1, bucket), np.int32), one, row, row)
        if not self._built:
            self._build_once(vocab_size, scalar)
        self._built |= wanted

    def _build_once(self, vocab_size: int, scalar: np.int32) -> None:
        lm = self.lm
        stop_rows.build(self.state, np.zeros((self.size,), bool))
        sampling = jax.device_put(SamplingParams.stack(self._rows, ()))
        logits = jax.ShapeDtypeStruct((1, vocab_size), np.float32)
        first_token.build(
            self.state, sampling, logits, scalar, np.zeros((vocab_size,), bool), scalar, scalar, scalar, logprobs=self.logprobs
        )
        decode.build(lm.model, lm.params, self.cache, self.state, sampling, steps=self.steps, logprobs=self.logprobs)

    def start(self, row: int, tokens: Sequence[int], options: SamplingOptions, *, held: Sequence[int] = ()) -> Sampled:
        """Gives `row` a request: prefills `tokens` after the first `len(held)` that it holds, and samples the first token.

        Args:
          row: which row; what it held beyond `held` is dropped.
          tokens: at least one, the part of the prompt that is not held.
          options: the request's; a seed is drawn where it has none.
          held: the part of the prompt that the row's cache holds.

        Returns:
          numpy `Sampled` with one step and one row.

        Raises:
          UserError: the prompt does not fit the row's capacity, or a logit bias is for no token of the vocabulary.
          ValueError: no tokens, or the row holds less than `held`.
        """
        if not len(tokens):
            raise ValueError("no tokens to prefill: the last token's logits are needed, so leave at least it out of `held`")
        if held and (holds := int(self.cache.lengths[row])) < len(held):
            raise ValueError(f"row {row} holds {holds} tokens, not the {len(held)} of `held`")
        vocab_size = self.lm.config.vocab_size
        options.check_vocabulary(vocab_size)
        length = len(held) + len(tokens)
        if length > self.capacity:
            raise UserError(
                f"the prompt has {length} tokens, but a row of the cache holds {self.capacity} (the model's context is "
                f"{self.lm.config.context_length}): shorten it or give a larger capacity"
            )
        self._rows[row] = options.seeded()
        self._requests[row] += 1
        self._sampling = jax.device_put(SamplingParams.stack(self._rows, sorted(self.lm.tokenizer.eos_ids)))
        for chunk in plan_chunks(len(tokens)):
            padded = np.zeros((1, chunk.bucket), np.int32)
            padded[0, : chunk.count] = tokens[chunk.start : chunk.start + chunk.count]
            numbers = (np.asarray([number], np.int32) for number in (chunk.count, row, len(held) + chunk.start))
            logits, self.cache = prefill(self.lm.model, self.lm.params, self.cache, padded, *numbers)
        seen = np.zeros((vocab_size,), bool)
        seen[list(held)] = True
        seen[list(tokens)] = True
        scalars = (np.int32(value) for value in (min(options.max_new_tokens, 2**31 - 1), length, self.capacity))
        remaining, position, capacity = scalars
        sampled, self.state = first_token(
            self.state, self._sampling, logits, np.int32(row), seen, remaining, position, capacity, logprobs=self.logprobs
        )
        return jax.device_get(sampled)

    def dispatch(self) -> None:
        """Starts `steps` more tokens of every running row, and returns before they are there."""
        if self._sampling is None:
            raise ValueError("no row has a request: call `start` first")
        sampled, self.state, self.cache = decode(
            self.lm.model, self.lm.params, self.cache, self.state, self._sampling, steps=self.steps, logprobs=self.logprobs
        )
        self.pending.append((sampled, self._requests.copy()))

    def read(self) -> Sampled:
        """Waits for the oldest dispatch: numpy `Sampled` of `steps` steps and all rows; -1 in rows that were given a request since."""
        sampled, requests = self.pending.popleft()
        sampled = jax.device_get(sampled)
        return sampled.replace(tokens=np.where(requests == self._requests, sampled.tokens, -1))

    def stop(self, row: int) -> None:
        """Ends a row for a reason that only the host sees, such as a stop string: later dispatches leave it idle."""
        self.state = stop_rows(self.state, np.arange(self.size) == row)
