"""A model's weights in few bits: layer after layer, each with what a text brings to it through the layers already done."""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

import kv
from kernels import Observed, QuantArray, is_packed, take_rows
from kv.fresh import Fresh
from model import ModelConfig, abstract_params, keeps_packed, num_inputs
from model.layers import Block
from model.rope import rope_table
from quantization import Scheme, awq, gptq, learn, quantize
from runtime import UserError
from sampling.language_model import LanguageModel
from sampling.layer_store import LayerStore, fingerprint
from sharding import axes

METHODS = ("rtn", "awq", "gptq", "learned")
WINDOWS = 128  # of calibration text
WINDOW = 512  # tokens
BATCH = 4  # windows that go through a layer at once

Progress = Callable[[int, int, float], None]
Flat = dict[str, Any]  # a layer's weights by path: "attention/wqkv"


def quantize_model(
    lm: LanguageModel,
    method: str,
    scheme: Scheme,
    tokens: Sequence[int] | None = None,
    *,
    act_order: bool = False,
    windows: int = WINDOWS,
    window: int = WINDOW,
    steps: int | None = None,
    out_state: Path | None = None,
    progress: Progress = lambda done, total, seconds_left: None,
) -> Any:
    """The parameter tree with the matrices of all layers packed; embedding, head, norms and biases stay as they are.

    A calibrated layer reads what the packed layers before it give. Beside the model, one such stream is held and a second one made:
    2 x windows x window x D x 4 bytes (1 GiB with D = 2048 and the default windows); twice that with "learned", which also follows the
    model as it was.

    Args:
      lm: a model with plain weights, on one device, unrolled.
      method: "rtn" (to the nearest: reads no text), "awq", "gptq" or "learned" (`quantization.learn`, from the best of the others).
      scheme: of the matrices.
      tokens: of the calibration text, without BOS; what is more than `windows` need is left out in even steps.
      act_order: see `quantization.gptq`.
      windows: at most.
      window: tokens of each; no more than the model's context.
      steps: of "learned"; None: its default.
      out_state: a folder for each finished layer, from which a later call with the same arguments goes on.
      progress: called after each layer with layers done, layers in all, and seconds left.

    Raises:
      UserError: an unknown method, a model that is packed, split or stacked, a text without one window, a group that does not divide a
        matrix, experts with a method that calibrates, another run's state.
    """
    if method not in METHODS:
        raise UserError(f"--method={method} is not known: use one of {', '.join(METHODS)}")
    if act_order and method not in ("gptq", "learned"):
        raise UserError(f"act_order orders GPTQ's columns, and --method={method} has no order: use --method=gptq or learned")
    if method == "learned" and scheme.code.startswith("float"):
        raise UserError(f"the rounding of {scheme.code} is not learned, whose steps differ: use codes that are integers, or --method=gptq")
    if lm.placement is not None or lm.model.layer_loop != "unrolled":
        raise UserError(f"{lm.name} is split or stacked, and is quantized whole: load it on one device with layer_loop='unrolled'")
    config = lm.config
    plans = [_plan(config, number, method, scheme) for number in range(len(config.layers))]
    layers = [_flat(lm.params[f"layer_{number}"]) for number in range(len(plans))]
    if any(is_packed(weight) for layer in layers for weight in layer.values()):
        raise UserError(f"{lm.name} is packed already, and rounding twice adds up: load it with weights='f32' or 'bf16'")

    stream = None
    if method != "rtn":
        text = calibration_windows(lm, tokens, windows, window)
        stream = exact = _embed(config, lm.params["embedding"], text)
    else:
        text = np.zeros((0, 0), np.int32)
    options = {"method": method, "scheme": dataclasses.asdict(scheme), "act_order": act_order, "steps": steps}
    store = None if out_state is None else LayerStore(Path(out_state), fingerprint(options, text, repr(config), lm.params))

    packed, began, computed = dict(lm.params), time.perf_counter(), 0
    for number, (plan, layer) in enumerate(zip(plans, layers, strict=True)):
        matrices = {path: as_matrix(layer[path], names) for path, names in plan.matrices}
        target = None
        if method == "learned":  # what the model as it was gives
            target = exact = _forward(plan.run, layer, exact)
        found = None if store is None else store.read(number)
        if found is None:
            found = _round_layer(plan, layer, matrices, method, scheme, stream, target, act_order, steps)
            computed += 1
            if store is not None:
                store.write(number, found)
        layer = layer | found
        if stream is not None and number + 1 < len(plans):
            stream = jax.block_until_ready(_forward(plan.run, layer, stream))
        packed[f"layer_{number}"] = flax.traverse_util.unflatten_dict(layer, sep="/")
        left = (time.perf_counter() - began) / max(computed, 1) * (len(plans) - number - 1)
        progress(number + 1, len(plans), left)
    return packed


def calibration_windows(lm: LanguageModel, tokens: Sequence[int] | None, windows: int = WINDOWS, window: int = WINDOW) -> np.ndarray:
    """int32 [n, window]: pieces of a text, evenly spread over it, n <= windows. Each begins with BOS where the model wants one.

    Raises:
      UserError: the text has less than one window.
    """
    window = min(window, lm.config.context_length)
    new = window - 1 if lm.tokenizer.adds_bos else window  # tokens of the text in each
    ids = np.asarray([] if tokens is None else tokens, np.int32)
    if windows < 1 or len(ids) < new:
        raise UserError(
            f"{windows} windows of {window} tokens are wanted of a calibration text of {len(ids)}: give a longer text, or --method=rtn"
        )
    pieces = ids[: len(ids) // new * new].reshape(-1, new)
    chosen = pieces[np.linspace(0, len(pieces) - 1, min(windows, len(pieces))).astype(int)]
    if lm.tokenizer.adds_bos:
        chosen = np.concatenate([np.full((len(chosen), 1), lm.tokenizer.bos_id, np.int32), chosen], axis=1)
    return chosen


@dataclasses.dataclass(frozen=True)
class _Run:
    """A layer over whole windows, nothing cached. Equal layers are equal, and share their executables."""

    block: Block

    def __call__(self, weights: Flat, x: jax.Array) -> jax.Array:  # x f32 [B, T, D]
        B, T = x.shape[:2]
        positions = jnp.broadcast_to(jnp.arange(T), (B, T))
        tables = tuple(None if rope is None else rope_table(rope, positions, T) for rope in self.block.config.attention.ropes)
        step = kv.Step(rows=None, start=jnp.zeros((B,), jnp.int32), count=jnp.full((B,), T, jnp.int32))
        params = flax.traverse_util.unflatten_dict(weights, sep="/")
        return self.block.apply({"params": params}, x, tables, step, Fresh())[0]


@dataclasses.dataclass(frozen=True)
class _Apply:
    """A layer as `quantization.learn` wants it: matrices [O, I] in, outputs out."""

    run: _Run
    shapes: tuple[tuple[str, tuple[int, ...]], ...]  # of the matrices, by path

    def __call__(self, dense: Flat, held: Flat, x: jax.Array) -> jax.Array:
        return self.run(held | {path: dense[path].reshape(shape) for path, shape in self.shapes}, x)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What is to be done with a layer.

    Attributes:
      run: the layer.
      matrices: path and logical axes of each weight that is packed.
    """

    run: _Run
    matrices: tuple[tuple[str, tuple[str, ...]], ...]


def _plan(config: ModelConfig, number: int, method: str, scheme: Scheme) -> _Plan:
    boxes = _flat(abstract_params(config)[f"layer_{number}"], is_leaf=lambda _, leaf: hasattr(leaf, "names"))
    matrices = []
    for path, box in boxes.items():
        if not keeps_packed(path.split("/"), box.names):
            continue
        if axes.EXPERTS in box.names and method != "rtn":
            raise UserError(
                f"layer {number} is a mixture of experts, each of which sees its own tokens: use --method=rtn, which reads no text"
            )
        scheme.check(jax.eval_shape(functools.partial(as_matrix, names=box.names), box.value).shape[-1], f"layer {number}'s {path}")
        matrices.append((path, tuple(box.names)))
    return _Plan(_Run(Block(config.layers[number], config.norm_eps, parent=None)), tuple(matrices))


def as_matrix(w: jax.Array, names: Sequence[str]) -> jax.Array:
    """[O..., I] of a weight with these logical axes."""
    return w.reshape(*w.shape[: len(names) - num_inputs(names)], -1)


def _round_layer(
    plan: _Plan,
    layer: Flat,
    matrices: Mapping[str, jax.Array],
    method: str,
    scheme: Scheme,
    stream: jax.Array | None,
    target: jax.Array | None,
    act_order: bool,
    steps: int | None,
) -> dict[str, QuantArray]:
    """By path."""
    rtn = {} if method in ("awq", "gptq") else {path: quantize(w, scheme) for path, w in matrices.items()}
    if method == "rtn":
        return rtn
    seen = _observe(plan.run, tuple(matrices), layer, stream)
    rounded_awq = {} if method == "gptq" else {path: awq(w, *seen[path], scheme) for path, w in matrices.items()}
    if method == "awq":
        return rounded_awq
    rounded_gptq = {path: gptq(w, seen[path][0], scheme, act_order=act_order) for path, w in matrices.items()}
    if method == "gptq":
        return rounded_gptq
    starts = [{path: _flat_rows(array) for path, array in start.items()} for start in (rtn, rounded_awq, rounded_gptq)]
    dense = {path: w.reshape(-1, w.shape[-1]) for path, w in matrices.items()}
    apply = _Apply(plan.run, tuple((path, layer[path].shape) for path in matrices))
    held = {path: weight for path, weight in layer.items() if path not in matrices}
    more = {} if steps is None else {"steps": steps}
    learned = learn(apply, dense, starts, scheme, stream, target, held=held, **more)
    return {path: learned[path].map_rows(lambda a, w=w: a.reshape(*w.shape[:-1], a.shape[-1])) for path, w in matrices.items()}


def _flat_rows(array: QuantArray) -> QuantArray:
    """[O, I] of [O..., I]."""
    return array.map_rows(lambda part: part.reshape(-1, part.shape[-1]))


def _flat(tree: Any, is_leaf: Callable[[Any, Any], bool] | None = None) -> Flat:
    return flax.traverse_util.flatten_dict(tree, sep="/", is_leaf=is_leaf)


def _batches(stream: jax.Array) -> list[jax.Array]:
    """[n, T, D] in pieces [B, T, D], all of the size that leaves no part of a batch: a loop over them in one program would be split over
    fewer of a CPU's cores."""
    size = max(size for size in range(1, BATCH + 1) if len(stream) % size == 0)
    return [stream[first : first + size] for first in range(0, len(stream), size)]


@functools.partial(jax.jit, static_argnames=("config",))
def _embed(config: ModelConfig, embedding: jax.Array, tokens: jax.Array) -> jax.Array:
    """f32 [n, T, D]: what the first layer reads."""
    return take_rows(embedding, tokens, jnp.float32) * config.embedding_scale


def _forward(run: _Run, weights: Flat, stream: jax.Array) -> jax.Array:
    """[n, T, D] after the layer."""
    return jnp.concatenate([_forward_batch(run, weights, batch) for batch in _batches(stream)])


@functools.partial(jax.jit, static_argnames=("run",))
def _forward_batch(run: _Run, weights: Flat, batch: jax.Array) -> jax.Array:
    return run(weights, batch)


def _observe(run: _Run, paths: tuple[str, ...], weights: Flat, stream: jax.Array) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Of each matrix's inputs x: the sum of x x^T over all tokens, f32 [I, I], and the mean of |x|, f32 [I]."""
    totals = None
    for batch in _batches(stream):
        sums = _observe_batch(run, paths, weights, batch)
        totals = sums if totals is None else jax.block_until_ready(_added(totals, sums))
    tokens = stream.shape[0] * stream.shape[1]
    return {path: (hessian, total / tokens) for path, (hessian, total) in totals.items()}


@functools.partial(jax.jit, static_argnames=("run", "paths"))
def _observe_batch(run: _Run, paths: tuple[str, ...], weights: Flat, batch: jax.Array) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Sums of x x^T and of |x|."""
    sums: dict[str, tuple[jax.Array, jax.Array]] = {}

    def see(path: str, x: jax.Array) -> None:
        rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
        sums[path] = jnp.matmul(rows.T, rows, precision="highest"), jnp.sum(jnp.abs(rows), axis=0)

    run(weights | {path: Observed(weights[path], functools.partial(see, path)) for path in paths}, batch)
    return sums


@functools.partial(jax.jit, donate_argnums=0)
def _added(totals: Any, sums: Any) -> Any:
    return jax.tree.map(jnp.add, totals, sums)
