"""Runs a language model: prompts in, streamed text out.

    python run_inference.py --prompt "Why is the sky blue?"
    echo "Why is the sky blue?" | python run_inference.py --temperature=0.8 --top_p=0.95 --seed=1
    python run_inference.py --prompt_file=in.jsonl --out=out.jsonl --batch_size=8
    python run_inference.py --prompt "Once upon a time" --raw --json
    python run_inference.py --task=chat
    python run_inference.py --task=convert --model=hf:Qwen/Qwen3-0.6B --out=qwen3
    python run_inference.py --task=quantize --method=gptq --bits=4 --group=64 --out=smollm2-int4
    python run_inference.py --task=compare --model=qwen3-folder
    python run_inference.py --task=eval --weights=bf16 --against=f32
    python run_inference.py --mesh=model=4 --prompt "Why is the sky blue?"

Text goes to standard output, a line with the numbers to standard error. The first run downloads the default model (98 MB) with pip.
Ctrl-C ends an answer and keeps what is there; in a chat the next turn may follow, and Ctrl-D ends it.
Exit codes: 0, 1 if --task=compare finds a difference, 2 for a mistake (one line says which), 130 after Ctrl-C.
"""

import signal
import sys

from absl import app, logging

from command import flags
from command.checks import check_flags
from command.processes import mesh_settings
from command.tasks import list_models, run_task
from runtime.terminal import ending, parse_flags


def main() -> int:
    """Returns the exit code: 0, 1 if a comparison finds a difference, or 130 after Ctrl-C."""
    if flags.LIST_MODELS.value:
        return list_models()
    check_flags()
    sizes, processes = mesh_settings()
    return processes.ending(lambda: ending(lambda: run_task(sizes, processes)))


def guarded(_: list[str]) -> None:
    if logging.get_verbosity() == logging.INFO:  # app.run's default, at which JAX tells which platforms are not there
        logging.set_verbosity(logging.WARNING)
    if sys.stdout is not None:
        sys.stdout.reconfigure(errors="replace")  # for characters that the terminal's encoding does not have
    sys.exit(ending(main))


def run() -> None:
    """The console script."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until all is imported: jaxlib aborts at a KeyboardInterrupt in its start
    app.run(guarded, flags_parser=lambda argv: parse_flags(argv, __doc__, flags.HELP))


if __name__ == "__main__":
    run()
