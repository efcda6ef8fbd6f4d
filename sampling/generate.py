"""Text in, text out: `generate` for whole answers, `stream` for an answer as it is written."""

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from runtime import LEDGER, Compile, UserError
from sampling.batch import STEPS, Batch, plan_capacity
from sampling.language_model import LanguageModel, Prompt
from sampling.loop import CAPACITY, LENGTH, RUNNING, STOP, Sampled
from sampling.options import SamplingOptions
from sampling.stop import StopStrings
from tokenizer import StreamingDetokenizer

FINISH_REASONS = {STOP: "stop", LENGTH: "length", CAPACITY: "capacity"}


@dataclasses.dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one token, of the model itself: before penalties, temperature and filters."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token, logprob), likeliest first


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds. Programs are compiled before the clock starts.

    Attributes:
      time_to_first_token: from the prompt's token ids to the first token on the host: prefill and sampling.
      inter_token_latencies: per further token. Tokens of one dispatch arrive together; each counts as its share.
      compile_seconds: spent for this request before the clock started; of requests that decode together, the first has it all.
      compiles: programs built in that time.
    """

    time_to_first_token: float
    inter_token_latencies: tuple[float, ...]
    compile_seconds: float
    compiles: int


@dataclasses.dataclass(frozen=True)
class Completion:
    """A finished answer."""

    text: str  # without what ended it
    tokens: tuple[int, ...]  # as sampled, an end-of-sequence token included
    prompt_tokens: int
    cached_tokens: int  # of the prompt, held from before and not prefilled
    finish_reason: str  # "stop" (end-of-sequence token or stop string), "length", "capacity", "cancelled"
    timing: Timing
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Piece:
    """What `stream` yields: text that is certain, and with the last piece the finished answer."""

    text: str
    completion: Completion | None = None


class Answer:
    """Collects one request's tokens into text."""

    def __init__(
        self,
        lm: LanguageModel,
        options: SamplingOptions,
        prompt_tokens: int,
        cached_tokens: int = 0,
        compiled: Sequence[Compile] = (),
    ):
        self._options = options
        self._detokenizer = StreamingDetokenizer(lm.tokenizer)
        self._stop = StopStrings(options.stop)
        self._prompt_tokens, self._cached_tokens = prompt_tokens, cached_tokens
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprobs] = []
        self._compiled = compiled
        self.tokens: list[int] = []
        self.finish_reason: str | None = None
        self.time_to_first_token = 0.0
        self.latencies: list[float] = []

    def take(self, sampled: Sampled, row: int, seconds: float) -> str:
        """Adds what one read brought for this row, `seconds` after the read before.

        Returns:
          Text that became certain.
        """
        text = ""
        fresh = 0
        for step in range(sampled.tokens.shape[0]):
            token = int(sampled.tokens[step, row])
            if self.finish_reason is not None or token < 0:
                break
            fresh += 1
            self.tokens.append(token)
            if self._options.logprobs is not None:
                self._logprobs.append(_token_logprobs(sampled, step, row, self._options.logprobs))
            text += self._stop.push(self._detokenizer.push([token]))
            if self._stop.stopped:
                self.finish_reason = "stop"
            elif sampled.finish[step, row] != RUNNING:
                self.finish_reason = FINISH_REASONS[int(sampled.finish[step, row])]
                text += self._stop.push(self._detokenizer.flush()) + self._stop.flush()
        if len(self.tokens) == fresh:
            self.time_to_first_token = seconds
        else:
            self.latencies += [seconds / sampled.tokens.shape[0]] * fresh
        self._texts.append(text)
        return text

    def cancel(self) -> str:
        """Ends the answer where it is; returns text that was withheld."""
        text = self._stop.push(self._detokenizer.flush()) + self._stop.flush()
        self._texts.append(text)
        self.finish_reason = "cancelled"
        return text

    def completion(self) -> Completion:
        """The answer so far."""
        return Completion(
            text="".join(self._texts),
            tokens=tuple(self.tokens),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            finish_reason=self.finish_reason or "cancelled",
            timing=Timing(
                time_to_first_token=self.time_to_first_token,
                inter_token_latencies=tuple(self.latencies),
                compile_seconds=sum(entry.seconds for entry in self._compiled),
                compiles=len(self._compiled),
            ),
            logprobs=tuple(self._logprobs) if self._options.logprobs is not None else None,
        )


def _token_logprobs(sampled: Sampled, step: int, row: int, count: int) -> TokenLogprobs:
    top = ()
    if count:
        tokens, values = sampled.top_tokens[step, row, :count], sampled.top_logprobs[step, row, :count]
        top = tuple((int(token), float(value)) for token, value in zip(tokens, values, strict=True))
    return TokenLogprobs(token=int(sampled.tokens[step, row]), logprob=float(sampled.logprobs[step, row]), top=top)


def start(batch: Batch, row: int, tokens: list[int], options: SamplingOptions, answer: Answer, held: Sequence[int] = ()) -> str:
    """`Batch.start`, timed, its token taken by `answer`: returns the text that it brought."""
    began = time.perf_counter()
    return answer.take(batch.start(row, tokens, options, held=held), 0, time.perf_counter() - began)


def run(batch: Batch, answers: dict[int, Answer], *, run_ahead: int = 1) -> Iterator[tuple[int, str]]:
    """Decodes until every answer has its end: yields (row, text) as text becomes certain, and when an answer ends.

    The next dispatch is under way before the last one's tokens are read, so the device does not wait for the host; `run_ahead` is how
    many are. What they decode after a row's end is dropped.
    """
    then = time.perf_counter()
    while any(answer.finish_reason is None for answer in answers.values()):
        while len(batch.pending) <= run_ahead:
            batch.dispatch()
        sampled = batch.read()
        now = time.perf_counter()
        seconds, then = now - then, now
        for row, answer in answers.items():
            if answer.finish_reason is None:
                text = answer.take(sampled, row, seconds)
                if text or answer.finish_reason is not None:
                    yield row, text
    batch.pending.clear()


def stream(
    lm: LanguageModel,
    prompt: Prompt,
    options: SamplingOptions | None = None,
    *,
    raw: bool = False,
    system: str | None = None,
    capacity: int | None = None,
    steps: int = STEPS,
    **changes: Any,
) -> Iterator[Piece]:
    """An answer as it is written. The texts of all pieces, joined, are the completion's text; the last piece has the completion.

    Args:
      lm: from `load`.
      prompt: text, chat messages, or token ids.
      options: how to sample; `changes` are its fields by name (`temperature=0.8`).
      raw, system: as in `LanguageModel.encode`.
      capacity: cache slots; by default what prompt and answer may need.
      steps: tokens per dispatch; text arrives that many tokens at a time.

    Raises:
      UserError: before the first piece: a bad option, or a prompt that does not fit.
    """
    options = dataclasses.replace(options or SamplingOptions(), **changes)
    [batch] = _batches(lm, [lm.encode(prompt, raw=raw, system=system)], [options], 1, capacity, steps)
    return (piece for _, piece in _pieces(lm, *batch))


def generate(
    lm: LanguageModel, prompts: Prompt | Sequence[Prompt], options: SamplingOptions | Sequence[SamplingOptions] | None = None, **kwargs: Any
) -> Completion | list[Completion]:
    """Whole answers: of one prompt, or a list of them for a list of prompts.

    Args and Raises: as in `generate_each`, which gives answers as they end.
    """
    one = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], (int, np.integer, Mapping)))
    answers = dict(generate_each(lm, [prompts] if one else prompts, options, **kwargs))
    return answers[0] if one else [answers[index] for index in sorted(answers)]


def generate_each(
    lm: LanguageModel,
    prompts: Sequence[Prompt],
    options: SamplingOptions | Sequence[SamplingOptions] | None = None,
    *,
    raw: bool = False,
    system: str | None = None,
    batch_size: int = 8,
    capacity: int | None = None,
    steps: int = STEPS,
    **changes: Any,
) -> Iterator[tuple[int, Completion]]:
    """Answers of many prompts, as they end: (index of the prompt, answer). `batch_size` of them decode together.

    Args:
      lm: from `load`.
      prompts: each text, messages, or token ids.
      options: for all prompts, or one per prompt; `changes` are fields by name (`temperature=0.8`).
      raw, system: as in `LanguageModel.encode`.
      batch_size: rows that decode together.
      capacity: cache slots per row; by default what prompts and answers may need.
      steps: tokens per dispatch.

    Raises:
      UserError: before anything is generated.
    """
    if not isinstance(options, Sequence):
        options = [options or SamplingOptions()] * len(prompts)
    if len(options) != len(prompts):
        raise UserError(f"there are {len(prompts)} prompts but {len(options)} options: give one for all, or one for each")
    options = [dataclasses.replace(option, **changes) for option in options]
    tokens = [lm.encode(prompt, raw=raw, system=system) for prompt in prompts]
    groups = _batches(lm, tokens, options, batch_size, capacity, steps)
    return (
        (number * batch_size + row, piece.completion)
        for number, group in enumerate(groups)
        for row, piece in _pieces(lm, *group)
        if piece.completion is not None
    )


def check_capacity(lm: LanguageModel, capacity: int) -> None:
    """Raises: UserError, unless a row may have this many cache slots."""
    if not 1 <= capacity <= lm.config.context_length:
        raise UserError(f"capacity {capacity} is out of range: give 1 to {lm.config.context_length}, the model's context")


def _batches(
    lm: LanguageModel, tokens: list[list[int]], options: list[SamplingOptions], batch_size: int, capacity: int | None, steps: int
) -> Iterator[tuple[Batch, list[list[int]], list[SamplingOptions]]]:
    """Checks every request, then groups them; all groups have one shape."""
    if batch_size < 1:
        raise UserError(f"batch_size {batch_size} is below 1: give at least 1")
    longest = max(map(len, tokens), default=0)
    context = lm.config.context_length
    if capacity is None:
        need = max((len(ids) + option.max_new_tokens for ids, option in zip(tokens, options, strict=True)), default=1)
        capacity = plan_capacity(need, context)
    check_capacity(lm, capacity)
    if longest > capacity:
        remedy = "shorten it" if capacity == context else f"shorten it or give a capacity of at least {longest + 1}"
        limit = f"the model's context is {context}" if capacity == context else f"the cache holds {capacity} per row"
        raise UserError(f"the prompt has {longest} tokens, but {limit}: {remedy}")
    for option in options:
        if bad := [token for token in option.logit_bias if not 0 <= token < lm.config.vocab_size]:
            raise UserError(f"logit_bias names token {bad[0]}, which is not in the vocabulary: ids go from 0 to {lm.config.vocab_size - 1}")
    logprobs = max((option.logprobs for option in options if option.logprobs is not None), default=None)
    size = min(batch_size, len(tokens))

    def groups() -> Iterator[tuple[Batch, list[list[int]], list[SamplingOptions]]]:
        for first in range(0, len(tokens), batch_size):
            part = slice(first, first + batch_size)
            yield Batch(lm, size, capacity, logprobs=logprobs, steps=steps), tokens[part], options[part]

    return groups()


def _pieces(lm: LanguageModel, batch: Batch, tokens: list[list[int]], options: list[SamplingOptions]) -> Iterator[tuple[int, Piece]]:
    answers: dict[int, Answer] = {}

    def piece(row: int, text: str) -> tuple[int, Piece]:
        answer = answers[row]
        return row, Piece(text, answer.completion() if answer.finish_reason else None)

    mark = len(LEDGER.entries)
    batch.build(map(len, tokens))
    compiled = LEDGER.programs(mark)
    for row, (ids, option) in enumerate(zip(tokens, options, strict=True)):
        answers[row] = Answer(lm, option, len(ids), compiled=compiled if row == 0 else ())
        text = start(batch, row, ids, option, answers[row])
        if text or answers[row].finish_reason:
            yield piece(row, text)
    for row, text in run(batch, answers):
        yield piece(row, text)
