"""Loading is streamed: beyond the weights themselves the host holds little more than the weight in hand."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import checkpoint
from checkpoint.safetensors_folder import SafetensorsFolder

D, F, V, LAYERS, N = 512, 2048, 16_000, 12, 8
MEASURE = """
import sys
import jax, jax.numpy as jnp
import checkpoint
from pathlib import Path
from sharding import Placement, make_mesh, parse_mesh

placement = Placement.on(make_mesh(parse_mesh(sys.argv[3]))) if sys.argv[3] else None
jax.device_put(jnp.ones((8, 8))).block_until_ready()  # the backend, before the count begins
status = lambda key: int(next(line for line in open("/proc/self/status") if line.startswith(key)).split()[1]) * 1024
resident = status("VmRSS")
loaded = jax.block_until_ready(checkpoint.load(Path(sys.argv[1]), jnp.dtype(sys.argv[2]), None, placement, sys.argv[4]).params)
peak = status("VmHWM")  # and not ru_maxrss, which begins with what the parent process held
sizes = [sum(shard.data.nbytes for shard in leaf.addressable_shards) for leaf in jax.tree.leaves(loaded)]
print(peak - resident, sum(sizes), max(sizes))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    config = {
        "model_type": "llama", "hidden_size": D, "intermediate_size": F, "vocab_size": V, "num_hidden_layers": LAYERS,
        "num_attention_heads": N, "num_key_value_heads": N, "max_position_embeddings": 128, "tie_word_embeddings": True,
    }  # fmt: skip
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    for number in range(LAYERS):
        prefix = f"model.layers.{number}."
        shapes |= {f"{prefix}self_attn.{name}_proj.weight": (D, D) for name in "qkvo"}
        shapes |= {f"{prefix}mlp.gate_proj.weight": (F, D), f"{prefix}mlp.up_proj.weight": (F, D), f"{prefix}mlp.down_proj.weight": (D, F)}
        shapes |= {f"{prefix}{name}_layernorm.weight": (D,) for name in ("input", "post_attention")}
    values = {name: np.full(shape, 0.5, ml_dtypes.bfloat16) for name, shape in shapes.items()}
    safetensors.numpy.save_file(values, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize(
    ("dtype", "mesh", "layer_loop"),
    [
        pytest.param("float32", "", "unrolled", marks=pytest.mark.slow),
        pytest.param("bfloat16", "", "unrolled", marks=pytest.mark.slow),
        ("float32", "model=4", "unrolled"),
        pytest.param("bfloat16", "model=2,fsdp=2", "unrolled", marks=pytest.mark.slow),
        pytest.param("float32", "model=4", "scan", marks=pytest.mark.slow),
    ],
)
def test_peak_memory_above_the_weights_is_at_most_twice_the_largest(folder, dtype, mesh, layer_loop):
    settings = {"JAX_NUM_CPU_DEVICES": "4", "NPROC": "32"} if mesh else {}
    command = [sys.executable, "-c", MEASURE, str(folder), dtype, mesh, layer_loop]
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True, check=True, timeout=120)
    grown, weights, largest = map(int, done.stdout.split())
    assert layer_loop == "scan" or weights > 4 * largest, "too easy: one weight is most of the model"
    assert grown <= weights + 2 * largest


@pytest.mark.parametrize("layer_loop", ["unrolled", "scan"])
def test_no_weight_is_read_before_the_one_before_it_is_on_its_device(folder, layer_loop, monkeypatch):
    given, early, read, put = [], [], SafetensorsFolder.read, jax.device_put

    def reading(self, name, box=()):
        early.extend(name for value in given if not value.is_deleted() and not value.is_ready())
        return read(self, name, box)

    def putting(*args, **kwargs):
        given.append(put(*args, **kwargs))
        return given[-1]

    monkeypatch.setattr(SafetensorsFolder, "read", reading)
    monkeypatch.setattr(jax, "device_put", putting)
    checkpoint.load(folder, jnp.bfloat16, layer_loop=layer_loop)
    assert len(given) > LAYERS and not early
