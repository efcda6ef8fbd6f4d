"""How well a model predicts a text, and what the number format of its cache changes about that."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

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


@dataclasses.dataclass(frozen=True, eq=False)
class Score:
    """The predictions of a text under one cache format, token by token: each array is f32 [tokens]."""

    nll: np.ndarray  # negative log-likelihood of the text's token, in nats
    kl: np.ndarray  # KL divergence of the prediction from the reference format's, in nats: sum of p_ref (log p_ref - log p)
    agrees: np.ndarray  # 1 where the likeliest token is the reference's

    @property
    def tokens(self) -> int:
        return len(self.nll)

    @property
    def perplexity(self) -> float:
        """Per token."""
        return float(np.exp(self.nll.mean(dtype=np.float64)))

    @property
    def mean_kl(self) -> float:
        return float(self.kl.mean(dtype=np.float64))

    @property
    def agreement(self) -> float:
        """Share of tokens whose likeliest continuation is the reference's."""
        return float(self.agrees.mean(dtype=np.float64))

    def ratio(self, reference: "Score") -> tuple[float, float]:
        """Perplexity over the reference's, and the standard error of that ratio, token by token on the same text."""
        gain = (self.nll - reference.nll).astype(np.float64)
        ratio = float(np.exp(gain.mean()))
        return ratio, ratio * float(gain.std() / np.sqrt(len(gain)))


def evaluate(
    lm: LanguageModel,
    tokens: Sequence[int],
    formats: Mapping[str, kv.Format],
    *,
    window: int = WINDOW,
    chunk: int = CHUNK,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Score]:
    """Predicts a text under several cache formats at once: all see the same tokens in the same calls.

    The text is cut in windows, and a window is read chunk by chunk into an empty row. Each token is predicted once, from those before it in
    its window. A window begins with BOS where the model wants one, otherwise with the token before it, so that the text's own first token
    is predicted only where there is a BOS.

    Args:
      lm: the model; its own `kv_format` is not used.
      tokens: of the text, without BOS; at least two.
      formats: by name. The first is the reference of `kl` and `agrees`.
      window: tokens.
      chunk: tokens per call, a divisor of `window`. Two f32 [chunk, V] blocks of logits are held at a time.
      progress: called after each chunk with how many tokens have been predicted.

    Returns:
      By name. Two formats that are equal score equal, bit for bit.

    Raises:
      UserError: fewer than two tokens, no format, or a chunk that does not divide the window or a window past the model's context.
    """
    if not formats:
        raise UserError("no cache format is given: give at least one")
    if chunk < 1 or window < chunk or window % chunk:
        raise UserError(f"chunk {chunk} does not divide window {window}: give a divisor, such as {CHUNK} for {WINDOW}")
    if paged := [name for name, format in formats.items() if format.page_size is not None]:
        raise UserError(f"the cache format {paged[0]} is paged, which changes no number: give it without pages")
    if window > lm.config.context_length:
        raise UserError(f"window {window} is longer than the model's context {lm.config.context_length}: give a shorter one")
    inputs, targets = _pairs(lm, tokens)
    parts = 1 if lm.placement is None else lm.placement.shards(axes.BATCH)  # a row of the text, and others that stay empty
    rows = None if parts == 1 else np.zeros((1,), np.int32)
    caches = {name: kv.init(lm.config, parts, window, format, None, lm.placement) for name, format in formats.items()}
    scores: dict[str, list[tuple[np.ndarray, ...]]] = {name: [] for name in formats}
    for start in range(0, len(targets), chunk):
        real = min(chunk, len(targets) - start)
        padded = np.zeros((2, chunk), np.int32)
        padded[:, :real] = inputs[start : start + real], targets[start : start + real]
        first = start % window  # of the chunk in its window
        if first == 0 and lm.tokenizer.adds_bos:
            padded[0, 0] = lm.tokenizer.bos_id
        counts, held = (np.asarray([value], np.int32) for value in (real, first))
        reference = None
        for name in formats:
            logits, caches[name] = prefill(lm.model, lm.params, caches[name], padded[:1], counts, rows, held, logits="all")
            reference = logits if reference is None else reference
            scores[name].append(tuple(np.asarray(part)[:real] for part in score(logits[0], reference[0], padded[1])))
            del logits  # before the next call makes its own
        progress(start + real)
    return {name: Score(*(np.concatenate(parts) for parts in zip(*chunks, strict=True))) for name, chunks in scores.items()}


def _pairs(lm: LanguageModel, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Each predicted token, and the token before it: int32 [n] both."""
    ids = np.asarray(tokens, np.int32)
    if len(ids) < 2:
        raise UserError(f"a text of {len(ids)} tokens predicts nothing: give at least two")
    if lm.tokenizer.adds_bos:
        ids = np.concatenate([np.asarray([lm.tokenizer.bos_id], np.int32), ids])
    return ids[:-1], ids[1:]


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
