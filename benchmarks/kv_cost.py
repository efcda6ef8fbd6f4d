"""What a cache costs: bytes, decode steps against capacity and against tokens held, and recomputing the prefix instead.

Each function measures one part, and returns it as data that JSON can hold. Seconds are medians of interleaved rounds.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

import kv
from benchmarks.curves import fit, total
from benchmarks.decoding import Decoding
from benchmarks.report import noise_note
from benchmarks.rounds import interleaved, median_seconds, seconds
from model import ModelConfig, prefill
from sampling import LanguageModel
from sampling.batch import STEPS, plan_capacity

Formats = Mapping[str, kv.Format]


@dataclasses.dataclass(frozen=True)
class Rounds:
    """How all parts are measured; see `rounds.interleaved`."""

    count: int
    between: Callable[[], None] = lambda: None
    quiet_seconds: float = 0.0
    note: Callable[[str], None] = lambda text: None  # told how many calls other work disturbed

    def medians(self, cases: Mapping[Any, Callable[[], float]]) -> dict[Any, float]:
        records = interleaved(cases, self.count, between=self.between, quiet_seconds=self.quiet_seconds)
        if noise := noise_note([measurement for record in records.values() for measurement in record.measurements]):
            self.note(noise)
        return {name: median_seconds(record) for name, record in records.items()}


def sizes(config: ModelConfig, formats: Formats, capacity: int) -> dict[str, dict[str, float]]:
    """Bytes of a cache of one row, and of one token, beside bf16's.

    Raises:
      RuntimeError: the live arrays do not have the bytes that were counted.
    """
    bf16 = kv.nbytes(config, 1, capacity, kv.Format(np.dtype(jax.numpy.bfloat16)))
    parts = {}
    for name, format in formats.items():
        counted = kv.nbytes(config, 1, capacity, format)
        live = sum(leaf.nbytes for leaf in jax.tree.leaves(kv.init(config, 1, capacity, format)))
        if live != counted:
            raise RuntimeError(f"a {name} cache of 1 x {capacity} was counted as {counted} bytes, but its arrays have {live}")
        parts[name] = {"bytes_per_token": kv.bytes_per_token(config, format), "bytes": live, "to_bf16": live / bf16}
    return parts


def capacity(
    lm: LanguageModel, formats: Formats, rounds: Rounds, *, held: int, slots: tuple[int, int], batches: Sequence[int]
) -> dict[str, dict[str, Any]]:
    """A step's seconds with the same tokens held in a small and in a large cache: "FORMAT xBATCH" -> both and their ratio.

    Dispatches are half as long as a generation's: eight rows take long enough.
    """
    parts = {}
    for name, format in formats.items():
        cases = {
            (batch, size): functools.partial(Decoding(lm, format, batch, size, STEPS // 2), held) for batch in batches for size in slots
        }
        medians = rounds.medians(cases)
        for batch in batches:
            small, large = (medians[batch, size] for size in slots)
            parts[f"{name} x{batch}"] = {"small_s": small, "large_s": large, "ratio": large / small}
    return parts


def held(lm: LanguageModel, formats: Formats, rounds: Rounds, lengths: Sequence[int]) -> dict[str, dict[str, Any]]:
    """A step's seconds against the tokens held, in one cache per format that has room for all lengths; the line through them.

    The lengths may not exceed the model's context less a dispatch.
    """
    room = plan_capacity(max(lengths) + STEPS, lm.config.context_length)
    decodings = {name: Decoding(lm, format, 1, room, STEPS) for name, format in formats.items()}
    cases = {(name, length): functools.partial(decodings[name], length) for name in formats for length in lengths}
    medians = rounds.medians(cases)
    parts = {}
    for name, format in formats.items():
        x = [decodings[name].mean_held(length) for length in lengths]
        y = [medians[name, length] for length in lengths]
        parts[name] = {"held": x, "step_s": y, **slope(x, y, growing_bytes(lm.config, format))}
    return parts


def slope(held: Sequence[float], step_s: Sequence[float], bytes_per_token: int) -> dict[str, float]:
    """The line through a step's seconds, and the bytes that its slope moves per second."""
    line = fit(held, step_s)
    return {
        "slope_s_per_token": line.slope,
        "intercept_s": line.intercept,
        "r_squared": line.r_squared,
        "bytes_per_token": bytes_per_token,
        "bytes_per_s": bytes_per_token / line.slope,
    }


def growing_bytes(config: ModelConfig, format: kv.Format) -> int:
    """Bytes that a step reads for each further token held: of the layers without a window, the others' being full."""
    layers = tuple(layer.attention.cache_layer for layer in config.layers if layer.attention.spec.window is None)
    return kv.bytes_per_token(_Layers(layers), format)


@dataclasses.dataclass(frozen=True)
class _Layers:
    cache_layers: tuple[kv.LayerSpec, ...]


def recompute(lm: LanguageModel, format: kv.Format, rounds: Rounds, *, prompt: int, new: int, samples: int) -> dict[str, Any]:
    """Seconds for `new` tokens after a prompt, decoded with the cache, and by the full forward over the prefix of each.

    The full forward is measured at `samples` lengths and summed along straight lines between them. The prompt's prefill, which both need,
    is the first token of the latter and not in the former.
    """
    lengths = np.linspace(prompt, prompt + new - 1, samples).round().astype(int).tolist()
    dispatches = -(-new // STEPS)
    decoding = Decoding(lm, format, 1, plan_capacity(prompt + dispatches * STEPS, lm.config.context_length), STEPS)
    forwards = {length: functools.partial(_forward_seconds, lm, length) for length in lengths}
    medians = rounds.medians({"step": lambda: decoding(prompt, dispatches), **forwards})
    forward_s = [medians[length] for length in lengths]
    recomputed, cached = total(lengths, forward_s, prompt, new), new * medians["step"]
    return {
        "prompt": prompt,
        "new": new,
        "lengths": lengths,
        "forward_s": forward_s,
        "recomputed_s": recomputed,
        "cached_s": cached,
        "factor": recomputed / cached,
    }


def _forward_seconds(lm: LanguageModel, length: int) -> float:
    """Of one token's logits after a prefix of `length` tokens, with nothing cached. Its shape is exact: there is no padding to pay for."""
    tokens, counts = np.ones((1, length), np.int32), np.full((1,), length, np.int32)
    return seconds(lambda: prefill(lm.model, lm.params, kv.fresh(lm.config, 1), tokens, counts)[0])
