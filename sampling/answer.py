"""What becomes of a request: its tokens collected into text, and the figures that go with it."""

import dataclasses
from collections.abc import Sequence

from runtime import Compile
from sampling.language_model import LanguageModel
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
    seed: int  # gives the same tokens again
    logprobs: tuple[TokenLogprobs, ...] | None = None


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
        self._prompt_tokens = prompt_tokens
        self.cached_tokens = cached_tokens
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
                text += self._end()
        if len(self.tokens) == fresh:
            self.time_to_first_token = seconds
        else:
            self.latencies += [seconds / int((sampled.tokens >= 0).any(axis=1).sum())] * fresh  # the steps that ran
        self._texts.append(text)
        return text

    def cancel(self) -> str:
        """Ends the answer where it is; returns text that was withheld."""
        self.finish_reason = "cancelled"
        text = self._end()
        self._texts.append(text)
        return text

    def _end(self) -> str:
        """Text that was withheld; the bytes of half a character may be what completes a stop string."""
        text = self._stop.push(self._detokenizer.flush())
        if self._stop.stopped:
            self.finish_reason = "stop"
        return text + self._stop.flush()

    def completion(self) -> Completion:
        """The answer so far."""
        return Completion(
            text="".join(self._texts),
            tokens=tuple(self.tokens),
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self.cached_tokens,
            finish_reason=self.finish_reason or "cancelled",
            timing=Timing(
                time_to_first_token=self.time_to_first_token,
                inter_token_latencies=tuple(self.latencies),
                compile_seconds=sum(entry.seconds for entry in self._compiled),
                compiles=len(self._compiled),
            ),
            seed=self._options.seed,
            logprobs=tuple(self._logprobs) if self._options.logprobs is not None else None,
        )


def _token_logprobs(sampled: Sampled, step: int, row: int, count: int) -> TokenLogprobs:
    top = ()
    if count:
        tokens, values = sampled.top_tokens[step, row, :count], sampled.top_logprobs[step, row, :count]
        top = tuple((int(token), float(value)) for token, value in zip(tokens, values, strict=True))
    return TokenLogprobs(token=int(sampled.tokens[step, row]), logprob=float(sampled.logprobs[step, row]), top=top)
