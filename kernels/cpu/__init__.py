"""Kernels in C++ for CPUs with AVX2 or AVX-512, behind `jax.ffi`. They are built with the package where there is a compiler."""

import functools
from typing import Any

import jax
import numpy as np

try:
    from kernels.cpu import native
except ImportError:  # no compiler when the package was installed, or another kind of machine
    native = None


@functools.cache
def instruction_set() -> str | None:
    """What the kernels use here: "avx512" (with VNNI) or "avx2"; None: they can't run."""
    found = None if native is None else native.instruction_set()
    if found is not None:
        for name, target in native.targets().items():
            jax.ffi.register_ffi_target(name, target, platform="cpu")
    return found


def call(name: str, out: Any, *arrays: jax.Array, aliases: dict[int, int] | None = None, **attributes: int | float) -> Any:
    """What a handler gives.

    Args:
      name: the handler's.
      out: `jax.ShapeDtypeStruct`s of what it gives.
      aliases: inputs by number whose memory an output by number takes.
      attributes: passed as int32 or f32.
    """
    if instruction_set() is None:
        raise RuntimeError("no native kernels here: they are not built, or the CPU has no AVX2")
    told = {key: np.float32(value) if isinstance(value, float) else np.int32(value) for key, value in attributes.items()}
    return jax.ffi.ffi_call(name, out, input_output_aliases=aliases)(*arrays, **told)
