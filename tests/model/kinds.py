"""Every kind of cache with a tiny model that uses it, for the laws: what is kept x where it lies x in what numbers."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import struct

import kv
from kernels import cpu
from kv.codec import Codec
from kv.fresh import Fresh
from model import LayerConfig, MLPConfig, ModelConfig, Rope, Transformer, decode_step, prefill
from tests.model.hybrids import CONFIGS, attention, model, random_params

B, T, CAPACITY = 3, 24, 40
WINDOW, MARGIN = 5, 3
F32, BF16, INT8, INT4, FP8 = map(np.dtype, (np.float32, jnp.bfloat16, np.int8, ml_dtypes.int4, ml_dtypes.float8_e4m3fn))

# A step of the format, of a group's largest number; in 24 tokens of 2 layers, some numbers that count may differ by one.
FLIP = {BF16: 2**-7, INT8: 4 / 127, FP8: 2 / 8, INT4: 6 / 15}


def windowed(num_heads: int = 6, num_kv_heads: int = 2, **more: Any) -> ModelConfig:
    """A layer with a window, then one without."""
    heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, **more}
    return model(*(LayerConfig(attention(window=window, **heads), MLPConfig(hidden=32)) for window in (WINDOW, None)))


WIDE = windowed(6, 2, head_dim=64, rope=Rope(theta=1e4, dim=64), sinks=True)  # heads as Pallas kernels of a TPU take them
MODELS = {
    "gqa": windowed(),
    "wide": WIDE,
    "mqa": windowed(4, 1),
    "mha": windowed(4, 4),
    "mla": CONFIGS["mla"],
    "deepseek": CONFIGS["deepseek"],
}


class ReadBack(struct.PyTreeNode):
    """What a number format does and nothing else: the kind that stores nothing, given each row as it would be read back."""

    codec: Codec = struct.field(pytree_node=False)
    layer: jax.Array | int | None = None

    def attend(self, query, new, step, spec, weights=None):
        new = jax.tree.map(lambda rows: self.codec.decode(self.codec.encode(rows), -1), new)
        return Fresh().attend(query, new, step, spec, weights)[0], self


@dataclasses.dataclass(frozen=True)
class Kind:
    """A model and how its cache is stored."""

    model_name: str
    format: kv.Format

    @property
    def config(self) -> ModelConfig:
        return MODELS[self.model_name]

    @property
    def model(self) -> Transformer:
        return Transformer(self.config)

    @property
    def params(self) -> Any:
        return _params(self.model_name)

    @property
    def exact(self) -> bool:
        return self.format.dtype == F32

    @property
    def windows(self) -> tuple[int | None, ...]:
        return kv.page_groups(self.config, CAPACITY, self.format)

    @property
    def pools(self) -> tuple[int, ...] | None:
        """Pages per group: for a window so few that rows must hand them on to one another."""
        size = self.format.page_size

        def pages(tokens):
            return -(-tokens // size) + 1

        if size is None:
            return None
        return tuple(B * min(pages(CAPACITY), pages(CAPACITY if window is None else window + MARGIN + 8)) + 1 for window in self.windows)

    def empty(self) -> kv.Cache:
        """A cache that holds nothing, and nan in every slot (or the largest codes, with a scale of nan)."""
        cache = kv.init(self.config, B, CAPACITY, self.format, self.pools)

        def garbage(array):
            return jnp.asarray(np.full(array.nbytes, 0xFF, np.uint8).view(array.dtype).reshape(array.shape))

        return cache.replace(stores=jax.tree.map(garbage, cache.stores))

    def full(self, tokens: jax.Array, read_back: bool = True) -> np.ndarray:
        """Logits of the full forward, f32 [B, T, V]; `read_back`: over rows as this kind's number format gives them back."""
        return _full(self.model_name, self.format.codec if read_back and not self.exact else None, tokens.tobytes())

    def prefill(self, cache: kv.Cache, tokens: Any, counts: Any, rows: Any = None, **more) -> tuple[np.ndarray, kv.Cache]:
        rows = None if rows is None else jnp.asarray(rows, jnp.int32)
        out, cache = prefill(
            self.model, self.params, cache, jnp.asarray(tokens, jnp.int32), jnp.asarray(counts, jnp.int32), rows, logits="all", **more
        )
        return np.asarray(out), cache

    def decode(self, cache: kv.Cache, tokens: Any) -> tuple[np.ndarray, kv.Cache]:
        out, cache = decode_step(self.model, self.params, cache, jnp.asarray(tokens, jnp.int32))
        return np.asarray(out), cache


@functools.cache
def _params(name: str) -> Any:
    return random_params(MODELS[name], seed=2)


@functools.cache
def _full(name: str, codec: Codec | None, tokens: bytes) -> np.ndarray:
    cache = kv.fresh(MODELS[name], B)
    if codec is not None:
        cache = cache.replace(stores=(ReadBack(codec),))
    tokens = jnp.asarray(np.frombuffer(tokens, np.int32).reshape(B, -1))
    return np.asarray(prefill(Transformer(MODELS[name]), _params(name), cache, tokens, jnp.full((B,), tokens.shape[1]), logits="all")[0])


def _kinds() -> dict[str, Kind]:
    layouts = {"ring": {}, "dense": {"margin": 64}, "paged": {"page_size": 4}, "paged16": {"page_size": 16}}

    def kind(model_name: str, layout: str, dtype: np.dtype = F32, **more: Any) -> Kind:
        return Kind(model_name, kv.Format(dtype, **{"margin": MARGIN, "group": 2, **layouts[layout], **more}))

    kinds = {f"{name}-{layout}": kind(name, layout) for name in ("gqa", "mqa", "mha") for layout in ("ring", "paged", "paged16")}
    kinds |= {f"{name}-{layout}": kind(name, layout) for name in ("mla", "deepseek") for layout in ("dense", "paged")}
    kinds["gqa-ring-tpu"] = kind("gqa", "ring", key_order="SKH", value_order="SKH")
    kinds["gqa-paged-tpu"] = kind("gqa", "paged", key_order="SKH", value_order="SKH")
    pallas = {"key_order": "SKH", "value_order": "SKH", "kernels": "pallas", "interpret": True}
    for layout in ("ring", "paged", "paged16"):
        kinds[f"gqa-{layout}-pallas"] = kind("gqa", layout, **pallas)  # as on a GPU
        if layout != "paged":  # of 4, which fill no tiles
            kinds[f"wide-{layout}-pallas"] = kind("wide", layout, lanes=128, **pallas)  # as on a TPU
    for dtype in (BF16, INT8, INT4, FP8):
        for layout in ("ring", "dense", "paged"):
            kinds[f"gqa-{layout}-{dtype.name}"] = kind("gqa", layout, dtype, as_bits=True, group=8 if dtype == INT4 else 2)
    for layout in layouts if cpu.instruction_set() is not None else ():
        kinds[f"wide-{layout}-int8-native"] = kind("wide", layout, INT8, as_bits=True, group=16, kernels="native")
    kinds["gqa-ring-float8_e4m3fn-tpu"] = kind("gqa", "ring", FP8, key_order="SKH", value_order="SKH")
    kinds["mla-dense-int8"] = kind("mla", "dense", INT8, as_bits=True)
    kinds["mla-paged-float8_e4m3fn"] = kind("mla", "paged", FP8, as_bits=True)
    return kinds


KINDS = _kinds()


class Pages:
    """The page tables of a cache as an engine would keep them: pages are given to rows as they grow, in no order, and those that a window
    has left behind are taken away, for other rows."""

    def __init__(self, kind: Kind, seed: int = 0):
        self.kind, self.size = kind, kind.format.page_size
        rng = np.random.default_rng(seed)
        self.free = [list(rng.permutation(pool)) for pool in kind.pools or ()]
        width = -(-CAPACITY // self.size) if self.size else 0
        self.tables = [np.full((B, width), pool, np.int32) for pool in kind.pools or ()]

    def grow(self, row: int, held: int, most: int, count: int) -> None:
        """Row `row`, which holds `held` tokens and has held `most`, is about to be given `count` more."""
        for window, pool, free, table in zip(self.kind.windows, self.kind.pools or (), self.free, self.tables, strict=True):
            if window is not None:  # the first query to come may be `margin` before the most
                self._release(row, 0, max(most - MARGIN - window + 1, 0) // self.size, pool, free, table)
            for page in range(held // self.size, -(-(held + count) // self.size)):
                if table[row, page] == pool:
                    table[row, page] = free.pop()

    def reset(self, row: int) -> None:
        """Row `row` starts anew."""
        for pool, free, table in zip(self.kind.pools or (), self.free, self.tables, strict=True):
            self._release(row, 0, table.shape[1], pool, free, table)

    @staticmethod
    def _release(row, first, last, pool, free, table):
        for page in range(first, last):
            if table[row, page] < pool:
                free.insert(0, table[row, page])
                table[row, page] = pool

    def into(self, cache: kv.Cache) -> kv.Cache:
        return cache.replace(tables=tuple(jnp.asarray(table) for table in self.tables))


class Comparison:
    """Collects logits beside the full forward's."""

    def __init__(self, kind: Kind, full: np.ndarray):
        self.kind, self.full, self.scale, self.errors = kind, full, np.abs(full).max(), []

    def add(self, row: int, position: int, logits: np.ndarray) -> None:
        self.errors.append(np.abs(logits - self.full[row, position]).max() / self.scale)
        assert self.errors[-1] <= (1e-4 if self.kind.exact else FLIP[self.kind.format.dtype]), (row, position)

    @property
    def equal(self) -> float:
        """The part of the logits that are equal."""
        return np.mean(np.asarray(self.errors) <= 1e-4)


class Course:
    """A cache in use: what its rows hold and have held, and whether each answer is the full forward's."""

    def __init__(self, kind: Kind, tokens: np.ndarray, seed: int = 0):
        self.kind, self.tokens, self.comparison = kind, tokens, Comparison(kind, kind.full(tokens))
        self.cache, self.pages = kind.empty(), Pages(kind, seed)
        self.held, self.most = np.zeros(B, int), np.zeros(B, int)

    def _grow(self, counts: np.ndarray) -> None:
        for row in np.flatnonzero(counts):
            self.pages.grow(row, self.held[row], self.most[row], counts[row])
        self.cache = self.pages.into(self.cache)

    def _grown(self, counts: np.ndarray) -> None:
        self.held += counts
        self.most = np.maximum(self.most, self.held)
        np.testing.assert_array_equal(self.cache.lengths, self.held)

    def chunk(self, width: int, counts: np.ndarray, order: np.ndarray | None) -> None:
        """A prefill of `width` tokens a row, of which `counts` are real, at most what is left; rows come in any order."""
        counts = np.minimum(np.minimum(counts, width), T - self.held)
        self._grow(counts)
        part = np.full((B, width), -1)
        rows = np.arange(B) if order is None else order
        for place, row in enumerate(rows):
            part[place, : counts[row]] = self.tokens[row, self.held[row] : self.held[row] + counts[row]]
        logits, self.cache = self.kind.prefill(self.cache, part, counts[rows], order)
        for place, row in enumerate(rows):
            for t in range(counts[row]):
                self.comparison.add(row, self.held[row] + t, logits[place, t])
        self._grown(counts)

    def step(self, active: np.ndarray) -> None:
        """A decode step of the active rows that have tokens left."""
        counts = (active & (self.held < T)).astype(int)
        self._grow(counts)
        feed = np.where(counts, self.tokens[np.arange(B), np.minimum(self.held, T - 1)], -1)
        logits, self.cache = self.kind.decode(self.cache, feed)
        for row in np.flatnonzero(counts):
            self.comparison.add(row, self.held[row], logits[row])
        self._grown(counts)

    def rewind(self, by: np.ndarray) -> None:
        """Back by so many tokens, at most the margin from the most that a row has held; by 8, to nothing."""
        by = np.where(by == 8, self.held, np.minimum(by, MARGIN - (self.most - self.held)))
        self.held = np.maximum(self.held - np.maximum(by, 0), 0)
        self.cache = self.cache.rewind(jnp.asarray(self.held))
        for row in np.flatnonzero(self.held == 0):
            self.most[row] = 0
            self.pages.reset(row)
