"""A chat whose KV cache stays: each turn prefills only what is new."""

from collections.abc import Generator, Iterator

from runtime import LEDGER, UserError
from sampling.answer import Answer, Completion
from sampling.batch import STEPS, Batch
from sampling.generate import Piece, check_capacity, run, start
from sampling.language_model import LanguageModel
from sampling.options import SamplingOptions


class Conversation:
    """One row of cache, and the messages that it holds.

    Attributes:
      messages: the chat so far; an answer that was cut short is in it as far as it came.
    """

    def __init__(
        self,
        lm: LanguageModel,
        options: SamplingOptions | None = None,
        *,
        system: str | None = None,
        parse_special: bool = False,
        capacity: int | None = None,
        steps: int = STEPS,
        pages: int | None = None,
    ):
        """Args:
          lm: a model with a chat template.
          options: how to sample every turn.
          system: the system message, in place of the template's own.
          parse_special: as in `LanguageModel.encode`.
          capacity: cache slots for the whole chat; by default the model's context.
          steps: tokens per dispatch.
          pages: as in `Batch`.

        Raises:
          UserError: the model has no chat template, or the capacity is out of range.
        """
        if lm.tokenizer.chat is None:
            raise UserError(f"{lm.name} has no chat template: use --task=generate with --raw, or a model that was trained for chat")
        self._lm = lm
        self._parse_special = parse_special
        self._options = options or SamplingOptions()
        capacity = lm.config.context_length if capacity is None else capacity
        check_capacity(lm, capacity)
        self._options.check_vocabulary(lm.config.num_tokens)
        self._batch = Batch(lm, 1, capacity, logprobs=self._options.logprobs, steps=steps, pages=pages)
        self._held: list[int] = []  # tokens in the cache
        self._open: Generator[Piece] | None = None  # the last answer's iterator
        self.messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]

    @property
    def batch(self) -> Batch:
        """The batch of one row that the chat runs in."""
        return self._batch

    @property
    def held(self) -> int:
        """Tokens in the cache."""
        return len(self._held)

    def say(self, text: str) -> Iterator[Piece]:
        """The answer to the next user turn, piece by piece, as `stream` gives it; `cached_tokens` tells what needed no prefill.

        Stop iterating (or close the iterator) to cut the answer short: the chat goes on with what was read of it.

        Raises:
          UserError: an empty turn, or a chat that outgrew the capacity; the chat is then as it was before.
        """
        if self._open is not None:
            self._open.close()  # an answer that was left half read: the row is this turn's from here on
        if not text.strip():
            raise UserError("the message is empty: write something, or end the chat with Ctrl-D")
        messages = [*self.messages, {"role": "user", "content": text}]
        tokens = self._lm.encode(messages, parse_special=self._parse_special)
        common = min(_common_prefix(self._held, tokens), len(tokens) - 1)  # the last token's logits are needed in any case
        held = self._batch.keeps(0, common)
        if len(tokens) > self._batch.capacity:
            raise UserError(
                f"the chat has grown to {len(tokens)} tokens, but the cache holds {self._batch.capacity}: "
                "start a new chat, or give a larger capacity"
            )
        self._open = self._answer(messages, tokens, held)
        return self._open

    def _answer(self, messages: list[dict[str, str]], tokens: list[int], held: int) -> Generator[Piece]:
        mark = len(LEDGER.entries)
        self._batch.build([len(tokens) - held])
        options = self._options.seeded()
        answer = Answer(self._lm, options, len(tokens), cached_tokens=held, compiled=LEDGER.programs(mark))
        self._held = []  # until the prefill is through, the row's contents are not known
        try:
            text = start(self._batch, 0, tokens[held:], options, answer, held=tokens[:held])
            yield Piece(text, _finished(answer))
            for _, text in run(self._batch, {0: answer}):
                yield Piece(text, _finished(answer))
        finally:
            self._batch.pending.clear()
            if answer.tokens:
                if answer.finish_reason is None:
                    answer.cancel()
                # The last token was sampled but perhaps not fed back, so the cache may not hold it.
                self._held = [*tokens, *answer.tokens[:-1]]
                self.messages = [*messages, {"role": "assistant", "content": answer.completion().text}]


def _finished(answer: Answer) -> Completion | None:
    return answer.completion() if answer.finish_reason else None


def _common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
