"""What the KV cache costs, and what its number formats change: `python benchmarks/kv.py`.

Parts, each printed as a table:
  bytes      a cache's, per format, counted and compared with the live arrays
  quality    perplexity over the evaluation text, KL divergence from an f32 cache, agreement with it
  capacity   a decode step with the same tokens held in a small and in a large cache
  held       a step against the tokens held: a line through it, its slope beside the memory's bandwidth, and kv_decode_cost.png
  recompute  1,000 tokens with the cache, and by the full forward over the prefix of each

Everything runs in this process. Cases take turns in rounds, in an order drawn anew for each; medians leave out calls that ran beside other
work. Where only time counts, the slots hold random contents. A JSON file and the plot are written to the folder --out.
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
sys.path.insert(0, str(ROOT))  # a script finds its own folder only, where `kv` is this file

import sampling  # noqa: E402
from benchmarks import kv_cost, kv_page, kv_peers, kv_plot, stacks  # noqa: E402
from benchmarks.driver import Worker  # noqa: E402
from benchmarks.entry import print_page  # noqa: E402
from benchmarks.kv_parts import FORMATS, PARTS, RECOMPUTE_ROUNDS, check, formats, measure, plan  # noqa: E402
from benchmarks.report import spread  # noqa: E402
from checkpoint import resolve  # noqa: E402
from runtime import enable_compilation_cache  # noqa: E402
from runtime.files import check_writable, replacing  # noqa: E402
from sampling.evaluate import CHUNK, WINDOW  # noqa: E402

PEER_ROUNDS = 5

_MODEL = flags.DEFINE_string("model", sampling.DEFAULT_MODEL, "As run_inference.py takes it.")
_PARTS = flags.DEFINE_list("parts", list(PARTS), f"Which to measure, of {', '.join(PARTS)}.")
_FORMATS = flags.DEFINE_list("formats", list(FORMATS), f"Of the cache, some of {', '.join(FORMATS)}; recompute takes the first.")
_ROUNDS = flags.DEFINE_integer("rounds", 20, f"Counted calls per case; recompute has {RECOMPUTE_ROUNDS} at most.", lower_bound=1)
_TOKENS = flags.DEFINE_integer("tokens", 20_480, "Tokens of the evaluation text that quality predicts, per format.", lower_bound=1)
_WINDOW = flags.DEFINE_integer("window", WINDOW, "Tokens that a prediction of quality may look back at.", lower_bound=1)
_CHUNK = flags.DEFINE_integer("chunk", CHUNK, "Tokens per call of quality.", lower_bound=1)
_QUIET = flags.DEFINE_float("quiet_seconds", 5, "How long to wait before each round for other work to end.", lower_bound=0)
_OUT = flags.DEFINE_string("out", ".", "The folder of kv.json and kv_decode_cost.png.")
_PEERS = flags.DEFINE_list("peers", ["llama.cpp"], "Stacks of compare.py whose slope `held` measures too, given --peers_python.")
_PEERS_PYTHON = flags.DEFINE_string("peers_python", None, "The interpreter that has the peers; without it a figure of llama.cpp is quoted.")


def say(text: str) -> None:
    """Progress, beside the result on stdout."""
    print(text, file=sys.stderr, flush=True)


def run(out: Path) -> dict[str, Any]:
    """Measures what the flags ask for. The folder `out` is made if need be; its files are written anew after every part.

    Raises:
      UserError: a flag that can't be served, or a model that can't be loaded: before anything is measured.
    """
    check(_PARTS.value)
    chosen = formats(_FORMATS.value)
    peer_stacks = stacks.find(_PEERS.value) if _PEERS_PYTHON.value else []
    with contextlib.suppress(OSError):  # the check says why
        out.mkdir(parents=True, exist_ok=True)
    check_writable(str(out / "kv.json"), "out")
    if "held" in _PARTS.value:
        kv_plot.check_installed()
    enable_compilation_cache()
    lm = sampling.load(_MODEL.value)
    planned = plan(_PARTS.value, lm.config.context_length, tokens=_TOKENS.value, window=_WINDOW.value, chunk=_CHUNK.value)
    threads, notes = os.cpu_count() or 1, []
    f16_bytes = kv_cost.growing_bytes(lm.config, formats(["bf16"])["bf16"])  # as many as bf16's

    def note(text: str) -> None:
        notes.append(text)
        say(text)

    def peers(lengths: Sequence[int]) -> dict[str, Any]:
        if not peer_stacks:
            return kv_peers.quoted(f16_bytes)
        settings = {"threads": threads, "note": note, "quiet_seconds": _QUIET.value}
        return kv_peers.measured(peer_stacks, _PEERS_PYTHON.value, resolve(_MODEL.value), lengths, f16_bytes, PEER_ROUNDS, **settings)

    meter = Worker(stacks.CEILINGS.command(sys.executable, "", Path(lm.name), threads), stacks.CEILINGS.environment(threads))
    samples: list[float] = []

    def between() -> None:
        samples.append(meter.ask({"op": "ceilings"})["read_bytes_per_s"])

    def complete(report: dict[str, Any]) -> dict[str, Any]:
        return {**report, "ceilings": {"read_bytes_per_s": spread(samples), "how": meter.hello["how"]}, "notes": notes}

    def save(report: dict[str, Any]) -> None:
        with replacing(str(out / "kv.json")) as file:
            file.write(json.dumps(complete(report), indent=1) + "\n")
        if "held" in report:
            kv_plot.plot(complete(report), out / "kv_decode_cost.png")

    with contextlib.closing(meter):
        between()
        rounds = kv_cost.Rounds(_ROUNDS.value, between, _QUIET.value, note)
        return complete(measure(lm, chosen, planned, rounds, peers=peers, say=say, save=save))


def main(argv: Sequence[str]) -> int:
    return print_page(argv, lambda: kv_page.markdown(run(Path(_OUT.value))))


if __name__ == "__main__":
    app.run(main)
