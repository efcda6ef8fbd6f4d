"""Eight virtual devices, each with its rows and all the weights, call the native product at once: run by `test_native_matmul.py`."""

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from kernels.native_matmul import native_matmul
from kernels.tiled_array import tile
from tests.kernels.packed import KINDS, random_weights


def main() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    for kind in KINDS[1], KINDS[3], KINDS[10]:
        x = np.random.default_rng(0).normal(size=(24, kind.inputs)).astype(np.float32)
        w = tile(random_weights(kind), 15)

        def product(x, w):
            return jax.lax.psum(native_matmul(x, w), "data")  # a collective too: those may not wait for threads that kernels hold

        split = jax.jit(jax.shard_map(product, mesh=mesh, in_specs=(P("data"), P()), out_specs=P(None), check_vma=False))
        want = np.asarray(jax.jit(native_matmul)(x, w)).reshape(8, 3, -1).sum(0, dtype=np.float64)
        for _ in range(20):
            got = np.asarray(split(x, w), np.float64).reshape(3, -1)
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())
    print(len(jax.devices()), "devices agree")


if __name__ == "__main__":
    main()
