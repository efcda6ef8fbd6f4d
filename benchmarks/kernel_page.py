"""The report of `benchmarks/kernels.py` as Markdown, read from what its JSON file holds."""

import itertools
from collections.abc import Mapping
from typing import Any

from benchmarks.page import rate, spread, table

METHOD = (
    "limit: the larger of the bytes that must move over the reading ceiling, and of the arithmetic over the ceiling of plain products; "
    "% of it: how near the median comes. Operations whose arrays stay in the processor's cache, and products of 8 bits, may pass it",
    "~: every measurement ran beside other work",
)


def markdown(report: Mapping[str, Any]) -> str:
    """The whole page."""
    machine, ceilings = report["machine"], report["ceilings"]
    read, product = (spread(ceilings[key], 1e9) for key in ("read_bytes_per_s", "matmul_flop_per_s"))
    parts = [
        "# Kernels",
        f"{machine['cpu']}, {machine['cores']} cores; {report['settings']['platform']}; {machine['system']}; {machine['date']}; medians of "
        f"up to {report['settings']['rounds']} rounds.",
        f"The machine's ceilings, sampled in between: reading {read} GB/s, arithmetic {product} GFLOP/s ({ceilings['how']}). "
        "Limits take the most that was seen.",
    ]
    for op, results in itertools.groupby(report["results"], key=lambda result: result["op"]):
        parts += [f"## {op}", table(HEAD, [_row(result) for result in results])]
    parts += ["## Notes", "\n".join(f"- {note}" for note in (*report["notes"], *METHOD))]
    return "\n\n".join(parts) + "\n"


HEAD = ("shape", "must move", "must compute", "limit, us", "native, us", "% of it", "XLA, us", "% of it", "XLA / native")


def _row(result: Mapping[str, Any]) -> tuple[str, ...]:
    cells = itertools.chain(*(_cells(result["kernels"].get(name)) for name in ("native", "xla")))
    ratio = "-" if result["xla_to_native"] is None else f"{result['xla_to_native']:.2f}"
    moved, flops = f"{rate(result['bytes'] / 1e6)} MB", f"{rate(result['flops'] / 1e6)} MFLOP" if result["flops"] else "-"
    return (result["shape"], moved, flops, f"{rate(result['limit_s'] * 1e6)} ({result['bound']})", *cells, ratio)


def _cells(kernel: Mapping[str, Any] | None) -> tuple[str, str]:
    if kernel is None:
        return "-", "-"
    return rate(kernel["seconds"]["median"] * 1e6) + (" ~" if kernel["disturbed"] else ""), f"{kernel['reached']:.0%}"
