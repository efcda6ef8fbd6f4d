"""What the measurements ran on, and how much other work ran beside them. Where there is no /proc, the latter is not known."""

import os
import platform
import time
from pathlib import Path

QUIET = 0.15  # cores of other work up to which a measurement counts as undisturbed
_TICK = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01


def describe() -> dict:
    """The machine as facts for the report."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor() or platform.machine()
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }


def cache_bytes() -> int:
    """Of the last level of the first processor's caches; where the system does not say, 64 MiB, which is an accelerator's or more."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text(encoding="utf-8").strip()
        sizes.append(int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}[text[-1]])
    return max(sizes, default=64 << 20)


class OtherWork:
    """Cores that other processes kept busy since this was made; `session` is the worker's, whose work is not other work.

    A worker that spins while it should wait counts as other work: it takes the cores of the one that is measured.
    """

    def __init__(self, session: int | None = None):
        self._session = session
        self._began, self._busy, self._own = time.perf_counter(), _busy_seconds(), self._own_seconds()

    def cores(self) -> float | None:
        """None where the system does not say."""
        busy = _busy_seconds()
        if busy is None or self._busy is None:
            return None
        other = (busy - self._busy) - (self._own_seconds() - self._own)
        rounding = 2 * _TICK  # of the counters, which matters when a measurement is short
        return max(0.0, other - rounding) / (time.perf_counter() - self._began)

    def _own_seconds(self) -> float:
        times = os.times()
        return times.user + times.system + (0.0 if self._session is None else _session_seconds(self._session))


def wait_until_quiet(limit_seconds: float) -> None:
    """Returns when little other work runs, or after the limit."""
    end = time.perf_counter() + limit_seconds
    while time.perf_counter() < end:
        other = OtherWork()
        time.sleep(0.25)
        cores = other.cores()
        if cores is None or cores <= QUIET:
            return


def _busy_seconds() -> float | None:
    """CPU seconds of all processes, and those that the hypervisor took away, since boot."""
    try:
        with open("/proc/stat", encoding="utf-8") as stat:
            ticks = [int(field) for field in stat.readline().split()[1:9]]
    except (OSError, ValueError):
        return None
    return (sum(ticks) - ticks[3] - ticks[4]) * _TICK  # without idle and waiting for a disk


def _session_seconds(session: int) -> float:
    """CPU seconds of a session's living processes."""
    total = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[3]) == session:
            total += int(fields[11]) + int(fields[12])
    return total * _TICK
