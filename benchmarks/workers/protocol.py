"""A worker's side of the line protocol: one JSON object a line, requests on stdin, replies on stdout.

    at the start  argv[1] holds the settings                             -> {"load_seconds": s, "vocab_size": V, "versions": {...}}
    prefill       {"op": "prefill", "tokens": [...]}                      -> {"seconds": s, "tokens": [the first new token]}
    decode        {"op": "decode", "tokens": [...], "batch": B, "steps": n} -> {"seconds": s, "tokens": [row 0's n tokens]}

Every reply also holds `peak_bytes`, the most memory that the process has had resident. A request that fails is answered with
{"error": "..."}; the end of stdin ends the worker. `seconds` is the timed part alone: a worker keeps what it set up (a filled cache)
for the next request of the same shape.

Standard library only: this runs under the peers' interpreter, which has nothing of this project.
"""

import json
import os
import re
import resource
import sys
import traceback


def serve(make):
    """Builds the stack by `make(**settings)`, then answers requests with its methods until stdin ends.

    Args:
      make: its result has `info`, a dict for the first reply, and a method per operation, which takes the request's other fields
        by name and returns a dict.
    """
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print must not mix with the replies

    def answer(call):
        try:
            reply = call()
        except Exception as error:
            traceback.print_exc()
            reply = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:500]}
        print(json.dumps({**reply, "peak_bytes": peak_bytes()}), file=replies, flush=True)
        return "error" not in reply

    stack = None

    def start():
        nonlocal stack
        stack = make(**json.loads(sys.argv[1]))
        return stack.info

    if not answer(start):
        return
    for line in sys.stdin:
        request = json.loads(line)
        operation = getattr(stack, request.pop("op"))
        answer(lambda operation=operation, request=request: operation(**request))


def peak_bytes():
    """The most memory that was resident: VmHWM on Linux (ru_maxrss there starts from the parent's), else ru_maxrss."""
    try:
        with open("/proc/self/status", encoding="utf-8") as status:
            return int(re.search(r"VmHWM:\s+(\d+) kB", status.read()).group(1)) * 1024
    except (OSError, AttributeError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
