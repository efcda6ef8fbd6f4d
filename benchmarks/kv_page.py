"""The report of `benchmarks/kv.py` as Markdown, read from what its JSON file holds, and the plot."""

from collections.abc import Mapping
from typing import Any

from benchmarks.page import spread, table

MOST_CAPACITY_RATIO, LEAST_R_SQUARED, LEAST_FACTOR = 1.15, 0.98, 5.0


def markdown(report: Mapping[str, Any]) -> str:
    """The whole page: the parts that the report has."""
    machine = report["machine"]
    ceilings = report["ceilings"]
    reading = spread(ceilings["read_bytes_per_s"], 1e9)
    parts = [f"# KV cache: {report['model']}", f"{machine['cpu']}, {machine['cores']} cores; {machine['system']}; {machine['date']}."]
    parts.append(f"Reading memory, sampled between the rounds: {reading} GB/s ({ceilings['how']}). Limits take the most that was seen.")
    for name, section in _SECTIONS.items():
        if name in report:
            parts += section(report)
    parts += ["\n".join(f"- {note}" for note in report["notes"])] if report["notes"] else []
    parts.append("Took " + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in report["seconds"].items()) + ".")
    return "\n\n".join(parts) + "\n"


def _bytes(report: Mapping[str, Any]) -> list[str]:
    slots = report["settings"]["bytes"]["capacity"]
    rows = [
        (name, f"{part['bytes_per_token']:,}", f"{part['bytes'] / 1e6:.1f}", f"{part['to_bf16']:.3f}")
        for name, part in report["bytes"].items()
    ]
    return ["## Bytes, equal to the live arrays'", table(("format", "bytes per token", f"1 x {slots:,} slots, MB", "to bf16"), rows)]


def _capacity(report: Mapping[str, Any]) -> list[str]:
    settings = report["settings"]["capacity"]
    rows = [
        (name, _ms(part["small_s"]), _ms(part["large_s"]), f"{part['ratio']:.3f}", _met(part["ratio"] <= MOST_CAPACITY_RATIO))
        for name, part in report["capacity"].items()
    ]
    small, large = settings["slots"]
    head = ("format, rows", f"{small:,} slots, ms", f"{large:,} slots, ms", "ratio", f"at most {MOST_CAPACITY_RATIO}")
    return [f"## A step with {settings['held']} tokens held, against the slots that there are", table(head, rows)]


def _held(report: Mapping[str, Any]) -> list[str]:
    ceiling = max(report["ceilings"]["read_bytes_per_s"]["all"])

    def row(name: str, part: Mapping[str, Any]) -> tuple[str, ...]:
        steps = (_ms(part["step_s"][0]), _ms(part["step_s"][-1])) if "step_s" in part else ("-", "-")
        line = (f"{part['r_squared']:.4f}", _met(part["r_squared"] >= LEAST_R_SQUARED)) if "r_squared" in part else ("-", "-")
        size, slope, rate = part["bytes_per_token"], part["slope_s_per_token"], part["bytes_per_s"]
        limit = f"{size / ceiling * 1e9:.0f}"
        return (name, *steps, f"{slope * 1e9:.0f}", *line, f"{size:,}", limit, f"{rate / 1e9:.1f}", f"{rate / ceiling:.0%}")

    first, *_, last = next(iter(report["held"].values()))["held"]
    ends = (f"at {first:,.0f}, ms", f"at {last:,.0f}, ms")
    line = ("slope, ns/token", "R^2", f"at least {LEAST_R_SQUARED}")
    head = ("format", *ends, *line, "bytes read per token", "limit, ns/token", "GB/s reached", "of reading")
    rows = [row(name, part) for name, part in [*report["held"].items(), *report["peers"].items()]]
    return ["## A step against the tokens held, in one cache", table(head, rows)]


def _recompute(report: Mapping[str, Any]) -> list[str]:
    part = report["recompute"]
    cells = (f"{part['cached_s']:.1f}", f"{part['recomputed_s']:.1f}", f"{part['factor']:.1f}", _met(part["factor"] >= LEAST_FACTOR))
    head = ("with the cache, s", "recomputing the prefix, s", "factor", f"at least {LEAST_FACTOR:.0f}")
    return [f"## {part['new']:,} tokens after a prompt of {part['prompt']}", table(head, [cells])]


def _quality(report: Mapping[str, Any]) -> list[str]:
    rows = [
        (
            name,
            f"{part['perplexity']:.4f}",
            f"{part['ratio']:.5f} ± {part['ratio_error']:.5f}",
            f"{part['mean_kl']:.2e}",
            f"{part['agreement']:.2%}",
        )
        for name, part in report["quality"].items()
    ]
    settings = report["settings"]["quality"]
    reference = next(iter(report["quality"]))
    title = f"## Quality: {settings['tokens']:,} tokens in windows of {settings['window']:,}, {settings['chunk']} a call"
    head = ("format", "perplexity", f"to {reference}", f"KL from {reference}, nats per token", "same likeliest token")
    return [title, table(head, rows)]


_SECTIONS = {"bytes": _bytes, "quality": _quality, "capacity": _capacity, "held": _held, "recompute": _recompute}


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _met(good: bool) -> str:
    return "yes" if good else "NO"
