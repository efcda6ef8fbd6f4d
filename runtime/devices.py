"""What JAX runs on: default number formats, and the compilation cache on disk."""

import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from runtime.errors import UserError
from runtime.paths import cache_dir

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16}
KV_DTYPES = DTYPES | {"int8": jnp.int8, "int4": jnp.int4, "fp8": jnp.float8_e4m3fn}


def platform() -> str:
    """`cpu`, `gpu` or `tpu`: where an array without a sharding of its own is put."""
    return jax.default_backend()


def resolve_dtype(flag: str, name: str, where: str, known: Mapping[str, Any] = DTYPES) -> jnp.dtype:
    """The number format that a flag value names.

    Args:
      flag: the flag's name, for the error.
      name: `auto` (f32 on CPU, where bf16 has no fast dot; bf16 elsewhere), or one of `known`.
      where: the platform.
      known: formats by name.

    Raises:
      UserError: another name.
    """
    if name == "auto":
        return jnp.dtype(jnp.float32 if where == "cpu" else jnp.bfloat16)
    if name not in known:
        raise UserError(f"--{flag}={name} is not known: use one of auto, {', '.join(known)}")
    return jnp.dtype(known[name])


@functools.cache
def cpu_multiplies_bf16() -> bool:
    """Whether this processor has bf16 products (AVX512-BF16 or AMX): only then is the CPU backend's bf16 dot fast."""
    try:
        known = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return False
    return "avx512_bf16" in known or "amx_bf16" in known


def enable_compilation_cache() -> None:
    """Keeps executables in the user's cache folder, so that a second start compiles nothing.

    A folder that can't be written leaves the cache off: the run is slower to start, not wrong. `JAX_COMPILATION_CACHE_DIR` wins.
    """
    if jax.config.jax_compilation_cache_dir:
        return
    folder = cache_dir() / "xla"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return
    if os.access(folder, os.W_OK):
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
