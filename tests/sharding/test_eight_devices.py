"""The tests of `eight/`, in a process with eight virtual devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run(tier: str, seconds: int) -> str:
    settings = {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu", "NPROC": "32"}  # without the last, collectives may wait for ever
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | settings
    command = [sys.executable, "-m", "pytest", "-q", "-m", tier, str(HERE / "eight")]
    done = subprocess.run(command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def test_on_eight_devices():
    assert "passed" in run("not slow", 600)


@pytest.mark.slow
def test_on_eight_devices_all_the_rest():
    assert "passed" in run("slow", 2400)
