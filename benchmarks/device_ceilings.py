"""What an accelerator can do, measured by what XLA makes of a sum and of a product; a CPU has `workers/ceilings_worker.py` for that."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.rounds import seconds

READ_BYTES = 1 << 30
SIDE = 8192
TRIES = 5


class DeviceCeilings:
    """Answers as a `driver.Worker` of the ceilings does, in this process."""

    def __init__(self, read_bytes: int = READ_BYTES, side: int = SIDE):
        self._vector, self._matrix = jnp.ones((read_bytes // 4,), jnp.float32), jnp.ones((side, side), jnp.bfloat16)
        self._read, self._multiply = jax.jit(jnp.sum), jax.jit(jnp.matmul)
        what = f"XLA's sum of {read_bytes >> 20} MiB; its product of {side} x {side} bf16 matrices"
        self.hello = {"how": f"{what} on {jax.devices()[0].device_kind}"}

    def ask(self, request: Mapping[str, Any]) -> dict[str, float]:
        """The ceilings, best of a few: of what the device can do, not of what it does beside other work."""
        del request
        for program, *given in ((self._read, self._vector), (self._multiply, self._matrix, self._matrix)):
            jax.block_until_ready(program(*given))  # compiled
        read = min(seconds(lambda: self._read(self._vector)) for _ in range(TRIES))
        product = min(seconds(lambda: self._multiply(self._matrix, self._matrix)) for _ in range(TRIES))
        side = len(self._matrix)
        return {"read_bytes_per_s": self._vector.nbytes / read, "matmul_flop_per_s": 2 * side**3 / product}

    def close(self) -> None:
        """Nothing to end."""
