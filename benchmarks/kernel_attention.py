"""Attention out of a cache, for `benchmarks/kernels.py`: a decode step that finds tokens held, and a prefill into an empty row."""

import dataclasses
import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kv
from benchmarks.decoding import filled, with_pages
from benchmarks.kernel_cases import Case, Group, copies_of, kernels_here
from benchmarks.rounds import seconds
from runtime import platform

HELD, PROMPTS = (128, 1024, 4096), (128, 512, 2048)
PAGE = 64
WINDOW = 512


@dataclasses.dataclass(frozen=True)
class Heads:
    """A layer of a model: N query heads and K of keys and values, of H numbers; the window that it sees, None for all."""

    model: str
    queries: int
    keys: int
    width: int
    window: int | None = None


LAYOUTS = {
    "dense": Heads("SmolLM2", 9, 3, 64),
    "ring": Heads("Gemma 3", 4, 1, 256, WINDOW),
    "paged": Heads("SmolLM2", 9, 3, 64),
}


def attentions() -> list[Group]:
    """Every layout in every number format that both kernels have."""
    return [
        Group("attention", f"{layout} {dtype}", functools.partial(attention, layout, dtype))
        for layout in LAYOUTS
        for dtype in ("f32", "bf16")
    ]


def attention(layout: str, dtype: str, held: Sequence[int] = HELD, prompts: Sequence[int] = PROMPTS) -> list[Case]:
    """One row's queries, the new keys and values being written by the same call."""
    heads, size = LAYOUTS[layout], {"f32": 4, "bf16": 2}[dtype]
    shape = f"{heads.model} {layout} {dtype}"
    cases = []

    def case(what: str, start: int, count: int) -> None:
        ends = np.arange(start + 1, start + count + 1)  # what each query could see without a window
        seen = ends if heads.window is None else np.minimum(ends, heads.window)
        token = 2 * heads.keys * heads.width * size  # bytes of its key and value
        read = min(start, heads.window or start)
        moved = token * (read + count) + 4 * 2 * count * heads.queries * heads.width
        calls = {name: _call(name, layout, dtype, start, count) for name in kernels_here()}
        cases.append(Case("attention", f"{shape}, {what}", calls, float(moved), 4.0 * heads.queries * heads.width * float(seen.sum())))

    for tokens in held:
        case(f"decode, {tokens:,} held", tokens, 1)
    for tokens in prompts:
        case(f"prefill of {tokens:,}", 0, tokens)
    return cases


def _call(kernels: str, layout: str, dtype: str, start: int, count: int) -> Callable[[], float]:
    """Seconds of one layer's attention; of a decode step over as many layers as don't fit into the processor's cache."""
    heads = LAYOUTS[layout]
    page = {"page_size": PAGE} if layout == "paged" else {}
    numbers = np.dtype({"f32": jnp.float32, "bf16": jnp.bfloat16}[dtype])
    format = kv.Format.for_platform(platform(), numbers, kernels=kernels, **page)
    token = 2 * heads.keys * heads.width * numbers.itemsize
    layers = copies_of(token * min(start, heads.window or start)) if count == 1 else 1
    spec = kv.LayerSpec(heads.keys, heads.width, heads.width, heads.window)
    config = types.SimpleNamespace(cache_layers=(spec,) * layers)
    # More than a ring, and than the 256 slots that are read at a time: where they are all, XLA copies all layers' caches in each.
    capacity = -(-(start + count) // 256) * 256 + 256 if heads.window is None else start + count + 2 * WINDOW
    cache = filled(with_pages(types.SimpleNamespace(config=config), format, 1, capacity))
    start_, count_ = (jnp.full((1,), number, jnp.int32) for number in (start, count))
    step = kv.Step(rows=None, start=start_, count=count_, tables=cache.tables)
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.normal(size=(1, count, many, heads.width)).astype(np.float32)) for many in (heads.queries, heads.keys, heads.keys)
    )
    how = kv.AttentionSpec(scale=heads.width**-0.5, window=heads.window)

    @functools.partial(jax.jit, donate_argnums=0)
    def program(store: Any, step: kv.Step, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[Any, jax.Array]:
        def layer(index: jax.Array, state: tuple[Any, jax.Array]) -> tuple[Any, jax.Array]:
            store, total = state
            out, store = store.replace(layer=index).attend(kv.Query(q), kv.KeyValue(k, v), step, how)
            return store.replace(layer=None), total + out

        return jax.lax.fori_loop(0, layers, layer, (store, jnp.zeros_like(q)))

    state = [*cache.stores]  # one: the layers are alike

    def call() -> float:
        def run() -> jax.Array:
            store, out = program(state.pop(), step, q, k, v)
            state.append(store)
            return out

        return seconds(run) / layers

    return call
