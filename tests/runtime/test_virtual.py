"""Virtual CPU devices, in processes of their own: JAX counts its devices once."""

import os
import pathlib
import subprocess
import sys

import pytest

from runtime import UserError, virtual
from runtime.virtual import virtual_devices

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture
def clean(monkeypatch):
    for name in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS", "NPROC", "JAX_PLATFORMS"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_as_many_devices_as_asked_for_are_there_and_the_pool_is_large(clean):
    code = "from runtime.virtual import virtual_devices; virtual_devices(3); import jax, os; print(len(jax.devices()), os.environ['NPROC'])"
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    assert subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60).stdout == "3 32\n"


@pytest.mark.parametrize("given", ["", "--xla_cpu_collective_call_terminate_timeout_seconds=7", "--xla_cpu_enable_fast_math=false"])
def test_devices_wait_long_for_one_another_unless_a_flag_says_how_long(clean, given):
    """Flags that XLA does not know would end the process."""
    clean.setenv("XLA_FLAGS", given)
    code = "from runtime.virtual import virtual_devices; virtual_devices(2); import jax, os; jax.devices(); print(os.environ['XLA_FLAGS'])"
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    flags = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60).stdout.split()
    assert flags == [*given.split(), *([] if "terminate" in given else [virtual.PATIENCE])]


def test_after_jax_it_is_an_error_that_names_both_settings(clean):
    import jax  # noqa: F401

    with pytest.raises(UserError, match=r"set JAX_NUM_CPU_DEVICES=3 and NPROC=32 in the environment, or import jax later"):
        virtual_devices(3)
    assert "NPROC" not in os.environ and "JAX_NUM_CPU_DEVICES" not in os.environ


@pytest.mark.parametrize("name, value", [("JAX_NUM_CPU_DEVICES", "2"), ("XLA_FLAGS", "--xla_force_host_platform_device_count=2")])
def test_what_the_environment_says_stays(clean, name, value):
    clean.setenv(name, value)
    clean.setenv("NPROC", "16")
    before = dict(os.environ)
    virtual_devices(3)  # though JAX is here
    assert dict(os.environ) == before


def test_the_platform_is_read_from_the_variable_or_the_device_files(clean, tmp_path):
    clean.setattr(virtual, "DEVICE_FILES", (str(tmp_path / "accel*"),))
    assert virtual.runs_on_cpu()
    (tmp_path / "accel0").touch()
    assert not virtual.runs_on_cpu()
    clean.setenv("JAX_PLATFORMS", "cpu")
    assert virtual.runs_on_cpu()
    clean.setenv("JAX_PLATFORMS", "cuda,cpu")
    assert not virtual.runs_on_cpu()
