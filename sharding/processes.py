"""A run of several processes: how they find each other, agree on what they run, and end together.

processes = connect("10.0.0.1:1234", num_processes=2, process_id=0)   # before JAX has a backend
processes.agree(**{"--seed": 1})                                      # a difference is an error of all of them
code = processes.ending(work)                                         # the exit code; a lost process ends all with one line
"""

import dataclasses
import hashlib
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from runtime.errors import UserError
from sharding.coordinator import AGAIN, BEAT, JAX_HEARTBEAT, LOST_AFTER
from sharding.link import LOST_CODE, Link

EXAMPLE = "--coordinator=HOST:PORT --num_processes=N --process_id=I"
SHORT = 40  # characters of a value that an error shows
CONNECTION = re.compile(r"gloo|nccl|UNAVAILABLE|DEADLINE_EXCEEDED|connection (closed|reset|refused)", re.IGNORECASE)


@dataclasses.dataclass(frozen=True, eq=False)
class Processes:
    """This process among those of its run.

    Attributes:
      index: 0 to count - 1. Process 0 alone prints.
      count: of all.
      link: to the coordinator; None where there is one process, which agrees with itself.
    """

    index: int = 0
    count: int = 1
    link: Link | None = dataclasses.field(default=None, repr=False)

    @property
    def first(self) -> bool:
        return self.index == 0

    def agree(self, *, timeout_s: float = 600.0, **named_values: Any) -> None:
        """Every process hands in the same named values (JSON, or bytes); all wait until all have.

        Raises:
          UserError: in every process: what differs, or the others did not come within `timeout_s`.
        """
        if self.link is not None:
            self.link.ask({"agree": {name: _digest(value) for name, value in named_values.items()}}, timeout_s)

    def share(self, value: Any, *, timeout_s: float = 600.0) -> Any:
        """Process 0's value (JSON), in every process. Raises: UserError, as `agree`."""
        return value if self.link is None else self.link.ask({"share": value}, timeout_s)

    def shared_seed(self) -> int:
        """A fresh seed, the same in every process: 0 to 2**32 - 1."""
        return self.share(secrets.randbits(32))

    def ending(self, work: Callable[[], int]) -> int:
        """The exit code of `work`, after which every process has left.

        Where it fails, this process tells the others and ends without waiting for them: JAX would wait at exit. An error of a collective
        becomes one line, which names the process that was lost.
        """
        if self.link is None:
            return work()
        code = 1
        try:
            code = self._run(work)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:
            sys.excepthook(*sys.exc_info())
        self.link.leave(code)
        return code

    def _run(self, work: Callable[[], int]) -> int:
        try:
            return work()
        except Exception as error:  # a collective's is a JaxRuntimeError or a ValueError, by where it is noticed
            connection = CONNECTION.search(str(error)) is not None
            time.sleep(LOST_AFTER + 3 * BEAT if connection else 2 * BEAT)  # if a process was lost, the link ends this one meanwhile
            if not connection:
                raise
            print(f"error: another process can't be reached ({str(error)[:200]!r}): {AGAIN}", file=sys.stderr)
            return LOST_CODE


def connect(
    coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None, timeout_s: float = 60.0
) -> Processes:
    """Joins a run of several processes. Call it before anything asks JAX for its devices.

    Args:
      coordinator: HOST:PORT of process 0, a free port that the others reach.
      num_processes: of the run.
      process_id: this one's, from 0.
        All three None: as JAX finds them (SLURM, Open MPI, GKE and Cloud TPU).
      timeout_s: until all must be there.

    Raises:
      UserError: one of the three missing or wrong, a coordinator that is not reached, processes that did not come, or JAX in use already.
    """
    given = {"--coordinator": coordinator, "--num_processes": num_processes, "--process_id": process_id}
    missing = [name for name, value in given.items() if value is None]
    if 0 < len(missing) < len(given):
        raise UserError(f"{missing[0]} is missing: several processes need all of {EXAMPLE}")
    local_devices = None
    if missing:
        coordinator, num_processes, process_id, local_devices = _detect(timeout_s)
    host, port = parse_address(coordinator)
    if num_processes < 1:
        raise UserError(f"--num_processes={num_processes} is below 1: give at least 1")
    if not 0 <= process_id < num_processes:
        raise UserError(f"--process_id={process_id} is out of range: give 0 to {num_processes - 1}, for --num_processes={num_processes}")
    _check_unused()
    if process_id == 0:
        _start_coordinator(host, port, num_processes, timeout_s)
    link = _join(host, port, num_processes, process_id, timeout_s)
    link.start()
    _connect_jax(host, port, num_processes, process_id, timeout_s, local_devices)
    return Processes(process_id, num_processes, link)


def parse_address(text: str) -> tuple[str, int]:
    """("10.0.0.1", 1234) of "10.0.0.1:1234". Raises: UserError."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise UserError(f"--coordinator={text} is not HOST:PORT (a port from 1 to 65535): write for example --coordinator=10.0.0.1:1234")
    return host, int(port)


def _detect(timeout_s: float) -> tuple[str, int, int, Any]:
    from jax._src import clusters

    try:
        found = clusters.ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, int(timeout_s))
    except Exception as error:
        raise UserError(f"--distributed: this cluster's description can't be read ({error}): give {EXAMPLE}") from error
    if None in found[:3]:
        raise UserError(f"--distributed: neither SLURM, Open MPI, GKE nor Cloud TPU was found here: give {EXAMPLE}")
    return found


def _check_unused() -> None:
    from jax._src import xla_bridge
    from jax._src.distributed import global_state

    if xla_bridge.backends_are_initialized() or global_state.client is not None:
        raise UserError("JAX has started already, as a single process: call sharding.connect before anything that asks for a device")


def _start_coordinator(host: str, port: int, count: int, timeout_s: float) -> None:
    room = str(Path(__file__).parents[1])
    changes = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    path = os.pathsep.join(filter(None, (room, os.environ.get("PYTHONPATH"))))
    child = subprocess.Popen(
        [sys.executable, "-m", "sharding.coordinator", host, str(port), str(count), str(timeout_s)],
        env=os.environ | changes | {"PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C ends the processes; it tells the others
        text=True,
    )
    with child.stdout:
        word = child.stdout.readline().strip()
    if word != "listening":
        raise UserError(
            f"--coordinator={host}:{port} can't be listened on ({word or 'it did not start'}): give a free port of this machine"
        )


def _join(host: str, port: int, count: int, index: int, timeout_s: float) -> Link:
    """Once all processes have joined."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=max(0.1, min(5.0, deadline - time.monotonic())))
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise UserError(
                    f"--coordinator={host}:{port} was not reached within {timeout_s:g} s ({_reason(error)}): start process 0 with "
                    "the same address, on a port that this machine reaches"
                ) from None
            time.sleep(0.2)
    connection.settimeout(timeout_s + LOST_AFTER)  # the coordinator says who did not come
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link = Link(connection)
    try:
        link.send({"hello": index, "of": count})
        message = link.receive()
    except (OSError, ValueError) as error:
        raise UserError(f"--coordinator={host}:{port} does not answer as a coordinator ({error}): give the address of process 0") from None
    if "lost" in message:
        raise UserError(message["lost"])
    return link


def _connect_jax(host: str, port: int, count: int, index: int, timeout_s: float, local_devices: Any) -> None:
    """What `jax.distributed.initialize` does, but with the service in the coordinator; and without the handler of SIGTERM, which would
    keep that signal from ending the process."""
    import jax
    from jax._src.distributed import global_state
    from jax._src.lib import _jax

    if local_devices:
        visible = ",".join(map(str, local_devices))
        jax.config.update("jax_cuda_visible_devices", visible)
        jax.config.update("jax_rocm_visible_devices", visible)
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    global_state.coordinator_address = address
    global_state.process_id, global_state.num_processes = index, count
    global_state.client = _jax.get_distributed_runtime_client(
        address,
        index,
        init_timeout=int(timeout_s),
        shutdown_timeout=JAX_HEARTBEAT,
        heartbeat_timeout=JAX_HEARTBEAT,
        use_compression=True,
    )
    global_state.client.connect()


def _reason(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno else str(error)


def _digest(value: Any) -> list[str]:
    """SHA-256 of the bytes, or of the value's canonical JSON; and the value, where it is short."""
    text = "" if isinstance(value, bytes) else json.dumps(_plain(value), sort_keys=True, ensure_ascii=True)
    data = value if isinstance(value, bytes) else text.encode()
    return [hashlib.sha256(data).hexdigest(), text if len(text) <= SHORT else ""]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, (list, tuple)) else value
