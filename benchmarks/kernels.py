"""Every kernel beside what XLA makes of the same operation, and beside what the machine allows: `python benchmarks/kernels.py`.

  matmul     a product with packed weights, in each code, with the matrices of SmolLM2-135M and Gemma 3 270M
  fused      the same with the norm of its input and the sum with its output
  attention  a decode step and a prefill, out of dense, ring and paged caches
  append     new rows into a cache
  norm       a sum and its norm, by themselves
  sampling   a token of logits
  experts    a mixture of experts

The limit of an operation is the larger of the bytes that it must move over the bandwidth of reading memory, and of the arithmetic that it
must do over the rate of a plain product, both measured in the same run. All kernels of a few shapes take turns in rounds, in an order
drawn anew for each; medians. Weights of up to 32 rows and caches of a decode step are read from main memory, as in a model. On an
accelerator the same runs, with what runs there.
"""

import contextlib
import functools
import itertools
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a script finds its own folder only, where `kernels` is this file

from benchmarks import kernel_cases, kernel_page, machine, stacks  # noqa: E402
from benchmarks.device_ceilings import DeviceCeilings  # noqa: E402
from benchmarks.driver import Record, Worker  # noqa: E402
from benchmarks.kernel_attention import attentions  # noqa: E402
from benchmarks.kernel_cases import CODES, MATRICES, Case, Group  # noqa: E402
from benchmarks.report import is_disturbed, noise_note, spread, undisturbed  # noqa: E402
from benchmarks.rounds import interleaved  # noqa: E402
from runtime import UserError, enable_compilation_cache, platform  # noqa: E402
from runtime.files import check_writable, replacing  # noqa: E402

OPS = ("matmul", "fused", "attention", "append", "norm", "sampling", "experts")

_OPS = flags.DEFINE_list("ops", list(OPS), f"Which to time, of {', '.join(OPS)}.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Counted calls per case.", lower_bound=1)
_SECONDS = flags.DEFINE_float(
    "seconds", 270, "Past its share of this no case has another round; past all of it none begins.", lower_bound=0
)
_QUIET = flags.DEFINE_float("quiet_seconds", 0, "How long to wait before each round for other work to end.", lower_bound=0)
_OUT = flags.DEFINE_string("out", ".", "The folder of kernels.json and kernels.md.")

Result = tuple[Case, Mapping[str, Record]]


def say(text: str) -> None:
    """Progress, beside the result on stdout."""
    print(text, file=sys.stderr, flush=True)


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


def run(out: Path) -> dict[str, Any]:
    """Times what the flags ask for. The folder `out` is made if need be; its files are written anew after every operation.

    Raises:
      UserError: a flag that can't be served, before anything is timed.
    """
    chosen = groups(_OPS.value)
    with contextlib.suppress(OSError):  # the check says why
        out.mkdir(parents=True, exist_ok=True)
    check_writable(str(out / "kernels.json"), "out")
    enable_compilation_cache()
    threads = os.cpu_count() or 1
    on_cpu = platform() == "cpu"
    meter = Worker(stacks.CEILINGS.command(sys.executable, "", Path(), threads), stacks.CEILINGS.environment(threads)) if on_cpu else None

    def save(report: dict[str, Any]) -> None:
        for name, text in (("kernels.json", json.dumps(report, indent=1) + "\n"), ("kernels.md", kernel_page.markdown(report))):
            with replacing(str(out / name)) as file:
                file.write(text)

    with contextlib.closing(meter or DeviceCeilings()) as meter:
        return measure(chosen, meter, _ROUNDS.value, _SECONDS.value, _QUIET.value, save)


def main(argv: Sequence[str]) -> int:
    try:
        if len(argv) > 1:
            raise UserError(f"argument {argv[1]!r} is not understood: all settings are flags, see --help")
        print(kernel_page.markdown(run(Path(_OUT.value))), end="")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    app.run(main)
