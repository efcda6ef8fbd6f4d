"""Text in, text out: `generate` for whole answers, `stream` for an answer as it is written."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from runtime import LEDGER, UserError
from sampling.answer import Answer, Completion
from sampling.batch import STEPS, Batch, plan_capacity
from sampling.language_model import LanguageModel, Prompt
from sampling.options import SamplingOptions


@dataclasses.dataclass(frozen=True)
class Piece:
    """What `stream` yields: text that is certain, and with the last piece the finished answer."""

    text: str
    completion: Completion | None = None


class PromptError(UserError):
    """What is wrong with one of several prompts.

    Attributes:
      index: which.
    """

    def __init__(self, index: int, message: str):
        super().__init__(message)
        self.index = index


def never() -> bool:
    """The default of `cancelled`."""
    return False


def start(batch: Batch, row: int, tokens: list[int], options: SamplingOptions, answer: Answer, held: Sequence[int] = ()) -> str:
    """`Batch.start`, timed, its token taken by `answer`: returns the text that it brought."""
    began = time.perf_counter()
    first = batch.start(row, tokens, options, held=held)
    answer.cached_tokens = int(batch.cached_tokens[row])
    return answer.take(first, 0, time.perf_counter() - began)


def run(
    batch: Batch, answers: dict[int, Answer], *, run_ahead: int = 1, cancelled: Callable[[], bool] = never
) -> Iterator[tuple[int, str]]:
    """Decodes until every answer has its end: yields (row, text) as text becomes certain, and when an answer ends.

    The next dispatch is under way before the last one's tokens are read, so the device does not wait for the host; `run_ahead` is how
    many are. What they decode after a row's end is dropped.
    """
    then = time.perf_counter()
    while any(answer.finish_reason is None for answer in answers.values()) and not cancelled():
        while len(batch.pending) <= run_ahead:
            batch.dispatch()
        sampled = batch.read()
        now = time.perf_counter()
        seconds, then = now - then, now
        for row, answer in answers.items():
            if answer.finish_reason is None:
                text = answer.take(sampled, row, seconds)
                if answer.finish_reason == "stop":
                    batch.stop(row)  # the device does not know of stop strings
                if text or answer.finish_reason is not None:
                    yield row, text
    batch.pending.clear()
    for row, answer in answers.items():
        if answer.finish_reason is None:
            batch.stop(row)
            yield row, answer.cancel()


def stream(
    lm: LanguageModel,
    prompt: Prompt,
    options: SamplingOptions | None = None,
    *,
    raw: bool = False,
    system: str | None = None,
    parse_special: bool = False,
    capacity: int | None = None,
    steps: int = STEPS,
    pages: int | None = None,
    prefix_cache: bool = False,
    cancelled: Callable[[], bool] = never,
    inspect: Callable[[Batch], None] | None = None,
    **changes: Any,
) -> Iterator[Piece]:
    """An answer as it is written. The texts of all pieces, joined, are the completion's text; the last piece has the completion.

    Args:
      lm: from `load`.
      prompt: text, chat messages, or token ids.
      options: how to sample; `changes` are its fields by name (`temperature=0.8`).
      raw, system, parse_special: as in `LanguageModel.encode`.
      capacity: cache slots; by default what prompt and answer may need.
      steps: tokens per dispatch; text arrives that many tokens at a time.
      pages, prefix_cache: as in `Batch`.
      cancelled: asked between dispatches; once it is true, the answer ends where it is, with the reason "cancelled".
      inspect: given the batch once all is generated, and before a paged cache's rows are given back.

    Raises:
      UserError: before the first piece: a bad option, or a prompt that does not fit.
    """
    options = dataclasses.replace(options or SamplingOptions(), **changes)
    tokens, options = [lm.encode(prompt, raw=raw, system=system, parse_special=parse_special)], [options.seeded()]
    batch = _prepare(lm, tokens, options, 1, capacity, steps, pages, prefix_cache)
    return (piece for _, piece in _all_pieces(lm, batch, tokens, options, cancelled, inspect))


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
    parse_special: bool = False,
    batch_size: int = 8,
    capacity: int | None = None,
    steps: int = STEPS,
    pages: int | None = None,
    prefix_cache: bool = False,
    cancelled: Callable[[], bool] = never,
    inspect: Callable[[Batch], None] | None = None,
    **changes: Any,
) -> Iterator[tuple[int, Completion]]:
    """Answers of many prompts, as they end: (index of the prompt, answer). `batch_size` of them decode together.

    Args:
      lm: from `load`.
      prompts: each text, messages, or token ids.
      options: for all prompts, or one per prompt; `changes` are fields by name (`temperature=0.8`).
      raw, system, parse_special: as in `LanguageModel.encode`.
      batch_size: rows that decode together.
      capacity: cache slots per row; by default what prompts and answers may need.
      steps: tokens per dispatch.
      pages, prefix_cache: as in `Batch`.
      cancelled: as in `stream`; prompts that were not begun by then have no answer.
      inspect: as in `stream`.

    Raises:
      UserError: before anything is generated; a `PromptError` if it is about one of the prompts.
    """
    if not isinstance(options, Sequence):
        options = [options or SamplingOptions()] * len(prompts)
    if len(options) != len(prompts):
        raise UserError(f"there are {len(prompts)} prompts but {len(options)} options: give one for all, or one for each")
    options = [dataclasses.replace(option, **changes).seeded() for option in options]
    tokens = []
    for index, prompt in enumerate(prompts):
        try:
            tokens.append(lm.encode(prompt, raw=raw, system=system, parse_special=parse_special))
        except UserError as error:
            raise PromptError(index, str(error)) from error
    batch = _prepare(lm, tokens, options, batch_size, capacity, steps, pages, prefix_cache)
    pieces = _all_pieces(lm, batch, tokens, options, cancelled, inspect)
    return ((index, piece.completion) for index, piece in pieces if piece.completion is not None)


def check_capacity(lm: LanguageModel, capacity: int) -> None:
    """Raises: UserError, unless a row may have this many cache slots."""
    if not 1 <= capacity <= lm.config.context_length:
        raise UserError(f"capacity {capacity} is out of range: give 1 to {lm.config.context_length}, the model's context")


def _prepare(
    lm: LanguageModel,
    tokens: list[list[int]],
    options: list[SamplingOptions],
    batch_size: int,
    capacity: int | None,
    steps: int,
    pages: int | None,
    prefix_cache: bool,
) -> Batch:
    """Checks every request; a batch that has room for any `batch_size` of them."""
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
        raise PromptError([*map(len, tokens)].index(longest), f"the prompt has {longest} tokens, but {limit}: {remedy}")
    if pages is not None and lm.kv_format.page_size is not None and longest > pages * lm.kv_format.page_size:
        size = lm.kv_format.page_size
        raise PromptError(
            [*map(len, tokens)].index(longest),
            f"the prompt has {longest} tokens, but the pool of {pages} pages of {size} tokens holds {pages * size}: give at least "
            f"{-(-longest // size) + 1} pages (--kv_pages)",
        )
    for option in options:
        option.check_vocabulary(lm.config.num_tokens)
    logprobs = max((option.logprobs for option in options if option.logprobs is not None), default=None)
    size = max(1, min(batch_size, len(tokens)))
    return Batch(lm, size, capacity, logprobs=logprobs, steps=steps, pages=pages, prefix_cache=prefix_cache)


def _all_pieces(
    lm: LanguageModel,
    batch: Batch,
    tokens: list[list[int]],
    options: list[SamplingOptions],
    cancelled: Callable[[], bool],
    inspect: Callable[[Batch], None] | None,
) -> Iterator[tuple[int, Piece]]:
    """`_pieces` of as many prompts at a time as the batch has rows: (index of the prompt, piece)."""
    for first in range(0, len(tokens), batch.size):
        if cancelled():
            break
        some = slice(first, first + batch.size)
        for row, piece in _pieces(lm, batch, tokens[some], options[some], cancelled):
            yield first + row, piece
            if piece.completion is not None and batch.running:
                batch.free(row)  # others may need its pages
    if inspect is not None:
        inspect(batch)


def _pieces(
    lm: LanguageModel, batch: Batch, tokens: list[list[int]], options: list[SamplingOptions], cancelled: Callable[[], bool]
) -> Iterator[tuple[int, Piece]]:
    answers: dict[int, Answer] = {}

    def piece(row: int, text: str) -> tuple[int, Piece]:
        answer = answers[row]
        return row, Piece(text, answer.completion() if answer.finish_reason else None)

    mark = len(LEDGER.entries)
    batch.build(map(len, tokens))
    compiled = LEDGER.programs(mark)
    for row, (ids, option) in enumerate(zip(tokens, options, strict=True)):
        if cancelled():
            break
        answers[row] = Answer(lm, option, len(ids), compiled=compiled if row == 0 else ())
        text = start(batch, row, ids, option, answers[row])
        if text or answers[row].finish_reason:
            yield piece(row, text)
    for row, text in run(batch, answers, cancelled=cancelled):
        yield piece(row, text)
