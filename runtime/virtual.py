"""Several devices on a CPU, for a mesh without accelerators. Needs no JAX, and must come before it."""

import glob
import os
import sys

from runtime.errors import UserError

POOL = 32  # threads that XLA's CPU devices share; with as many as there are cores, collectives in flight can fill it and wait for ever
PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=600"  # a device that others wait for; after 40 s XLA ends the process
DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/accel*", "/dev/vfio/[0-9]*", "/dev/kfd")


def runs_on_cpu() -> bool:
    """Whether JAX will take the CPU: `JAX_PLATFORMS` says so, or it is not set and there is no accelerator's device file."""
    if platforms := os.environ.get("JAX_PLATFORMS", ""):
        return platforms.split(",")[0].strip().lower() == "cpu"
    return not any(glob.glob(pattern) for pattern in DEVICE_FILES)


def virtual_devices(count: int) -> None:
    """Gives this process's CPU `count` devices, and XLA's pool enough threads for their collectives, which may wait for ten minutes on a
    machine that is busy or sleeps. What the environment says already (`JAX_NUM_CPU_DEVICES`, a count or this timeout in `XLA_FLAGS`,
    `NPROC`) is left as it is.

    Raises:
      UserError: JAX was imported before, when neither can be set any more.
    """
    counted = "JAX_NUM_CPU_DEVICES" in os.environ or "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if counted and "NPROC" in os.environ:
        return
    if "jax" in sys.modules:
        raise UserError(
            f"JAX was imported before its {count} CPU devices were asked for: set JAX_NUM_CPU_DEVICES={count} and NPROC={POOL} in the "
            "environment, or import jax later"
        )
    if not counted:
        os.environ["JAX_NUM_CPU_DEVICES"] = str(count)
    os.environ.setdefault("NPROC", str(POOL))
    flags = os.environ.get("XLA_FLAGS", "")
    if PATIENCE.split("=")[0] not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {PATIENCE}".strip()
