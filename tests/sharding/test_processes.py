"""Real processes: they find each other, agree, and end together whatever befalls one of them."""

import contextlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import pytest

from runtime import UserError
from sharding import Processes, connect
from sharding.coordinator import difference
from sharding.processes import _digest, parse_address

ROOT = pathlib.Path(__file__).parents[2]
WORKER = pathlib.Path(__file__).parent / "worker.py"
BOUND = 30.0  # seconds in which the others must have ended when one is lost


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"127.0.0.1:{probe.getsockname()[1]}"


class Worker:
    """A process that can only be killed from outside, with what it printed."""

    def __init__(self, folder: pathlib.Path, arguments: Sequence[str]):
        self.out, self.err = folder / f"{arguments[2]}.out", folder / f"{arguments[2]}.err"
        with self.out.open("w") as out, self.err.open("w") as err:
            env = os.environ | {"PYTHONPATH": str(ROOT)}
            self.process = subprocess.Popen([sys.executable, str(WORKER), *arguments], stdout=out, stderr=err, env=env, cwd=ROOT)

    def end(self, seconds: float = BOUND) -> int:
        """Its exit code; a failure of the test if it still runs after that long."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it runs after {seconds:g} s: {self.printed!r}") from None

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + 60
        while text not in self.out.read_text():
            assert self.process.poll() is None and time.monotonic() < deadline, self.printed
            time.sleep(0.02)

    @property
    def printed(self) -> str:
        return self.out.read_text() + self.err.read_text()

    @property
    def errors(self) -> list[str]:
        """The lines of standard error."""
        return self.err.read_text().splitlines()


@contextlib.contextmanager
def workers(folder: pathlib.Path, *arguments: str, count: int = 2, address: str | None = None) -> Iterator[list[Worker]]:
    """One for each of `arguments` (ROUNDS and what follows), killed at the end."""
    address = address or free_address()
    started = [Worker(folder, [address, str(count), str(index), *each.split()]) for index, each in enumerate(arguments)]
    try:
        yield started
    finally:
        for worker in started:
            worker.process.send_signal(signal.SIGCONT)
            worker.process.kill()
            worker.process.wait()


def test_processes_that_agree_compute_over_the_mesh_of_all_and_draw_one_seed(tmp_path):
    with workers(tmp_path, "3 --seed=1 prompts=a", "3 --seed=1 prompts=a") as both:
        assert [worker.end() for worker in both] == [0, 0], [worker.printed for worker in both]
        seeds = [re.search(r"^seed (\d+)$", worker.printed, re.M)[1] for worker in both]
        assert seeds[0] == seeds[1] and 0 <= int(seeds[0]) < 2**32
        assert all("sum 8\n" in worker.printed for worker in both)  # 8 columns, half of them each


@pytest.mark.parametrize(
    "first, second, line",
    [
        ("--seed=1", "--seed=2", 'process 1 differs from process 0 in --seed ("2", not "1"): give all processes the same flags'),
        ("--seed=1", "", 'process 1 differs from process 0 in --seed (none, not "1"): give all processes the same flags'),
        ("prompts=" + "a" * 50, "prompts=" + "b" * 50, "process 1 differs from process 0 in prompts: give all processes the same"),
    ],
)
def test_a_difference_ends_every_process_with_a_line_that_names_it(tmp_path, first, second, line):
    with workers(tmp_path, f"0 {first}", f"0 {second}") as both:
        assert [worker.end() for worker in both] == [2, 2]
        assert [worker.errors for worker in both] == [[f"error: {line}"]] * 2


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_other_with_a_line_that_names_it(tmp_path, victim):
    with workers(tmp_path, "-1", "-1") as both:
        for worker in both:
            worker.wait_for("sum 8")
        both[victim].process.kill()
        assert both[1 - victim].end() == 2
        assert both[1 - victim].errors == [f"error: process {victim} was lost (its connection closed): start all processes again"]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_frozen_process_ends_the_other_in_half_a_minute(tmp_path, victim):
    with workers(tmp_path, "-1", "-1") as both:
        for worker in both:
            worker.wait_for("sum 8")
        both[victim].process.send_signal(signal.SIGSTOP)
        assert both[1 - victim].end() == 2
        line = f"error: process {victim} was lost (no sign of life for 15 s): start all processes again"
        assert both[1 - victim].errors == [line]
        both[victim].process.send_signal(signal.SIGCONT)
        assert both[victim].end() == 2
        assert both[victim].errors == [line]


def test_an_error_that_is_no_user_s_is_shown_where_it_was_made(tmp_path):
    with workers(tmp_path, "-1", "-1 fail=error") as both:
        assert both[1].end() == 1
        assert both[1].errors[-1] == "RuntimeError: a mistake of this process alone"
        assert both[0].end() == 2
        assert both[0].errors == ["error: process 1 ended with an error: see what it printed, and start all processes again"]


@pytest.mark.slow
def test_sigterm_ends_a_process_and_the_other_is_told(tmp_path):
    with workers(tmp_path, "-1", "-1") as both:
        for worker in both:
            worker.wait_for("sum 8")
        both[1].process.terminate()
        assert both[1].end() == -signal.SIGTERM
        assert both[0].end() == 2


def test_a_process_that_does_not_come_is_named(tmp_path):
    with workers(tmp_path, "0 timeout=3") as (alone,):
        assert alone.end() == 2
        assert alone.errors == [
            "error: process 1 of 2 did not come within 3 s: start all 2 with the same --coordinator, or give --num_processes as it is"
        ]


def test_a_coordinator_that_is_not_there_is_named(tmp_path):
    address = free_address()
    worker = Worker(tmp_path, [address, "2", "1", "0", "timeout=2"])
    assert worker.end() == 2
    assert re.fullmatch(
        rf"error: --coordinator={address} was not reached within 2 s \(Connection refused\): start process 0 with .*", worker.errors[0]
    )


def test_a_port_in_use_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        worker = Worker(tmp_path, [address, "2", "0", "0"])
        assert worker.end() == 2
    assert worker.errors == [
        f"error: --coordinator={address} can't be listened on (Address already in use): give a free port of this machine"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(
    "arguments, line",
    [
        (("0", "1", "1"), "two processes were given --process_id=1: give each its own, from 0 to 2"),
        (("0", "2", "1"), "process 2 was given --num_processes=4, process 0 --num_processes=3: give all the same"),
    ],
)
def test_wrong_numbers_end_every_process(tmp_path, arguments, line, late):
    """Also one that starts when the others have ended already: it learns why."""
    address = free_address()
    started = []
    for place, index in enumerate(arguments):
        (tmp_path / str(place)).mkdir()
        count = "4" if index == "2" else "3"
        if late and place == 2 and count != "4" and index not in arguments[:2]:
            assert [worker.end() for worker in started] == [2, 2]
        started.append(Worker(tmp_path / str(place), [address, count, index, "0", "timeout=20"]))
    assert [worker.end() for worker in started] == [2, 2, 2]
    assert [worker.errors for worker in started] == [[f"error: {line}"]] * 3


@pytest.mark.parametrize(
    "coordinator, count, index, line",
    [
        ("nowhere", 2, 0, r"--coordinator=nowhere is not HOST:PORT"),
        ("host:0", 2, 0, r"--coordinator=host:0 is not HOST:PORT"),
        ("host:1234", 2, 2, r"--process_id=2 is out of range: give 0 to 1"),
        ("host:1234", 2, -1, r"--process_id=-1 is out of range: give 0 to 1"),
        ("host:1234", 0, 0, r"--num_processes=0 is below 1: give at least 1"),
        ("host:1234", 2, None, r"--process_id is missing: several processes need all of --coordinator=HOST:PORT"),
        (None, 2, 1, r"--coordinator is missing"),
    ],
)
def test_what_is_wrong_with_the_flags_alone_is_said_at_once(coordinator, count, index, line):
    with pytest.raises(UserError, match=re.escape(line)):
        connect(coordinator, count, index)


def test_a_cluster_that_is_none_is_said(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("SLURM", "OMPI", "KUBERNETES", "TPU"))]:
        monkeypatch.delenv(name)
    with pytest.raises(UserError, match="--distributed: neither SLURM, Open MPI, GKE nor Cloud TPU was found here"):
        connect()


def test_jax_in_use_is_said():
    import jax

    jax.devices()
    with pytest.raises(UserError, match="JAX has started already"):
        connect("127.0.0.1:1234", 2, 1)


def test_addresses_may_be_of_ipv6():
    assert parse_address("[::1]:80") == ("::1", 80)


def test_one_process_agrees_with_itself():
    alone = Processes()
    alone.agree(**{"--seed": 1})
    assert alone.first and alone.share("x") == "x" and alone.ending(lambda: 3) == 3


def test_the_first_difference_is_named_whatever_the_order_of_names():
    same = {"--a": _digest(1), "b": _digest(b"x")}
    assert difference([same, dict(reversed(same.items())), same]) is None
    assert difference([same, same, same | {"b": _digest(b"y")}]) == "process 2 differs from process 0 in b: give all processes the same"
    assert (
        difference([same, same | {"c": _digest(1)}]) == "process 1 differs from process 0 in c (1, not none): give all processes the same"
    )
    assert _digest({"y": 1, "x": (1, 2)}) == _digest({"x": [1, 2], "y": 1})
