"""Fixtures for every room."""

import gc
import json
import pathlib

import jax
import pytest

import checkpoint
import sampling
from model import AttentionConfig, LayerConfig, MLPConfig, ModelConfig, Rope, init_params

jax.config.update("jax_default_matmul_precision", "highest")  # the precision that the laws' tolerances name

GOLDEN = pathlib.Path(__file__).parent / "golden"


MAPS = pathlib.Path("/proc/self/maps")
MAX_MAPS = 30_000


@pytest.fixture(autouse=True)
def few_programs():
    """Drops compiled programs once there are many: each takes parts of a process's memory map, of which Linux allows 65,530,
    and a compile that finds none left is a segmentation fault."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MAX_MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def smollm2_path() -> pathlib.Path:
    """The default model's file: downloaded once, then found in the cache."""
    return checkpoint.resolve("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def smollm2(smollm2_path) -> sampling.LanguageModel:
    """The default model, everything in f32."""
    return sampling.load("smollm2-135m-instruct", weights="f32", compute="f32", kv_dtype="f32")


@pytest.fixture(scope="session")
def smollm2_golden() -> list[dict]:
    """What transformers in f32 gives for six prompts."""
    return json.loads((GOLDEN / "smollm2-135m-instruct.json").read_text(encoding="utf-8"))["records"]


@pytest.fixture(scope="session")
def tiny_config() -> ModelConfig:
    """Three layers of grouped-query attention, small enough to compile in a second."""
    layer = LayerConfig(AttentionConfig(num_heads=6, num_kv_heads=2, head_dim=8, rope=Rope(theta=10000.0, dim=8)), MLPConfig(hidden=64))
    return ModelConfig(vocab_size=101, width=48, layers=(layer,) * 3, norm_eps=1e-5, tie_embeddings=True, context_length=512)


@pytest.fixture(scope="session")
def tiny_params(tiny_config):
    return init_params(tiny_config, seed=1)
