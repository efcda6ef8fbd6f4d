"""What the machine can do, measured between the stacks: reading memory, and matrix products, by what is fastest of numpy's BLAS and XLA."""

import time

import jax
import jax.numpy as jnp
import numpy as np
from protocol import serve

READ_BYTES = 512 << 20  # well past any cache, and about what a decode step reads of a 135M model in f32
SIDE = 2048


class Ceilings:
    def __init__(self, model, threads):
        del model, threads  # both took the threads from the environment
        self.vector = np.ones(READ_BYTES // 4, np.float32)
        self.matrix = np.random.default_rng(0).random((SIDE, SIDE), np.float32)
        self.halves = jnp.asarray(self.matrix, jnp.bfloat16)
        self.multiply = jax.jit(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32))
        jax.block_until_ready(self.multiply(self.halves))  # compiled
        self.info = {
            "load_seconds": 0.0,
            "vocab_size": 0,
            "versions": {"numpy": np.__version__, "jax": jax.__version__},
            "how": f"numpy's dot of a {READ_BYTES >> 20} MiB vector with itself; the faster of its product of {SIDE} x {SIDE} f32 matrices "
            "and XLA's of bf16",
        }

    def ceilings(self):
        """A dot product of a vector with itself reads every byte once; a square product does 2 n^3 operations."""
        return {
            "read_bytes_per_s": self.vector.nbytes / _seconds(lambda: np.dot(self.vector, self.vector)),
            "matmul_flop_per_s": 2 * SIDE**3 / min(_seconds(lambda: self.matrix @ self.matrix), _seconds(self._halves_product)),
        }

    def _halves_product(self):
        return jax.block_until_ready(self.multiply(self.halves))


def _seconds(call, tries=3):
    """The best of a few: the ceiling is what the machine can do, not what it does beside other work."""
    best = float("inf")
    for _ in range(tries):
        began = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - began)
    return best


if __name__ == "__main__":
    serve(Ceilings)
