"""One process of a run of several: joins, agrees on what it was given, multiplies matrices over the mesh of all, and ends.

worker.py ADDRESS COUNT INDEX ROUNDS [NAME=VALUE ...]      ROUNDS: steps; -1 goes on until something ends it; 0 asks for no device
"""

import os
import sys
import time

os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "NPROC": "32"}

from runtime.terminal import ending, show
from sharding import connect, make_mesh


def loop(rounds: int, count: int) -> None:
    """A product whose sum is over the devices of all processes."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = make_mesh({"model": count})
    make = jax.jit(lambda: jnp.ones((8, 4 * count)), out_shardings=NamedSharding(mesh, PartitionSpec(None, "model")))
    step = jax.jit(lambda w: w @ w.T, out_shardings=NamedSharding(mesh, PartitionSpec()))
    w = make()
    done = 0
    while done != rounds:
        total = float(step(w).addressable_data(0)[0, 0])
        if done == 0:
            show(f"sum {total:g}\n")
        done += 1


def main() -> int:
    address, count, index, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    given = dict(entry.split("=", 1) for entry in sys.argv[5:])
    fails, timeout = given.pop("fail", None), float(given.pop("timeout", 60))
    processes = connect(address, count, index, timeout_s=timeout)

    def work() -> int:
        processes.agree(**given)
        show(f"seed {processes.shared_seed()}\n")
        if fails == "error":
            raise RuntimeError("a mistake of this process alone")
        if rounds:
            loop(rounds, count)
        elif fails == "wait":
            time.sleep(60)
        return 0

    return processes.ending(lambda: ending(work))


if __name__ == "__main__":
    sys.exit(ending(main))
