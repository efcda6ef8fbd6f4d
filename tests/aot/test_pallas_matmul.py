"""Packed products as Pallas kernels, compiled for chips that are not there: legal, with no wide copy of a weight anywhere in memory.

The compiler of a TPU takes the kernel to the end, vector memory included; the GPU's takes it to machine code.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels import TransposedArray, experts, transpose
from kernels.grouped_matmul import grouped_matmul
from quantization import SCHEMES
from tests.aot.meshes import compiled_on
from tests.aot.test_packed import BYTES, CONFIG, MATRICES, packed_bytes, unpacked, written
from tests.kernels.packed import I8, SUPER, U8, Kind, random_weights

pytestmark = pytest.mark.slow

INPUTS, OUTS = 4096, 6144
F32 = np.dtype(np.float32)
KINDS = {
    "fp8": Kind("float8", (1,), INPUTS, INPUTS, scales=F32),
    "fp8_block": Kind("float8", (1,), INPUTS, 128),
    "int8": Kind("int8", (1,), INPUTS, INPUTS, scales=F32),
    "q8_0": Kind("int8", (1,), INPUTS, 32),
    "int4": Kind("uint4", (1,), INPUTS, 64, has=("zeros",)),
    "gptq": Kind("uint4", (1,), INPUTS, 128, has=("zeros",)),
    "q4_0": Kind("uint4", (1,), INPUTS, 32, zero=8),
    "q4_1": Kind("uint4", (1,), INPUTS, 32, has=("offsets",)),
    "q2_k": Kind("uint2", (1,), INPUTS, 16, has=SUPER, scales=U8),
    "uint3": Kind("uint3", (1,), INPUTS, 32, zero=4),
    "q4_k": Kind("uint4", (1,), INPUTS, 32, has=SUPER, scales=U8),
    "q5_k": Kind("uint5", (1,), INPUTS, 32, has=SUPER, scales=U8),
    "q6_k": Kind("uint6", (1,), INPUTS, 16, zero=32, has=("super_scales",), scales=I8),
    "mxfp4": Kind("float4", (1,), INPUTS, 32, scales=np.dtype(ml_dtypes.float8_e8m0fnu)),
}
CHIPS = ("v5e", "v6e", "h200")


@pytest.fixture(scope="module", params=CHIPS)
def mesh(request):
    from jax.experimental import topologies

    if request.param == "h200":
        pytest.importorskip("jax_plugins.xla_cuda12", reason="the GPU's compiler is not installed: pip install -e '.[gpu-compiler]'")
        from tests.aot.hopper import H200

        topology = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1")
    else:
        pytest.importorskip("libtpu", reason="the TPU's compiler is not installed: pip install -e '.[tpu]'")
        request.getfixturevalue("chip")  # which sets the environment
        topology = topologies.get_topology_desc(platform="tpu", topology_name=f"{request.param}:1x1", chips_per_host_bounds=[1, 1, 1])
    return Mesh(np.asarray(topology.devices), ("model",))


def shapes(kind: Kind, outs: tuple[int, ...], *lead: int) -> TransposedArray:
    """A weight [lead..., outs..., I] of that kind, as shapes."""
    w = transpose(random_weights(kind))
    many = math.prod(outs)
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct((*lead, *array.shape[:-1], many), array.dtype), w).replace(outs=outs)


def compiled(mesh, function, *arguments):
    sharding = NamedSharding(mesh, PartitionSpec())
    placed = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding), arguments)
    with jax.set_mesh(mesh):
        return jax.jit(function).lower(*placed).compile()


def is_kernel(text: str) -> bool:
    return "tpu_custom_call" in text or "xla.gpu.triton" in text


def wide(text: str, weights: int) -> list[str]:
    """What writes as many numbers as there are weights in more than a byte each."""
    return [line[:160] for _, kind, count, line in written(text) if count == weights and BYTES[kind] > 1]


@pytest.mark.parametrize("rows", [16, 512])
@pytest.mark.parametrize("name", KINDS)
def test_every_format_is_read_packed(mesh, name, rows):
    w = shapes(KINDS[name], (OUTS,), 1)
    dtype = jnp.float32 if name == "q4_k" and rows == 512 else jnp.bfloat16  # the largest blocks
    x, sizes = jax.ShapeDtypeStruct((rows, INPUTS), dtype), jax.ShapeDtypeStruct((1,), jnp.int32)
    executable = compiled(mesh, grouped_matmul, x, w, sizes)
    text, memory = executable.as_text(), executable.memory_analysis()
    assert is_kernel(text)
    assert wide(text, INPUTS * OUTS) == []
    given = memory.argument_size_in_bytes - w.nbytes - rows * INPUTS * jnp.dtype(dtype).itemsize
    assert 0 <= given < 2**16 + 2 * OUTS * 4  # no array is padded by its layout, but for a single row
    shares = 1 if "tpu_custom_call" in text else 16  # of sums, on a GPU
    assert memory.temp_size_in_bytes <= shares * rows * OUTS * 4 + rows * INPUTS * 4 + 2**16
    assert rows > 16 or memory.temp_size_in_bytes < 2 * INPUTS * OUTS  # a widened weight


def test_a_product_that_widens_is_found_out(mesh):
    """The checks above must fail for what reads wide weights."""
    w = shapes(KINDS["int4"], (OUTS,))
    x = jax.ShapeDtypeStruct((16, INPUTS), jnp.bfloat16)

    def ahead(x, w):
        return x @ jax.lax.optimization_barrier(w.widen(x.dtype)).T

    text = compiled(mesh, ahead, x, w).as_text()
    assert wide(text, INPUTS * OUTS) and not is_kernel(text)


@pytest.mark.parametrize(("T", "k", "E", "F"), [(1, 4, 32, 2880), (16, 8, 48, 768), (2048, 2, 8, 1408)])
@pytest.mark.parametrize("name", ["mxfp4", "q4_k", "fp8_block"])
def test_experts_are_read_packed_and_only_those_that_are_hit(mesh, name, T, k, E, F):
    kind = KINDS[name]
    F, D = -(-F // 256) * 256, 1792  # no activations have as many numbers as weights
    w_in = shapes(dataclasses.replace(kind, inputs=D), (2, F), E)
    w_out = shapes(dataclasses.replace(kind, inputs=F), (D,), E)
    x, indices = jax.ShapeDtypeStruct((T, D), jnp.bfloat16), jax.ShapeDtypeStruct((T, k), jnp.int32)
    shares = jax.ShapeDtypeStruct((T, k), jnp.float32)

    def run(x, indices, shares, w_in, w_out):
        return experts(x, indices, shares, w_in, w_out, lambda gate, up: jax.nn.silu(gate) * up)

    executable = compiled(mesh, run, x, indices, shares, w_in, w_out)
    text, memory = executable.as_text(), executable.memory_analysis()
    assert is_kernel(text)
    for weights in (E * 2 * F * D, E * F * D, 2 * F * D, F * D):
        assert wide(text, weights) == []
    activations = (T * k + 512) * (2 * F + D) * 4
    assert memory.temp_size_in_bytes < 18 * activations if "triton" in text else 3 * activations
    assert T > 16 or memory.temp_size_in_bytes < 2 * E * 2 * F * D  # the widened experts


@pytest.mark.parametrize("scheme", ["int8", "int4", "fp8_block"])
def test_a_decode_loop_holds_packed_weights_only(mesh, scheme):
    """64 steps of 16 rows, three layers of Llama-8B, weights as they are stored."""
    program = compiled_on(mesh, "decode", CONFIG, scheme=SCHEMES[scheme], pallas=True)
    text = program.executable.as_text()
    assert is_kernel(text)
    assert unpacked(text, "int8") == []  # nothing with as many numbers as a matrix in more bytes
    temporaries = program.memory.temp_size_in_bytes
    print(f"\n{mesh.devices.flat[0].device_kind}, {scheme}: temporaries {temporaries / 2**20:.1f} MiB")
    if mesh.devices.flat[0].platform == "tpu":
        assert temporaries < packed_bytes("int4", *MATRICES["w_gate_up"])  # a layer's largest matrix at 4 bits
    else:  # where attention takes its own: no more than what sums of shares are
        assert temporaries < compiled_on(mesh, "decode", CONFIG).memory.temp_size_in_bytes + 2**25
