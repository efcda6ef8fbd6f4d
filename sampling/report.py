"""A run's numbers, for people and for programs."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

import kv
from model import abstract_params, decode_step, prefill, tree_names
from sampling.answer import Completion
from sampling.batch import Batch
from sampling.language_model import LanguageModel
from sharding import collectives, collectives_table, format_mesh, placed_arrays, placement_table


def as_json(lm: LanguageModel, completion: Completion) -> dict[str, Any]:
    """The object that `--json` prints; times in seconds, null where there was nothing to measure."""
    latencies = completion.timing.inter_token_latencies
    out = {
        "model": lm.name,
        "text": completion.text,
        "tokens": list(completion.tokens),
        "prompt_tokens": completion.prompt_tokens,
        "finish_reason": completion.finish_reason,
        "ttft_s": completion.timing.time_to_first_token,
        "itl_s": {
            "mean": float(np.mean(latencies)) if latencies else None,
            "p50": _percentile(latencies, 50),
            "p99": _percentile(latencies, 99),
        },
        "prefill_tokens_per_s": prefill_rate([completion]),
        "decode_tokens_per_s": decode_rate([completion]),
        "compile_s": completion.timing.compile_seconds,
        "compiles": completion.timing.compiles,
    }
    if completion.logprobs is not None:
        out["logprobs"] = [{"token": t.token, "logprob": t.logprob, "top": [list(pair) for pair in t.top]} for t in completion.logprobs]
    return out


def summary(lm: LanguageModel, completions: Sequence[Completion]) -> str:
    """One line: what was read and written, how fast, and at what memory traffic."""
    latencies = [seconds for completion in completions for seconds in completion.timing.inter_token_latencies]
    firsts = [completion.timing.time_to_first_token for completion in completions]
    prompt = sum(completion.prompt_tokens for completion in completions)
    held = sum(completion.cached_tokens for completion in completions)
    parts = [
        f"prompt {prompt} tokens" + (f" ({held} held)" if held else ""),
        f"TTFT {np.median(firsts) * 1e3:.0f} ms",
        f"prefill {prefill_rate(completions) or 0:.0f} tok/s",
        f"new {sum(len(completion.tokens) for completion in completions)} tokens",
    ]
    if latencies:
        read = bytes_per_token(lm, completions)
        rate = decode_rate(completions)
        parts += [
            f"ITL p50 {_percentile(latencies, 50) * 1e3:.1f} ms p99 {_percentile(latencies, 99) * 1e3:.1f} ms",
            f"decode {rate:.1f} tok/s" + (" per row" if len(completions) > 1 else ""),
            f"{read / 1e6:.0f} MB/token, {read * rate / 1e9:.1f} GB/s",
        ]
    compiled = sum(completion.timing.compile_seconds for completion in completions)
    programs = sum(completion.timing.compiles for completion in completions)
    parts.append(f"load {lm.load_seconds:.1f} s, compile {compiled:.1f} s ({programs} programs)")
    return " | ".join(parts)


def bytes_per_token(lm: LanguageModel, completions: Sequence[Completion]) -> float:
    """Bytes that one decode step of one row must read: the weights, and the keys and values held, averaged over the answers' tokens.

    In a batch the weights are read once for all rows, so a row's share is less.
    """
    steps = [(completion.prompt_tokens, len(completion.tokens)) for completion in completions]
    tokens = sum(new for _, new in steps)
    held = sum(new * (prompt + new / 2) for prompt, new in steps) / max(tokens, 1)
    return lm.weight_bytes + kv.held_bytes(lm.config, held, lm.kv_format)


def cache_table(batch: Batch) -> str:
    """What `--stats` prints: the KV cache's bytes, and of a paged one its pools and prefix hits."""
    lm = batch.lm
    half = kv.bytes_per_token(lm.config, dataclasses.replace(lm.kv_format, dtype=np.dtype(jnp.bfloat16)))
    own = kv.bytes_per_token(lm.config, lm.kv_format)
    lines = [
        kv.report(batch.cache),
        f"KV cache {lm.kv_format.dtype.name}: {own} bytes per token ({own / half:.3f} of bf16's {half}), "
        f"{batch.size} row{'s' * (batch.size > 1)} of {batch.capacity} tokens",
    ]
    if batch.pager is not None:
        for pool in batch.pager.pools():
            kind = "all tokens" if pool.window is None else f"window {pool.window}"
            use = f"{pool.used} of {pool.total} used, {pool.shared} shared, {pool.cached} cached"
            lines.append(f"pages of {batch.pager.page_size} tokens, {kind}: {use}")
        counters = batch.pager.counters()
        if batch.prefix_cache:
            lines.append(
                f"prefix cache: {counters.lookups} lookups, {counters.hit_tokens} tokens hit, {counters.missed_tokens} missed, "
                f"{counters.inserted_pages} pages inserted, {counters.evicted_pages} evicted"
            )
    return "\n".join(lines)


def sharding_tables(lm: LanguageModel, batch_size: int = 1, capacity: int | None = None) -> str:
    """What `--explain_sharding` prints: where each weight and each array of the KV cache lies, and what a prefill (of one row, 32 tokens)
    and a decode step of a batch communicate. Compiles both.

    Args:
      lm: over a mesh.
      batch_size: rows of the cache.
      capacity: tokens of a row; None: 512.
    """
    placement, config = lm.placement, lm.config
    batch = Batch(lm, batch_size, min(512, config.context_length) if capacity is None else capacity)
    names = tree_names(lm.params, abstract_params(config, layer_loop=lm.model.layer_loop))
    weights = placed_arrays(lm.params, names, placement)
    kept = placed_arrays(batch.cache.stores, batch.cache.logical_axes().stores, placement)
    one, row = np.ones((1,), np.int32), np.zeros((1,), np.int32)
    programs = {
        "prefill of 32 tokens": prefill.lower(lm.model, lm.params, batch.cache, np.zeros((1, 32), np.int32), one, row, row),
        f"decode step of {batch.size} row{'s' * (batch.size > 1)}": decode_step.lower(
            lm.model, lm.params, batch.cache, np.zeros((batch.size,), np.int32)
        ),
    }
    parts = [
        f"mesh {format_mesh(placement.mesh.shape)} on {placement.mesh.size} {placement.platform} devices; bytes per device and replicated:"
    ]
    parts += [placement_table(weights, placement), placement_table(kept, placement)]
    if (copies := max(getattr(layer.attention, "kv_copies", 1) for layer in config.layers)) > 1:
        parts.append(f"KV heads stand {copies} times, as there are fewer of them than shards of heads")
    if config.vocab_padding:
        parts.append(f"{config.vocab_padding} rows of zeros pad the vocabulary; they are never sampled")
    for name, lowered in programs.items():
        parts.append(f"{name}:\n{collectives_table(collectives(lowered.compile().as_text()))}")
    return "\n".join(parts)


def prefill_rate(completions: Sequence[Completion]) -> float | None:
    """Prompt tokens that were read per second of time to first token."""
    seconds = sum(completion.timing.time_to_first_token for completion in completions)
    return sum(completion.prompt_tokens - completion.cached_tokens for completion in completions) / seconds if seconds else None


def decode_rate(completions: Sequence[Completion]) -> float | None:
    """Tokens per second of a row, after its first."""
    latencies = [seconds for completion in completions for seconds in completion.timing.inter_token_latencies]
    return len(latencies) / sum(latencies) if sum(latencies) else None


def _percentile(values: Sequence[float], rank: float) -> float | None:
    return float(np.percentile(values, rank)) if len(values) else None
