"""Floor 5: weights files: which one a name stands for, where it is fetched from, and its contents as a parameter tree."""

from checkpoint.download import Progress
from checkpoint.fingerprint import fingerprint
from checkpoint.gguf_file import GGUFFile, open_gguf
from checkpoint.load import Checkpoint, load
from checkpoint.placed import How, Storage, weight_bytes
from checkpoint.registry import Preset, presets, resolve
from checkpoint.safetensors_folder import SafetensorsFolder, open_folder
from checkpoint.source import Source

__all__ = [
    "Checkpoint",
    "GGUFFile",
    "How",
    "Preset",
    "Progress",
    "SafetensorsFolder",
    "Source",
    "Storage",
    "fingerprint",
    "load",
    "open_folder",
    "open_gguf",
    "presets",
    "resolve",
    "weight_bytes",
]
