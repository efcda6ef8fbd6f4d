"""A model with its tokenizer and number formats, ready to generate."""

import dataclasses
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import checkpoint
import kv
from checkpoint import orbax_folder
from model import ModelConfig, Transformer, is_tiled, tiled, transposed, untiled
from quantization import Scheme
from runtime import DTYPES, KV_DTYPES, UserError, platform, resolve_dtype, use_huge_pages
from sampling.formats import weight_formats
from sampling.kernel_choice import activation_bits, choose_kernels
from sharding import Placement
from tokenizer import Tokenizer, tokenizer_from_folder, tokenizer_from_gguf, tokenizer_from_saved

DEFAULT_MODEL = "smollm2-135m-instruct"
CACHES = ("dense", "paged")
PAGE_SIZE = 64  # tokens
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]  # text, token ids, or chat messages


@dataclasses.dataclass(frozen=True, eq=False)
class LanguageModel:
    """All that generation needs; build it with `load`, or from your own parts."""

    name: str
    model: Transformer = dataclasses.field(repr=False)
    params: Any = dataclasses.field(repr=False)
    tokenizer: Tokenizer = dataclasses.field(repr=False)
    kv_format: kv.Format
    load_seconds: float = 0.0
    placement: Placement | None = dataclasses.field(default=None, repr=False)  # over a mesh; None: one device

    def __post_init__(self):
        """Raises: UserError, if the tokenizer has more tokens than the model, or the cache's number format does not suit its heads."""
        kv.bytes_per_token(self.config, self.kv_format)
        padding = self.config.vocab_size - self.tokenizer.vocab_size
        if padding < 0:
            raise UserError(
                f"{self.name}: the tokenizer has {self.tokenizer.vocab_size} tokens, but the model has {self.config.vocab_size} rows of "
                "embedding: they do not belong together; download the model again"
            )
        if padding:  # rows of embedding past the tokenizer's list stand for no text
            padded = dataclasses.replace(self.tokenizer, pieces=self.tokenizer.pieces + (b"",) * padding)
            object.__setattr__(self, "tokenizer", padded)

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that one decode step reads: all, but of an embedding that is not also the head only a row per token."""
        total = sum(leaf.nbytes for leaf in jax.tree.leaves(self.params))
        return total if self.config.tie_embeddings else total - self.params["embedding"].nbytes

    def encode(self, prompt: Prompt, *, raw: bool = False, system: str | None = None, parse_special: bool = False) -> list[int]:
        """The token ids of a prompt.

        Args:
          prompt: text (the user's turn of a chat where the model has a chat template), messages of a chat, or token ids as they are.
          raw: take text as it is, without the chat template.
          system: the system message of the chat; replaces none that `prompt` holds.
          parse_special: read `<|im_end|>` and the like in the prompt's text as control tokens; by default they are ordinary characters.

        Raises:
          UserError: an empty prompt, ids outside the vocabulary, a chat for a model without template, system with raw.
        """
        if len(prompt) == 0:
            raise UserError("the prompt is empty: give at least one character")
        if isinstance(prompt, str):
            if raw or self.tokenizer.chat is None:
                if system is not None:
                    raise UserError("a system message needs the chat template: leave out --system, or --raw")
                return self.tokenizer.encode(prompt, parse_special=parse_special)
            prompt = [{"role": "user", "content": prompt}]
        if all(isinstance(item, (int, np.integer)) and not isinstance(item, bool) for item in prompt):
            if system is not None:
                raise UserError("a system message needs the chat template: leave it out, or give text or messages instead of token ids")
            if bad := [item for item in prompt if not 0 <= item < self.config.num_tokens]:
                raise UserError(f"token id {bad[0]} is not in the vocabulary: ids go from 0 to {self.config.num_tokens - 1}")
            return [int(item) for item in prompt]
        if raw:
            raise UserError("messages need the chat template: leave out --raw, or give a plain prompt")
        messages = list(prompt)
        if system is not None:
            if isinstance(messages[0], Mapping) and messages[0].get("role") == "system":
                raise UserError("the messages hold a system message already: leave out --system")
            messages = [{"role": "system", "content": system}, *messages]
        return self.tokenizer.encode_chat(messages, parse_special=parse_special)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the model as an Orbax checkpoint with its tokenizer, of which `load(folder)` makes the same model again.

        Raises:
          UserError: the folder exists and is not empty, or can't be written, or the layers' weights are stacked.
        """
        if self.model.layer_loop != "unrolled":
            raise UserError(
                f"a model with layer_loop={self.model.layer_loop!r} can't be saved: load it unrolled (what is saved loads either way)"
            )
        params = untiled(self.params)
        orbax_folder.save(folder, self.config, params, metadata={"name": self.name}, add_files=self.tokenizer.save)


def load(
    name: str | os.PathLike[str] = DEFAULT_MODEL,
    *,
    weights: str | Scheme = "auto",
    head_weights: str | Scheme = "auto",
    weights_group: int | None = None,
    compute: str = "auto",
    kv_dtype: str = "auto",
    cache: str = "dense",
    page_size: int | None = None,
    kv_group: int | None = None,
    progress: checkpoint.Progress | None = None,
    mesh: Mesh | None = None,
    layer_loop: str = "unrolled",
    kernels: str = "auto",
    activations: str = "auto",
) -> LanguageModel:
    """Fetches (the first time), reads and prepares a model.

    Args:
      name: a preset's name, the path of a .gguf file or of a model's folder (Hugging Face's, or one that `save` wrote), or
        hf:ORG/NAME[@REVISION] for a model of the Hugging Face Hub.
      weights: storage of the layers' matrices: auto (native with native kernels, else f32 on CPU and bf16 elsewhere; packed where `save`
        wrote them so), native (packed as the file stores them, the others f32 on CPU and bf16 elsewhere), f32, bf16; int8, w8a8 (products
        round activations to 8 bits too), int4 or fp8, to which they are rounded; or a `quantization.Scheme`.
      head_weights: of embedding and head, likewise; auto follows `weights`, but int8 goes with int4.
      weights_group: inputs that share a scale at int4 and int8: 32, 64 or 128; None: 64 (at int8 whole rows where that does not divide).
      compute: of activations: auto (f32 on CPU, bf16 elsewhere), f32, bf16.
      kv_dtype: of the KV cache: auto (f32 on a CPU without native kernels, else bf16), f32, bf16, int8, int4, fp8.
      cache: layout of the KV cache: "dense" (slots of each row's own; of layers with a window a ring) or "paged".
      page_size: tokens per page, a power of two; None: 64.
      kv_group: channels that share a scale in a quantized KV cache; None: 32.
      progress: where to report downloads and reading; by default standard error, reading only on a terminal.
      mesh: the devices to split the model over, with axes named as in `sharding.MESH_AXES` (`sharding.make_mesh` makes one); None: one
        device.
      layer_loop: "unrolled", or "scan", which compiles layers that repeat once: for models of many layers.
      kernels: auto (native on one CPU where they are built, else xla), xla (what JAX compiles), native (C++: products with packed weights,
        and attention over caches of f32, bf16 and int8) or pallas (on TPUs and GPUs, int8 caches excepted; notices say what it is not for).
      activations: of native products with packed weights, which round them with a scale for every 32: auto (int8), float (not rounded),
        int16 (15 bits) or int8 (15 bits where the 32 hold an outlier, else 8). Where they are rounded, attention over a bf16 cache is in
        bf16.

    Raises:
      UserError: no such model, no network, a damaged file, an unknown format; one line with the remedy.
    """
    # Names first: a typing error should not cost a download.
    placement = None if mesh is None else Placement.on(mesh)
    where = platform() if placement is None else placement.platform
    kernels, notice = choose_kernels(kernels, where, split=placement is not None, layer_loop=layer_loop)
    weight_dtype, layers, head = weight_formats(weights, head_weights, weights_group, where, kernels)
    bits = activation_bits(activations, kernels, layers, head)
    dtype = resolve_dtype("compute", compute, where)
    kv_format = cache_format(kv_dtype, cache, page_size, kv_group, where, kernels)
    progress = progress or checkpoint.Progress()
    if notice is not None:
        progress.notice(notice)
    path = checkpoint.resolve(name, progress=progress)
    began = time.perf_counter()
    loaded = checkpoint.load(path, weight_dtype, progress, placement, layer_loop, layers, head)
    for notice in (*loaded.notices, *not_by_pallas(loaded.config, kv_format, placement)):
        progress.notice(notice)
    match loaded.kind:
        case "gguf":
            tokenizer = tokenizer_from_gguf(loaded.metadata, loaded.path)
        case "folder":
            tokenizer = tokenizer_from_folder(loaded.path)
        case _:
            tokenizer = tokenizer_from_saved(loaded.path)
    params = loaded.params
    if kernels == "native":
        params = tiled(params, loaded.config, bits)
    elif kernels == "pallas" and placement is None and layer_loop == "unrolled":
        params = transposed(params, loaded.config, free=True)
    if bits and kv_format.dtype == jnp.bfloat16 and is_tiled(params):
        kv_format = dataclasses.replace(kv_format, round_queries=True)
    jax.block_until_ready(params)
    if kernels == "native":
        use_huge_pages(params)
    return LanguageModel(
        name=str(name),
        model=Transformer(loaded.config, jnp.dtype(dtype), layer_loop),
        params=params,
        tokenizer=tokenizer,
        kv_format=kv_format,
        load_seconds=time.perf_counter() - began,
        placement=placement,
    )


def not_by_pallas(config: ModelConfig, format: kv.Format, placement: Placement | None) -> list[str]:
    """What a user who asked for Pallas kernels should be told of layers that they do not answer."""
    if format.kernels != "pallas":
        return []
    reasons = [reason for spec in config.cache_layers if (reason := format.kernels_of(spec, placement)[1]) is not None]
    return [
        f"{reasons.count(each)} of {len(config.cache_layers)} layers are not read by Pallas kernels ({each})"
        for each in dict.fromkeys(reasons)
    ]


def cache_format(
    kv_dtype: str,
    cache: str = "dense",
    page_size: int | None = None,
    kv_group: int | None = None,
    where: str | None = None,
    kernels: str = "xla",
) -> kv.Format:
    """The KV cache's format on a platform (None: this one's default); args as of `load`.

    Raises:
      UserError: an unknown name, a page size that is no power of two, or one without a paged cache.
    """
    if cache not in CACHES:
        raise UserError(f"--cache={cache} is not known: use one of {', '.join(CACHES)}")
    if page_size is not None and cache != "paged":
        raise UserError(f"--page_size={page_size} needs a paged KV cache: add --cache=paged")
    where = platform() if where is None else where
    kv_dtype = "bf16" if (kv_dtype, kernels) == ("auto", "native") else kv_dtype
    dtype, more = resolve_dtype("kv", kv_dtype, where, KV_DTYPES), {"kernels": kernels}
    if kernels == "pallas" and dtype not in DTYPES.values():
        raise UserError(f"--kernels=pallas reads a KV cache of f32 or bf16, not {dtype.name}: use --kv=bf16, or --kernels=auto")
    if kv_group is not None:
        if dtype in DTYPES.values():
            raise UserError(f"--kv_group={kv_group} is of a quantized KV cache: add --kv=int8, int4 or fp8")
        more["group"] = kv_group
    if cache == "paged":
        more["page_size"] = PAGE_SIZE if page_size is None else page_size
    return kv.Format.for_platform(where, dtype, **more)
