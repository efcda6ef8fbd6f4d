"""The tests of `eight/`, in a process with eight virtual devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.virtual import PATIENCE

HERE = Path(__file__).parent


def run(tier: str, seconds: int) -> str:
    patience = {"NPROC": "32", "XLA_FLAGS": PATIENCE}  # without the first, collectives may wait for ever
    settings = {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu", **patience}
    command = [sys.executable, "-m", "pytest", "-q", "-m", tier, str(HERE / "eight")]
    done = subprocess.run(command, cwd=HERE.parents[1], env=os.environ | settings, capture_output=True, text=True, timeout=seconds)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[:4000]  # where XLA ends a process it says why first
    return done.stdout


def test_on_eight_devices():
    assert "passed" in run("not slow", 600)


@pytest.mark.slow
def test_on_eight_devices_all_the_rest():
    assert "passed" in run("slow", 2400)
