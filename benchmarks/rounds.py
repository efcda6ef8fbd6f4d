"""Calls within this process that take turns, so that what disturbs the machine disturbs all alike."""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from benchmarks.driver import Measurement, Record
from benchmarks.machine import OtherWork, wait_until_quiet
from benchmarks.report import undisturbed


def interleaved(
    cases: Mapping[Any, Callable[[], float]],
    rounds: int,
    *,
    between: Callable[[], None] = lambda: None,
    quiet_seconds: float = 0.0,
    deadline: float = math.inf,
) -> dict[Any, Record]:
    """A warm-up call of every case, then rounds of one counted call each, in an order drawn anew for each round.

    Args:
      cases: each returns the seconds of its own timed part, and has ended its work when it returns.
      rounds: counted calls of each.
      between: called before each round.
      quiet_seconds: how long at most to wait before each round for other work to end.
      deadline: no round but the first begins past it, on `time.perf_counter`'s clock.
    """
    first_calls = {name: seconds(case) for name, case in cases.items()}
    measurements: dict[Any, list[Measurement]] = {name: [] for name in cases}
    names, order = list(cases), np.random.default_rng(1)
    for number in range(rounds):
        if number and time.perf_counter() > deadline:
            break
        between()
        wait_until_quiet(quiet_seconds)
        for index in order.permutation(len(names)):  # no case always follows the same one, with what that leaves in the caches
            other = OtherWork()
            took = cases[names[index]]()
            measurements[names[index]].append(Measurement(took, (), other.cores()))
    return {name: Record(first_calls[name], tuple(done)) for name, done in measurements.items()}


def seconds(call: Callable[[], Any]) -> float:
    """How long the call takes until its results are there."""
    began = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - began


def median_seconds(record: Record) -> float:
    """Seconds of the calls that ran undisturbed, or of all where there are no others."""
    return statistics.median(measurement.seconds for measurement in undisturbed(record.measurements))
