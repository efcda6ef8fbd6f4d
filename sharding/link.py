"""A process's end of its connection to the coordinator."""

import contextlib
import json
import os
import queue
import socket
import sys
import threading
from typing import Any

from runtime.errors import UserError
from sharding.coordinator import AGAIN, BEAT, LOST_AFTER, encode

LOST_CODE = 2  # the exit code where another process was lost


class Link:
    """This process's connection to the coordinator: a thread says each second that it lives, another hears what is told."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._buffer = b""
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._left = threading.Event()
        self._lock = threading.Lock()  # a message is sent whole

    def send(self, message: dict[str, Any]) -> None:
        with self._lock:
            self._connection.sendall(encode(message))

    def receive(self) -> dict[str, Any]:
        """The next message. Raises: OSError, at the connection's end or after LOST_AFTER seconds of silence."""
        while b"\n" not in self._buffer:
            data = self._connection.recv(1 << 16)
            if not data:
                raise ConnectionError("the connection closed")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        return json.loads(line)

    def start(self) -> None:
        """From now on a lost process ends this one."""
        self._connection.settimeout(LOST_AFTER)
        threading.Thread(target=self._beat, daemon=True, name="alive").start()
        threading.Thread(target=self._hear, daemon=True, name="watch").start()

    def ask(self, message: dict[str, Any], timeout_s: float) -> Any:
        """What the coordinator answers once all processes have asked. Raises: UserError."""
        self.send(message)
        try:
            reply = self._answers.get(timeout=timeout_s)
        except queue.Empty:
            raise UserError(f"the other processes did not come as far within {timeout_s:g} s: see where they wait, and {AGAIN}") from None
        if reply.get("difference"):
            raise UserError(reply["difference"])
        return reply["answer"]

    def leave(self, code: int) -> None:
        """Says goodbye. With code 0 it waits for the others, which may still need this one; otherwise it ends this process."""
        if code == 0:
            import jax

            jax.distributed.shutdown()  # waits for all; a lost one still ends this process
        self._left.set()
        with contextlib.suppress(OSError):
            self.send({"ended": code})
        if code != 0:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
            with contextlib.suppress(Exception):
                sys.stderr.flush()
            os._exit(code)

    def _beat(self) -> None:
        while not self._left.wait(BEAT):
            try:
                self.send({"alive": True})
            except OSError:
                return  # the other thread says so

    def _hear(self) -> None:
        while True:
            try:
                message = self.receive()
            except (OSError, ValueError) as error:
                why = f"silent for {LOST_AFTER:g} s" if isinstance(error, TimeoutError) else "the connection closed"
                return self._end(f"the coordinator was lost ({why}): {AGAIN}")
            if "lost" in message:
                return self._end(message["lost"])
            if "answer" in message:
                self._answers.put(message)

    def _end(self, text: str) -> None:
        """Not by an exception: the main thread may be inside a collective that never returns."""
        if not self._left.is_set():
            os.write(2, f"error: {text}\n".encode())
            os._exit(LOST_CODE)
