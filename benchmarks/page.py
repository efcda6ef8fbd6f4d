"""The report as a page of Markdown, read from what the JSON file holds."""

from collections.abc import Mapping, Sequence
from typing import Any

METHOD = (
    "prefill: prompt tokens per second, from token ids to the first new token on the host; "
    "decode: new tokens per second of all rows, greedy, from a cache that holds the given tokens in every row",
    "limit: the larger of what must be read over the reading ceiling (decode: all weights once per step, and every row's keys and values), "
    "and of the arithmetic over its ceiling (prefill: the weights but the head for every token, the head for the last, and "
    "causal attention); as this stack stores its weights: a peer with packed weights has less to read",
    "load: from the file's name to a model with its tokenizer, without Python's imports; start to ready: the whole process, with them. "
    "Peak memory: the most that was resident until then",
    "~: every measurement ran beside other work",
    "tokens as the reference: leading greedy tokens of row 0 that are equal, over all cases",
)


def markdown(report: Mapping[str, Any]) -> str:
    """The whole page."""
    machine, settings = report["machine"], report["settings"]
    parts = [
        f"# Side by side: {settings['model']}",
        f"{machine['cpu']}, {machine['cores']} cores; {settings['threads']} threads for every stack; "
        f"{machine['system']}; {machine['date']}.",
    ]
    if ceilings := report["ceilings"]:
        read, product = (spread(ceilings[key], 1e9) for key in ("read_bytes_per_s", "matmul_flop_per_s"))
        parts.append(
            f"The machine's ceilings, sampled between the rounds: reading {read} GB/s, arithmetic {product} GFLOP/s "
            f"({ceilings['how']}). The limits below take the most that was seen: other work only lowers it."
        )
    if any(case["ours"] for case in report["cases"].values()):
        parts += ["## The limit, and how near this stack comes", _limits(report)]
    parts += ["## All stacks: tokens per second, median [least-most]", _rates(report)]
    parts += ["## Loading, memory, tokens", _stacks(report)]
    parts += ["## Notes", "\n".join(f"- {note}" for note in (*report["notes"], *METHOD))]
    return "\n\n".join(parts) + "\n"


def _limits(report: Mapping[str, Any]) -> str:
    rows = []
    for name, case in report["cases"].items():
        best = case["best_peer"]
        peer = f"{_median(case['stacks'][best])} ({best})" if best else "-"
        for stack, entry in case["ours"].items():
            limit = ("-", "-", "-", "-")
            if bound := entry.get("limit"):
                read, compute = f"{bound['bytes'] / 1e6:.0f} MB", f"{bound['flops'] / 1e9:.2f} GFLOP"
                limit = (read, compute, f"{rate(bound['tokens_per_s'])} ({bound['bound']})", f"{bound['reached']:.0%}")
            ratio = "-" if entry["to_best_peer"] is None else f"{entry['to_best_peer']:.2f}"
            rows.append((name, *limit[:3], stack, _median(case["stacks"][stack]), limit[3], peer, ratio))
    demand = ("must read", "must compute", "limit, tok/s")
    head = ("case", *demand, "this stack", "tok/s", "of the limit", "best peer, tok/s", "this / best peer")
    return table(head, rows)


def _rates(report: Mapping[str, Any]) -> str:
    def cell(entry: Mapping[str, Any] | None) -> str:
        return "-" if entry is None else spread(entry["tokens_per_s"]) + (" ~" if entry["disturbed"] else "")

    stacks = list(report["stacks"])
    rows = [(name, *(cell(case["stacks"].get(stack)) for stack in stacks)) for name, case in report["cases"].items()]
    return table(("case", *stacks), rows)


def _stacks(report: Mapping[str, Any]) -> str:
    rows = []
    for name, stack in report["stacks"].items():
        equal = report["tokens_equal"].get(name)
        rows.append(
            (
                name,
                stack["about"],
                f"{stack['load_seconds']:.2f}",
                f"{stack['ready_seconds']:.1f}",
                f"{stack['load_peak_bytes'] / 2**20:.0f}",
                f"{stack['peak_bytes'] / 2**20:.0f}",
                f"{equal[0]} of {equal[1]}" if equal else "-",
                ", ".join(f"{library} {version}" for library, version in stack["versions"].items()),
            )
        )
    memory = ("peak memory, MiB: loaded", "after all cases")
    tokens = f"tokens as {report['reference'] or 'the reference'}"
    head = ("stack", "setting", "load, s", "start to ready, s", *memory, tokens, "versions")
    return table(head, rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, ["---"] * len(head), *rows))


def _median(entry: Mapping[str, Any]) -> str:
    return rate(entry["tokens_per_s"]["median"]) + (" ~" if entry["disturbed"] else "")


def spread(values: Mapping[str, Any], unit: float = 1.0) -> str:
    median, least, most = (rate(values[key] / unit) for key in ("median", "min", "max"))
    return f"{median} [{least}-{most}]"


def rate(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
