"""Starts the workers and asks them in turn: exactly one works at a time."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import OtherWork, wait_until_quiet
from benchmarks.stacks import Stack


class Failed(Exception):
    """A request was answered with an error; the worker is ready for the next."""


class Died(Exception):
    """A worker has ended; it can't be asked again."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """One counted call."""

    seconds: float
    tokens: tuple[int, ...]  # row 0's, to compare stacks by
    other_cores: float | None  # of other work beside it


@dataclasses.dataclass(frozen=True)
class Record:
    """All calls of one case and stack."""

    first_call_seconds: float  # the warm-up, on the driver's clock: it compiles, and fills the cache
    measurements: tuple[Measurement, ...]


class Worker:
    """A stack's process, started and ready.

    Attributes:
      hello: the fields of its first reply.
      ready_seconds: from the start of its process, imports included.
      peak_bytes: as of its last reply.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]):
        """Raises: Failed or Died, if it could not build its stack."""
        self.peak_bytes = 0
        self._log = tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed by close()
        began = time.perf_counter()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
            start_new_session=True,  # so that it and its children can be told from other work
        )
        try:
            self.hello = self._reply()
        except BaseException:
            self.close()
            raise
        self.ready_seconds = time.perf_counter() - began

    @property
    def session(self) -> int:
        return self._process.pid

    def ask(self, request: Mapping[str, Any]) -> dict:
        """The answer to one request.

        Raises:
          Failed, Died.
        """
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise Died(self._last_words()) from error
        return self._reply()

    def close(self) -> None:
        """Ends the process; harmless if it has ended."""
        with contextlib.suppress(OSError):  # a request that it did not take any more
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(self.session, signal.SIGKILL)  # and what it started
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def _reply(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            raise Died(self._last_words())
        reply = json.loads(line)
        self.peak_bytes = max(self.peak_bytes, reply.get("peak_bytes", 0))
        if "error" in reply:
            raise Failed(reply["error"])
        return reply

    def _last_words(self) -> str:
        code = self._process.wait()
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().splitlines() if line.strip()]
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"it ended with {how}" + (f": {lines[-1][:300]}" if lines else "")


def start(stack: Stack, python: str, peers_python: str, model: Path, threads: int, note: Callable[[str], None]) -> Worker | None:
    """Loads a stack. Where that can't be done: None, and `note` is told why and what to do.

    Raises:
      UserError: the peers' interpreter does not run.
    """
    if missing := stack.missing(peers_python):
        where = f"--{stack.python_flag}={peers_python}"
        note(f"{stack.name} is left out, since {', '.join(missing)} is not installed for {where}: {stack.install}")
        return None
    try:
        return Worker(stack.command(python, peers_python, model, threads), stack.environment(threads))
    except (Failed, Died) as error:
        remedy = f"; it was built for another CPU, build it here: {stack.install}" if "SIGILL" in str(error) else ""
        note(f"{stack.name} is left out, since it could not load: {error}{remedy}")
        return None


def measure(worker: Worker, request: Mapping[str, Any]) -> Measurement:
    """One call, with what else ran beside it."""
    other = OtherWork(worker.session)
    reply = worker.ask(request)
    return Measurement(reply["seconds"], tuple(reply["tokens"]), other.cores())


def run_case(
    workers: dict[str, Worker],
    request: Mapping[str, Any],
    repetitions: int,
    deadline: float,
    *,
    between: Callable[[], None] = lambda: None,
    tell: Callable[[str, str], None] = lambda name, text: None,
    quiet_seconds: float = 0.0,
) -> dict[str, Record]:
    """One case on all workers, in turn: a warm-up call each, then rounds of one counted call each.

    Args:
      workers: by name; one that dies is taken out.
      request: what each is asked.
      repetitions: rounds at most.
      deadline: no round but the first begins past it, on `time.perf_counter`'s clock.
      between: called before each round.
      tell: called with a stack's name and what became of it, when it fails.
      quiet_seconds: how long at most to wait before a call for other work to end.

    Returns:
      By name; a stack that failed is not in it.
    """
    first_calls: dict[str, float] = {}
    measurements: dict[str, list[Measurement]] = {}

    def attempt(name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except (Failed, Died) as error:
            measurements.pop(name, None)
            tell(name, str(error))
            if isinstance(error, Died):
                workers.pop(name).close()

    def warm_up(name: str) -> None:
        began = time.perf_counter()
        workers[name].ask(request)
        first_calls[name] = time.perf_counter() - began
        measurements[name] = []

    def count(name: str) -> None:
        wait_until_quiet(quiet_seconds)
        measurements[name].append(measure(workers[name], request))

    for name in list(workers):
        attempt(name, lambda name=name: warm_up(name))
    for repetition in range(repetitions):
        if repetition and time.perf_counter() > deadline:
            break
        between()
        for name in list(measurements):
            attempt(name, lambda name=name: count(name))
    return {name: Record(first_calls[name], tuple(done)) for name, done in measurements.items()}
