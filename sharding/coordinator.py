"""The coordinator of a run of several processes: a small process of its own, which process 0 starts.

It waits until all are there, serves JAX's distributed runtime on the same port, hears each process once a second, compares what they
hand in, and tells all of them when one is lost. JAX keeps that service in process 0 and aborts every other process, with a C++ trace, the
moment the service goes; outside of process 0 the service outlives any of them, and the loss of one is told in a line.

Messages are lines of JSON. To the coordinator: hello, alive, agree, share, ended. From it: go, alive, answer, lost.
"""

import collections
import contextlib
import json
import os
import selectors
import socket
import sys
import time
from typing import Any

BEAT = 1.0  # seconds between signs of life, both ways
LOST_AFTER = 15.0  # seconds without one: longer than anything holds Python's lock, and well below half a minute
GRACE = 3.0  # seconds in which the others may end by themselves after one ended with an error
LATE = 5.0  # seconds in which a process that comes late is told why the others ended
LINE = 1 << 22  # bytes of a message at most
JAX_HEARTBEAT = 25  # seconds; behind LOST_AFTER, and only if the coordinator itself is gone: JAX's own detection aborts
AGAIN = "start all processes again"


def encode(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


class Peer:
    """One process's connection."""

    def __init__(self, connection: socket.socket):
        self.connection = connection
        self.buffer = b""
        self.index: int | None = None
        self.heard = time.monotonic()
        self.ended: tuple[int, float] | None = None  # exit code, when
        self.posted: collections.deque[tuple[str, Any]] = collections.deque()

    def send(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # its loss is seen where it is read
            self.connection.sendall(encode(message))

    def receive(self) -> list[dict[str, Any]] | None:
        """The messages that came; None at the connection's end."""
        try:
            data = self.connection.recv(1 << 16)
        except (BlockingIOError, TimeoutError):
            return []
        except OSError:
            return None
        if not data or len(self.buffer) > LINE:
            return None
        self.heard = time.monotonic()
        *lines, self.buffer = (self.buffer + data).split(b"\n")
        try:
            return [dict(json.loads(line)) for line in lines]
        except (ValueError, TypeError):
            return None  # a stranger


class Coordinator:
    """See the module.

    Args:
      host, port: where to listen; a loopback host is listened on alone, any other means all interfaces.
      count: processes of the run.
      timeout: seconds until all must be there.
    """

    def __init__(self, host: str, port: int, count: int, timeout: float):
        self.count = count
        self.timeout = timeout
        self.local = host in ("localhost", "127.0.0.1")
        self.port = port
        self.address = f"127.0.0.1:{port}" if self.local else f"[::]:{port}" if socket.has_dualstack_ipv6() else f"0.0.0.0:{port}"
        self.peers: dict[int, Peer] = {}
        self.greeted = 0  # processes that said who they are
        self.selector = selectors.DefaultSelector()
        self.listener = self._listen()

    def _listen(self) -> socket.socket:
        if self.local:
            return socket.create_server(("127.0.0.1", self.port))
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", self.port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", self.port))

    def gather(self) -> str | None:
        """Waits for every process; the reason, which all were told, if they can't start together."""
        self.selector.register(self.listener, selectors.EVENT_READ)
        deadline = time.monotonic() + self.timeout
        reason = None
        while reason is None and len(self.peers) < self.count:
            if time.monotonic() > deadline:
                absent = [str(index) for index in range(self.count) if index not in self.peers]
                are = "processes" if len(absent) > 1 else "process"
                reason = (
                    f"{are} {', '.join(absent)} of {self.count} did not come within {self.timeout:g} s: start all {self.count} with the "
                    "same --coordinator, or give --num_processes as it is"
                )
                break
            for key, _ in self.selector.select(0.2):
                if key.fileobj is self.listener:
                    self._accept()
                else:
                    reason = reason or self._greet(key.data)
        if reason is not None:
            self.tell(lost=reason)
            self._tell_latecomers(reason, min(deadline, time.monotonic() + LATE))
        self.selector.unregister(self.listener)
        self.listener.close()
        for key in list(self.selector.get_map().values()):
            if key.data.index is None:
                self._drop(key.data)
        return reason

    def _greet(self, peer: Peer) -> str | None:
        messages = peer.receive()
        if messages is None:
            self._drop(peer)
            if peer.index is not None:
                del self.peers[peer.index]  # it may be started again
            return None
        for message in messages:
            if "hello" not in message:
                continue
            index, count = message["hello"], message.get("of")
            peer.index = index
            self.greeted += 1
            if count != self.count:
                text = f"process {index} was given --num_processes={count}, process 0 --num_processes={self.count}: give all the same"
            elif index in self.peers:
                text = f"two processes were given --process_id={index}: give each its own, from 0 to {self.count - 1}"
            else:
                self.peers[index] = peer
                continue
            peer.send(lost=text)
            return text
        return None

    def _accept(self) -> None:
        peer = Peer(self.listener.accept()[0])
        peer.connection.settimeout(BEAT)
        self.selector.register(peer.connection, selectors.EVENT_READ, peer)

    def _tell_latecomers(self, reason: str, end: float) -> None:
        """A process that comes a little later would find nobody here, and not learn why."""
        while self.greeted < self.count and time.monotonic() < end:
            for key, _ in self.selector.select(0.2):
                if key.fileobj is self.listener:
                    self._accept()
                elif (messages := key.data.receive()) is None:
                    self._drop(key.data)
                elif any("hello" in message for message in messages):
                    self.greeted += 1
                    key.data.send(lost=reason)

    def _drop(self, peer: Peer) -> None:
        self.selector.unregister(peer.connection)
        peer.connection.close()

    def tell(self, **message: Any) -> None:
        for peer in self.peers.values():
            peer.send(**message)

    def watch(self) -> None:
        """Until all have ended, or one is lost and the others were told."""
        beat = now = time.monotonic()
        while self.peers:
            before, now = now, time.monotonic()
            if now - before > LOST_AFTER / 2:  # this process was not running: nobody was heard, and nobody is to blame
                for peer in self.peers.values():
                    peer.heard = now
            if now - beat > BEAT:
                beat = now
                self.tell(alive=True)
            for key, _ in self.selector.select(BEAT / 4):
                if reason := self._read(key.data):
                    return self._tell_lost(reason)
            self._answer()
            if reason := self._missing(time.monotonic()):
                return self._tell_lost(reason)
        return None

    def _tell_lost(self, reason: str) -> None:
        """JAX aborts where its service goes away: those who are told end first."""
        self.tell(lost=reason)
        time.sleep(GRACE)

    def _read(self, peer: Peer) -> str | None:
        messages = peer.receive()
        for message in messages or ():
            if "ended" in message:
                peer.ended = message["ended"], time.monotonic()
            for kind in ("agree", "share"):
                if kind in message:
                    peer.posted.append((kind, message[kind]))
        if messages is None and peer.ended is None:
            return f"process {peer.index} was lost (its connection closed): {AGAIN}"
        if messages is None:
            self._drop(peer)
            if peer.ended[0] == 0:
                del self.peers[peer.index]
            else:
                peer.connection = socket.socket()  # remembered until the others ended, too
        return None

    def _missing(self, now: float) -> str | None:
        failed = [peer for peer in self.peers.values() if peer.ended is not None and peer.ended[0] != 0]
        if len(failed) == len(self.peers):
            self.peers.clear()
            return None
        for peer in failed:
            if now - peer.ended[1] > GRACE:
                return f"process {peer.index} ended with an error: see what it printed, and {AGAIN}"
        for peer in self.peers.values():
            if peer.ended is None and now - peer.heard > LOST_AFTER:
                return f"process {peer.index} was lost (no sign of life for {LOST_AFTER:g} s): {AGAIN}"
        return None

    def _answer(self) -> None:
        """Once each of them has handed something in."""
        while len(self.peers) == self.count and all(peer.posted for peer in self.peers.values()):
            posts = [self.peers[index].posted.popleft() for index in range(self.count)]
            if len({kind for kind, _ in posts}) > 1:
                self.tell(answer=None, difference="the processes run different programs: start all with the same version")
            elif posts[0][0] == "share":
                self.tell(answer=posts[0][1])
            else:
                self.tell(answer=None, difference=difference([named for _, named in posts]))


def difference(handed: list[dict[str, list[str]]]) -> str | None:
    """Of what each process handed in, name -> (hash, the value if it is short): the first that differs, as a line; None if none does."""
    first = handed[0]
    for index, named in enumerate(handed[1:], 1):
        for name in [*first, *(name for name in named if name not in first)]:
            mine, other = first.get(name), named.get(name)
            if mine is None or other is None or mine[0] != other[0]:
                values = f" ({_shown(other)}, not {_shown(mine)})" if _shown(mine) and _shown(other) else ""
                same = "the same flags" if name.startswith("--") else "the same"
                return f"process {index} differs from process 0 in {name}{values}: give all processes {same}"
    return None


def _shown(entry: list[str] | None) -> str:
    return "none" if entry is None else entry[1]


def main(argv: list[str]) -> int:
    """HOST PORT COUNT TIMEOUT. Prints "listening", or why not, as its only output."""
    from jax._src.lib import _jax

    host, port, count, timeout = argv[0], int(argv[1]), int(argv[2]), float(argv[3])
    try:
        coordinator = Coordinator(host, port, count, timeout)
    except OSError as error:
        print(os.strerror(error.errno) if error.errno else error, flush=True)  # without what Python adds
        return 1
    print("listening", flush=True)
    if coordinator.gather():
        return 1
    try:
        service = _jax.get_distributed_runtime_service(
            coordinator.address, count, heartbeat_timeout=JAX_HEARTBEAT, shutdown_timeout=JAX_HEARTBEAT
        )
    except Exception as error:
        coordinator.tell(lost=f"the port {port} can't be served ({error}): give another --coordinator=HOST:PORT")
        return 1
    coordinator.tell(go=True)
    coordinator.watch()
    service.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
