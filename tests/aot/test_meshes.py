"""Models over whole slices: how they are split is decided by the real compilers, and checked in what they write.

What must not happen is seen by no test that runs on a CPU: a compiler that gathers a weight, or the cache, to suit an array elsewhere.
"""

import math
import os
import re

import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from sharding import axes, rules_for
from tests.aot.meshes import BATCH, LLAMA_8B, OnMesh, compiled_on

pytestmark = pytest.mark.slow

LAYERS = len(LLAMA_8B.layers)
SLICES = {"v5e:2x2": (4, 16 << 30), "v6e:2x4": (8, 32 << 30)}  # chips, and bytes of memory of each


@pytest.fixture(scope="session")
def slices():
    """Meshes of whole slices, with all chips on the axis `model`."""
    pytest.importorskip("libtpu", reason="the TPU's compiler is not installed: pip install -e '.[tpu]'")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_LOG_DIR", "disabled")
    from jax.experimental import topologies

    def mesh(name: str) -> Mesh:
        return Mesh(np.asarray(topologies.get_topology_desc(platform="tpu", topology_name=name).devices), ("model",))

    return {name: mesh(name) for name in SLICES}


@pytest.fixture(scope="session")
def gpus():
    """Four H200 on the axis `model`."""
    pytest.importorskip("jax_plugins.xla_cuda12", reason="the GPU's compiler is not installed: pip install -e '.[gpu-compiler]'")
    from jax.experimental import topologies

    from tests.aot.hopper import H200

    topology = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x4")
    return Mesh(np.asarray(topology.devices), ("model",))


def communicated(program: OnMesh, least: int = 1024) -> dict[tuple[str, str], int]:
    """How often a program does each collective of at least so many bytes, per turn of loops."""
    return {(each.kind, each.shapes): each.count for each in program.collectives() if each.nbytes >= least}


def expected(program: OnMesh, layers: int, shards: int) -> dict[tuple[str, str], int]:
    """Of a decode step: two sums per layer and one for the embedding, and the rows' logits to where they are sampled."""
    width, vocab = LLAMA_8B.width, LLAMA_8B.vocab_size
    return {
        ("all-reduce", f"bf16[{BATCH},{width}]"): 2 * layers,
        ("all-reduce", f"bf16[{BATCH},1,{width}]"): 1,
        ("all-to-all", f"bf16[{shards},{BATCH // shards},{vocab // shards}]"): 1,
    }


def check_moves_no_large_array(program: OnMesh) -> None:
    """Nothing of the size of a layer's part of a weight or of the cache is communicated, in whatever shape."""
    arrays = [shape for shape in (*program.cache, *program.weights) if len(shape) > 2]
    smallest = min(math.prod(shape) // (LAYERS if shape[0] == LAYERS else 1) for shape in arrays)
    assert smallest > 2**20
    for each in program.collectives():
        for shape in re.findall(r"\[([\d,]+)\]", each.shapes):
            assert math.prod(map(int, shape.split(","))) < smallest // 8, each


def check_in_place(program: OnMesh) -> None:
    """The cache that is given is the cache that comes back, and nothing of its size is made on the way."""
    memory = program.memory
    state = memory.alias_size_in_bytes - program.cache_bytes  # and what decoding keeps besides
    assert 0 <= state < program.cache_bytes // 100
    shapes = {",".join(map(str, shape)) for shape in program.cache if math.prod(shape) > 2**20}
    found = re.findall(
        r"^ *(?:ROOT )?%?\S+ = \w+\[([\d,]+)\]\S* (copy|transpose|convert|all-gather|broadcast)\(", program.executable.as_text(), re.M
    )
    assert not [(shape, kind) for shape, kind in found if shape in shapes]


@pytest.mark.parametrize("name", SLICES)
def test_a_looped_decode_communicates_what_it_must_and_needs_no_memory(slices, name):
    """64 steps of Llama-3.1-8B, 16 rows of 2,048 slots, weights as the compiler wants them."""
    program, shards = compiled_on(slices[name], "decode", LLAMA_8B, "scan", auto=True), SLICES[name][0]
    check_in_place(program)
    assert communicated(program) == expected(program, 1, shards)
    check_moves_no_large_array(program)
    temporaries = program.memory.temp_size_in_bytes
    assert temporaries < 0.02 * program.cache_bytes
    print(f"\n{name}: cache {program.cache_bytes >> 20} MiB a chip, in place, temporaries {temporaries / 2**20:.1f} MiB")


@pytest.mark.parametrize("name", SLICES)
def test_an_unrolled_decode_communicates_the_same(slices, name):
    program, shards = compiled_on(slices[name], "decode", LLAMA_8B), SLICES[name][0]
    check_in_place(program)
    assert communicated(program) == expected(program, LAYERS, shards)
    check_moves_no_large_array(program)
    memory = program.memory
    assert memory.argument_size_in_bytes + memory.temp_size_in_bytes < SLICES[name][1]
    print(f"\n{name}: temporaries {memory.temp_size_in_bytes / 2**20:.0f} MiB, code {memory.generated_code_size_in_bytes / 2**20:.0f} MiB")


@pytest.mark.parametrize("name", SLICES)
def test_a_prefill_of_2048_tokens_fits(slices, name):
    program = compiled_on(slices[name], "prefill", LLAMA_8B, "scan")
    check_in_place(program)
    memory = program.memory
    assert memory.argument_size_in_bytes + memory.temp_size_in_bytes < SLICES[name][1]
    sums = {key: count for key, count in communicated(program, 1 << 20).items()}
    assert sums == {("all-reduce", "bf16[2048,4096]"): 2, ("all-reduce", "bf16[1,2048,4096]"): 1}
    print(f"\n{name}: prefill, temporaries {memory.temp_size_in_bytes / 2**20:.1f} MiB")


@pytest.mark.parametrize("kv_dtype", [jnp.int8, jnp.float8_e4m3fn])
def test_a_quantized_cache_is_split_and_stays_in_place(slices, kv_dtype):
    program = compiled_on(slices["v5e:2x2"], "decode", LLAMA_8B, "scan", auto=True, kv_dtype=kv_dtype)
    check_in_place(program)
    assert communicated(program) == expected(program, 1, 4)


def test_a_bad_rule_table_is_found_out(slices):
    """Weights split along what each product sums over, and the cache's heads on every device: the checks above must fail."""
    bad = tuple({**dict(rules_for(("model",))), axes.MLP: (), axes.VOCAB: (), axes.EMBED: ("model",)}.items())
    program = compiled_on(slices["v5e:2x2"], "decode", LLAMA_8B, "scan", rules=bad)
    with pytest.raises(AssertionError):
        assert communicated(program) == expected(program, 1, 4)
    bad_heads = tuple({**dict(rules_for(("model",))), axes.KV_HEADS: (), axes.HEADS: ()}.items())
    program = compiled_on(slices["v5e:2x2"], "decode", LLAMA_8B, "scan", rules=bad_heads)
    with pytest.raises(AssertionError):
        assert communicated(program) == expected(program, 1, 4)


@pytest.mark.parametrize("layer_loop", ["unrolled", "scan"])
def test_on_h200_it_communicates_the_same_and_fits(gpus, layer_loop):
    """The GPU's compiler knows no limit of its own: peak memory is compared with 141 GB here."""
    program = compiled_on(gpus, "decode", LLAMA_8B, layer_loop)
    memory = program.memory
    assert 0 <= memory.alias_size_in_bytes - program.cache_bytes < program.cache_bytes // 100
    check_moves_no_large_array(program)
    sums = [each for each in program.collectives() if each.kind == "all-reduce" and each.nbytes >= BATCH * LLAMA_8B.width * 2]
    assert sum(each.count for each in sums) == 2 * LAYERS + 1  # this compiler tells how often a loop is run
    assert memory.peak_memory_in_bytes < 141e9
    print(f"\nH200, {layer_loop}: peak {memory.peak_memory_in_bytes / 1e9:.1f} GB, temporaries {memory.temp_size_in_bytes / 2**20:.0f} MiB")
