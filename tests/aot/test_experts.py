"""kernels.experts as the TPU compiler sees it: the work is that of the chosen experts, and no weight is copied."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest

from kernels import experts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install -e '.[tpu]'"),
]


@pytest.mark.parametrize(
    ("T", "k", "E", "D", "F", "dtype", "biases"),
    [
        (1, 2, 64, 512, 1024, "bfloat16", True),
        (16, 8, 64, 2048, 768, "bfloat16", False),
        (512, 4, 32, 2880, 2880, "bfloat16", True),
        (4096, 2, 8, 4096, 1408, "bfloat16", False),  # the largest tiles
        (4096, 2, 8, 4096, 1408, "float32", True),
    ],
)
def test_only_chosen_experts_are_multiplied_and_no_weight_is_copied(chip, T, k, E, D, F, dtype, biases, capsys):
    def array(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=chip)

    def activation(gate, up):
        return jax.nn.silu(gate) * up

    arguments = array(T, D), array(T, k, dtype=jnp.int32), array(T, k, dtype=jnp.float32), array(E, 2, F, D), array(E, D, F)
    more = (array(E, 2, F), array(E, D)) if biases else ()
    executable = jax.jit(experts, static_argnums=5).lower(*arguments, activation, *more).compile()
    rows = -(-T * k // 16) * 16
    flops = executable.cost_analysis()["flops"] / (rows * 6 * D * F)
    temporaries = executable.memory_analysis().temp_size_in_bytes
    with capsys.disabled():
        print(f"\n{T} tokens, {k} of {E} experts, {dtype}: {flops:.2f} of the FLOPs needed, temporaries {temporaries / 2**20:.2f} MiB")
    assert flops < 1.2
    assert temporaries < 2 * rows * (2 * F + D) * 4 + 2**20  # two copies of the activations at most
