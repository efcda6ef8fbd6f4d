"""What a held token costs in llama.cpp: measured in the same run where it is installed, otherwise quoted."""

import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import Case
from benchmarks.driver import run_case, start
from benchmarks.kv_cost import slope
from benchmarks.rounds import median_seconds
from benchmarks.stacks import Stack
from sampling.batch import STEPS

# Reached by llama.cpp's keys and values in f16 on two cores with AVX2, as others measured it on a machine like the one that the
# figures in this repository come from.
QUOTED_BYTES_PER_S = 5.7e9
LONGEST = 4096  # tokens held: a peer reads each length as a prompt first, which takes minutes beyond


def quoted(bytes_per_token: int) -> dict[str, dict[str, float]]:
    """The slope that the quoted bandwidth makes for so many bytes of f16."""
    slope_s = bytes_per_token / QUOTED_BYTES_PER_S
    return {
        "llama.cpp (quoted)": {
            "slope_s_per_token": slope_s,
            "bytes_per_token": bytes_per_token,
            "bytes_per_s": QUOTED_BYTES_PER_S,
        }
    }


def measured(
    stacks: Sequence[Stack],
    python: str,
    model: Path,
    lengths: Sequence[int],
    bytes_per_token: int,
    repetitions: int,
    *,
    threads: int,
    note: Callable[[str], None],
    quiet_seconds: float = 0.0,
) -> dict[str, dict[str, Any]]:
    """Each stack's steps at each length, and the line through them; a stack that can't be loaded or asked is noted and left out.

    A length is measured before the next one, since a peer would have to read the whole prompt again to come back to it.

    Args:
      stacks: peers of `benchmarks/compare.py`.
      python: the interpreter that has them.
      model: the GGUF file.
      lengths: tokens held; those past `LONGEST` are left out.
      bytes_per_token: of f16 keys and values.
      repetitions: counted calls per length.
      threads: of each.
      note: called with what could not be done.
      quiet_seconds: see `run_case`.
    """
    parts: dict[str, dict[str, Any]] = {}
    for stack in stacks:
        with contextlib.ExitStack() as closing:
            worker = start(stack, sys.executable, python, model, threads, note)
            if worker is None:
                continue
            closing.callback(worker.close)
            x, y = [], []
            for length in [length for length in lengths if length <= LONGEST]:
                case = Case("decode", held=length, batch=1, steps=STEPS)
                request = case.request(worker.hello["vocab_size"])
                records = run_case(
                    {stack.name: worker},
                    request,
                    repetitions,
                    deadline=float("inf"),
                    tell=lambda name, text, case=case: note(f"{name} has no {case.name}: {text}"),
                    quiet_seconds=quiet_seconds,
                )
                if not records:
                    break
                x.append(length + (STEPS + 1) / 2)
                y.append(median_seconds(records[stack.name]) / STEPS)
            else:
                parts[f"{stack.name} ({stack.about})"] = {"held": x, "step_s": y, **slope(x, y, bytes_per_token)}
    return parts
