"""What packed weights cost and give: bytes, quality and speed of every format, beside bf16's, in one run.

    python benchmarks/quantization.py --out=quantization.json
    python benchmarks/quantization.py --task=memory

Native kernels round activations; `int8/float` does not.
Formats take turns, round by round, so that whatever else the machine does meets all of them; speeds are medians.
"""

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from absl import app, flags, logging

sys.path.insert(0, str(Path(__file__).parents[1]))

TASK = flags.DEFINE_enum("task", "all", ["all", "memory"], "memory: only the table of bytes for a model of 7B parameters.")
MODELS = flags.DEFINE_list("models", ["smollm2-135m-instruct", "gemma3-270m"], "Presets or paths.")
FORMATS = flags.DEFINE_list(
    "formats",
    ["f32", "bf16", "native", "native/float", "int8", "int8/float", "w8a8", "int4", "int4/float", "fp8"],
    "Values of --weights, and after a slash of --activations; bf16 is needed.",
)
KERNELS = flags.DEFINE_enum("kernels", "auto", ["auto", "xla", "native"], "As of run_inference.py.")
FOLDERS = flags.DEFINE_multi_string("folder", [], "MODEL=NAME=PATH: a folder that --task=quantize wrote of MODEL, to measure as well.")
TOKENS = flags.DEFINE_integer("tokens", 8192, "Tokens of the evaluation text to predict; 0 leaves quality out.")
PROMPT = flags.DEFINE_integer("prompt", 256, "Tokens per prefill.")
ROUNDS = flags.DEFINE_integer("rounds", 7, "Turns of each format.")
STEPS = flags.DEFINE_integer("steps", 16, "Decode steps per turn.")
OUT = flags.DEFINE_string("out", None, "Where to write the numbers as JSON.")


def main(_: list[str]) -> None:
    logging.set_verbosity(logging.ERROR)  # Orbax tells what it reads
    found: dict[str, Any] = {"memory": memory()}
    if TASK.value == "all":
        from benchmarks import machine

        found |= {"machine": machine.describe(), "models": {name: measure(name) for name in MODELS.value}}
    if OUT.value is not None:
        Path(OUT.value).write_text(json.dumps(found, indent=1), encoding="utf-8")


def memory() -> dict[str, Any]:
    """The rule of thumb for 7B parameters, 4 / 2 / 1 / 0.5 bytes each, and what scales add to it."""
    import jax.numpy as jnp

    from checkpoint import Storage, weight_bytes
    from model import AttentionConfig, LayerConfig, MLPConfig, ModelConfig, Rope
    from quantization import SCHEMES, Scheme
    from sampling.formats import NAMED

    attention = AttentionConfig(num_heads=32, num_kv_heads=32, head_dim=128, rope=Rope(theta=10000.0, dim=128))
    layer = LayerConfig(attention, MLPConfig(hidden=11008))
    llama2 = ModelConfig(32000, 4096, (layer,) * 32, norm_eps=1e-5, tie_embeddings=False, context_length=4096)
    f32, bf16 = jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16)
    int4 = Scheme("uint4", group=128)
    formats = {
        "f32": (f32, f32),
        "bf16": (bf16, bf16),
        "int8": (bf16, NAMED["int8"]),
        "w8a8": (bf16, SCHEMES["w8a8"]),
        "fp8": (bf16, SCHEMES["fp8"]),
    }
    formats |= {"int4 g128": (bf16, int4), "int4 g64 asymmetric": (bf16, SCHEMES["int4"]), "mxfp4": (bf16, SCHEMES["mxfp4"])}
    print("| Llama-2-7B | GB | of that scales | bits per weight |\n|---|---|---|---|")
    rows = {}
    for name, (dtype, how) in formats.items():
        parts = weight_bytes(llama2, Storage(dtype, how, how))
        total = parts["layers"] + parts["head"] + parts["other"]
        count = sum(weight_bytes(llama2, Storage(f32, f32, f32)).values()) / 4
        rows[name] = parts | {"total": total, "bits": total * 8 / count}
        print(f"| {name} | {total / 1e9:.2f} | {parts['scales'] / 1e9:.3f} | {rows[name]['bits']:.2f} |", flush=True)
    return rows


def measure(name: str) -> dict[str, Any]:
    import sampling

    compute = {"compute": "f32", "kv_dtype": "f32", "kernels": KERNELS.value}
    models = {}
    for each in FORMATS.value:
        weights, _, activations = each.partition("/")
        changes = {"compute": "bf16"} if weights == "bf16" else {}
        models[each] = sampling.load(name, weights=weights, activations=activations or "auto", **compute | changes)
    for text in FOLDERS.value:
        model, label, path = text.split("=", 2)
        if model == name:
            models[label] = sampling.load(path, **compute)
    rows = {label: sizes(lm) for label, lm in models.items()}
    check_bytes(name, models, rows)
    for label, speed in speeds(models).items():
        rows[label] |= speed
    if TOKENS.value:
        from runtime.corpus import corpus

        reference = "f32" if "f32" in models else "bf16"
        candidates = {label: (lm, lm.kv_format) for label, lm in sorted(models.items(), key=lambda item: item[0] != reference)}
        quality = sampling.measure_quality(candidates, corpus("evaluation"), max_tokens=TOKENS.value, stride=1024)
        for label, part in quality.as_json()["candidates"].items():
            rows[label] |= part
    show(name, rows)
    return rows


def sizes(lm: Any) -> dict[str, Any]:
    """Bytes of all weights, and of those that multiply in the layers."""
    import jax

    layers = {key: value for key, value in lm.params.items() if key.startswith("layer_")}
    linear = sum(
        leaf.nbytes
        for path, leaf in jax.tree_util.tree_leaves_with_path(layers)
        if any(key in jax.tree_util.keystr(path) for key in ("wqkv", "'wo'", "w_gate_up", "w_down"))
    )
    return {"bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(lm.params)), "linear_bytes": linear}


def check_bytes(name: str, models: dict[str, Any], rows: dict[str, Any]) -> None:
    """Puts beside the bytes those of the formula: of native weights what the file takes, with a byte for each of its 6-bit scales."""
    import checkpoint
    from runtime import platform
    from sampling.formats import weight_formats

    for label, lm in models.items():
        if label.startswith("native"):
            path = checkpoint.resolve(name)
            if path.suffix != ".gguf":
                continue
            file = checkpoint.open_gguf(path)
            formula = sum(info.num_bytes for info in file.tensors.values())
            formula += sum(4 * info.num_bytes // 144 for info in file.tensors.values() if info.type.name == "Q4_K")
        elif label in FORMATS.value:
            parts = checkpoint.weight_bytes(lm.config, checkpoint.Storage(*weight_formats(label.partition("/")[0], where=platform())))
            formula = parts["layers"] + parts["head"] + parts["other"]
        else:
            continue
        rows[label]["formula_bytes"] = formula


def speeds(models: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Prefill and decode of one row, in turns."""
    import numpy as np

    from benchmarks.decoding import Decoding
    from model import prefill

    runs = {label: Decoding(lm, lm.kv_format, 1, PROMPT.value + 4 * STEPS.value, STEPS.value) for label, lm in models.items()}
    tokens = np.arange(100, 100 + PROMPT.value, dtype=np.int32)[None]
    count, zero = np.asarray([PROMPT.value], np.int32), np.zeros((1,), np.int32)

    def read(run: Any) -> float:
        began = time.perf_counter()
        logits, run.cache = prefill(run.lm.model, run.lm.params, run.cache, tokens, count, None, zero)
        logits.block_until_ready()
        return time.perf_counter() - began

    times: dict[str, tuple[list[float], list[float]]] = {label: ([], []) for label in runs}
    for turn in range(ROUNDS.value + 1):
        for label, run in runs.items():
            took = read(run), run(PROMPT.value)
            if turn:  # the first compiles
                for kept, seconds in zip(times[label], took, strict=True):
                    kept.append(seconds)
    return {
        label: {"prefill_tokens_per_s": PROMPT.value / statistics.median(read), "decode_tokens_per_s": 1 / statistics.median(step)}
        for label, (read, step) in times.items()
    }


def show(name: str, rows: dict[str, Any]) -> None:
    base, reference = rows["bf16"], rows.get("f32", rows["bf16"])
    print(f"\n{name}: each beside bf16 (perplexity beside {'f32' if 'f32' in rows else 'bf16'}'s)\n")
    heads = ["weights", "MB", "of bf16", "linear", "formula", "perplexity", "ratio", "KL", "same top"]
    heads += ["prefill tok/s", "of bf16", "decode tok/s", "of bf16"]
    print(f"| {' | '.join(heads)} |\n" + "|---" * len(heads) + "|")
    for label, row in rows.items():
        cells = [
            label,
            f"{row['bytes'] / 1e6:.1f}",
            f"{row['bytes'] / base['bytes']:.3f}",
            f"{row['linear_bytes'] / base['linear_bytes']:.3f}",
        ]
        cells.append(f"{row['bytes'] / row['formula_bytes'] - 1:+.3%}" if "formula_bytes" in row else "-")
        if "perplexity" in row:
            against = row.get("against", {})
            cells += [f"{row['perplexity']:.3f}", f"{row['perplexity'] / reference['perplexity']:.4f}"]
            cells += [f"{against['mean_kl']:.4f}", f"{against['agreement']:.2%}"] if against else ["-", "-"]
        else:
            cells += ["-"] * 4
        for key in ("prefill_tokens_per_s", "decode_tokens_per_s"):
            cells += [f"{row[key]:.1f}", f"{row[key] / base[key]:.2f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    app.run(main)
