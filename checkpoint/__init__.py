"""Floor 4: weights files: which one a name stands for, where it is fetched from, and its contents as a parameter tree."""

from checkpoint.gguf_file import GGUFFile, open_gguf
from checkpoint.load import Checkpoint, load
from checkpoint.registry import Preset, presets, resolve

__all__ = ["Checkpoint", "GGUFFile", "Preset", "load", "open_gguf", "presets", "resolve"]
