"""A line through measurements, and the sum under a curve that was sampled at a few places."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Line:
    """y = intercept + slope * x, least squares."""

    slope: float
    intercept: float
    r_squared: float  # share of the variance of y that the line explains; nan where y does not vary

    def at(self, x: float) -> float:
        return self.intercept + self.slope * x


def fit(x: Sequence[float], y: Sequence[float]) -> Line:
    """The line through two points or more."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    slope, intercept = np.polyfit(x, y, 1)
    rest = y - (intercept + slope * x)
    spread = ((y - y.mean()) ** 2).sum()
    return Line(float(slope), float(intercept), float(1 - (rest**2).sum() / spread) if spread else float("nan"))


def total(sampled: Sequence[int], values: Sequence[float], first: int, count: int) -> float:
    """The sum of a curve over first, first + 1, ... (`count` places), straight between the samples.

    Raises:
      ValueError: the samples, in rising order, do not reach from the first to the last of the places.
    """
    if any(a >= b for a, b in itertools.pairwise(sampled)) or not sampled[0] <= first <= first + count - 1 <= sampled[-1]:
        raise ValueError(f"samples at {list(sampled)} do not rise from {first} to {first + count - 1}")
    return float(np.interp(np.arange(first, first + count), sampled, values).sum())
