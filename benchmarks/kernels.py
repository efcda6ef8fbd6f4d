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
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from absl import app, flags

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # a script finds its own folder only, where `kernels` is this file

from benchmarks import kernel_page, kernel_run, stacks  # noqa: E402
from benchmarks.device_ceilings import DeviceCeilings  # noqa: E402
from benchmarks.driver import Worker  # noqa: E402
from benchmarks.entry import print_page  # noqa: E402
from benchmarks.kernel_run import OPS  # noqa: E402
from runtime import enable_compilation_cache, platform  # noqa: E402
from runtime.files import check_writable, replacing  # noqa: E402

_OPS = flags.DEFINE_list("ops", list(OPS), f"Which to time, of {', '.join(OPS)}.")
_ROUNDS = flags.DEFINE_integer("rounds", 5, "Counted calls per case.", lower_bound=1)
_SECONDS = flags.DEFINE_float(
    "seconds", 270, "Past its share of this no case has another round; past all of it none begins.", lower_bound=0
)
_QUIET = flags.DEFINE_float("quiet_seconds", 0, "How long to wait before each round for other work to end.", lower_bound=0)
_OUT = flags.DEFINE_string("out", ".", "The folder of kernels.json and kernels.md.")


def say(text: str) -> None:
    """Progress, beside the result on stdout."""
    print(text, file=sys.stderr, flush=True)


def run(out: Path) -> dict[str, Any]:
    """Times what the flags ask for. The folder `out` is made if need be; its files are written anew after every operation.

    Raises:
      UserError: a flag that can't be served, before anything is timed.
    """
    chosen = kernel_run.groups(_OPS.value)
    with contextlib.suppress(OSError):  # the check says why
        out.mkdir(parents=True, exist_ok=True)
    check_writable(str(out / "kernels.json"), "out")
    enable_compilation_cache()
    threads = os.cpu_count() or 1
    on_cpu = platform() == "cpu"
    meter = Worker(stacks.CEILINGS.command(sys.executable, "", Path(), threads), stacks.CEILINGS.environment(threads)) if on_cpu else None

    def save(report: dict[str, Any]) -> None:
        for name, text in (("kernels.json", json.dumps(report) + "\n"), ("kernels.md", kernel_page.markdown(report))):
            with replacing(str(out / name)) as file:
                file.write(text)

    with contextlib.closing(meter or DeviceCeilings()) as meter:
        return kernel_run.measure(chosen, meter, _ROUNDS.value, _SECONDS.value, _QUIET.value, save, say)


def main(argv: Sequence[str]) -> int:
    return print_page(argv, lambda: kernel_page.markdown(run(Path(_OUT.value))))


if __name__ == "__main__":
    app.run(main)
