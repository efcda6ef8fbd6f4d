"""All that `benchmarks/kernels.py` times, in turn, and the report of it."""

import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import kernel_cases, machine
from benchmarks.driver import Record
from benchmarks.kernel_attention import attentions
from benchmarks.kernel_cases import CODES, MATRICES, Case, Group
from benchmarks.report import is_disturbed, noise_note, spread, undisturbed
from benchmarks.rounds import interleaved
from runtime import UserError, platform

OPS = ("matmul", "fused", "attention", "append", "norm", "sampling", "experts")

Result = tuple[Case, Mapping[str, Record]]


def groups(ops: Sequence[str]) -> list[Group]:
    """All that the named operations have, in the order of the table.

    Raises:
      UserError: an unknown name, or none.
    """
    if unknown := [op for op in ops if op not in OPS]:
        raise UserError(f"--ops names {unknown[0]!r}, which is not known: use some of {', '.join(OPS)}")
    if not ops:
        raise UserError(f"no operation is named: give some of {', '.join(OPS)} to --ops")

    def group(op: str, name: str, function: Callable[..., Sequence[Case]], *given: Any) -> Group:
        return Group(op, name, functools.partial(function, *given))

    made = [
        group("matmul", f"{model} {matrix} {code}", kernel_cases.products, model, matrix, code)
        for model, code in itertools.product(MATRICES, CODES)
        for matrix in MATRICES[model]
    ]
    made += [
        group("fused", f"{model} gate_up u4", kernel_cases.products, model, "gate_up", "u4", (1, 8, 32), "fused") for model in MATRICES
    ]
    made += attentions()
    made += [group("append", "append", kernel_cases.appends, 1024)]
    made += [group("norm", f"width {width}", kernel_cases.norms, width) for width in (576, 640)]
    made += [group("sampling", f"{vocabulary:,} tokens", kernel_cases.samplings, vocabulary) for vocabulary in (49_152, 262_144)]
    made += [group("experts", "experts", kernel_cases.mixtures, 32, 512, 1024)]
    return [each for each in made if each.op in ops]


def measure(
    chosen: Sequence[Group],
    meter: Any,
    rounds: int,
    budget_seconds: float,
    quiet_seconds: float = 0.0,
    save: Callable[[dict[str, Any]], None] = lambda report: None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """The report.

    Args:
      chosen: what is timed.
      meter: of the ceilings: a `Worker` or what answers as one; asked before the first group of every operation and every few seconds.
      rounds: counted calls of each kernel and case.
      budget_seconds: from now on. A group may use its share of what is left, and has one round in any event; once nothing is left, no
        other begins.
      quiet_seconds: how long at most to wait for other work to end, before each round.
      save: called with the report so far, after every operation.
      say: told what was done.
    """
    end = time.perf_counter() + budget_seconds
    samples: list[dict[str, float]] = []
    results: list[Result] = []
    notes: list[str] = []
    settings = {"rounds": rounds, "budget_seconds": budget_seconds, "platform": platform()}

    def so_far() -> dict[str, Any]:
        return build(machine.describe(), settings, results, samples, meter.hello["how"], notes)

    for number, group in enumerate(chosen):
        now = time.perf_counter()
        if now > end and results:
            notes.append(f"the budget of {budget_seconds:.0f} s left out {', '.join(each.name for each in chosen[number:])}")
            break
        if number % 5 == 0 or group.op != chosen[number - 1].op:
            samples.append(meter.ask({"op": "ceilings"}))
        cases = group.make()
        calls = {(index, name): call for index, case in enumerate(cases) for name, call in case.calls.items()}
        records = interleaved(calls, rounds, quiet_seconds=quiet_seconds, deadline=now + (end - now) / (len(chosen) - number))
        for index, case in enumerate(cases):
            results.append((_bare(case), {name: record for (of, name), record in records.items() if of == index}))
        say(f"{group.op} {group.name}: {time.perf_counter() - now:.1f} s")
        if number + 1 == len(chosen) or chosen[number + 1].op != group.op:
            save(so_far())
    return so_far()


def _bare(case: Case) -> Case:
    """Without its calls, which hold its arrays."""
    return Case(case.op, case.shape, {}, case.bytes, case.flops)


def build(
    described: Mapping[str, Any],
    settings: Mapping[str, Any],
    results: Sequence[Result],
    samples: Sequence[Mapping[str, float]],
    how: str,
    notes: Sequence[str],
) -> dict[str, Any]:
    """From measurements to what the JSON file holds. Limits take the highest ceilings that were seen: other work only lowers them."""
    ceilings = {key: spread([sample[key] for sample in samples]) for key in ("read_bytes_per_s", "matmul_flop_per_s")}
    measurements = [measurement for _, records in results for record in records.values() for measurement in record.measurements]
    noise = noise_note(measurements)
    fewer = sum(len(record.measurements) < settings["rounds"] for _, records in results for record in records.values())
    short = [f"the budget cut the rounds of {fewer} of the measured kernels"] if fewer else []
    return {
        "machine": dict(described),
        "settings": dict(settings),
        "ceilings": {**ceilings, "how": how},
        "results": [_result(case, records, ceilings) for case, records in results],
        "notes": [*notes, *short, *([noise] if noise else [])],
    }


def _result(case: Case, records: Mapping[str, Record], ceilings: Mapping[str, Any]) -> dict[str, Any]:
    reading, arithmetic = case.bytes / ceilings["read_bytes_per_s"]["max"], case.flops / ceilings["matmul_flop_per_s"]["max"]
    limit = max(reading, arithmetic)
    kernels = {}
    for name, record in records.items():
        times = spread([measurement.seconds for measurement in undisturbed(record.measurements)])
        disturbed = all(map(is_disturbed, record.measurements))
        kernels[name] = {"seconds": times, "reached": limit / times["median"], "disturbed": disturbed}
    medians = {name: each["seconds"]["median"] for name, each in kernels.items()}
    return {
        "op": case.op,
        "shape": case.shape,
        "bytes": case.bytes,
        "flops": case.flops,
        "limit_s": limit,
        "bound": "reading" if reading >= arithmetic else "arithmetic",
        "kernels": kernels,
        "xla_to_native": medians["xla"] / medians["native"] if "native" in medians else None,
    }
