"""Law 6, the donated cache is updated in place, as the TPU compiler sees it: no chip is needed, `libtpu` is (extra `tpu`).

The CPU backend's memory report is no proxy: it widens bf16 and keeps other temporaries. That the cache is aliased is not enough either:
a loop that reads what it was given and writes elsewhere is aliased and copies. So both are asserted: alias, and temporary memory that does
not grow with the cache.
"""

import importlib.util
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kv
from model import AttentionConfig, LayerConfig, MLPConfig, ModelConfig, Rope, Transformer, abstract_params, prefill
from sampling import DecodeState, SamplingOptions, SamplingParams, decode

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install -e '.[tpu]'"),
]

BATCH, STEPS, CHUNK = 4, 16, 256


def layers(count: int, attention: AttentionConfig, hidden: int) -> tuple[LayerConfig, ...]:
    return (LayerConfig(attention, MLPConfig(hidden=hidden)),) * count


# K = 8 and H = 128 fill a TPU's tiles; SmolLM2's K = 3 and H = 64 do not, and are padded there.
TILED = ModelConfig(
    vocab_size=1024,
    width=512,
    layers=layers(8, AttentionConfig(num_heads=16, num_kv_heads=8, head_dim=128, rope=Rope(theta=1e4)), 1024),
    norm_eps=1e-5,
    tie_embeddings=True,
    context_length=8192,
)
SMOLLM2 = ModelConfig(
    vocab_size=49152,
    width=576,
    layers=layers(30, AttentionConfig(num_heads=9, num_kv_heads=3, head_dim=64, rope=Rope(theta=1e5)), 1536),
    norm_eps=1e-5,
    tie_embeddings=True,
    context_length=8192,
)


@pytest.fixture(scope="module")
def chip():
    """One v5e chip's worth of compiler."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # another test process may hold the library
    os.environ.setdefault("TPU_LOG_DIR", "disabled")
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:1x1", chips_per_host_bounds=[1, 1, 1])
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


def compiled(program, chip, config, capacity):
    """The program for a cache of `capacity` slots: the executable, and the cache's bytes."""
    model = Transformer(config, dtype=jnp.dtype(jnp.bfloat16))
    format = kv.Format.for_platform("tpu", np.dtype(jnp.bfloat16))

    def on_chip(tree, dtype=None):
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype, sharding=chip), tree)

    boxes = abstract_params(config)
    params = on_chip(jax.tree.map(lambda box: box.value, boxes, is_leaf=lambda leaf: hasattr(leaf, "names")), jnp.bfloat16)
    cache = on_chip(jax.eval_shape(lambda: kv.init(config, BATCH, capacity, format)))
    if program == "decode":
        state = on_chip(jax.eval_shape(lambda: DecodeState.init(BATCH, config.vocab_size)))
        sampling = on_chip(SamplingParams.stack([SamplingOptions(seed=0)] * BATCH, ()))
        lowered = decode.lower(model, params, cache, state, sampling, steps=STEPS)
    else:
        tokens, one = (jax.ShapeDtypeStruct(shape, jnp.int32, sharding=chip) for shape in ((1, CHUNK), (1,)))
        lowered = prefill.lower(model, params, cache, tokens, one, one)
    return lowered.compile(), kv.nbytes(config, BATCH, capacity, format)


@pytest.mark.parametrize("program", ["decode", "prefill"])
def test_the_cache_is_updated_in_place_and_temporaries_do_not_grow_with_it(chip, program, record_property, capsys):
    memory, nbytes = {}, {}
    for capacity in (2048, 8192):
        executable, nbytes[capacity] = compiled(program, chip, TILED, capacity)
        memory[capacity] = executable.memory_analysis()
        assert memory[capacity].alias_size_in_bytes >= nbytes[capacity]
        state = memory[capacity].alias_size_in_bytes - nbytes[capacity]
        assert state < 2**20  # besides the cache, decode donates its small state
    grown = memory[8192].temp_size_in_bytes - memory[2048].temp_size_in_bytes
    with capsys.disabled():
        print(f"\n{program}: cache {nbytes[8192] >> 20} MiB aliased, temporaries {memory[2048].temp_size_in_bytes / 2**20:.2f} MiB "
              f"at 2,048 slots and {memory[8192].temp_size_in_bytes / 2**20:.2f} MiB at 8,192")  # fmt: skip
    assert grown < 0.02 * (nbytes[8192] - nbytes[2048])


def test_smollm2_decodes_in_place_and_its_temporaries_are_reported(chip, capsys):
    executable, nbytes = compiled("decode", chip, SMOLLM2, 2048)
    memory = executable.memory_analysis()
    formula, aliased, temporaries = (size / 2**20 for size in (nbytes, memory.alias_size_in_bytes, memory.temp_size_in_bytes))
    with capsys.disabled():
        print(
            f"\nSmolLM2-135M decode, 4 rows of 2,048 slots: cache {formula:.0f} MiB, aliased {aliased:.0f}, temporaries {temporaries:.0f}"
        )
    assert memory.alias_size_in_bytes >= nbytes
