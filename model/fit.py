"""What a model must be to be split over a mesh: the same model, in numbers that divide."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kernels import JoinedArray, QuantArray, is_packed
from model.config import AttentionConfig, LayerConfig, MLAConfig, MLPConfig, ModelConfig, MoEConfig
from runtime import UserError
from sharding import MESH_AXES, Placement, axes, format_mesh


def fit(config: ModelConfig, placement: Placement) -> ModelConfig:
    """The config with KV heads copied and the vocabulary padded as far as the mesh needs it; the function computed stays the same.

    A mesh with more `model` shards than KV heads has several copies of each head: every shard then has all that its queries attend to. (To
    split heads by their elements instead would cost an all-reduce of scores in each block of keys.)

    Raises:
      UserError: something can't be split evenly, or a mesh axis would split nothing; names the sizes that would work.
    """
    _check(config, placement)
    shards = placement.shards(axes.KV_HEADS)
    vocab = placement.shards(axes.VOCAB)
    padding = -config.vocab_size % vocab
    layers = tuple(dataclasses.replace(layer, attention=_copied(layer.attention, shards)) for layer in config.layers)
    return dataclasses.replace(config, layers=layers, vocab_size=config.vocab_size + padding, vocab_padding=config.vocab_padding + padding)


def copied(config: ModelConfig, fitted: ModelConfig, params: Any) -> Any:
    """The (unrolled) parameters of a config as those of what `fit` made of it: KV heads copied, vocabulary padded with zeros."""

    def padded(table: jax.Array) -> jax.Array:
        return jnp.pad(table, ((0, fitted.vocab_size - config.vocab_size), (0, 0)))

    params = dict(params)
    params |= {name: _of_rows(params[name], padded) for name in ("embedding", "head") if name in params}
    for number, (before, after) in enumerate(zip(config.layers, fitted.layers, strict=True)):
        if (times := _times(before.attention, after.attention)) > 1:
            layer = dict(params[f"layer_{number}"])
            layer["attention"] = _with_copies(layer["attention"], before.attention, times)
            params[f"layer_{number}"] = layer
    return params


def _times(before: AttentionConfig | MLAConfig, after: AttentionConfig | MLAConfig) -> int:
    return 1 if isinstance(before, MLAConfig) else after.num_kv_heads // before.num_kv_heads


def _with_copies(weights: Any, attention: AttentionConfig, times: int) -> Any:
    K, G = attention.num_kv_heads, attention.queries_per_kv

    def queries(x: jax.Array, axis: int = 0) -> jax.Array:  # [..., K, G, ...] -> [..., K * times, G / times, ...]
        return x.reshape(*x.shape[:axis], K * times, G // times, *x.shape[axis + 2 :])

    def copies(x: jax.Array) -> jax.Array:  # [K, ...]
        return jnp.repeat(x, times, axis=0)

    def joined(w: Any) -> Any:  # [K, G + 2, ...]
        if isinstance(w, JoinedArray):
            q, *others = w.parts
            return JoinedArray((_of_rows(q, queries), *(_of_rows(each, copies) for each in others)), w.axis)
        return _of_rows(w, lambda x: jnp.concatenate([queries(x[:, :G]), copies(x[:, G:])], axis=1))

    changes = {"wqkv": joined, "bqkv": joined, "sinks": queries}
    if not is_packed(weights["wo"]):  # whose heads are one axis
        changes["wo"] = lambda x: queries(x, 1)
    if attention.qk_norm == "full":
        changes |= {"q_norm": queries, "k_norm": copies}
    return {name: changes[name](value) if name in changes else value for name, value in weights.items()}


def _of_rows(w: Any, change: Callable[[jax.Array], jax.Array]) -> Any:
    """`change` of a weight's rows, packed or not."""
    return w.map_rows(change) if isinstance(w, QuantArray) else change(w)


def _copied(attention: AttentionConfig | MLAConfig, shards: int) -> AttentionConfig | MLAConfig:
    if isinstance(attention, MLAConfig):
        return attention
    times = shards // math.gcd(shards, attention.num_kv_heads)
    return dataclasses.replace(attention, num_kv_heads=attention.num_kv_heads * times, kv_copies=attention.kv_copies * times)


def _check(config: ModelConfig, placement: Placement) -> None:
    asked = format_mesh(placement.mesh.shape)
    for mesh_axis, size in placement.mesh.shape.items():
        if mesh_axis not in MESH_AXES:
            raise UserError(f"mesh axis {mesh_axis!r} shards no array: use {', '.join(MESH_AXES)}")
        if mesh_axis == "expert" and size > 1 and not any(isinstance(layer.mlp, MoEConfig) for layer in config.layers):
            others = {name: n for name, n in placement.mesh.shape.items() if name != "expert"}
            instead = format_mesh(others | {"model": size * others.get("model", 1)})
            raise UserError(
                f"--mesh={asked}: the axis expert={size} shards no array, as the model has no experts: give for example {instead}"
            )
    for logical, what in ((axes.KV_HEADS, _heads), (axes.MLP, _hidden), (axes.EXPERTS, _experts), (axes.EMBED, _width)):
        shards, numbers = placement.shards(logical), what(config)
        if wrong := {name: number for name, number in numbers.items() if number % shards}:
            name, number = next(iter(wrong.items()))
            mesh_axis = " and ".join(f"{axis}={placement.mesh.shape[axis]}" for axis in placement.mesh_axes(logical))
            fitting = _divisors(
                math.gcd(*numbers.values(), *(_hidden(config) | _heads(config)).values()) if logical != axes.EXPERTS else number
            )
            raise UserError(
                f"--mesh={asked}: {number} {name} can't be split evenly by {mesh_axis}: sizes that work for this model are {fitting}"
            )


def _heads(config: ModelConfig) -> dict[str, int]:
    return {"query heads": math.gcd(*(layer.attention.num_heads for layer in config.layers))}


def _hidden(config: ModelConfig) -> dict[str, int]:
    return {"hidden units": math.gcd(*(mlp.hidden for layer in config.layers for mlp in _gated(layer)))}


def _gated(layer: LayerConfig) -> tuple[MLPConfig, ...]:
    if not isinstance(layer.mlp, MoEConfig):
        return (layer.mlp,)
    return (layer.mlp.expert, *([layer.mlp.shared] if layer.mlp.shared is not None else []))


def _experts(config: ModelConfig) -> dict[str, int]:
    counts = [layer.mlp.router.num_experts for layer in config.layers if isinstance(layer.mlp, MoEConfig)]
    return {"experts": math.gcd(*counts)} if counts else {}


def _width(config: ModelConfig) -> dict[str, int]:
    return {"channels": config.width}


def _divisors(number: int) -> str:
    fitting = [size for size in range(1, number + 1) if number % size == 0]
    return ", ".join(map(str, fitting[:8])) + (", ..." if len(fitting) > 8 else "")
