"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864) and the ways to stretch it over longer contexts.

Pairs are (i, i + dim/2) of the first `dim` elements of a head. Checkpoints that rotate neighbours (2i, 2i + 1) have their weights' rows
reordered at loading, which changes no score.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from runtime import UserError


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor` (Chen et al. 2023, arXiv 2306.15595)."""

    factor: float


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Long wavelengths are stretched by `factor`, short ones kept, those between are mixed (Llama 3.1)."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_context: int


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv 2309.00071): frequencies that turn less than `slow` times in the original context are stretched, those
    that turn more than `fast` times kept; cos and sin are multiplied by `magnitude`."""

    factor: float
    original_context: int
    fast: float = 32.0
    slow: float = 1.0
    truncate: bool = True  # round the ramp's ends to whole pairs
    magnitude: float = 1.0


@dataclasses.dataclass(frozen=True)
class FactorScaling:
    """Each frequency divided by a factor of its own, one list for contexts up to `original_context` and one for longer ones (LongRoPE, Ding
    et al. 2024, arXiv 2402.13753); cos and sin are multiplied by `magnitude`."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_context: int
    magnitude: float = 1.0


@dataclasses.dataclass(frozen=True)
class Rope:
    """Which elements of a head turn with the position, and how fast."""

    theta: float
    dim: int  # elements that are rotated, from the head's first on
    scaling: LinearScaling | Llama3Scaling | YarnScaling | FactorScaling | None = None

    def __post_init__(self):
        if self.dim % 2:
            raise UserError(f"rotary embedding of {self.dim} elements: their number must be even; the checkpoint's metadata is damaged")
        if isinstance(self.scaling, FactorScaling):
            for name in ("short", "long"):
                if len(factors := getattr(self.scaling, name)) != self.dim // 2:
                    raise UserError(
                        f"the rotary embedding has {len(factors)} {name} factors for {self.dim // 2} frequencies: the metadata is damaged"
                    )

    def frequencies(self, context: int) -> np.ndarray:
        """Radians per position of each pair: f32 [dim / 2].

        Args:
          context: how many tokens a row may come to hold; only `FactorScaling` asks. It is a static property of the cache and not the
            length at hand, so that a token's key does not depend on what comes after it.
        """
        plain = self.theta ** (-np.arange(0, self.dim, 2, dtype=np.float32) / self.dim)
        return _scaled(plain, self, context).astype(np.float32)

    @property
    def magnitude(self) -> float:
        return getattr(self.scaling, "magnitude", 1.0)


def _scaled(plain: np.ndarray, rope: Rope, context: int) -> np.ndarray:
    match rope.scaling:
        case None:
            return plain
        case LinearScaling(factor):
            return plain / factor
        case FactorScaling(short, long, original):
            return plain / np.asarray(long if context > original else short, np.float32)
        case Llama3Scaling(factor, low, high, original):
            turns = original * plain / (2 * np.pi)  # in the original context
            mixed = np.clip((turns - low) / (high - low), 0.0, 1.0)
            return plain * (mixed + (1 - mixed) / factor)
        case YarnScaling(factor, original, fast, slow, truncate):

            def pair(turns: float) -> float:
                """The (fractional) pair that turns so often in the original context."""
                return rope.dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

            first, last = pair(fast), pair(slow)
            if truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, rope.dim - 1)
            if first == last:
                last += 0.001  # a ramp needs a width
            stretched = np.clip((np.arange(rope.dim // 2, dtype=np.float32) - first) / (last - first), 0.0, 1.0)
            return plain / factor * stretched + plain * (1 - stretched)
    raise TypeError(f"{rope.scaling!r} is no scaling of rotary embeddings")


def rope_table(rope: Rope, positions: jax.Array, context: int) -> tuple[jax.Array, jax.Array]:
    """cos and sin of the angles position * frequency.

    Args:
      positions: int32 [B, T].
      context: static; as for `Rope.frequencies`.

    Returns:
      cos and sin, f32 [B, T, 1, dim], for `kernels.apply_rope`.
    """
    angles = positions[..., None].astype(jnp.float32) * rope.frequencies(context)
    cos, sin = jnp.cos(angles)[:, :, None] * rope.magnitude, jnp.sin(angles)[:, :, None] * rope.magnitude
    return jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)
