"""What `benchmarks/kv.py` measures: its parts, what each is given, and all of them on one model."""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import kv
from benchmarks import kv_cost, machine
from benchmarks.kv_quality import quality
from runtime import KV_DTYPES, UserError
from sampling import LanguageModel, cache_format
from sampling.batch import STEPS

PARTS = ("bytes", "quality", "capacity", "held", "recompute")  # quality early: it may refuse what it is given
HELD = (256, 512, 1024, 2048, 4096, 8192)
RECOMPUTE_ROUNDS = 2  # a round decodes 1,000 tokens: long enough to need no more


PAGED = "paged-"  # before a number format's name: its cache is of pages
FORMATS = (*KV_DTYPES, f"{PAGED}f32")


def formats(names: Sequence[str]) -> dict[str, kv.Format]:
    """Each format as this platform stores it; "paged-f32" is f32 in pages.

    Raises:
      UserError: an unknown name, or none.
    """
    if not names:
        raise UserError(f"no format is named: give some of {', '.join(FORMATS)} to --formats")
    if unknown := [name for name in names if name.removeprefix(PAGED) not in KV_DTYPES]:
        raise UserError(f"--formats={unknown[0]} is not known: use some of {', '.join(KV_DTYPES)}, each also with {PAGED} before it")
    return {name: cache_format(name.removeprefix(PAGED), "paged" if name.startswith(PAGED) else "dense") for name in names}


def check(parts: Sequence[str]) -> None:
    """Raises: UserError, for an unknown part, or none."""
    if unknown := [name for name in parts if name not in PARTS]:
        raise UserError(f"--parts names {unknown[0]!r}, which is not known: use some of {', '.join(PARTS)}")
    if not parts:
        raise UserError(f"no part is named: give some of {', '.join(PARTS)} to --parts")


def plan(parts: Sequence[str], context: int, *, tokens: int, window: int, chunk: int) -> dict[str, dict[str, Any]]:
    """What each part is given, in the order of `PARTS`: sizes are cut to the model's context.

    Raises:
      UserError: the context is too short for any of it.
    """
    if context < 2 * HELD[1]:
        raise UserError(f"the model's context of {context} tokens is too short to measure: take one of at least {2 * HELD[1]}")
    large = min(4096, context)
    given = {
        "bytes": {"capacity": large},
        "quality": {"tokens": tokens, "window": min(window, context), "chunk": chunk},
        "capacity": {"held": HELD[0], "slots": (HELD[1], large), "batches": (1, 8)},
        "held": {"lengths": sorted({min(length, context - STEPS) for length in HELD})},
        "recompute": {"prompt": 32, "new": min(1000, context - 32 - STEPS), "samples": 10},
    }
    return {name: given[name] for name in PARTS if name in parts}


def measure(
    lm: LanguageModel,
    chosen: Mapping[str, kv.Format],
    planned: Mapping[str, Mapping[str, Any]],
    rounds: kv_cost.Rounds,
    *,
    peers: Callable[[Sequence[int]], Mapping[str, Any]],
    say: Callable[[str], None] = lambda text: None,
    save: Callable[[dict[str, Any]], None] = lambda report: None,
) -> dict[str, Any]:
    """The report but for the ceilings and notes: every part of the plan, what it was given, and the seconds it took.

    Args:
      lm: the model.
      chosen: formats by name; recompute takes the first.
      planned: from `plan`.
      rounds: of the timed parts.
      peers: gives what stands beside `held`, for the same lengths; see `kv_peers`.
      say: told what is being done.
      save: called with the report so far, after every part.
    """

    def of(part: str, most: int | None = None) -> kv_cost.Rounds:
        count = rounds.count if most is None else min(rounds.count, most)
        return dataclasses.replace(rounds, count=count, note=lambda text: rounds.note(f"{part}: {text}"))

    not_paged = {name: format for name, format in chosen.items() if format.page_size is None}  # where numbers lie does not change them
    functions = {
        "bytes": lambda **given: kv_cost.sizes(lm.config, chosen, **given),
        "quality": lambda **given: quality(lm, formats(["f32"]) | not_paged, **given, say=say),
        "capacity": lambda **given: kv_cost.capacity(lm, chosen, of("capacity"), **given),
        "held": lambda **given: kv_cost.held(lm, chosen, of("held"), **given),
        "recompute": lambda **given: kv_cost.recompute(lm, next(iter(chosen.values())), of("recompute", RECOMPUTE_ROUNDS), **given),
    }
    report: dict[str, Any] = {
        "model": lm.name,
        "machine": machine.describe(),
        "weight_bytes": lm.weight_bytes,
        "settings": {"rounds": rounds.count, **planned},
        "seconds": {},
    }
    for name, given in planned.items():
        say(f"{name} ...")
        began = time.perf_counter()
        report[name] = functions[name](**given)
        if name == "held":
            report["peers"] = peers(given["lengths"])
        report["seconds"][name] = time.perf_counter() - began
        save(report)
    return report
