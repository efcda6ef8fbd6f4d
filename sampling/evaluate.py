"""How well models predict a text, and what the number formats of weights and caches change about that."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

import kv
from model import prefill
from runtime import UserError, program
from sampling.language_model import LanguageModel
from sharding import axes

WINDOW = 1024  # tokens that a prediction may look back at, at most
CHUNK = 128  # tokens per call: bounds the logits, 128 MiB for 262,144 tokens; later chunks of a window read what the cache holds
Candidate = tuple[LanguageModel, kv.Format]  # the model's own `kv_format` is not used


@dataclasses.dataclass(frozen=True, eq=False)
class Score:
    """A candidate's predictions of a text, token by token: each array is f32 [tokens]."""

    nll: np.ndarray  # negative log-likelihood of the text's token, in nats
    kl: np.ndarray  # KL divergence of the prediction from the reference's, in nats: sum of p_ref (log p_ref - log p)
    agrees: np.ndarray  # 1 where the likeliest token is the reference's
    seconds: float = 0.0  # in this candidate's calls, none of which compiled

    @property
    def tokens(self) -> int:
        return len(self.nll)

    @property
    def perplexity(self) -> float:
        """Per token."""
        return float(np.exp(self.nll.mean(dtype=np.float64)))

    @property
    def perplexity_error(self) -> float:
        """Standard error of `perplexity`, of tokens taken as independent."""
        return self.perplexity * _standard_error(self.nll)

    @property
    def mean_kl(self) -> float:
        return float(self.kl.mean(dtype=np.float64))

    @property
    def p99_kl(self) -> float:
        return float(np.percentile(self.kl.astype(np.float64), 99))

    @property
    def max_kl(self) -> float:
        return float(self.kl.max())

    @property
    def agreement(self) -> float:
        """Share of tokens whose likeliest continuation is the reference's."""
        return float(self.agrees.mean(dtype=np.float64))

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens predicted, not those read again; None where no time was taken."""
        return self.tokens / self.seconds if self.seconds else None

    def bits_per_byte(self, num_bytes: int) -> float:
        """Bits that the text costs, over its bytes: comparable between tokenizers, as perplexity is not."""
        return float(self.nll.sum(dtype=np.float64)) / float(np.log(2)) / num_bytes

    def ratio(self, reference: "Score") -> tuple[float, float]:
        """Perplexity over the reference's, and the standard error of that ratio, token by token on the same text."""
        gain = self.nll.astype(np.float64) - reference.nll
        ratio = float(np.exp(gain.mean()))
        return ratio, ratio * _standard_error(gain)


def evaluate(
    candidates: Mapping[str, Candidate],
    tokens: Sequence[int],
    *,
    window: int | None = None,
    stride: int | None = None,
    chunk: int = CHUNK,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Score]:
    """Predicts a text with several candidates at once: all see the same tokens in the same calls.

    A window is read chunk by chunk into an empty row. Each token is predicted once, from those before it in its window; see `windows` for
    which windows there are. A window begins with BOS where the model wants one, otherwise with the token before it, so that the text's own
    first token is predicted only where there is a BOS.

    Args:
      candidates: by name, models with one vocabulary. The first is the reference of `kl` and `agrees`.
      tokens: of the text, without BOS; at least two, or one where there is a BOS.
      window: tokens; None: 1024, or the models' context if that is shorter.
      stride: tokens by which a window begins after the one before. The rest of a window, window - stride tokens, is read again and not
        scored: at least so many stand before each token but the first window's. None: half of `window`; `window`: nothing is read twice.
      chunk: tokens per call at most. Two f32 [chunk, V] blocks of logits are held at a time, and a cache of `window` tokens per candidate.
      progress: called with how many tokens have been predicted, at first 0, then after each chunk that is scored.

    Returns:
      By name. Two candidates that are equal score equal, bit for bit.

    Raises:
      UserError: too few tokens, no candidate, candidates of two vocabularies, a cache of pages, a window past the context of a model,
        a stride past the window, or one of the sizes below 1.
    """
    if not candidates:
        raise UserError("no candidate is given: give at least one")
    if paged := [name for name, (_, format) in candidates.items() if format.page_size is not None]:
        raise UserError(f"the cache of {paged[0]} is paged, which changes no number: give its format without pages")
    _check_vocabulary(candidates)
    window, stride = window_and_stride(window, stride, min(lm.config.context_length for lm, _ in candidates.values()))
    if chunk < 1:
        raise UserError(f"chunk {chunk} is below 1: give at least 1, such as {CHUNK}")
    chunk = min(chunk, window)
    lm, _ = next(iter(candidates.values()))
    inputs, targets = _pairs(lm, tokens)
    rereads = stride < window < len(targets)
    readers = {name: _Reader(lm, format, window, chunk, rereads) for name, (lm, format) in candidates.items()}
    parts: dict[str, list[tuple[np.ndarray, ...]]] = {name: [] for name in candidates}
    progress(0)
    for start, scored, stop in windows(len(targets), window, stride):
        read = inputs[start:stop].copy()
        if lm.tokenizer.adds_bos:
            read[0] = lm.tokenizer.bos_id
        for first in range(start, scored, chunk):
            for reader in readers.values():
                reader.read(read[first - start : min(first + chunk, scored) - start], first - start)
        for first in range(scored, stop, chunk):
            last, reference = min(first + chunk, stop), None
            for name, reader in readers.items():
                logits, part = reader.score(read[first - start : last - start], targets[first:last], first - start, reference)
                reference = logits if reference is None else reference
                parts[name].append(part)
                del logits  # before the next call makes its own
            progress(last)
    return {
        name: Score(*(np.concatenate(part) for part in zip(*parts[name], strict=True)), seconds=reader.seconds)
        for name, reader in readers.items()
    }


def windows(count: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Which tokens each window reads, and from where on it scores them: (start, scored, stop).

    Seven tokens, window 4, stride 2 ("." is read, "x" is read and scored):

        x x x x
            . . x x
                . . x

    Args:
      count: tokens.
      window: the most that are read, `stop - start`.
      stride: from 1 to `window`; the most that are scored, but for the first window, which scores all.
    """
    scored = 0
    while scored < count:
        start = max(0, scored - (window - stride))
        stop = min(start + window, count)
        yield start, scored, stop
        scored = stop


def window_and_stride(window: int | None, stride: int | None, context: int | None = None) -> tuple[int, int]:
    """Both as `evaluate` takes them, the defaults put in.

    Args:
      window, stride: see `evaluate`.
      context: the models'; None: not known yet, so that only what no model could do is refused.

    Raises:
      UserError: a window past the context, a stride past the window, or one of them below 1.
    """
    for name, value in (("window", window), ("stride", stride)):
        if value is not None and value < 1:
            raise UserError(f"{name} {value} is below 1: give at least 1")
    if window is not None and context is not None and window > context:
        raise UserError(f"window {window} is longer than the model's context {context}: give at most {context}")
    if window is None:
        window = WINDOW if context is None else min(WINDOW, context)
    if stride is None:
        stride = max(1, window // 2)
    if stride > window:
        raise UserError(f"stride {stride} is longer than window {window}, which would skip tokens: give at most {window}")
    return window, stride


def _check_vocabulary(candidates: Mapping[str, Candidate]) -> None:
    (reference, (first, _)), *others = candidates.items()
    for name, (lm, _) in others:
        own, its = first.tokenizer, lm.tokenizer
        if its is own:
            continue
        if own.pieces != its.pieces:
            raise UserError(
                f"{name} has another vocabulary than {reference} ({its.vocab_size} tokens, not the same {own.vocab_size}): "
                "give models that share their tokenizer"
            )
        if (own.adds_bos, own.bos_id) != (its.adds_bos, its.bos_id):
            raise UserError(f"{name} and {reference} do not begin a text with the same BOS: give models that share their tokenizer")


def _pairs(lm: LanguageModel, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Each predicted token, and the token before it: int32 [n] both."""
    ids = np.asarray(tokens, np.int32)
    if len(ids) < (1 if lm.tokenizer.adds_bos else 2):
        raise UserError(f"a text of {len(ids)} tokens predicts nothing: give at least two")
    if lm.tokenizer.adds_bos:
        ids = np.concatenate([np.asarray([lm.tokenizer.bos_id], np.int32), ids])
    return ids[:-1], ids[1:]


class _Reader:
    """One candidate's cache, a row of which reads the windows one after the other, in calls of one shape."""

    def __init__(self, lm: LanguageModel, format: kv.Format, window: int, chunk: int, rereads: bool):
        self._lm, self._chunk = lm, chunk
        parts = 1 if lm.placement is None else lm.placement.shards(axes.BATCH)  # a row of the text, and others that stay empty
        self._rows = None if parts == 1 else np.zeros((1,), np.int32)
        self._cache = kv.init(lm.config, parts, window, format, None, lm.placement)
        self.seconds = 0.0
        # Nothing is read, but all that will be called is compiled: before the clock starts.
        none = np.zeros((0,), np.int32)
        if rereads:
            self.read(none, 0)
        self.score(none, none, 0, None)
        self.seconds = 0.0

    def read(self, tokens: np.ndarray, held: int) -> None:
        """Tokens, int32 [at most chunk], after the first `held` of the window."""
        began = time.perf_counter()
        jax.block_until_ready(self._prefill(tokens, held, "last"))
        self.seconds += time.perf_counter() - began

    def score(
        self, tokens: np.ndarray, targets: np.ndarray, held: int, reference: jax.Array | None
    ) -> tuple[jax.Array, tuple[np.ndarray, ...]]:
        """As `read`; returns the logits [chunk, V], and of each token what `Score` keeps, compared with the logits `reference` (None: its
        own)."""
        began = time.perf_counter()
        logits = self._prefill(tokens, held, "all")[0]
        found = score(logits, logits if reference is None else reference, self._padded(targets))
        kept = tuple(np.asarray(part)[: len(tokens)] for part in found)
        self.seconds += time.perf_counter() - began
        return logits, kept

    def _prefill(self, tokens: np.ndarray, held: int, logits: str) -> jax.Array:
        lm, (count, kept) = self._lm, (np.asarray([value], np.int32) for value in (len(tokens), held))
        out, self._cache = prefill(lm.model, lm.params, self._cache, self._padded(tokens)[None], count, self._rows, kept, logits=logits)
        return out

    def _padded(self, tokens: np.ndarray) -> np.ndarray:
        return np.pad(tokens, (0, self._chunk - len(tokens)))


@program()
def score(logits: jax.Array, reference: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What `Score` keeps of a block of logits, reduced where the logits are.

    Args:
      logits: f32 [T, V].
      reference: f32 [T, V].
      targets: int32 [T], the tokens that came.

    Returns:
      nll, kl and agrees: f32 [T] each.
    """

    def token(row: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        own, others, target = row  # [V], [V], []
        log_q, log_p = jax.nn.log_softmax(own), jax.nn.log_softmax(others)
        kl = jnp.sum(jnp.exp(log_p) * (log_p - log_q))
        return -log_q[target], kl, (jnp.argmax(own) == jnp.argmax(others)).astype(jnp.float32)

    # One row at a time: whole blocks of log-probabilities would be several times the logits' own memory.
    return jax.lax.map(token, (logits, reference, targets))


def _standard_error(values: np.ndarray) -> float:
    """Of their mean."""
    return float(values.std(dtype=np.float64)) / float(np.sqrt(len(values)))
