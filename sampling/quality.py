"""How well models predict one text, in figures: perplexity, bits per byte, speed, and the distance from a reference."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from runtime import UserError
from runtime.corpus import corpus
from sampling.evaluate import CHUNK, Candidate, Score, evaluate, window_and_stride
from sampling.requests import read_text

EVALUATION_TEXT = "the evaluation text"  # the committed half, by the name that tables give it


@dataclasses.dataclass(frozen=True, eq=False)
class Quality:
    """What `measure_quality` found.

    Attributes:
      text: what the text is called.
      tokens: how many were predicted.
      num_bytes: that these tokens write.
      window, stride: see `evaluate`.
      scores: by candidate; the first is the reference of the others.
      about: by candidate: the model's name, its `weight_bytes`, and the number formats of activations and cache.
    """

    text: str
    tokens: int
    num_bytes: int
    window: int
    stride: int
    scores: dict[str, Score]
    about: dict[str, dict[str, Any]]

    @property
    def reference(self) -> str:
        return next(iter(self.scores))

    def as_json(self) -> dict[str, Any]:
        """What `--json` prints: divergences in nats, and null for what is no number or was not measured. `against` is of all but the
        reference."""
        found = {}
        for name, score in self.scores.items():
            part = self.about[name] | {
                "perplexity": _finite(score.perplexity),
                "perplexity_error": _finite(score.perplexity_error),
                "bits_per_byte": _finite(score.bits_per_byte(self.num_bytes)),
                "tokens_per_s": score.tokens_per_second,
            }
            if name != self.reference:
                ratio, error = score.ratio(self.scores[self.reference])
                part["against"] = {
                    "reference": self.reference,
                    "perplexity_ratio": _finite(ratio),
                    "perplexity_ratio_error": _finite(error),
                    "mean_kl": _finite(score.mean_kl),
                    "p99_kl": _finite(score.p99_kl),
                    "max_kl": _finite(score.max_kl),
                    "agreement": score.agreement,
                }
            found[name] = part
        sizes = {"tokens": self.tokens, "bytes": self.num_bytes, "window": self.window, "stride": self.stride}
        return {"text": self.text, **sizes, "candidates": found}

    def table(self) -> str:
        """For people."""
        own = [("candidate", "perplexity", "bits/byte", "tokens/s", "MB")]
        others = [("candidate", "perplexity ratio", "mean KL", "99th pct.", "max.", "same top token")]
        for name, score in self.scores.items():
            rate = score.tokens_per_second
            own.append(
                (
                    name,
                    f"{score.perplexity:.4f} ± {score.perplexity_error:.4f}",
                    f"{score.bits_per_byte(self.num_bytes):.4f}",
                    "-" if rate is None else f"{rate:.0f}",
                    f"{self.about[name]['weight_bytes'] / 1e6:.1f}",
                )
            )
            if name != self.reference:
                ratio, error = score.ratio(self.scores[self.reference])
                distances = (f"{kl:.3g}" for kl in (score.mean_kl, score.p99_kl, score.max_kl))
                others.append((name, f"{ratio:.5f} ± {error:.5f}", *distances, f"{score.agreement:.2%}"))
        lines = [
            f"{self.about[self.reference]['model']} on {self.text}: {self.tokens:,} tokens of {self.num_bytes:,} bytes, "
            f"in windows of {self.window:,} tokens, stride {self.stride:,}",
            *_columns(own),
        ]
        if len(others) > 1:
            lines += ["", f"against {self.reference} (KL in nats per token):", *_columns(others)]
        return "\n".join(lines)


def read_evaluation_text(path: str | None) -> tuple[str, str]:
    """A text to evaluate and what to call it: a UTF-8 file's, its line ends as they are, or the committed evaluation half.

    Raises:
      UserError: the file can't be read, is not UTF-8, or is empty.
    """
    if path is None:
        return corpus("evaluation"), EVALUATION_TEXT
    if not (text := read_text(path, newline="")):
        raise UserError(f"{path} is empty: give a text of at least two tokens")
    return text, path


def measure_quality(
    candidates: Mapping[str, Candidate],
    text: str,
    *,
    name: str = "the text",
    window: int | None = None,
    stride: int | None = None,
    max_tokens: int | None = None,
    chunk: int = CHUNK,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Quality:
    """Predicts a text with every candidate, and compares them with the first.

    Args:
      candidates, window, stride, chunk: see `evaluate`.
      text: plain text; control tokens that are written out in it are text.
      name: what to call it.
      max_tokens: predict no more than its first ones; None: all.
      progress: called with how many tokens have been predicted, and of how many.

    Raises:
      UserError: as `evaluate`; a text that the vocabulary can't write; or max_tokens below 1.
    """
    if not candidates:
        raise UserError("no candidate is given: give at least one")
    if max_tokens is not None and max_tokens < 1:
        raise UserError(f"max_tokens {max_tokens} is below 1: give at least 1")
    models = {name: lm for name, (lm, _) in candidates.items()}
    tokenizer = next(iter(models.values())).tokenizer
    window, stride = window_and_stride(window, stride, min(lm.config.context_length for lm in models.values()))
    try:
        ids = tokenizer.encode(text, add_bos=False, add_eos=False)
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
    unpredicted = 0 if tokenizer.adds_bos else 1  # without BOS nothing stands before the first token
    total = len(ids) - unpredicted
    if total < 1:
        raise UserError(f"{name} is of {len(ids)} token{'s' * (len(ids) != 1)}, too short to predict any of it: give at least two")
    total = total if max_tokens is None else min(total, max_tokens)
    ids = ids[: total + unpredicted]
    whole, before = (len(tokenizer.without_prefix(tokenizer.bytes_of(part))) for part in (ids, ids[:unpredicted]))
    told = {"window": window, "stride": stride, "chunk": chunk, "progress": lambda done: progress(done, total)}
    scores = evaluate(candidates, ids, **told)
    about = {
        name: {"model": lm.name, "weight_bytes": lm.weight_bytes, "compute": lm.model.dtype.name, "kv": format.dtype.name}
        for name, (lm, format) in candidates.items()
    }
    return Quality(name, total, whole - before, window, stride, scores, about)


def _columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows as lines: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]) for row in rows
    ]


def _finite(value: float) -> float | None:
    """JSON has no other numbers."""
    return value if math.isfinite(value) else None
