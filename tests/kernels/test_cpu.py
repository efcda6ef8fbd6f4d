"""kernels.cpu: which kernels run here, and why they don't where they don't."""

import platform
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from kernels import cpu


@pytest.fixture
def absent(monkeypatch):
    """No instruction set, whatever was found before."""
    monkeypatch.setattr(cpu, "instruction_set", lambda: None)
    return monkeypatch


def test_kernels_that_run_need_no_reason():
    assert (cpu.reason() is None) == (cpu.instruction_set() is not None)


def test_another_machine_is_named(absent):
    absent.setattr(platform, "machine", lambda: "aarch64")
    assert cpu.reason() == "not an x86-64 Linux machine, but linux on aarch64"


@pytest.mark.skipif(cpu.native is None, reason="the native kernels are not built")
def test_a_cpu_without_avx2_is_told_from_a_package_without_kernels(absent):
    assert cpu.reason() == "this CPU has no AVX2"
    with pytest.raises(RuntimeError, match="no native kernels here: this CPU has no AVX2"):
        cpu.call("diptych_matmul", jax.ShapeDtypeStruct((1, 1), jnp.float32))


ROOT = Path(__file__).parents[2]
IMPORT = "from kernels import cpu; print(cpu.instruction_set(), '|', cpu.reason())"


def imported(folder) -> str:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT], cwd=folder, env={"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.skipif((sys.platform, platform.machine()) != ("linux", "x86_64"), reason="another machine is the reason first")
def test_what_is_not_built_or_does_not_load_says_so(tmp_path):
    for room in ("kernels", "runtime", "configs"):
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    says = "None | not built: no C++ compiler was there when Diptych was installed; install g++, then Diptych again"
    assert imported(tmp_path) == says
    (tmp_path / "kernels/cpu/native.abi3.so").write_bytes(b"not a library")
    assert imported(tmp_path).startswith("None | built, but not to be loaded (")
