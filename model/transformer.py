"""The Transformer, read top to bottom."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

import kv
from kernels import matmul
from model.config import ModelConfig
from model.layers import Block
from model.norm import RMSNorm
from model.rope import Rope, rope_table
from model.weights import is_matrix, scaled_normal, weight
from sharding import axes

NEVER = -1e30  # the logit of a row that stands for no token; finite, so that differences of two are no nan


class Transformer(nn.Module):
    """Tokens in, logits out; the cache goes through.

    Attributes:
      config: what the model is.
      dtype: the number format of activations (`--compute`). Norms, softmax, rotations and logits are f32 in any case.
    """

    config: ModelConfig
    dtype: jnp.dtype = jnp.dtype(jnp.float32)

    @nn.compact
    def __call__(self, tokens: jax.Array, step: kv.Step, cache: kv.Cache, logits: str = "last") -> tuple[jax.Array, kv.Cache]:
        """Args: tokens int32 [B, T], any value where padded. Returns: f32 [B, V] at each row's last token, or [B, T, V] of all."""
        c = self.config
        embedding = weight(self, "embedding", (c.vocab_size, c.width), (axes.VOCAB, axes.EMBED), scaled_normal(0))
        # Tied to the tokens by a barrier, lest a decode loop on CPU widens the whole bf16 table ahead of its first step.
        entries, tokens = jax.lax.optimization_barrier((embedding, tokens))
        x = jnp.take(entries, tokens, axis=0, mode="clip").astype(self.dtype)  # [B, T, D]
        x = x * jnp.asarray(c.embedding_scale, x.dtype) if c.embedding_scale != 1 else x
        positions, context = step.positions(tokens.shape[1]), cache.capacity or tokens.shape[1]
        tables: dict[Rope | None, Any] = {None: None}

        def table(rope: Rope | None) -> Any:
            if rope not in tables:
                tables[rope] = rope_table(rope, positions, context)
            return tables[rope]

        for number, layer in enumerate(c.layers):
            if logits == "last" and tokens.shape[1] > 1 and number == len(c.layers) - 1:
                step = step.replace(last_only=True)  # the other tokens leave their keys and values, and are done
            block = Block(layer, c.norm_eps, name=f"layer_{number}")
            rotations = tuple(table(rope) for rope in layer.attention.ropes)
            if self.is_initializing():
                x, view = block(x, rotations, step, cache.layer(number))
            else:
                weights = self.get_variable("params", block.name)
                x, view = _apply_block(block.clone(parent=None, name=None), weights, x, rotations, step, cache.layer(number))
            cache = cache.with_layer(number, view)
            self.sow("intermediates", f"stream_{number}", x)
        if logits == "last":
            x = x[:, 0]  # [B, D]
        x = RMSNorm(c.norm_eps, name="final_norm")(x)
        head = embedding
        if not c.tie_embeddings:
            head = weight(self, "head", (c.vocab_size, c.width), (axes.VOCAB, axes.EMBED), scaled_normal(1))
        out = matmul(x, head).astype(jnp.float32)
        out = out if c.final_softcap is None else c.final_softcap * jnp.tanh(out / c.final_softcap)
        if c.vocab_padding:
            out = jnp.where(jnp.arange(c.vocab_size) < c.vocab_size - c.vocab_padding, out, NEVER)
        return out, cache


@functools.partial(jax.jit, static_argnames=("block",))
def _apply_block(block: Block, weights: Any, x: jax.Array, tables: Any, step: kv.Step, view: Any) -> tuple[jax.Array, Any]:
    """One layer. A jit of its own, so that equal layers are traced and lowered once, not L times; XLA inlines the calls."""
    return block.apply({"params": weights}, x, tables, step, view)


@functools.cache
def abstract_params(config: ModelConfig, dtype: jnp.dtype = jnp.float32) -> Any:
    """The parameter tree without values: a `flax.linen.Partitioned` per weight, its `value` a `jax.ShapeDtypeStruct`, its `names` the
    logical axes. Initialisation, shardings, checkpoint mappings and byte counts derive from it.

    Args:
      config: the model's.
      dtype: the storage format of matrices. Vectors stay f32: scales, biases and sinks are small, and their rounding shows.
    """

    def stored(box: Any) -> Any:
        return box.replace(value=jax.ShapeDtypeStruct(box.value.shape, dtype if is_matrix(box.names) else jnp.float32))

    boxes = jax.eval_shape(lambda: _boxed_params(config, jax.random.key(0)))
    return jax.tree.map(stored, boxes, is_leaf=lambda leaf: isinstance(leaf, nn.Partitioned))


def init_params(config: ModelConfig, seed: int = 0, dtype: jnp.dtype = jnp.float32) -> Any:
    """Random weights, stored as `abstract_params(config, dtype)` says, for tests and benchmarks."""
    values = nn.meta.unbox(_boxed_params(config, jax.random.key(seed)))
    return jax.tree.map(lambda value, wanted: value.astype(wanted.dtype), values, nn.meta.unbox(abstract_params(config, dtype)))


def _boxed_params(config: ModelConfig, key: jax.Array) -> Any:
    step = kv.Step(rows=None, start=jnp.zeros((1,), jnp.int32), count=jnp.ones((1,), jnp.int32))
    return Transformer(config).init(key, jnp.zeros((1, 1), jnp.int32), step, kv.fresh(config, 1))["params"]
