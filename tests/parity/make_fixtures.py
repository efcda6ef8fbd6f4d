"""Makes the fixtures anew with transformers, and checks that each can tell a right model from a wrong one:

    python -m tests.parity.make_fixtures [FAMILY ...]

from the checkout's root, with the extra `reference` installed. For each family this

- lets transformers write the model once, for its config and for the names and shapes of its tensors, and fills those tensors from the seed;
- has transformers read the folder that the tests will write, and records its answers;
- takes away one feature at a time: the logits must move by at least what `Ablation.felt` says, relative to the largest;
- jiggles all weights by 1e-6: the logits must stay within STEADY of it, or the model amplifies rounding;
- watches every choice of the k best: the last one taken must be ahead of the first one left by MARGIN, or rounding decides;
- has transformers read the config in its older spelling: it must mean the same.
"""

import argparse
import dataclasses
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
import transformers
from torch.overrides import TorchFunctionMode

from tests.parity import fixture as fixtures
from tests.parity import reference
from tests.parity.families import FAMILIES, Family, fill
from tests.parity.fixture import Fixture

LENGTHS = np.asarray([24, 17, 9], np.int32)
STEADY, MARGIN = 5e-5, 1e-4
LIMIT = 60_000  # bytes of a fixture


def main() -> None:
    names = [family.name for family in FAMILIES]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"one of {', '.join(names)}; all if none is given")
    wanted = parser.parse_args().families or names
    if unknown := set(wanted) - set(names):
        parser.error(f"{min(unknown)!r} is no family: use {', '.join(names)}")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    weak = [line for family in FAMILIES if family.name in wanted for line in make(family)]
    if weak:
        sys.exit("not good enough:\n" + "\n".join(weak))


def make(family: Family) -> list[str]:
    """Writes one fixture. Returns what is wrong with it."""
    config, tensors = described(family)
    tokens = np.random.default_rng(family.seed).integers(0, config["vocab_size"], (len(LENGTHS), LENGTHS.max()), np.int32)
    blank = np.zeros(0, np.float32)
    made = Fixture(
        name=family.name,
        config=config,
        seed=family.seed,
        sharded=family.sharded,
        tensors=tensors,
        crc32=fixtures.checksum(fixtures.tensors(family.seed, tensors)),
        tokens=tokens,
        lengths=LENGTHS,
        logits=blank,
        states=blank,
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = fixtures.write_folder(made, Path(scratch) / "new")
        with Margins() as margins:
            logits, states = reference.answers(reference.load(folder), tokens, LENGTHS)
        made = dataclasses.replace(made, logits=logits, states=states)
        size = save(made)
        wrong = [f"{size} bytes, more than {LIMIT}"] if size > LIMIT else []
        wrong += judge(family, made, folder, margins.smallest)
        if not same_meaning(folder, fixtures.write_folder(made, Path(scratch) / "old", hub=True)):
            wrong.append("the older spelling of its config means something else")
    return [f"{family.name}: {what}" for what in wrong]


def described(family: Family) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config and, by name, the tensors that transformers writes."""
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**family.config))
    with tempfile.TemporaryDirectory() as scratch:
        model.save_pretrained(scratch)
        config = json.loads((Path(scratch) / "config.json").read_text(encoding="utf-8"))
        with safetensors.safe_open(Path(scratch) / "model.safetensors", "np") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in sorted(file.keys())}
    config["dtype"] = {"F32": "float32", "BF16": "bfloat16"}[family.tensor_dtype]
    if family.packed:
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": None}
        shapes = packed(shapes)
    tensors = {}
    for name, shape in shapes.items():
        dtype = "U8" if name.endswith(("_blocks", "_scales")) else family.tensor_dtype
        tensors[name] = {"shape": shape, "dtype": dtype, "fill": fill(name, shape, family)}
    return config, tensors


def packed(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """MXFP4: an expert weight [E, in, out] becomes blocks [E, out, in / 32, 16] of two values a byte, and scales [E, out, in / 32]."""
    out = {}
    for name, shape in shapes.items():
        if re.search(r"experts\.(gate_up|down)_proj$", name):
            experts, width, rows = shape
            out[f"{name}_blocks"] = (experts, rows, width // 32, 16)
            out[f"{name}_scales"] = (experts, rows, width // 32)
        else:
            out[name] = shape
    return out


class Margins(TorchFunctionMode):
    """Watches every top-k: by how much the last value taken is ahead of the first one left."""

    def __init__(self) -> None:
        super().__init__()
        self.smallest = np.inf

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.topk, torch.Tensor.topk):
            values = args[0].detach().numpy()
            k = kwargs["k"] if "k" in kwargs else args[1]
            if k < values.shape[-1]:
                ordered = -np.sort(-values, axis=-1)
                last, first = ordered[..., k - 1], ordered[..., k]
                gaps = (last - first)[first > -1e30]  # what is masked is -inf or the least float
                self.smallest = min(self.smallest, float(gaps.min(initial=np.inf)))
        return function(*args, **(kwargs or {}))


def judge(family: Family, made: Fixture, folder: Path, margin: float) -> list[str]:
    """Prints what each feature is worth. Returns what is wrong."""
    largest = float(np.abs(made.logits).max())

    def moved(model: torch.nn.Module) -> float:
        return float(np.abs(reference.answers(model, made.tokens, made.lengths)[0] - made.logits).max()) / largest

    def jiggled() -> torch.nn.Module:
        model = reference.load(folder)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for value in model.parameters():
                value.mul_(1 + 1e-6 * torch.randn(value.shape, generator=generator))
        return model

    noise = moved(jiggled())
    print(f"{family.name}: largest logit {largest:.3g}, moved by jiggling {noise:.1e}, smallest margin of a choice {margin:.1e}")
    wrong = [f"jiggling the weights by 1e-6 moves it by {noise:.1e}, more than {STEADY}"] if noise > STEADY else []
    if margin < MARGIN:
        wrong.append(f"a choice is decided by {margin:.1e}, less than {MARGIN}: try another seed")
    for ablation in family.ablations:
        change = moved(reference.load(folder, ablation))
        print(f"    {change:9.2%}  {ablation.name}")
        if not change >= ablation.felt:
            wrong.append(f"the absence of {ablation.name!r} moves it by {change:.1e} only")
    return wrong


def same_meaning(new: Path, old: Path) -> bool:
    """Whether transformers reads the same config in both folders."""
    spelling = {"_name_or_path", "torch_dtype", "transformers_version", "sliding_window_pattern", "_sliding_window_pattern", "type"}
    spelling |= {"rope_theta", "rope_scaling", "partial_rotary_factor", "rope_local_base_freq"}

    def meaning(value: Any) -> Any:
        return {k: meaning(v) for k, v in value.items() if k not in spelling or k == "rope_theta"} if isinstance(value, dict) else value

    read = [meaning(transformers.AutoConfig.from_pretrained(folder).to_dict()) for folder in (new, old)]
    for config in read:
        config.pop("rope_theta", None)
    for key in sorted(read[0].keys() | read[1].keys()):
        if read[0].get(key) != read[1].get(key):
            print(f"    {key}: {read[0].get(key)} in the newer spelling, {read[1].get(key)} in the older")
    return read[0] == read[1]


def save(made: Fixture) -> int:
    """Writes a fixture's files. Returns their bytes."""
    folder = fixtures.FIXTURES / made.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(made.config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    lines = ",\n".join(f'    "{name}": {json.dumps(tensor)}' for name, tensor in made.tensors.items())
    head = "".join(f'  "{key}": {json.dumps(getattr(made, key))},\n' for key in ("seed", "sharded", "crc32"))
    (folder / "tensors.json").write_text(f'{{\n{head}  "tensors": {{\n{lines}\n  }}\n}}\n', encoding="utf-8")
    np.savez_compressed(folder / "reference.npz", tokens=made.tokens, lengths=made.lengths, logits=made.logits, states=made.states)
    return sum(file.stat().st_size for file in folder.iterdir())


if __name__ == "__main__":
    main()
