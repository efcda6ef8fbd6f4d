"""Law 6, the donated cache is updated in place, as the TPU compiler sees it: no chip is needed, `libtpu` is (extra `tpu`).

The CPU backend's memory report is no proxy: it widens bf16 and keeps other temporaries. That the cache is aliased is not enough either:
a loop that reads what it was given and writes elsewhere is aliased and copies. So both are asserted: alias, and temporary memory that does
not grow with the cache.
"""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kv
from model import (
    AttentionConfig,
    IndexerConfig,
    LayerConfig,
    MLAConfig,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    Rope,
    RouterConfig,
    Transformer,
    abstract_params,
    prefill,
)
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
    layers=layers(8, AttentionConfig(num_heads=16, num_kv_heads=8, head_dim=128, rope=Rope(theta=1e4, dim=128)), 1024),
    norm_eps=1e-5,
    tie_embeddings=True,
    context_length=8192,
)
SMOLLM2 = ModelConfig(
    vocab_size=49152,
    width=576,
    layers=layers(30, AttentionConfig(num_heads=9, num_kv_heads=3, head_dim=64, rope=Rope(theta=1e5, dim=64)), 1536),
    norm_eps=1e-5,
    tie_embeddings=True,
    context_length=8192,
)


def small(*layers: LayerConfig, **more) -> ModelConfig:
    common = {"vocab_size": 1024, "width": 512, "norm_eps": 1e-5, "tie_embeddings": True, "context_length": 8192}
    return ModelConfig(layers=layers, **common | more)


def gemma() -> ModelConfig:
    """Windows on every other layer, soft caps, norms of queries and keys, norms before and after each part."""
    mlp = MLPConfig(hidden=1024, activation="gelu_tanh")
    kinds = (
        AttentionConfig(num_heads=16, num_kv_heads=8, head_dim=128, rope=Rope(theta, 128), window=window, softcap=50.0, qk_norm="head")
        for theta, window in ((1e4, 512), (1e6, None))
    )
    return small(*(LayerConfig(kind, mlp, norms="sandwich") for kind in kinds), embedding_scale=512**0.5, final_softcap=30.0)


def experts(count: int) -> ModelConfig:
    """Two of `count` experts, with biases, beside sinks."""
    attention = AttentionConfig(num_heads=16, num_kv_heads=8, head_dim=128, rope=Rope(1e4, 128), sinks=True)
    router = RouterConfig(num_experts=count, top_k=2, scoring="softmax_topk")
    moe = MoEConfig(router, MLPConfig(hidden=1024, activation="clamped_swiglu", bias=True), router_bias=True)
    return small(*(LayerConfig(attention, moe),) * 2)


def deepseek(sparse: bool) -> ModelConfig:
    """Absorbed latent attention, with an indexer if `sparse`."""
    indexer = IndexerConfig(num_heads=16, head_dim=128, top_k=512, rope=Rope(1e4, 64)) if sparse else None
    sizes = {"q_rank": 256, "kv_rank": 512, "nope_dim": 128, "rope": Rope(1e4, 64), "value_dim": 128, "scale": 192**-0.5}
    return small(*(LayerConfig(MLAConfig(num_heads=16, indexer=indexer, **sizes), MLPConfig(hidden=1024)),) * 2)


FAMILIES = {"gemma": gemma(), "experts": experts(8), "latent": deepseek(sparse=False), "sparse": deepseek(sparse=True)}


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


@pytest.mark.parametrize("program", ["decode", "prefill"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_cache_of_every_kind_of_layer_is_updated_in_place(chip, name, program, capsys):
    memory, nbytes = {}, {}
    for capacity in (2048, 8192):
        executable, nbytes[capacity] = compiled(program, chip, FAMILIES[name], capacity)
        memory[capacity] = executable.memory_analysis()
        assert nbytes[capacity] <= memory[capacity].alias_size_in_bytes < nbytes[capacity] + 2**20  # and decode's small state
    per_slot = (memory[8192].temp_size_in_bytes - memory[2048].temp_size_in_bytes) / (8192 - 2048)
    with capsys.disabled():
        print(f"\n{name} {program}: cache {nbytes[8192] >> 20} MiB aliased, temporaries {memory[2048].temp_size_in_bytes / 2**20:.2f} MiB "
              f"at 2,048 slots and {memory[8192].temp_size_in_bytes / 2**20:.2f} MiB at 8,192: {per_slot:.0f} bytes a slot")  # fmt: skip
    # An indexer holds a f32 score of each slot for each query, and what its choice among them takes; nothing else grows.
    queries = {"decode": BATCH, "prefill": CHUNK}[program] if name == "sparse" else 0
    assert per_slot < 4 * 4 * queries + 0.001 * nbytes[8192] / 8192


def test_neither_work_nor_memory_grows_with_the_number_of_experts(chip, capsys):
    flops, temporaries, expert = {}, {}, 3 * 1024 * 512 * 2  # bytes in bf16
    for count in (8, 64):
        executable, _ = compiled("prefill", chip, experts(count), 2048)
        flops[count], temporaries[count] = executable.cost_analysis()["flops"], executable.memory_analysis().temp_size_in_bytes
        assert "tpu_custom_call" in executable.as_text()  # the grouped products
    with capsys.disabled():
        print(f"\nprefill of {CHUNK} tokens: {flops[8] / 1e9:.2f} GFLOP with 8 experts a layer and {flops[64] / 1e9:.2f} with 64, "
              f"temporaries {temporaries[8] / 2**20:.2f} and {temporaries[64] / 2**20:.2f} MiB")  # fmt: skip
    assert flops[64] < 1.05 * flops[8]
    assert temporaries[64] < 4 * expert  # no copy of a layer's
