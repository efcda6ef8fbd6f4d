"""What a request may ask of the sampler, and the same for a whole batch as traced arrays."""

import dataclasses
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from flax import struct

from runtime import UserError

BIAS_SLOTS = 300  # logit-bias entries per row: the compiled shape has room for as many, so that none recompiles
STOP_TOKEN_SLOTS = 16  # end-of-sequence ids per row, likewise
MAX_LOGPROBS = 20
MAX_BIAS = 1000


@dataclasses.dataclass(frozen=True)
class SamplingOptions:
    """One request's wishes. The order of effects: penalties, logit bias, temperature, top-k, top-p, min-p.

    Attributes:
      max_new_tokens: at most this many tokens, at least 1.
      temperature: 0 takes the likeliest token; above, logits are divided by it.
      top_k: keep the k likeliest tokens; 0 keeps all. Tokens as likely as the k-th are kept.
      top_p: keep the likeliest tokens that together have at least this probability (Holtzman et al. 2019, arXiv 1904.09751).
      min_p: keep tokens at least this many times as likely as the likeliest (Nguyen et al. 2024, arXiv 2407.01082).
      repetition_penalty: divides the positive and multiplies the negative logits of tokens that prompt or answer hold
        (Keskar et al. 2019, arXiv 1909.05858); 1 is off.
      presence_penalty: subtracted from the logits of tokens that the answer holds (OpenAI API).
      frequency_penalty: subtracted as often as the answer holds the token (OpenAI API).
      logit_bias: token id -> value added to its logit.
      seed: of this request's own randomness: the same seed gives the same tokens in any company. None takes a fresh one.
      stop: strings that end the answer; it is cut just before the first of them.
      ignore_eos: go on after an end-of-sequence token.
      logprobs: None, or how many of the likeliest tokens' log-probabilities to report beside the chosen one's (0 to 20); they are
        those of the model, before any of the above.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self):
        """Raises: UserError, naming the option, its value and what is allowed."""
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stop, Sequence) or not all(isinstance(text, str) for text in stop):
            raise UserError(f"stop {self.stop!r} is no text: give a string, or a list of strings")
        object.__setattr__(self, "stop", tuple(stop))
        if not isinstance(self.ignore_eos, (bool, np.bool_)):
            raise UserError(f"ignore_eos {self.ignore_eos!r} is out of range: give true or false")
        self._check("max_new_tokens", 1, math.inf, whole=True)
        self._check("temperature", 0, 1000)
        self._check("top_k", 0, 2**31 - 1, whole=True)
        self._check("top_p", 0, 1, above=True)
        self._check("min_p", 0, 1)
        self._check("repetition_penalty", 0, 1000, above=True)
        self._check("presence_penalty", -1000, 1000)
        self._check("frequency_penalty", -1000, 1000)
        if self.seed is not None:
            self._check("seed", 0, 2**32 - 1, whole=True)
        if self.logprobs is not None:
            self._check("logprobs", 0, MAX_LOGPROBS, whole=True)
        if len(self.logit_bias) > BIAS_SLOTS:
            raise UserError(f"logit_bias has {len(self.logit_bias)} entries: give at most {BIAS_SLOTS}")
        for token, value in self.logit_bias.items():
            if not _is_number(token, whole=True):
                raise UserError(f"logit_bias names token {token!r}, which is no token id: give a whole number")
            if not _is_number(value) or not abs(value) <= MAX_BIAS:
                raise UserError(
                    f"logit_bias of token {token} is {value!r}: give a number from -{MAX_BIAS} to {MAX_BIAS}; -100 bans a token"
                )
        if not all(self.stop):
            raise UserError("stop has an empty string, which every answer holds: leave it out")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises: UserError, if a bias is for no token of the vocabulary."""
        if bad := [token for token in self.logit_bias if not 0 <= token < vocab_size]:
            raise UserError(f"logit_bias names token {bad[0]}, which is not in the vocabulary: ids go from 0 to {vocab_size - 1}")

    def seeded(self) -> "SamplingOptions":
        """With a seed: its own, or a fresh one."""
        return self if self.seed is not None else dataclasses.replace(self, seed=secrets.randbits(32))

    def _check(self, name: str, low: float, high: float, *, above: bool = False, whole: bool = False) -> None:
        value = getattr(self, name)
        fits = _is_number(value, whole=whole) and (low < value if above else low <= value) and value <= high
        if not fits:  # nan fails every comparison
            kind = "a whole number" if whole else "a number"
            limit = f"{'above' if above else 'from'} {low}" + (f" to {high}" if math.isfinite(high) else "")
            raise UserError(f"{name} {value} is out of range: give {kind} {limit}")


def _is_number(value: Any, *, whole: bool = False) -> bool:
    kinds = (int, np.integer) if whole else (int, float, np.integer, np.floating)
    return isinstance(value, kinds) and not isinstance(value, bool)


class SamplingParams(struct.PyTreeNode):
    """`SamplingOptions` of every row, as arrays: traced, so that no mix of requests recompiles."""

    temperature: jax.Array  # f32 [B]
    top_k: jax.Array  # int32 [B]
    top_p: jax.Array  # f32 [B]
    min_p: jax.Array  # f32 [B]
    repetition_penalty: jax.Array  # f32 [B]
    presence_penalty: jax.Array  # f32 [B]
    frequency_penalty: jax.Array  # f32 [B]
    bias_tokens: jax.Array  # int32 [B, BIAS_SLOTS], -1 where unused
    bias_values: jax.Array  # f32 [B, BIAS_SLOTS]
    seed: jax.Array  # uint32 [B]
    stop_tokens: jax.Array  # int32 [B, STOP_TOKEN_SLOTS], -1 where unused

    @classmethod
    def stack(cls, options: Sequence[SamplingOptions], eos_ids: Sequence[int]) -> "SamplingParams":
        """Rows in the order of `options`, fresh seeds for those without; numpy arrays, not on a device yet."""
        options = [option.seeded() for option in options]
        if len(eos_ids) > STOP_TOKEN_SLOTS:
            raise UserError(f"the model has {len(eos_ids)} end-of-sequence ids: at most {STOP_TOKEN_SLOTS} are supported")

        def column(name: str, dtype: type) -> np.ndarray:
            return np.asarray([getattr(option, name) for option in options], dtype)

        bias_tokens = np.full((len(options), BIAS_SLOTS), -1, np.int32)
        bias_values = np.zeros((len(options), BIAS_SLOTS), np.float32)
        stop_tokens = np.full((len(options), STOP_TOKEN_SLOTS), -1, np.int32)
        for row, option in enumerate(options):
            bias_tokens[row, : len(option.logit_bias)] = list(option.logit_bias)
            bias_values[row, : len(option.logit_bias)] = list(option.logit_bias.values())
            if not option.ignore_eos:
                stop_tokens[row, : len(eos_ids)] = sorted(eos_ids)
        return cls(
            temperature=column("temperature", np.float32),
            top_k=column("top_k", np.int32),
            top_p=column("top_p", np.float32),
            min_p=column("min_p", np.float32),
            repetition_penalty=column("repetition_penalty", np.float32),
            presence_penalty=column("presence_penalty", np.float32),
            frequency_penalty=column("frequency_penalty", np.float32),
            bias_tokens=bias_tokens,
            bias_values=bias_values,
            seed=column("seed", np.uint32),
            stop_tokens=stop_tokens,
        )
