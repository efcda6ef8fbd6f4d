"""What the AOT tests compile: small models whose caches are large, and both programs over a cache of any kind."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import kv
from model import (
    AttentionConfig,
    IndexerConfig,
    LayerConfig,
    MLAConfig,
    MLPConfig,
    ModelConfig,
    Rope,
    Transformer,
    abstract_params,
    prefill,
)
from sampling import DecodeState, SamplingOptions, SamplingParams, decode
from tests.hlo import whole_copies

BATCH, STEPS, CHUNK = 4, 16, 256


def small(*layers: LayerConfig, **more) -> ModelConfig:
    common = {"vocab_size": 1024, "width": 512, "norm_eps": 1e-5, "tie_embeddings": True, "context_length": 8192}
    return ModelConfig(layers=layers, **common | more)


def attention(num_kv_heads: int = 8, head_dim: int = 128, window: int | None = None, layers: int = 2) -> ModelConfig:
    """Layers of grouped-query attention."""
    one = AttentionConfig(
        num_heads=2 * num_kv_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, rope=Rope(theta=1e4, dim=head_dim), window=window
    )
    return small(*(LayerConfig(one, MLPConfig(hidden=1024)),) * layers)


def deepseek(sparse: bool) -> ModelConfig:
    """Latent attention, with an indexer if `sparse`."""
    indexer = IndexerConfig(num_heads=16, head_dim=128, top_k=512, rope=Rope(1e4, 64)) if sparse else None
    sizes = {"q_rank": 256, "kv_rank": 512, "nope_dim": 128, "rope": Rope(1e4, 64), "value_dim": 128, "scale": 192**-0.5}
    return small(*(LayerConfig(MLAConfig(num_heads=16, indexer=indexer, **sizes), MLPConfig(hidden=1024)),) * 2)


@dataclasses.dataclass(frozen=True, eq=False)
class Compiled:
    """A program, and the cache that it is given.

    Attributes:
      executable: of the TPU's compiler.
      nbytes: of the cache, as `kv.nbytes` counts.
      cache: shapes and dtypes.
    """

    executable: jax.stages.Compiled
    nbytes: int
    cache: kv.Cache

    @property
    def aliased(self) -> int:
        """Bytes of arguments, padding included, that results take the place of."""
        return self.executable.memory_analysis().alias_size_in_bytes

    @property
    def temporaries(self) -> int:
        """Bytes besides arguments and results. What the compiler places in the vector memory is not counted."""
        return self.executable.memory_analysis().temp_size_in_bytes

    @property
    def copies(self) -> list[str]:
        """Instructions that copy, turn over or widen all of a cache array, wherever to.

        Moves of an array to the vector memory and back ("copy-start") are left out: the compiler may keep small ones there.
        """
        return whole_copies(self.executable.as_text(), self.cache.stores)


def compiled(
    program: str, chip: jax.sharding.Sharding, config: ModelConfig, capacity: int, format: kv.Format | None = None, rows: int = 1
) -> Compiled:
    """The program for a cache of BATCH rows of `capacity` slots.

    Args:
      program: "decode" (a loop of STEPS) or "prefill" (CHUNK tokens).
      format: of the cache; None: bf16 as it suits a TPU.
      rows: that a prefill is for.
    """
    model = Transformer(config, dtype=jnp.dtype(jnp.bfloat16))
    format = format or kv.Format.for_platform("tpu", np.dtype(jnp.bfloat16))

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
        tokens, each = (jax.ShapeDtypeStruct(shape, jnp.int32, sharding=chip) for shape in ((rows, CHUNK), (rows,)))
        lowered = prefill.lower(model, params, cache, tokens, each, each)
    return Compiled(lowered.compile(), kv.nbytes(config, BATCH, capacity, format), cache)
