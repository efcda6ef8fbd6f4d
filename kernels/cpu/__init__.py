"""Kernels in C++ for CPUs with AVX2 or AVX-512, behind `jax.ffi`. They are built with the package where there is a compiler."""

import functools
import importlib.util
import platform
import sys
from typing import Any

import jax
import numpy as np

try:
    from kernels.cpu import native
except ImportError as error:  # no compiler when the package was installed, or another kind of machine
    native, _failure = None, error


@functools.cache
def instruction_set() -> str | None:
    """What the kernels use here: "avx512" (with VNNI) or "avx2"; None: they can't run."""
    found = None if native is None else native.instruction_set()
    if found is not None:
        for name, target in native.targets().items():
            jax.ffi.register_ffi_target(name, target, platform="cpu")
    return found


def reason() -> str | None:
    """Why the kernels can't run here, in a line; None: they can."""
    if instruction_set() is not None:
        return None
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return f"not an x86-64 Linux machine, but {sys.platform} on {platform.machine()}"
    if native is not None:
        return "this CPU has no AVX2"
    if importlib.util.find_spec("kernels.cpu.native") is not None:
        return f"built, but not to be loaded ({_failure}); install Diptych again"
    return "not built: no C++ compiler was there when Diptych was installed; install g++, then Diptych again"


def call(name: str, out: Any, *arrays: jax.Array, aliases: dict[int, int] | None = None, **attributes: int | float) -> Any:
    """What a handler gives.

    Args:
      name: the handler's.
      out: `jax.ShapeDtypeStruct`s of what it gives.
      aliases: inputs by number whose memory an output by number takes.
      attributes: passed as int32 or f32.
    """
    if instruction_set() is None:
        raise RuntimeError(f"no native kernels here: {reason()}")
    told = {key: np.float32(value) if isinstance(value, float) else np.int32(value) for key, value in attributes.items()}
    return jax.ffi.ffi_call(name, out, input_output_aliases=aliases)(*arrays, **told)
