"""This stack beside its peers on the same GGUF file, in one run: `python benchmarks/compare.py`.

Each stack with each setting is a process of its own, all are loaded, and exactly one works at a time. Case by case, every stack is
called once as a warm-up (it compiles, and fills its cache), then in rounds, one counted call each, so that what disturbs the machine
disturbs all alike; medians and spreads over the rounds. Every stack has the same number of threads and reads the same random prompt.
prefill: from the prompt's token ids to the first new token on the host. decode: greedy steps from a cache that holds the given tokens
in every row, each token read by the host; the cache is put back between calls. Load time: from the file's name to a model with its
tokenizer, Python's imports left out. Peak memory: of the process, after its cases.
Peers are optional: one that is not installed is left out, and the command that installs it is printed. A peer may have an interpreter
of its own (`--peers_python`), and vLLM, which asks for certain versions of what others use too, another (`--vllm_python`).
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a script finds its own folder only

import checkpoint  # noqa: E402
from benchmarks import cases, machine, page, report, stacks  # noqa: E402
from benchmarks.driver import Record, Worker, run_case, start  # noqa: E402
from benchmarks.entry import print_page  # noqa: E402
from benchmarks.limits import Work  # noqa: E402
from runtime import UserError  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"

_MODEL = flags.DEFINE_string("model", "smollm2-135m-instruct", "A preset's name, or the path of a .gguf file.")
_STACKS = flags.DEFINE_list("stacks", list(stacks.DEFAULT), f"Which to compare, of {', '.join(stacks.STACKS)}.")
_CASES = flags.DEFINE_list("cases", list(cases.DEFAULT), "prefill-TOKENS, decode-HELD or decode-HELDxBATCH.")
_REPETITIONS = flags.DEFINE_integer("repetitions", 5, "Counted calls per case and stack.", lower_bound=1)
_BUDGET = flags.DEFINE_float(
    "budget_seconds", 1200, "Past its share of this no case gets another repetition; each has one at least.", lower_bound=0
)
_THREADS = flags.DEFINE_integer("threads", os.cpu_count(), "For every stack.", lower_bound=1)
_PEERS_PYTHON = flags.DEFINE_string("peers_python", sys.executable, "The interpreter that has the peers installed.")
_VLLM_PYTHON = flags.DEFINE_string("vllm_python", None, "The interpreter that has vLLM installed; without it --peers_python.")
_QUIET = flags.DEFINE_float("quiet_seconds", 5, "How long to wait for other work to end, before each counted call.", lower_bound=0)
_JSON = flags.DEFINE_string("json", str(RESULTS / "compare.json"), "Where the measurements are written.")
_MARKDOWN = flags.DEFINE_string("markdown", str(RESULTS / "compare.md"), "Where the tables are written.")


def say(text: str) -> None:
    """Progress, beside the result on stdout."""
    print(text, file=sys.stderr, flush=True)


def compare(
    chosen: Sequence[stacks.Stack],
    wanted: Sequence[cases.Case],
    model: Path,
    *,
    threads: int,
    repetitions: int,
    budget_seconds: float,
    quiet_seconds: float = 0.0,
    python: str = sys.executable,
    peers_python: str = sys.executable,
    vllm_python: str | None = None,
    ceilings: stacks.Stack | None = stacks.CEILINGS,
    save: Callable[[dict[str, Any]], None] = lambda report: None,
) -> dict[str, Any]:
    """Runs the comparison.

    Args:
      chosen: the stacks, in the order in which they take their turns.
      wanted: the cases, in the order in which they run.
      model: the GGUF file.
      threads: of every stack.
      repetitions: counted calls per case and stack.
      budget_seconds: from now on; a case may use its share of what is left, and has one repetition in any event.
      quiet_seconds: how long at most to wait for other work to end, before each counted call.
      python, peers_python, vllm_python: the interpreters of this project's workers, of the peers', and of vLLM's: None is the peers'.
      ceilings: the worker that measures the machine; None leaves out the limits.
      save: called with the report so far, after every case.

    Returns:
      The report, as `report.build` makes it.

    Raises:
      UserError: the peers' interpreter does not run, or no stack could be loaded.
    """
    end = time.perf_counter() + budget_seconds
    interpreters = {"peers_python": peers_python, "vllm_python": vllm_python or peers_python}
    settings = {"model": model.name, "threads": threads, "repetitions": repetitions, "budget_seconds": budget_seconds}
    described = machine.describe()
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        say(text)

    with contextlib.ExitStack() as closing:

        def load(stack: stacks.Stack) -> Worker | None:
            worker = start(stack, python, interpreters[stack.python_flag], model, threads, note)
            if worker is not None:
                closing.callback(worker.close)
                say(f"{stack.name}: loaded in {worker.hello['load_seconds']:.2f} s, ready after {worker.ready_seconds:.1f} s")
            return worker

        _read_once(model)
        started = {stack: worker for stack in chosen if (worker := load(stack))}
        if not started:
            raise UserError(f"no stack could be loaded, so there is nothing to compare: {'; '.join(notes)}")
        meter = load(ceilings) if ceilings else None
        samples: list[dict[str, float]] = []
        records: dict[cases.Case, dict[str, Record]] = {}

        def so_far() -> dict[str, Any]:
            loaded = {stack.name: _loaded(stack, worker) for stack, worker in started.items()}
            return report.build(described, settings, loaded, records, _ceilings(meter, samples), notes)

        workers = {stack.name: worker for stack, worker in started.items()}
        vocab_size = min(worker.hello["vocab_size"] for worker in workers.values())
        for number, case in enumerate(wanted):
            now = time.perf_counter()
            records[case] = run_case(
                workers,
                case.request(vocab_size),
                repetitions,
                deadline=now + (end - now) / (len(wanted) - number),
                between=lambda: samples.append(meter.ask({"op": "ceilings"})) if meter else None,
                tell=lambda name, text, case=case: note(f"{name} has no {case.name}: {text}"),
                quiet_seconds=quiet_seconds,
            )
            result = so_far()
            rates = {name: entry["tokens_per_s"]["median"] for name, entry in result["cases"][case.name]["stacks"].items()}
            say(f"{case.name}: " + ", ".join(f"{name} {rate:.1f}" for name, rate in rates.items()) + " tok/s")
            save(result)
        return so_far()


def _loaded(stack: stacks.Stack, worker: Worker) -> report.Loaded:
    hello = worker.hello
    work = Work(**hello["work"]) if "work" in hello else None
    return report.Loaded(
        about=stack.about,
        is_peer=stack.is_peer,
        load_seconds=hello["load_seconds"],
        ready_seconds=worker.ready_seconds,
        load_peak_bytes=hello["peak_bytes"],
        peak_bytes=worker.peak_bytes,
        versions=hello["versions"],
        work=work,
    )


def _ceilings(meter: Worker | None, samples: Sequence[dict[str, float]]) -> report.Ceilings | None:
    if not samples:
        return None
    read, product = (tuple(sample[key] for sample in samples) for key in ("read_bytes_per_s", "matmul_flop_per_s"))
    return report.Ceilings(read, product, meter.hello["how"])


def _read_once(model: Path) -> None:
    """Brings the file into memory, so that the first stack does not wait for the disk for all others."""
    with model.open("rb") as file:
        while file.read(1 << 24):
            pass


def save_files(result: dict[str, Any], json_path: Path, markdown_path: Path) -> str:
    """Writes both files; returns the page."""
    text = page.markdown(result)
    for path, contents in ((json_path, json.dumps(result, indent=1) + "\n"), (markdown_path, text)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(contents, encoding="utf-8")
    return text


def main(argv: Sequence[str]) -> int:
    return print_page(argv, _page)


def _page() -> str:
    paths = Path(_JSON.value), Path(_MARKDOWN.value)
    result = compare(
        stacks.find(_STACKS.value),
        [cases.parse(name) for name in dict.fromkeys(_CASES.value)],
        checkpoint.resolve(_MODEL.value),
        threads=_THREADS.value,
        repetitions=_REPETITIONS.value,
        budget_seconds=_BUDGET.value,
        quiet_seconds=_QUIET.value,
        peers_python=_PEERS_PYTHON.value,
        vllm_python=_VLLM_PYTHON.value,
        save=lambda result: save_files(result, *paths),
    )
    text = save_files(result, *paths)
    say(f"written: {paths[0]}, {paths[1]}")
    return text


if __name__ == "__main__":
    app.run(main)
