"""Pallas attention through the model, as the compilers of TPUs and of a GPU see it: legal, and over a cache that stays where it is.

That a kernel compiles here is what can be known without a chip: Mosaic checks its memory, layouts and operations, Triton and ptxas theirs.
"""

import dataclasses
import re
from collections.abc import Iterable

import numpy as np
import pytest
from jax.sharding import Mesh

from model import AttentionConfig, LayerConfig, MLPConfig, ModelConfig, Rope
from tests.aot.hopper import H200
from tests.aot.meshes import BATCH, LLAMA_8B, OnMesh, compiled_on

pytestmark = pytest.mark.slow

CONFIG = dataclasses.replace(LLAMA_8B, layers=LLAMA_8B.layers[:2])
CALL = {"v5e": "tpu_custom_call", "v6e": "tpu_custom_call", "H200": "__gpu$xla.gpu.triton"}


def mixed(head_dim: int, num_heads: int, num_kv_heads: int, layers: int = 2) -> ModelConfig:
    """Windows, soft caps and sinks in one."""

    def layer(window: int | None) -> LayerConfig:
        rope = Rope(1e4, head_dim)
        one = AttentionConfig(num_heads, num_kv_heads, head_dim, rope=rope, window=window, softcap=50.0, sinks=True)
        return LayerConfig(one, MLPConfig(hidden=2048))

    kinds = (layer(1024), layer(None)) * (layers // 2)
    return ModelConfig(vocab_size=32_768, width=1024, layers=kinds, norm_eps=1e-5, tie_embeddings=True, context_length=131_072)


def mesh_of(name: str, chips: int = 1) -> Mesh:
    from jax.experimental import topologies

    if name == "H200":
        pytest.importorskip("jax_plugins.xla_cuda12", reason="the GPU's compiler is not installed: pip install -e '.[gpu-compiler]'")
        topology = topologies.get_topology_desc(platform="cuda", target_config=H200, topology=f"1x1x{chips}")
    else:
        pytest.importorskip("libtpu", reason="the TPU's compiler is not installed: pip install -e '.[tpu]'")
        shape = {1: (1, 1), 4: (2, 2)}[chips]
        bounds = {"chips_per_host_bounds": [*shape, 1]}
        topology = topologies.get_topology_desc(platform="tpu", topology_name=f"{name}:{shape[0]}x{shape[1]}", **bounds)
    return Mesh(np.asarray(topology.devices), ("model",))


def check_in_place(program: OnMesh) -> None:
    """The cache is donated, not padded, and none of its arrays is copied or turned over."""
    assert 0 <= program.memory.alias_size_in_bytes - program.cache_bytes < 6 * BATCH * CONFIG.vocab_size  # and decode's state
    sizes = {_sizes(shape) for shape in program.cache}
    moves = re.findall(r" = (\w+\[([\d,]+)\]\S* (?:copy|transpose|convert|reshape)\()", program.executable.as_text())
    assert [move for move, shape in moves if _sizes(map(int, shape.split(","))) in sizes] == []


def _sizes(shape: Iterable[int]) -> tuple[int, ...]:
    """In no order, and without those of 1."""
    return tuple(sorted(size for size in shape if size > 1))


@pytest.mark.parametrize("layer_loop", ["unrolled", "scan"])
@pytest.mark.parametrize("program", ["decode", "prefill"])
@pytest.mark.parametrize("chip", CALL)
def test_two_layers_of_llama_8b_compile_and_temporaries_do_not_grow_with_the_cache(chip, program, layer_loop):
    mesh = mesh_of(chip)
    sizes = {"pallas": (2048, 8192), "xla": (8192,)}
    found = {
        (kernels, capacity): compiled_on(mesh, program, CONFIG, layer_loop, capacity=capacity, kernels=kernels)
        for kernels, capacities in sizes.items()
        for capacity in capacities
    }
    temporaries = {key: each.memory.temp_size_in_bytes for key, each in found.items()}
    calls = {key: each.executable.as_text().count(CALL[chip]) for key, each in found.items()}
    print(f"\n{chip}, {program}, {layer_loop}, temporaries in MiB: { {key: size >> 20 for key, size in temporaries.items()} }")
    small, large = (found["pallas", capacity] for capacity in sizes["pallas"])
    check_in_place(small)
    check_in_place(large)
    if (chip, layer_loop) != ("H200", "scan"):  # there the GPU's compiler slices a layer's weights out, more or fewer at a time
        assert temporaries["pallas", 8192] - temporaries["pallas", 2048] < 0.02 * (large.cache_bytes - small.cache_bytes)
    assert temporaries["pallas", 8192] < temporaries["xla", 8192] + (32 << 20)
    layers = 1 if layer_loop == "scan" else len(CONFIG.layers)
    assert calls == {("pallas", 2048): layers, ("pallas", 8192): layers, ("xla", 8192): 0}


@pytest.mark.parametrize("page_size", [None, 64])
@pytest.mark.parametrize("program", ["decode", "prefill"])
@pytest.mark.parametrize("chip", CALL)
def test_windows_sinks_soft_caps_and_heads_of_64_compile_in_rows_and_in_pages(chip, program, page_size):
    found = compiled_on(mesh_of(chip), program, mixed(64, 15, 5), capacity=8192, kernels="pallas", page_size=page_size)
    assert CALL[chip] in found.executable.as_text()
    check_in_place(found)


@pytest.mark.parametrize("chip", ["v5e", "H200"])
def test_each_of_four_chips_attends_with_its_own_heads(chip):
    mesh = mesh_of(chip, 4)
    found, xla = (compiled_on(mesh, "decode", CONFIG, capacity=8192, kernels=kernels) for kernels in ("pallas", "xla"))
    assert CALL[chip] in found.executable.as_text()
    check_in_place(found)
    assert sorted(map(str, found.collectives())) == sorted(map(str, xla.collectives()))  # attention communicates nothing


def test_a_block_that_does_not_fit_is_found_out(monkeypatch):
    """The compile must fail for a kernel that takes more of a TPU's vector memory than it may."""
    from kernels import pallas_attention_tpu

    mesh = mesh_of("v5e")
    monkeypatch.setattr(pallas_attention_tpu, "ROWS", 1 << 13)
    with pytest.raises(Exception, match=r"(?i)vmem|memory"):
        compiled_on(mesh, "prefill", CONFIG, capacity=8192, kernels="pallas")


@pytest.mark.parametrize(("rows", "fits"), [(16, True), (64, False)])
def test_the_longest_list_of_work_fits_the_scalar_memory(rows, fits, monkeypatch):
    """And one that is four times as long does not: the compiler knows its size."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    from kernels import Held, Packing, Scoring, pallas_attention, pallas_attention_tpu

    slots, longest = 65_536, pallas_attention_tpu.ITEMS
    monkeypatch.setattr(pallas_attention_tpu, "SLOTS", 32)
    monkeypatch.setattr(pallas_attention_tpu, "ITEMS", 4 * longest)
    mesh, packing = mesh_of("v5e"), Packing(1, 1, 128)

    def given(*shape, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    def decode(q, keys, values, held):
        source = Held(keys, values, (packing, packing), 0, jnp.arange(rows), jnp.zeros_like(held), held)
        return pallas_attention(q, [source], held - 1, jnp.ones_like(held), Scoring(1.0))

    arrays = (given(1, rows, *packing.shape(slots), dtype=jnp.bfloat16),) * 2
    with jax.set_mesh(mesh):
        lowered = jax.jit(decode).lower(given(rows, 1, 4, 128, dtype=jnp.bfloat16), *arrays, given(rows))
    assert (rows * slots // 32 <= longest) == fits
    if fits:
        lowered.compile()
    else:
        with pytest.raises(Exception, match=r"(?i)smem"):
            lowered.compile()
