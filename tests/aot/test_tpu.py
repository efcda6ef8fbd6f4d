"""Law 6, the donated cache is updated in place, as the TPU compiler sees it: no chip is needed, `libtpu` is (extra `tpu`).

The CPU backend's memory report is no proxy: it widens bf16 and keeps other temporaries. That the cache is aliased is not enough either:
a loop that reads what it was given and writes elsewhere is aliased and copies. So three things are asserted: alias, temporary memory that
does not grow with the cache, and (since the compiler does not count what it places in the vector memory) no instruction that copies one of
its arrays.
"""

import importlib.util

import pytest

from model import AttentionConfig, LayerConfig, MLPConfig, ModelConfig, MoEConfig, Rope, RouterConfig
from tests.aot.programs import BATCH, CHUNK, attention, compiled, deepseek, small

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: pip install -e '.[tpu]'"),
]

# K = 8 and H = 128 fill a TPU's tiles; SmolLM2's K = 3 and H = 64 do not.
TILED = attention(layers=8)
SMOLLM2 = ModelConfig(
    vocab_size=49152,
    width=576,
    layers=(LayerConfig(AttentionConfig(num_heads=9, num_kv_heads=3, head_dim=64, rope=Rope(1e5, 64)), MLPConfig(hidden=1536)),) * 30,
    norm_eps=1e-5,
    tie_embeddings=True,
    context_length=8192,
)


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


FAMILIES = {"gemma": gemma(), "experts": experts(8), "latent": deepseek(sparse=False), "sparse": deepseek(sparse=True)}


@pytest.mark.parametrize("program", ["decode", "prefill"])
def test_the_cache_is_updated_in_place_and_temporaries_do_not_grow_with_it(chip, program, capsys):
    small, large = (compiled(program, chip, TILED, capacity) for capacity in (2048, 8192))
    for each in (small, large):
        assert each.nbytes <= each.aliased < each.nbytes + 2**20  # besides the cache, decode donates its small state
        assert each.copies == []
    with capsys.disabled():
        print(f"\n{program}: cache {large.nbytes >> 20} MiB aliased, temporaries {small.temporaries / 2**20:.2f} MiB "
              f"at 2,048 slots and {large.temporaries / 2**20:.2f} MiB at 8,192")  # fmt: skip
    assert large.temporaries - small.temporaries < 0.02 * (large.nbytes - small.nbytes)


def test_smollm2_decodes_in_place_without_padding(chip, capsys):
    program = compiled("decode", chip, SMOLLM2, 2048)
    formula, aliased, temporaries = (size / 2**20 for size in (program.nbytes, program.aliased, program.temporaries))
    with capsys.disabled():
        print(
            f"\nSmolLM2-135M decode, 4 rows of 2,048 slots: cache {formula:.0f} MiB, aliased {aliased:.0f}, temporaries {temporaries:.0f}"
        )
    assert program.nbytes <= program.aliased < program.nbytes + 2**20
    assert program.copies == []


@pytest.mark.parametrize("program", ["decode", "prefill"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_cache_of_every_kind_of_layer_is_updated_in_place(chip, name, program, capsys):
    small, large = (compiled(program, chip, FAMILIES[name], capacity) for capacity in (2048, 8192))
    for each in (small, large):
        assert each.nbytes <= each.aliased < each.nbytes + 2**20  # and decode's small state
        assert each.copies == []
    per_slot = (large.temporaries - small.temporaries) / (8192 - 2048)
    with capsys.disabled():
        print(f"\n{name} {program}: cache {large.nbytes >> 20} MiB aliased, temporaries {small.temporaries / 2**20:.2f} MiB "
              f"at 2,048 slots and {large.temporaries / 2**20:.2f} MiB at 8,192: {per_slot:.0f} bytes a slot")  # fmt: skip
    # An indexer holds a f32 score of each slot for each query, and what its choice among them takes; nothing else grows.
    queries = {"decode": BATCH, "prefill": CHUNK}[program] if name == "sparse" else 0
    assert per_slot < 4 * 4 * queries + 0.001 * large.nbytes / 8192


def test_neither_work_nor_memory_grows_with_the_number_of_experts(chip, capsys):
    flops, temporaries, expert = {}, {}, 3 * 1024 * 512 * 2  # bytes in bf16
    for count in (8, 64):
        executable = compiled("prefill", chip, experts(count), 2048).executable
        flops[count], temporaries[count] = executable.cost_analysis()["flops"], executable.memory_analysis().temp_size_in_bytes
        assert "tpu_custom_call" in executable.as_text()  # the grouped products
    with capsys.disabled():
        print(f"\nprefill of {CHUNK} tokens: {flops[8] / 1e9:.2f} GFLOP with 8 experts a layer and {flops[64] / 1e9:.2f} with 64, "
              f"temporaries {temporaries[8] / 2**20:.2f} and {temporaries[64] / 2**20:.2f} MiB")  # fmt: skip
    assert flops[64] < 1.05 * flops[8]
    assert temporaries[64] < 4 * expert  # no copy of a layer's
