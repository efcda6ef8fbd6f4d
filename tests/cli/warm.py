"""Command lines as children of a process that has imported everything: each begins where a process of its own arrives after two seconds.

A request is a line of JSON with its arguments, folder and the files of its three streams; the answer is a line with the exit code.
"""

import json
import os
import sys

import checkpoint
import parity
import run_inference
import sampling
import sampling.evaluate
import sampling.pack
import sampling.quality
import sampling.report
import sampling.requests
import tokenizer

IMPORTED = (checkpoint, parity, sampling, tokenizer)


def become(args: list[str], folder: str, streams: list[str]) -> None:
    """The rest of this process is the command."""
    os.chdir(folder)
    for number, path in enumerate(streams):
        os.dup2(os.open(path, os.O_RDWR), number)
    sys.argv = ["run_inference.py", *args]
    code = 1
    try:
        run_inference.run()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    requests = os.fdopen(os.dup(0))
    for line in iter(requests.readline, ""):
        request = json.loads(line)
        child = os.fork()
        if not child:
            become(**request)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=answers, flush=True)


if __name__ == "__main__":
    main()
