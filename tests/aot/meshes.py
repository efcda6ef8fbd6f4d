"""Large models over whole slices of TPUs, and over GPUs, compiled without one."""

import dataclasses
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh

import kv
from checkpoint import Storage
from checkpoint.packed_tree import spread
from checkpoint.placed import stored_as
from model import (
    AttentionConfig,
    LayerConfig,
    Llama3Scaling,
    MLPConfig,
    ModelConfig,
    Rope,
    Transformer,
    abstract_params,
    fit,
    prefill,
    stacked,
    transposed,
    tree_names,
)
from quantization import Scheme
from sampling import DecodeState, SamplingOptions, SamplingParams, decode
from sharding import Placement, collectives, is_names

BATCH, CAPACITY, STEPS, CHUNK = 16, 2048, 64, 2048
LLAMA_8B, LLAMA_70B = (
    ModelConfig(
        vocab_size=128_256,
        width=width,
        layers=(
            LayerConfig(
                AttentionConfig(
                    num_heads=heads, num_kv_heads=8, head_dim=128, rope=Rope(5e5, 128, Llama3Scaling(8.0, 1.0, 4.0, original_context=8192))
                ),
                MLPConfig(hidden),
            ),
        )
        * layers,
        norm_eps=1e-5,
        tie_embeddings=False,
        context_length=131_072,
    )
    for width, heads, hidden, layers in ((4096, 32, 14_336, 32), (8192, 64, 28_672, 80))
)


def pack_abstract(boxes: Any, scheme: Scheme) -> Any:
    """Zeros in the places of `boxes`, the layers' matrices packed."""
    storage = Storage(jnp.dtype(jnp.bfloat16), scheme, jnp.dtype(jnp.bfloat16))
    flat = flax.traverse_util.flatten_dict(boxes, is_leaf=lambda _, leaf: isinstance(leaf, nn.Partitioned))
    made = {at: stored_as(at, jnp.zeros(box.value.shape, box.value.dtype), box, storage) for at, box in flat.items()}
    return flax.traverse_util.unflatten_dict(made)


@dataclasses.dataclass(frozen=True, eq=False)
class OnMesh:
    """A compiled program.

    Attributes:
      executable: of the platform's compiler.
      cache_bytes: of the cache, on each device.
      weight_bytes: likewise.
      cache: its arrays' shapes, on each device.
      weights: of the weights' shapes, on all devices together.
      seconds: that tracing, lowering and compiling took.
    """

    executable: jax.stages.Compiled
    cache_bytes: int
    weight_bytes: int
    cache: list[tuple[int, ...]]
    weights: list[tuple[int, ...]]
    seconds: float

    @property
    def memory(self) -> Any:
        return self.executable.memory_analysis()

    def collectives(self) -> list[Any]:
        return collectives(self.executable.as_text())


def compiled_on(
    mesh: Mesh,
    program: str,
    config: ModelConfig,
    layer_loop: str = "unrolled",
    rules: Any = None,
    auto: bool = False,
    kv_dtype: Any = jnp.bfloat16,
    scheme: Scheme | None = None,
    capacity: int = CAPACITY,
    pallas: bool = False,
    **format: Any,
) -> OnMesh:
    """ "decode" (STEPS steps of BATCH rows) or "prefill" (CHUNK tokens of a row), in bf16, over a cache of `capacity` slots.

    Args:
      rules: other ones than the mesh's own.
      auto: let the compiler choose how weights lie in memory.
      scheme: pack the layers' matrices so.
      format: fields of `kv.Format`.
      pallas: transpose packed matrices for the Pallas kernels; on one device, unrolled.
    """
    import time

    placement = Placement.on(mesh, rules)
    config = fit(config, placement)
    model = Transformer(config, jnp.dtype(jnp.bfloat16), layer_loop)
    boxes = abstract_params(config, jnp.dtype(jnp.bfloat16), layer_loop)
    cache_format = kv.Format.for_platform(placement.platform, np.dtype(kv_dtype), **format)
    is_box = lambda leaf: isinstance(leaf, nn.Partitioned)  # noqa: E731

    def placed(names: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placement.sharding(names))

    def whole(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: placed((), leaf), tree)

    if scheme is None:
        params = jax.tree.map(lambda box: placed(box.names, box.value), boxes, is_leaf=is_box)
    else:
        plain = abstract_params(config, jnp.dtype(jnp.bfloat16))
        kept = jax.eval_shape(lambda: stacked(config, spread(pack_abstract(plain, scheme), mesh.size > 1), layer_loop))
        if pallas:
            params = whole(jax.eval_shape(lambda kept: transposed(kept, config), kept))
        else:
            params = jax.tree.map(placed, tree_names(kept, boxes), kept, is_leaf=is_names)
    shapes = jax.eval_shape(lambda: kv.init(config, BATCH, capacity, cache_format, None, placement))
    cache = jax.tree.map(placed, shapes.logical_axes(), shapes, is_leaf=is_names)
    if program == "decode":
        state = jax.eval_shape(lambda: DecodeState.init(BATCH, config.vocab_size)).replace(placement=placement)
        state = jax.tree.map(placed, state.logical_axes(), state, is_leaf=is_names)
        more = state, whole(SamplingParams.stack([SamplingOptions(seed=0)] * BATCH, ()))
        run = lambda params, cache, state, sampling: decode.function(model, params, cache, state, sampling, STEPS)  # noqa: E731
    else:
        more = tuple(whole(jax.ShapeDtypeStruct(shape, jnp.int32)) for shape in ((1, CHUNK), (1,), (1,), (1,)))
        run = lambda params, cache, *rest: prefill.function(model, params, cache, *rest)  # noqa: E731
    settings: dict[str, Any] = {}
    given = params
    if auto:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, (cache, *more))
        settings["in_shardings"] = (jax.tree.map(lambda leaf: Format(Layout.AUTO, leaf.sharding), params), *shardings)
        given = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    began = time.perf_counter()
    with jax.set_mesh(mesh):
        lowered = jax.jit(run, donate_argnums=(1, 2) if program == "decode" else (1,), **settings).lower(given, cache, *more)
    executable = lowered.compile()
    seconds = time.perf_counter() - began

    def local(leaf: Any) -> tuple[int, ...]:
        return leaf.sharding.shard_shape(leaf.shape)

    def nbytes(tree: Any) -> int:
        return sum(int(np.prod(local(leaf))) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    return OnMesh(
        executable,
        nbytes(cache),
        nbytes(params),
        [local(leaf) for leaf in jax.tree.leaves(cache.stores)],
        [leaf.shape for leaf in jax.tree.leaves(params) if len(leaf.shape) > 1],
        seconds,
    )
