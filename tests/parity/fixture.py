"""A fixture on disk: a model's config, how each of its tensors is filled, and what transformers answers. Read without transformers.

fixtures/FAMILY/config.json     as `save_pretrained` writes it
fixtures/FAMILY/tensors.json    name -> shape, dtype and fill, for all tensors that `save_pretrained` writes
fixtures/FAMILY/reference.npz   tokens int32 [B, T], lengths int32 [B], logits f32 [B, T, V] (0 past a row's length),
                                states f32 [L, 8, D]: what each layer makes of row 0's first tokens

`python -m tests.parity.fixture FAMILY FOLDER` writes the model as a Hugging Face folder.
"""

import copy
import dataclasses
import json
import sys
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy

FIXTURES = Path(__file__).parent / "fixtures"
SHARDS = 3
DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "U8": np.dtype(np.uint8)}


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Fixture:
    """What the files hold, the arrays of `reference.npz` by name."""

    name: str
    config: Mapping[str, Any]
    seed: int
    sharded: bool
    tensors: Mapping[str, Mapping[str, Any]]  # name -> {"shape", "dtype", "fill"}
    crc32: int  # of all weights: another generator of random numbers is noticed
    tokens: np.ndarray
    lengths: np.ndarray
    logits: np.ndarray
    states: np.ndarray


def read(name: str) -> Fixture:
    """The fixture of this name."""
    folder = FIXTURES / name
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    described = json.loads((folder / "tensors.json").read_text(encoding="utf-8"))
    with np.load(folder / "reference.npz") as reference:
        return Fixture(name=name, config=config, **described, **reference)


def changed(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of a config with other values at some keys; `outer.inner` is a key inside another's object."""
    config = copy.deepcopy(dict(config))
    for path, value in changes.items():
        *parents, key = path.split(".")
        place = config
        for parent in parents:
            place = place[parent]
        place[key] = value
    return config


def tensor(seed: int, name: str, shape: tuple[int, ...], dtype: str, fill: Mapping[str, Any]) -> np.ndarray:
    """One tensor's values: they depend on the arguments alone, not on the other tensors."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if "integers" in fill:
        low, high = fill["integers"]
        return rng.integers(low, high + 1, shape).astype(DTYPES[dtype])
    mean, deviation = fill["normal"]
    return (mean + deviation * rng.standard_normal(shape)).astype(np.float32).astype(DTYPES[dtype])


def tensors(seed: int, described: Mapping[str, Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """All tensors of a model, by name."""
    return {name: tensor(seed, name, tuple(d["shape"]), d["dtype"], d["fill"]) for name, d in described.items()}


def checksum(weights: Mapping[str, np.ndarray]) -> int:
    """CRC-32 over all values, in the order of the names."""
    crc = 0
    for name in sorted(weights):
        crc = zlib.crc32(weights[name].tobytes(), crc)
    return crc


def write_folder(fixture: Fixture, path: Path, hub: bool = False) -> Path:
    """Writes a Hugging Face folder: `config.json` and `model.safetensors`, or three files of weights and their index.

    Args:
      fixture: a fixture.
      path: of the folder, which is made.
      hub: spell the config as files older than transformers 5 do.

    Returns:
      The path.
    """
    weights = tensors(fixture.seed, fixture.tensors)
    if checksum(weights) != fixture.crc32:
        raise AssertionError(f"fixture {fixture.name}: numpy {np.__version__} draws other weights than the reference was made with")
    path.mkdir(parents=True, exist_ok=True)
    config = hub_config(fixture.config) if hub else fixture.config
    (path / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    if not fixture.sharded:
        safetensors.numpy.save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        return path
    places = {}
    for number, part in enumerate(np.array_split(sorted(weights), SHARDS), start=1):
        file = f"model-{number:05}-of-{SHARDS:05}.safetensors"
        places |= {str(name): file for name in part}
        safetensors.numpy.save_file({str(name): weights[name] for name in part}, path / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": sum(value.nbytes for value in weights.values())}, "weight_map": places}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    return path


def hub_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same config as most files on the Hub spell it: `rope_theta` and `rope_scaling`, and no key that can be derived."""
    old = copy.deepcopy(dict(config))
    kind = old["model_type"]
    old["torch_dtype"] = old.pop("dtype")
    rope = old.pop("rope_parameters")
    if kind == "gemma3_text":
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        old["sliding_window_pattern"] = old.pop("_sliding_window_pattern")
        rope = rope["full_attention"]
    old["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        old["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    if kind in ("phi3", "deepseek_v3", "deepseek_v32"):
        rope["type"] = rope.pop("rope_type")
    old["rope_scaling"] = None if "default" in rope.values() else rope
    if kind == "phi3":
        del rope["original_max_position_embeddings"]  # stands at top level
    if kind == "qwen3_moe":
        old["num_experts"] = old.pop("num_local_experts")
    if kind.startswith("gemma"):
        del old["tie_word_embeddings"]
    if kind.startswith("deepseek"):
        del old["head_dim"], old["qk_head_dim"]
    if kind == "llama" and old["head_dim"] == old["hidden_size"] // old["num_attention_heads"]:
        del old["head_dim"]
    derived = ("layer_types", "mlp_layer_types", "swiglu_alpha", "no_rope_layers", "qkv_bias", "transformers_version")
    return {key: value for key, value in old.items() if key not in derived}


if __name__ == "__main__":
    write_folder(read(sys.argv[1]), Path(sys.argv[2]))
