"""What a compiled program communicates, read from its HLO text."""

import dataclasses
import math
import re
from collections import Counter

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4}
_BYTES |= {"s64": 8, "u64": 8, "f64": 8, "f8e4m3fn": 1, "f8e5m2": 1}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{\s*$")
_COLLECTIVE = re.compile(rf"= (.+?) ({'|'.join(KINDS)})(-start)?\(")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.-]+)|branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclasses.dataclass(frozen=True)
class Collective:
    """Collectives of one kind and size.

    Attributes:
      kind: one of `KINDS`.
      shapes: of what each device gets, such as "bf16[16,1,4096]".
      nbytes: of that.
      count: how often one run of the program does it, if its loops run as often as the compiler knows.
      looped: whether it stands in a loop whose number of runs is not known: then `count` is of one turn.
    """

    kind: str
    shapes: str
    nbytes: int
    count: int
    looped: bool = False


def collectives(hlo: str) -> list[Collective]:
    """Of a compiled program's text (`compiled.as_text()`), the largest in all first. Asynchronous ones count once, at their start."""
    bodies, entry = _computations(hlo)
    counts: Counter[tuple[str, str, bool]] = Counter()

    def walk(name: str, times: int, looped: bool) -> None:
        for line in bodies.get(name, ()):
            if found := _COLLECTIVE.search(line):
                counts[found[2], _result(found[1], bool(found[3]), found[2]), looped] += times
            trips, is_loop = _TRIPS.search(line), " while(" in line
            for one, several in _CALLED.findall(line):
                for called in [one] if one else re.findall(r"[\w.-]+", several):
                    if not is_loop:
                        walk(called, times, looped)
                    else:
                        walk(called, times * (int(trips[1]) if trips else 1), looped or trips is None)

    walk(entry, 1, False)
    found = [Collective(kind, shapes, _nbytes(shapes), count, looped) for (kind, shapes, looped), count in counts.items()]
    return sorted(found, key=lambda each: (-each.nbytes * each.count, each.kind, each.shapes))


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation, and which is run first."""
    bodies: dict[str, list[str]] = {}
    entry = name = ""
    for line in hlo.splitlines():
        if start := _COMPUTATION.match(line):
            name = start[2]
            bodies[name] = []
            entry = name if start[1] else entry
        elif name:
            bodies[name].append(line)
    return bodies, entry


def _result(text: str, is_start: bool, kind: str) -> str:
    """The arrays that it gives, without layouts; the start of most asynchronous ones names its operands first."""
    arrays = [f"{dtype}[{sizes}]" for dtype, sizes in _ARRAY.findall(text) if dtype in _BYTES]
    if is_start and kind in ("all-gather", "collective-permute") and text.startswith("("):
        arrays = [array for array in arrays if array not in ("u32[]", "s32[]")]
        arrays = arrays[len(arrays) // 2 :]
    return " ".join(arrays)


def _nbytes(shapes: str) -> int:
    return int(sum(_BYTES[dtype] * math.prod(int(size) for size in sizes.split(",") if size) for dtype, sizes in _ARRAY.findall(shapes)))


def collectives_table(found: list[Collective]) -> str:
    """A line each: kind, shape, bytes of one, how many, bytes in all."""
    if not found:
        return "  no collectives"
    width = max(len(each.shapes) for each in found)
    lines = [f"  {'kind':18}  {'shape':{width}}  {'bytes each':>12}  {'count':>6}  {'bytes':>14}"]
    for each in found:
        mark = "*" if each.looped else " "
        lines.append(f"  {each.kind:18}  {each.shapes:{width}}  {each.nbytes:12,}  {each.count:6}{mark} {each.nbytes * each.count:14,}")
    if any(each.looped for each in found):
        lines.append("  * in each turn of a loop whose length is data")
    return "\n".join(lines)
