"""Repeating layers as one loop: which layers repeat, and where their weights stand when they are stacked.

A stack of L equal layers is traced, lowered and compiled once instead of L times, by a `lax.scan` that carries the stream and the cache.
Hybrids repeat as well: Gemma 3's five local layers and a global one are a period of six.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from model.config import ModelConfig
from runtime import UserError

LAYER_LOOPS = ("unrolled", "scan")
STACK = "loop"  # in the parameter tree, above the layers of one period


@dataclasses.dataclass(frozen=True)
class Loop:
    """Layers first, first + 1, ... are `times` periods of `period` layers each; what is before and after stands alone."""

    first: int
    period: int
    times: int

    @property
    def stop(self) -> int:
        """The layer after the last one that is looped over."""
        return self.first + self.period * self.times

    def place(self, path: tuple[str, ...]) -> tuple[tuple[str, ...], int | None]:
        """Where the weight at `path` of the unrolled tree stands: a path, and which of its `times` entries; None: all of it.

        ("layer_7", "mlp", "w_down") -> (("loop", "layer_1", "mlp", "w_down"), 1), with first 0 and period 6.
        """
        if not path[0].startswith("layer_"):
            return path, None
        number = int(path[0].removeprefix("layer_"))
        if not self.first <= number < self.stop:
            return path, None
        turn, within = divmod(number - self.first, self.period)
        return (STACK, f"layer_{within}", *path[1:]), turn


def find_loop(layers: Sequence[Any]) -> Loop | None:
    """The loop that leaves the fewest layers to be compiled, of equal ones the one with the shortest period; None if no layer repeats."""
    best, fewest = None, len(layers)
    for period in range(1, len(layers) // 2 + 1):
        first = 0
        while first + 2 * period <= len(layers):
            times = 1
            while layers[first : first + period] == layers[first + period * times : first + period * (times + 1)]:
                times += 1
            compiled = len(layers) - period * (times - 1)
            if times > 1 and compiled < fewest:
                best, fewest = Loop(first, period, times), compiled
            first += 1
    return best


def loop_of(config: ModelConfig, layer_loop: str) -> Loop | None:
    """What `layer_loop` ("unrolled" or "scan") makes of a model's layers."""
    if layer_loop not in LAYER_LOOPS:
        raise UserError(f"layer_loop={layer_loop!r} is not known: use one of {', '.join(LAYER_LOOPS)}")
    return find_loop(config.layers) if layer_loop == "scan" else None
