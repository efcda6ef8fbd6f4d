"""From measurements to medians and ratios: `build` makes what the JSON file holds."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.cases import Case
from benchmarks.driver import Measurement, Record
from benchmarks.limits import Work, limit
from benchmarks.machine import QUIET

Records = Mapping[Case, Mapping[str, Record]]  # by case and stack; a stack that failed a case is not in it


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A stack that was loaded: what it said of itself. `work` is None for a peer."""

    about: str
    is_peer: bool
    load_seconds: float
    ready_seconds: float
    load_peak_bytes: int
    peak_bytes: int
    versions: Mapping[str, str]
    work: Work | None


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """What the machine did at best, sampled between the rounds, and how that was found."""

    read_bytes_per_s: tuple[float, ...]
    matmul_flop_per_s: tuple[float, ...]
    how: str


def build(
    machine: Mapping[str, Any],
    settings: Mapping[str, Any],
    loaded: Mapping[str, Loaded],
    records: Records,
    ceilings: Ceilings | None,
    notes: Sequence[str],
) -> dict[str, Any]:
    """The whole report, ready for JSON.

    Args:
      machine: from `machine.describe`.
      settings: of this run; `repetitions` and `budget_seconds` are read here.
      loaded: by stack, in the order of the tables.
      ceilings: None leaves out the limits.
      notes: what was noticed on the way.
    """
    reference = next((name for name, stack in loaded.items() if not stack.is_peer), None)
    cases = {case.name: _case(case, by_stack, loaded, ceilings) for case, by_stack in records.items()}
    return {
        "machine": dict(machine),
        "settings": dict(settings),
        "ceilings": ceilings
        and {
            "read_bytes_per_s": spread(ceilings.read_bytes_per_s),
            "matmul_flop_per_s": spread(ceilings.matmul_flop_per_s),
            "how": ceilings.how,
        },
        "cases": cases,
        "stacks": {name: dataclasses.asdict(stack) for name, stack in loaded.items()},
        "reference": reference,
        "tokens_equal": tokens_equal(records, reference),
        "notes": [*notes, *_closing_notes(records, settings)],
    }


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, least and most, and the values themselves."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "all": list(values)}


def tokens_equal(records: Records, reference: str | None) -> dict[str, tuple[int, int]]:
    """How many leading tokens of row 0 are those of the reference: stack -> (equal, compared), summed over the cases.

    The tokens are greedy: stacks with the same weights and formats agree, but where two tokens are about equally likely.
    """
    counts: dict[str, tuple[int, int]] = {}
    for by_stack in records.values():
        if reference not in by_stack:
            continue
        expected = by_stack[reference].measurements[-1].tokens
        for name, record in by_stack.items():
            pairs = zip(record.measurements[-1].tokens, expected, strict=True)
            equal = next((place for place, (token, right) in enumerate(pairs) if token != right), len(expected))
            before = counts.get(name, (0, 0))
            counts[name] = before[0] + equal, before[1] + len(expected)
    return counts


def is_disturbed(measurement: Measurement) -> bool:
    """Whether it ran beside other work. Where the system does not say, it did not."""
    return measurement.other_cores is not None and measurement.other_cores > QUIET


def undisturbed(measurements: Sequence[Measurement]) -> Sequence[Measurement]:
    """Those that ran without other work beside them; all, where there are no such."""
    return [measurement for measurement in measurements if not is_disturbed(measurement)] or measurements


def noise_note(measurements: Sequence[Measurement]) -> str | None:
    """What a reader of the medians must know of other work, if there was any."""
    if not (noisy := sum(map(is_disturbed, measurements))):
        return None
    return (
        f"{noisy} of {len(measurements)} measurements ran beside more than {QUIET} core of other work; the medians leave them out "
        "unless there are no others: run again on a quiet machine before trusting them"
    )


def _case(case: Case, by_stack: Mapping[str, Record], loaded: Mapping[str, Loaded], ceilings: Ceilings | None) -> dict[str, Any]:
    stacks = {name: _stack(case, record) for name, record in by_stack.items()}
    rates = {name: entry["tokens_per_s"]["median"] for name, entry in stacks.items()}
    best = max((name for name in rates if loaded[name].is_peer), key=lambda name: rates[name], default=None)
    ours = {name: {"to_best_peer": rates[name] / rates[best] if best else None} for name in rates if not loaded[name].is_peer}
    for name, entry in ours.items():
        if ceilings and loaded[name].work:
            bound = limit(case, loaded[name].work, max(ceilings.read_bytes_per_s), max(ceilings.matmul_flop_per_s))
            entry["limit"] = {**dataclasses.asdict(bound), "reached": rates[name] / bound.tokens_per_s}
    return {**dataclasses.asdict(case), "stacks": stacks, "best_peer": best, "ours": ours}


def _stack(case: Case, record: Record) -> dict[str, Any]:
    """One stack's part of a case. Disturbed measurements are left out, unless there are no others."""
    return {
        "tokens_per_s": spread([case.counted / measurement.seconds for measurement in undisturbed(record.measurements)]),
        "disturbed": all(map(is_disturbed, record.measurements)),
        "seconds": [measurement.seconds for measurement in record.measurements],
        "other_cores": [measurement.other_cores for measurement in record.measurements],
        "first_call_seconds": record.first_call_seconds,
    }


def _closing_notes(records: Records, settings: Mapping[str, Any]) -> list[str]:
    notes = []
    wanted = settings["repetitions"]
    rounds = {case.name: max((len(record.measurements) for record in by_stack.values()), default=0) for case, by_stack in records.items()}
    if fewer := [f"{name} ({count} of {wanted})" for name, count in rounds.items() if 0 < count < wanted]:
        notes.append(f"the budget of {settings['budget_seconds']:.0f} s cut the repetitions of {', '.join(fewer)}")
    measurements = [measurement for by_stack in records.values() for record in by_stack.values() for measurement in record.measurements]
    if noise := noise_note(measurements):
        notes.append(noise)
    return notes
