"""The Transformer, read top to bottom."""

import functools
from collections.abc import Callable
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
from flax import linen as nn

import kv
from kernels import matmul, take_rows
from model.config import ModelConfig
from model.layers import Block
from model.loop import STACK, Loop, loop_of
from model.norm import RMSNorm
from model.rope import Rope, rope_table
from model.weights import is_matrix, scaled_normal, weight
from sharding import axes

NEVER = -1e30  # the logit of a row that stands for no token; finite, so that differences of two are no nan


class Transformer(nn.Module):
    """Tokens in, logits out; the cache goes through. It runs where the cache is placed.

    Attributes:
      config: what the model is.
      dtype: the number format of activations (`--compute`). Norms, softmax, rotations and logits are f32 in any case.
      layer_loop: "unrolled", or "scan" for a loop over the layers that repeat: less to compile, and a parameter tree with stacked weights.
    """

    config: ModelConfig
    dtype: jnp.dtype = jnp.dtype(jnp.float32)
    layer_loop: str = "unrolled"

    @nn.compact
    def __call__(self, tokens: jax.Array, step: kv.Step, cache: kv.Cache, logits: str = "last") -> tuple[jax.Array, kv.Cache]:
        """Args: tokens int32 [B, T], any value where padded. Returns: f32 [B, V] at each row's last token, or [B, T, V] of all."""
        c, placement = self.config, cache.placement
        T, last = tokens.shape[1], len(c.layers) - 1
        embedding = weight(self, "embedding", (c.vocab_size, c.width), (axes.VOCAB, axes.EMBED), scaled_normal(0))
        # Tied to the tokens by a barrier, lest a decode loop on CPU widens the whole bf16 table ahead of its first step.
        entries, tokens = jax.lax.optimization_barrier((embedding, tokens))
        x = take_rows(entries, tokens, self.dtype)  # [B, T, D]
        x = x * jnp.asarray(c.embedding_scale, x.dtype) if c.embedding_scale != 1 else x
        x = x if placement is None else placement.constrain(x, *step.axes(T, placement))
        positions, context = step.positions(T), cache.capacity or T
        tables: dict[Rope | None, Any] = {None: None}
        for rope in {rope for layer in c.layers for rope in layer.attention.ropes if rope is not None}:
            tables[rope] = rope_table(rope, positions, context)

        def apply(number: int, weights: Any, x: jax.Array, step: kv.Step, view: Any) -> tuple[jax.Array, Any]:
            layer = c.layers[number]
            block = Block(layer, c.norm_eps, placement, parent=None)
            return _apply_block(block, weights, x, tuple(tables[rope] for rope in layer.attention.ropes), step, view)

        loop = None if self.is_initializing() else loop_of(c, self.layer_loop)
        for number, layer in enumerate(c.layers):
            if loop is not None and loop.first <= number < loop.stop:
                if number == loop.first:
                    x, cache = _looped(apply, loop, self.get_variable("params", STACK), x, step, cache)
                continue
            if logits == "last" and T > 1 and number == last:
                step = step.replace(last_only=True)  # the other tokens leave their keys and values, and are done
            name = f"layer_{number}"
            if self.is_initializing():
                rotations = tuple(tables[rope] for rope in layer.attention.ropes)
                x, view = Block(layer, c.norm_eps, name=name)(x, rotations, step, cache.layer(number))
            else:
                x, view = apply(number, self.get_variable("params", name), x, step, cache.layer(number))
            cache = cache.with_layer(number, view)
            self.sow("intermediates", f"stream_{number}", x)
        if logits == "last":
            x = (x if x.shape[1] == 1 else step.replace(last_only=True).queried(x))[:, 0]  # [B, D]
        x = RMSNorm(c.norm_eps, name="final_norm")(x)
        head = embedding
        if not c.tie_embeddings:
            head = weight(self, "head", (c.vocab_size, c.width), (axes.VOCAB, axes.EMBED), scaled_normal(1))
        out = matmul(x, head)
        if placement is not None:  # each device multiplies what it has of the head, whatever comes after
            out = placement.constrain(out, *(None,) * (out.ndim - 1), axes.VOCAB)
        out = out.astype(jnp.float32)
        if placement is not None:  # every row's vocabulary in one place: rows of a whole batch on a device each, others on all
            out = placement.constrain_dividing(out, axes.SAMPLED if step.rows is None and logits == "last" else None)
        out = out if c.final_softcap is None else c.final_softcap * jnp.tanh(out / c.final_softcap)
        if c.vocab_padding:
            out = jnp.where(jnp.arange(c.vocab_size) < c.vocab_size - c.vocab_padding, out, NEVER)
        return out, cache


def _looped(apply: Any, loop: Loop, stack: Any, x: jax.Array, step: kv.Step, cache: kv.Cache) -> tuple[jax.Array, kv.Cache]:
    """The layers of a loop. The cache is carried, since what is scanned over would be copied."""

    def turn(carry: tuple[jax.Array, kv.Cache, jax.Array], weights: Any) -> tuple[tuple[jax.Array, kv.Cache, jax.Array], None]:
        x, cache, index = carry
        for within in range(loop.period):
            number = loop.first + within
            x, view = apply(number, weights[f"layer_{within}"], x, step, cache.layer(number, index, loop.period))
            cache = cache.with_layer(number, view)
        return (x, cache, index + 1), None

    (x, cache, _), _ = jax.lax.scan(turn, (x, cache, jnp.int32(0)), stack)
    return x, cache


@functools.partial(jax.jit, static_argnames=("block",))
def _apply_block(block: Block, weights: Any, x: jax.Array, tables: Any, step: kv.Step, view: Any) -> tuple[jax.Array, Any]:
    """One layer. A jit of its own, so that equal layers are traced and lowered once, not L times; XLA inlines the calls."""
    return block.apply({"params": weights}, x, tables, step, view)


@functools.cache
def abstract_params(config: ModelConfig, dtype: jnp.dtype = jnp.float32, layer_loop: str = "unrolled") -> Any:
    """The parameter tree without values: a `flax.linen.Partitioned` per weight, its `value` a `jax.ShapeDtypeStruct`, its `names` the
    logical axes. Initialisation, shardings, checkpoint mappings and byte counts derive from it.

    Args:
      config: the model's.
      dtype: the storage format of matrices. Vectors stay f32: scales, biases and sinks are small, and their rounding shows.
      layer_loop: as of `Transformer`; with "scan", weights of layers that repeat have an axis LAYERS in front.
    """

    def stored(box: Any) -> Any:
        return box.replace(value=jax.ShapeDtypeStruct(box.value.shape, dtype if is_matrix(box.names) else jnp.float32))

    boxes = jax.eval_shape(lambda: _boxed_params(config, jax.random.key(0)))
    tree = jax.tree.map(stored, boxes, is_leaf=_is_box)

    def stack(boxes: list[nn.Partitioned]) -> nn.Partitioned:
        value = boxes[0].value
        return boxes[0].replace(value=jax.ShapeDtypeStruct((len(boxes), *value.shape), value.dtype), names=(axes.LAYERS, *boxes[0].names))

    return stacked(config, tree, layer_loop, stack, _is_box)


def init_params(config: ModelConfig, seed: int = 0, dtype: jnp.dtype = jnp.float32, layer_loop: str = "unrolled") -> Any:
    """Random weights, stored as `abstract_params` with the same arguments says, for tests and benchmarks."""
    values = nn.meta.unbox(_boxed_params(config, jax.random.key(seed)))
    values = jax.tree.map(lambda value, wanted: value.astype(wanted.dtype), values, nn.meta.unbox(abstract_params(config, dtype)))
    return stacked(config, values, layer_loop)


def stack_arrays(weights: list[Any]) -> Any:
    """Equal weights, packed or not, as one with an axis in front."""
    return jax.tree.map(lambda *arrays: jnp.stack(arrays), *weights)


def stacked(
    config: ModelConfig, tree: Any, layer_loop: str, stack: Callable[[list[Any]], Any] = stack_arrays, is_leaf: Callable | None = None
) -> Any:
    """An unrolled tree of parameters as the tree for `layer_loop`; `stack` joins the leaves of layers that repeat."""
    if (loop := loop_of(config, layer_loop)) is None:
        return tree
    flat = flax.traverse_util.flatten_dict(tree, is_leaf=(lambda _, leaf: is_leaf(leaf)) if is_leaf else None)
    joined: dict[tuple[str, ...], Any] = {}
    for path, leaf in flat.items():
        place, turn = loop.place(path)
        if turn is None:
            joined[place] = leaf
        else:
            joined.setdefault(place, [None] * loop.times)[turn] = leaf
    return flax.traverse_util.unflatten_dict({place: stack(leaf) if isinstance(leaf, list) else leaf for place, leaf in joined.items()})


def _is_box(leaf: Any) -> bool:
    return isinstance(leaf, nn.Partitioned)


def _boxed_params(config: ModelConfig, key: jax.Array) -> Any:
    step = kv.Step(rows=None, start=jnp.zeros((1,), jnp.int32), count=jnp.ones((1,), jnp.int32))
    return Transformer(config).init(key, jnp.zeros((1, 1), jnp.int32), step, kv.fresh(config, 1))["params"]
