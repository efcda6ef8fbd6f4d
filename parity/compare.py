"""Where this stack and a reference part, and why.

A mismatch is read from where it begins. At position 0 a token attends to itself alone and turns by no angle: only norms, weights and number
formats can show there. If a later position is the first, all that is seen from there and not before is to blame: a window ends, or, from
position 1 on, angles or scores differ. What the place leaves open is settled by trying: the layers up to the first wrong one are run again
with one thing changed at a time, and the change that brings them nearest to the reference names the cause.
"""

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import checkpoint
import kv
from model import AttentionConfig, MLAConfig, ModelConfig, Transformer
from parity import reference
from runtime import UserError

TOLERANCE = 2e-4  # of the largest value compared, in f32
SETTLED = 0.2  # a change that leaves less than this part of the difference is taken for the cause
MOST_TOKENS = 1024
NORM, ROPE, MASK, SCALE, DTYPE, OTHER = "eps/norm", "positions/rope", "mask/window", "scale/softcap", "dtype", "weights/other"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What `compare` found. Differences are the largest absolute ones over all tokens, beside the largest value of the reference.

    Attributes:
      tokens: how many were compared, over all prompts.
      layers: per layer, (difference, largest value) of the stream after it.
      logits: likewise of the logits.
      first_token: (prompt, position, ours, theirs) of the first position whose likeliest token differs; None if none does.
      cause: the likely class of cause; None where all agree.
      evidence: why, in words.
    """

    tokens: int
    layers: tuple[tuple[float, float], ...]
    logits: tuple[float, float]
    first_token: tuple[int, int, int, int] | None
    cause: str | None
    evidence: str
    tolerance: float = TOLERANCE

    @property
    def agrees(self) -> bool:
        return self.cause is None

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"agrees": self.agrees}

    def table(self) -> str:
        """For people."""
        rows = [(f"layer {number}", *each) for number, each in enumerate(self.layers)] + [("logits", *self.logits)]
        lines = [f"{'':10} {'max |difference|':>16} {'largest value':>14} {'relative':>9}"]
        for name, difference, largest in rows:
            relative = difference / max(largest, 1e-30)
            lines.append(f"{name:10} {difference:16.2e} {largest:14.3g} {relative:9.1e}{'' if relative <= self.tolerance else '  <-'}")
        if self.first_token is None:
            lines.append(f"the likeliest token is the same at all {self.tokens} positions")
        else:
            prompt, position, ours, theirs = self.first_token
            lines.append(f"first differing token: prompt {prompt}, position {position}: {ours} here, {theirs} in the reference")
        lines.append("agrees" if self.agrees else f"likely cause: {self.cause} ({self.evidence})")
        return "\n".join(lines)


def compare(
    model: str | os.PathLike[str],
    reference_model: str | os.PathLike[str] | None = None,
    prompts: list[list[int]] | None = None,
    new_tokens: int = 8,
) -> Comparison:
    """Runs both on the same tokens, in f32.

    Args:
      model: a Hugging Face folder.
      reference_model: the folder that transformers reads; by default the same.
      prompts: token ids; by default two rows of random ids, long enough to leave every window.
      new_tokens: greedy tokens of the reference that are appended to each prompt.

    Raises:
      UserError: a folder can't be loaded, transformers is missing, or the two are not of one shape.
    """
    if not (Path(model) / "config.json").is_file():
        raise UserError(f"{model} is no Hugging Face folder, which is what transformers reads: give such a folder as --model")
    loaded = checkpoint.load(model, jnp.float32)
    theirs = reference.load_reference(Path(reference_model or model))
    rows = [reference.greedy(theirs, np.asarray(row, np.int32), new_tokens) for row in prompts or _random_prompts(loaded.config)]
    answers = [reference.answers(theirs, row) for row in rows]
    ours = [forward(loaded.config, loaded.params, row) for row in rows]
    for (our_logits, our_states), (logits, states) in zip(ours, answers, strict=True):
        if our_logits.shape != logits.shape or our_states.shape != states.shape:
            raise UserError(
                f"{reference_model} answers with logits {logits.shape} and {len(states)} layers, {model} with {our_logits.shape} and "
                f"{len(our_states)}: they are not the same model"
            )
    differences = [[np.abs(a[part] - b[part]) for a, b in zip(ours, answers, strict=True)] for part in (0, 1)]
    logits = max(float(d.max()) for d in differences[0]), max(float(np.abs(each[0]).max()) for each in answers)
    layers = tuple(
        (max(float(d[n].max()) for d in differences[1]), max(float(np.abs(each[1][n]).max()) for each in answers))
        for n in range(len(loaded.config.layers))
    )
    cause, evidence = None, "all within the tolerance"
    if any(not difference <= TOLERANCE * largest for difference, largest in (*layers, logits)):
        cause, evidence = _cause(loaded, rows, ours, answers, layers)
    first = next(
        ((number, int(at[0]), int(a[at[0]]), int(b[at[0]])) for number, (a, b, at) in enumerate(_choices(ours, answers)) if len(at)), None
    )
    return Comparison(sum(map(len, rows)), layers, logits, first, cause, evidence)


def _choices(ours: list[Any], answers: list[Any]) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    for (our_logits, _), (logits, _) in zip(ours, answers, strict=True):
        a, b = our_logits.argmax(-1), logits.argmax(-1)
        yield a, b, np.flatnonzero(a != b)


def _random_prompts(config: ModelConfig) -> list[list[int]]:
    windows = [layer.attention.window for layer in config.layers if isinstance(layer.attention, AttentionConfig)]
    length = min(max([24, *(window + 8 for window in windows if window is not None)]), MOST_TOKENS, config.context_length)
    rng = np.random.default_rng(0)
    return [rng.integers(0, config.vocab_size, length).tolist() for _ in range(2)]


def forward(config: ModelConfig, params: Any, tokens: np.ndarray, dtype: Any = jnp.float32) -> tuple[np.ndarray, np.ndarray]:
    """Logits f32 [T, V], and the stream after each layer, f32 [L, T, D]."""
    model, T = Transformer(config, jnp.dtype(dtype)), len(tokens)
    step = kv.Step(rows=None, start=jnp.zeros((1,), jnp.int32), count=jnp.full((1,), T, jnp.int32))
    with jax.default_matmul_precision("highest"):
        (logits, _), seen = model.apply(
            {"params": params}, jnp.asarray(tokens)[None], step, kv.fresh(config, 1), "all", mutable=["intermediates"]
        )
    states = [seen["intermediates"][f"stream_{number}"][0][0] for number in range(len(config.layers))]
    return np.asarray(logits[0], np.float32), np.asarray(jnp.stack(states), np.float32)


def _cause(loaded: Any, rows: list[np.ndarray], ours: list[Any], answers: list[Any], layers: Any) -> tuple[str, str]:
    number = next((n for n, (difference, largest) in enumerate(layers) if not difference <= TOLERANCE * largest), None)
    if number is None:
        return (
            SCALE if loaded.config.final_softcap is not None else NORM,
            "all layers agree: the final norm, the head or a cap of the logits",
        )
    row, position = min(
        ((row, int(np.flatnonzero(wrong)[0])) for row, wrong in enumerate(_wrong(ours, answers, number, layers)) if wrong.any()),
        key=lambda place: place[1],
    )
    where = f"layer {number}, position {position} is the first that differs"
    config, trial = loaded.config, _Trial(loaded, number, rows[row], answers[row][1][number])
    if position == 0:
        best = trial.best(trial.around(NORM, "norm eps", 10.0 ** np.arange(-9, 1), lambda eps: dataclasses.replace(config, norm_eps=eps)))
        if best is not None:
            return best[0], f"{where}; with {best[1]} it agrees {best[2]:.0f} times better"
        if trial.rounding() / 4 < trial.plain < trial.rounding() * 4:
            return DTYPE, f"{where}; the difference is of the size that bf16 makes"
        return OTHER, f"{where}, where no position, mask or scale can show"
    if position > 1:
        return MASK, f"{where}: what is seen from there on is not the same"
    scales = trial.around(SCALE, "scores scaled by", 2.0 ** np.arange(-4, 5), lambda factor: _scaled(config, factor))
    thetas = trial.around(ROPE, "rope theta", 10.0 ** np.arange(3, 8), lambda theta: _rotated(config, theta=theta))
    best = trial.best([*scales, *thetas, *_other_trials(config)])
    if best is not None:
        return best[0], f"{where}; with {best[1]} it agrees {best[2]:.0f} times better"
    return ROPE, f"{where}: the first token that turns by an angle"


def _wrong(ours: list[Any], answers: list[Any], number: int, layers: Any) -> Iterator[np.ndarray]:
    """Which positions differ after layer `number`, per row: bool [T]."""
    for (_, our_states), (_, states) in zip(ours, answers, strict=True):
        yield ~(np.abs(our_states[number] - states[number]).max(-1) <= TOLERANCE * layers[number][1])


Change = tuple[str, str, ModelConfig]  # class of cause, in words, the changed config


class _Trial:
    """The layers up to the first wrong one, with something changed, against the reference."""

    def __init__(self, loaded: Any, number: int, tokens: np.ndarray, wanted: np.ndarray):
        self._config, self._params, self._layers, self._tokens, self._wanted = loaded.config, loaded.params, number + 1, tokens, wanted
        self.plain = self.difference(loaded.config)

    def _stream(self, config: ModelConfig, dtype: Any = jnp.float32) -> np.ndarray:
        with jax.disable_jit():  # a hundred variants of a few layers: compiling each would take longer than running it as it is written
            return forward(dataclasses.replace(config, layers=config.layers[: self._layers]), self._params, self._tokens, dtype)[1][-1]

    def difference(self, config: ModelConfig) -> float:
        return float(np.abs(self._stream(config) - self._wanted).max())

    @functools.cache  # noqa: B019 - lives as long as the comparison
    def rounding(self) -> float:
        """How much bf16 changes here."""
        return float(np.abs(self._stream(self._config, jnp.bfloat16) - self._stream(self._config)).max())

    def around(self, kind: str, words: str, coarse: np.ndarray, change: Callable[[float], ModelConfig]) -> Iterator[Change]:
        """Values about the best of a coarse geometric series, eight to a step of it."""
        near = coarse[int(np.argmin([self.difference(change(float(value))) for value in coarse]))]
        for value in near * (coarse[1] / coarse[0]) ** np.linspace(-1, 1, 17):
            yield kind, f"{words} {value:.3g}", change(float(value))

    def best(self, changes: Iterable[Change]) -> tuple[str, str, float] | None:
        """The change that comes nearest, if it settles the matter: class, words, and how many times nearer."""
        found = [(self.difference(config), kind, words) for kind, words, config in changes]
        if not found or not (nearest := min(found))[0] <= SETTLED * self.plain:
            return None
        return nearest[1], nearest[2], self.plain / max(nearest[0], 1e-30)


def _changed(config: ModelConfig, change: Callable[[Any], Any]) -> ModelConfig:
    """The config with every layer's attention changed."""
    layers = tuple(dataclasses.replace(layer, attention=change(layer.attention)) for layer in config.layers)
    return dataclasses.replace(config, layers=layers)


def _scaled(config: ModelConfig, factor: float) -> ModelConfig:
    return _changed(config, lambda old: dataclasses.replace(old, scale=old.spec.scale * factor))


def _rotated(config: ModelConfig, **changes: Any) -> ModelConfig:
    def attention(old: AttentionConfig | MLAConfig) -> Any:
        return old if old.rope is None else dataclasses.replace(old, rope=dataclasses.replace(old.rope, **changes))

    return _changed(config, attention)


def _other_trials(config: ModelConfig) -> Iterator[Change]:
    yield ROPE, "no rope scaling", _rotated(config, scaling=None)
    if all(isinstance(layer.attention, AttentionConfig) for layer in config.layers):

        def every(**changes: Any) -> ModelConfig:
            return _changed(config, lambda old: dataclasses.replace(old, **changes))

        yield ROPE, "no rotation", every(rope=None)
        yield MASK, "no window", every(window=None)
        for cap in (None, 20.0, 30.0, 50.0):
            yield SCALE, f"soft cap {cap}", every(softcap=cap)
