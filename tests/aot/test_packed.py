"""Packed weights in a decode loop, as the compilers of a TPU and a GPU see it: read packed in every step, widened inside of products only.

What must not happen shows in no result: a compiler that unpacks the weights once, ahead of the loop, and then reads the wide ones in each
step; or one that writes what widens them (a scale for every weight) to memory.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from kernels import QuantArray
from kernels.parted_matmul import parted_matmul
from quantization import SCHEMES
from tests.aot.meshes import BATCH, LLAMA_8B, OnMesh, compiled_on

pytestmark = pytest.mark.slow

LAYERS = 3
CONFIG = dataclasses.replace(LLAMA_8B, layers=LLAMA_8B.layers[:LAYERS])
MATRICES = {"wqkv": (6144, 4096), "wo": (4096, 4096), "w_gate_up": (28_672, 4096), "w_down": (4096, 14_336)}  # of a layer: rows, inputs
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4}


@pytest.fixture(scope="module")
def tpu(chip):
    pytest.importorskip("libtpu", reason="the TPU's compiler is not installed: pip install -e '.[tpu]'")
    return Mesh(np.asarray(list(chip.device_set)), ("model",))


@pytest.fixture(scope="module")
def gpu():
    pytest.importorskip("jax_plugins.xla_cuda12", reason="the GPU's compiler is not installed: pip install -e '.[gpu-compiler]'")
    from jax.experimental import topologies

    from tests.aot.hopper import H200

    topology = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1")
    return Mesh(np.asarray(topology.devices), ("model",))


def packed_bytes(scheme: str, rows: int, inputs: int) -> int:
    """A scale per row in f32; with int4 half a byte per weight, and for each 64 a scale in f16 and a zero of a byte."""
    return rows * inputs // 2 + 3 * rows * inputs // 64 if scheme == "int4" else rows * inputs + 4 * rows


def written(text: str) -> Iterator[tuple[str, str, int, str]]:
    """What a program writes to memory: computation, type, numbers and line of each instruction that is not a part of a fusion."""
    inside = set(re.findall(r"fusion\(.*?calls=(%[\w.\-]+)", text))
    computation = ""
    for line in text.splitlines():
        if opened := re.match(r"(ENTRY )?(%[\w.\-]+) \(", line):
            computation = opened[1] or opened[2]
        made = re.match(r" +(?:ROOT )?%\S+ = (\w+)\[([\d,]+)\]\S* ([\w\-]+)\(", line)
        if made and computation not in inside and made[3] not in ("parameter", "get-tuple-element", "bitcast"):
            yield computation, made[1], math.prod(map(int, made[2].split(","))), line.strip()


def unpacked(text: str, scheme: str) -> list[tuple[str, str]]:
    """Computation and line of what holds as many numbers as a matrix, of one layer or of all, in more bytes than it has packed."""
    byte = 2 if scheme == "int4" else 1  # codes of one, at most
    wide = {times * math.prod(shape) for shape in MATRICES.values() for times in (1, LAYERS)}
    packed = {count // byte for count in wide}  # some matrix has as many bytes as another has weights
    return [
        (where, line[:160])
        for where, kind, count, line in written(text)
        if count in wide and (BYTES[kind] > 1 or (scheme == "int4" and count not in packed))
    ]


def check_arguments(program: OnMesh, scheme: str) -> None:
    """The weights that are given are the packed ones, and the cache and the state are given back where they are."""
    memory, width = program.memory, CONFIG.width
    matrices = LAYERS * sum(packed_bytes(scheme, *shape) for shape in MATRICES.values())
    assert program.weight_bytes == matrices + 2 * 2 * CONFIG.vocab_size * width + 4 * (2 * LAYERS + 1) * width
    rest = memory.argument_size_in_bytes - program.weight_bytes - memory.alias_size_in_bytes
    assert 0 <= rest < 2**20  # how rows are sampled, and padding
    assert 0 <= memory.alias_size_in_bytes - program.cache_bytes < 6 * BATCH * CONFIG.vocab_size  # counts, of four bytes, and seen


@pytest.mark.parametrize("layer_loop", ["unrolled", "scan"])
@pytest.mark.parametrize("scheme", ["int8", "w8a8", "int4"])
def test_on_a_tpu_packed_weights_are_widened_inside_of_products_only(tpu, scheme, layer_loop):
    """64 steps of 16 rows on one v5e chip, weights as the compiler wants them."""
    program = compiled_on(tpu, "decode", CONFIG, layer_loop, auto=True, scheme=SCHEMES[scheme])
    check_arguments(program, scheme)
    assert unpacked(program.executable.as_text(), scheme) == []
    temporaries = program.memory.temp_size_in_bytes
    assert temporaries < packed_bytes(scheme, *MATRICES["w_gate_up"])  # a layer's largest matrix, packed
    print(f"\nv5e, {scheme}, {layer_loop}: temporaries {temporaries / 2**20:.1f} MiB, compiled in {program.seconds:.0f} s")


@pytest.mark.parametrize("layer_loop", ["unrolled", "scan"])
@pytest.mark.parametrize("scheme", ["int8", "w8a8", "int4"])
def test_on_a_gpu_packed_weights_stay_packed_between_steps(gpu, scheme, layer_loop):
    """On H200 integers meet integers; else a matrix may be widened right before its product, into memory that the next one uses again."""
    program = compiled_on(gpu, "decode", CONFIG, layer_loop, scheme=SCHEMES[scheme])
    check_arguments(program, scheme)
    found = unpacked(program.executable.as_text(), scheme)
    assert not [line for where, line in found if where == "ENTRY "]
    assert scheme != "w8a8" or found == []
    wide = compiled_on(gpu, "decode", CONFIG, layer_loop)
    more = program.memory.temp_size_in_bytes - wide.memory.temp_size_in_bytes
    assert more < 2 * math.prod(MATRICES["w_gate_up"])  # a layer's largest matrix in bf16
    print(f"\nH200, {scheme}, {layer_loop}: temporaries {more / 2**20:+.1f} MiB beside those with bf16 weights")


def test_weights_that_are_unpacked_ahead_of_their_product_are_found_out(chip):
    """The check above must fail for a product that reads wide weights; for the same one in parts it must not."""
    rows, inputs = MATRICES["wo"]

    def given(*shape, dtype=jnp.uint8):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=chip)

    w = QuantArray((given(rows, inputs // 2),), given(rows, inputs // 64, dtype=jnp.float16), given(rows, inputs // 64), code="uint4")
    x = given(16, inputs, dtype=jnp.bfloat16)

    def ahead(x, w):
        return x @ jax.lax.optimization_barrier(w.widen(x.dtype)).T

    assert unpacked(jax.jit(ahead).lower(x, w).compile().as_text(), "int4")
    assert unpacked(jax.jit(parted_matmul).lower(x, w).compile().as_text(), "int4") == []
