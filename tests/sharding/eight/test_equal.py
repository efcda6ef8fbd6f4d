"""What is computed over a mesh equals what one device computes: every strategy, every kind of cache, layers unrolled and looped.

A prompt's tokens are given, chunk by chunk and row by row, and then some that all decode together; logits are compared at each.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import kv
from model import (
    AttentionConfig,
    LayerConfig,
    MLPConfig,
    ModelConfig,
    MoEConfig,
    Rope,
    RouterConfig,
    Transformer,
    abstract_params,
    copied,
    decode_step,
    fit,
    init_params,
    prefill,
    stacked,
)
from runtime import LEDGER, UserError
from sharding import Placement, is_names, make_mesh, parse_mesh
from tests.model.hybrids import CONFIGS

ROWS, CHUNK, CAPACITY, STEPS = 4, 16, 64, 4
COUNTS = (37, 5, 21, 30)
EQUAL = 1e-4  # of the logits' scale, at the precision "highest"
# A number that lies between two steps of its format may go to the other one: then what is kept differs by a step, 1/127 of its group's
# largest, and the outputs, which are means over tokens, by no more than that part of their scale.
FLIP = 1 / 127


def layer(num_kv_heads: int, mlp=None, **more) -> LayerConfig:
    rope = Rope(theta=1e4, dim=more.get("head_dim", 8))
    attention = AttentionConfig(**{"num_heads": 8, "num_kv_heads": num_kv_heads, "head_dim": 8, "rope": rope} | more)
    return LayerConfig(attention, mlp or MLPConfig(hidden=64))


def model(*layers: LayerConfig, vocab_size: int = 128) -> ModelConfig:
    common = {"width": 48, "norm_eps": 1e-5, "tie_embeddings": False, "context_length": 8192}
    return ModelConfig(vocab_size=vocab_size, layers=layers, **common)


EXPERT = MLPConfig(hidden=32)
MIXED = MoEConfig(RouterConfig(num_experts=8, top_k=2, normalize=True), EXPERT, shared=EXPERT)
BIASED = MoEConfig(
    RouterConfig(num_experts=8, top_k=2, scoring="softmax_topk"),
    dataclasses.replace(EXPERT, activation="clamped_swiglu", bias=True),
    router_bias=True,
)
MODELS = {
    "dense": model(layer(8), layer(8, window=20), layer(8), layer(8, window=20)),
    "few_kv_heads": model(layer(2, qk_norm="full", qkv_bias=True), layer(2, sinks=True, window=20), vocab_size=101),
    "experts": model(*(layer(4, BIASED, window=20, sinks=True), layer(4, MIXED)) * 2),
    "deepseek": CONFIGS["deepseek"],
    "wide": model(*(layer(4, head_dim=64, window=window, sinks=True) for window in (20, None))),
}
MARGIN = 8
DENSE = kv.Format.for_platform("cpu", np.dtype(np.float32), margin=MARGIN)
INT8 = kv.Format.for_platform("cpu", np.dtype(np.int8), margin=MARGIN, group=8)
PALLAS = kv.Format(np.dtype(np.float32), "SKH", "SKH", margin=MARGIN, kernels="pallas", interpret=True)  # as on a GPU; packed, on a TPU
FORMATS = {
    "f32": DENSE,
    "paged": dataclasses.replace(DENSE, page_size=8),
    "int8": INT8,
    "paged_int8": dataclasses.replace(INT8, page_size=8),
    "pallas": PALLAS,
    "paged_pallas": dataclasses.replace(PALLAS, page_size=8),
    "packed_pallas": dataclasses.replace(PALLAS, lanes=128),
    "packed_paged_pallas": dataclasses.replace(PALLAS, lanes=128, page_size=32),
}


BY_XLA = {"pallas": "f32", "packed_pallas": "f32", "paged_pallas": "paged", "packed_paged_pallas": "paged"}  # what must come out


def placement_of(mesh: str) -> Placement:
    sizes = parse_mesh(mesh)
    return Placement.on(make_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values())))]))


def on_mesh(config: ModelConfig, params, placement: Placement, layer_loop: str):
    """The fitted config, and the parameters where they belong."""
    fitted = fit(config, placement)
    params = stacked(fitted, copied(config, fitted, params), layer_loop)
    boxes = abstract_params(fitted, layer_loop=layer_loop)
    put = functools.partial(jax.tree.map, lambda box, leaf: jax.device_put(leaf, placement.sharding(box.names)))
    return fitted, put(boxes, params, is_leaf=lambda leaf: isinstance(leaf, nn.Partitioned))


def answers(config: ModelConfig, params, format: kv.Format, placement: Placement | None, layer_loop: str = "unrolled") -> np.ndarray:
    """Logits f32 [ROWS * (1 + STEPS), V]: at each prompt's end, then of each step."""
    rng = np.random.default_rng(0)
    prompts, given = rng.integers(0, 101, (ROWS, max(COUNTS)), np.int32), rng.integers(0, 101, (STEPS, ROWS), np.int32)
    if placement is not None:
        config, params = on_mesh(config, params, placement, layer_loop)
    transformer, cache = Transformer(config, layer_loop=layer_loop), kv.init(config, ROWS, CAPACITY, format, None, placement)
    pager = None
    if format.page_size is not None:
        parts = 1 if placement is None else placement.shards("batch")
        pools = [pool * parts for pool in kv.pool_sizes(config, ROWS // parts, CAPACITY, format, None)]
        pager = kv.SplitPager(config, ROWS, CAPACITY, format, pools, parts)
        cache = kv.init(config, ROWS, CAPACITY, format, pools, placement)

    def reserved(cache, row, start, end):
        if pager is None:
            return cache
        pager.forget(row, start)
        assert pager.reserve(row, start, end) == end
        return pager.apply(cache)

    out = []
    for row, count in enumerate(COUNTS):
        for start in range(0, count, CHUNK):
            tokens = np.zeros((1, CHUNK), np.int32)
            part = prompts[row, start : min(start + CHUNK, count)]
            tokens[0, : len(part)] = part
            each = (np.asarray([number], np.int32) for number in (len(part), row, start))
            cache = reserved(cache, row, start, start + len(part))
            logits, cache = prefill(transformer, params, cache, tokens, *each)
        out.append(np.asarray(logits))
    for row, count in enumerate(COUNTS):
        cache = reserved(cache, row, count, count + STEPS)
    before = len(LEDGER.entries)
    for step, tokens in enumerate(given):
        logits, cache = decode_step(transformer, params, cache, tokens)
        out.append(np.asarray(logits))
        assert step == 0 or not LEDGER.programs(before + 1), "the cache that comes back is placed otherwise than the one that went in"
    return np.concatenate(out)[:, : config.num_tokens]


@functools.cache
def alone(model_name: str, format_name: str) -> np.ndarray:
    config = MODELS[model_name]
    return answers(config, init_params(config), FORMATS[format_name], None)


CASES = [
    *[("dense", "f32", mesh) for mesh in ("model=2", "model=4", "model=8", "data=2,model=4", "seq=4", "fsdp=2,model=2")],
    *[("dense", format, mesh) for format in ("paged", "int8", "paged_int8") for mesh in ("model=2", "model=8", "data=2,model=4", "seq=4")],
    ("dense", "paged", "data=2,seq=2,model=2"),
    *[("few_kv_heads", format, mesh) for format in ("f32", "paged_int8") for mesh in ("model=4", "model=8", "data=2,model=4")],
    *[("experts", format, mesh) for format in ("f32", "paged") for mesh in ("expert=4", "expert=2,model=2", "data=2,expert=2,model=2")],
    ("experts", "f32", "fsdp=4"),
    ("experts", "f32", "seq=2,expert=2"),
    *[("few_kv_heads", "pallas", mesh) for mesh in ("model=4", "data=2,seq=2")],
    ("dense", "paged_pallas", "data=2,seq=2,model=2"),
    *[("wide", "packed_pallas", mesh) for mesh in ("data=2,model=4", "seq=2,model=2")],
    ("wide", "packed_paged_pallas", "seq=2,model=2"),
    *[("deepseek", format, mesh) for format in ("f32", "paged") for mesh in ("model=2", "seq=4", "data=2,expert=2")],
]
QUICK = {
    ("dense", "paged_int8", "data=2,model=4"),
    ("experts", "f32", "seq=2,expert=2"),
    ("wide", "packed_pallas", "seq=2,model=2"),
}


def cases():
    for case in CASES:
        for layer_loop in ("unrolled", "scan"):
            quick = case in QUICK and layer_loop == "scan"
            yield pytest.param(*case, layer_loop, marks=() if quick else pytest.mark.slow, id="-".join((*case, layer_loop)))


@pytest.mark.parametrize(("model_name", "format_name", "mesh", "layer_loop"), list(cases()))
def test_a_mesh_computes_what_one_device_does(model_name, format_name, mesh, layer_loop):
    config, format, placement = MODELS[model_name], FORMATS[format_name], placement_of(mesh)
    assert format.kernels == "xla" or {format.kernels_of(spec, placement)[0] for spec in fit(config, placement).cache_layers} == {"pallas"}
    want = alone(model_name, BY_XLA.get(format_name, format_name))
    got = answers(config, init_params(config), format, placement, layer_loop)
    tolerance = (FLIP if "int8" in format_name else EQUAL) * np.abs(want).max()
    assert np.abs(got - want).max() <= tolerance
    for number, row in enumerate(np.flatnonzero(got.argmax(-1) != want.argmax(-1))):
        first, second = np.sort(want[row])[-2:]
        print(f"row {number}: the likeliest two are {second - first} apart, other one taken")
        assert abs(second - first) < 2 * tolerance


@pytest.mark.slow
@pytest.mark.parametrize("layer_loop", ["unrolled", "scan"])
def test_a_prompt_of_4096_tokens_over_four_shards_of_its_slots(layer_loop):
    config = model(layer(8), layer(8, window=600))
    params, placement = init_params(config), placement_of("seq=4")
    tokens = np.random.default_rng(1).integers(0, 101, (1, 4096), np.int32)
    results = []
    for where in (None, placement):
        own, weights = (config, params) if where is None else on_mesh(config, params, where, layer_loop)
        transformer = Transformer(own, layer_loop="unrolled" if where is None else layer_loop)
        cache, logits = kv.init(own, 1, 4352, DENSE, None, where), []
        for start in range(0, 4096, 512):
            each = (np.asarray([number], np.int32) for number in (512, 0, start))
            out, cache = prefill(transformer, weights, cache, tokens[:, start : start + 512], *each)
            logits.append(np.asarray(out))
        token = logits[-1].argmax(-1).astype(np.int32)
        for _ in range(8):
            out, cache = decode_step(transformer, weights, cache, token)
            logits.append(np.asarray(out))
            token = logits[-1].argmax(-1).astype(np.int32)
        results.append(np.concatenate(logits))
    np.testing.assert_array_equal(results[0].argmax(-1), results[1].argmax(-1))
    assert np.abs(results[0] - results[1]).max() <= EQUAL * np.abs(results[0]).max()


def test_padding_of_the_vocabulary_is_never_the_likeliest():
    config = fit(MODELS["few_kv_heads"], placement_of("model=4"))
    assert (config.vocab_size, config.vocab_padding, config.num_tokens) == (104, 3, 101)
    logits = Transformer(config).apply(
        {"params": init_params(config)},
        jnp.zeros((1, 3), jnp.int32),
        kv.Step(rows=None, start=jnp.zeros(1, jnp.int32), count=jnp.full(1, 3)),
        kv.fresh(config, 1),
        "all",
    )[0]
    assert float(logits[..., 101:].max()) < float(logits[..., :101].min())


def filled(placement):
    """A cache of four rows, the third with 21 tokens, and what decodes next."""
    config, params = MODELS["dense"], init_params(MODELS["dense"])
    _, params = on_mesh(config, params, placement, "unrolled")
    cache = kv.init(config, ROWS, CAPACITY, DENSE, None, placement)
    tokens = np.random.default_rng(2).integers(0, 101, (1, 21), np.int32)
    each = (np.asarray([number], np.int32) for number in (21, 2, 0))
    _, cache = prefill(Transformer(config), params, cache, tokens, *each)
    return config, params, cache


def test_a_row_moves_between_caches_that_are_split_otherwise():
    config, params, cache = filled(placement_of("data=2,model=2"))
    row = kv.export_row(cache, 2)
    other = placement_of("model=4")
    _, other_params = on_mesh(config, init_params(config), other, "unrolled")
    moved = kv.import_row(kv.init(config, ROWS, CAPACITY, DENSE, None, other), 1, row)
    for names, array in zip(jax.tree.leaves(moved.logical_axes(), is_leaf=is_names), jax.tree.leaves(moved), strict=True):
        assert array.sharding.is_equivalent_to(other.sharding(names), array.ndim)
    want, _ = decode_step(Transformer(config), params, cache, np.asarray([-1, -1, 5, -1], np.int32))
    got, _ = decode_step(Transformer(config), other_params, moved, np.asarray([-1, 5, -1, -1], np.int32))
    np.testing.assert_allclose(np.asarray(got)[1], np.asarray(want)[2], atol=EQUAL * np.abs(np.asarray(want)[2]).max())


def test_rows_of_a_cache_whose_slots_are_split_are_not_moved():
    with pytest.raises(UserError, match=r"slots that lie in turns on 4 devices .* use a mesh without seq"):
        kv.export_row(filled(placement_of("seq=4"))[2], 2)


@pytest.mark.parametrize(("mesh", "remedy"), [("seq=4", "give --page_size=4"), ("seq=3", "use a mesh whose axis seq is a power of two")])
def test_pages_that_can_not_be_split_are_refused_with_what_would_work(mesh, remedy):
    with pytest.raises(UserError, match=f"pages of 2 tokens can't be split evenly into . parts: {remedy}"):
        kv.init(MODELS["dense"], ROWS, CAPACITY, dataclasses.replace(DENSE, page_size=2), None, placement_of(mesh))
