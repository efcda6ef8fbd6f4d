"""Parts of weights files, mapped into memory, and what a file that is no weights file looks like."""

import os

import numpy as np

# What people pass instead of a weights file, by its first bytes.
LOOKS_LIKE = {
    b"PK\x03\x04": "a zip archive (a wheel or a PyTorch checkpoint)",
    b"\x1f\x8b": "a gzip archive",
    b"version https://git-lfs": "a Git LFS pointer, not the file it points to",
    b"<": "a web page",
    b"GGUF": "a GGUF file",
    b"lmgg": "a GGML file from before GGUF",
    b"fmgg": "a GGML file from before GGUF",
    b"tjgg": "a GGML file from before GGUF",
}


def map_bytes(path: str | os.PathLike[str], offset: int = 0, count: int | None = None) -> np.ndarray:
    """`count` bytes of a file from `offset` on (all that follow, if None): uint8, read-only.

    Each call is a mapping of its own: the pages that were read through it leave the process when the array does, so that reading a
    file tensor by tensor holds one tensor.

    Raises:
        OSError: the file can't be opened or mapped.
        ValueError: the file ends before.
    """
    if count == 0:
        return np.frombuffer(b"", np.uint8)  # an empty range can't be mapped
    return np.asarray(np.memmap(path, dtype=np.uint8, mode="r", offset=offset, shape=None if count is None else (count,)))


def looks_like(head: bytes) -> str:
    """A few words for a file that starts with `head`."""
    for start, name in LOOKS_LIKE.items():
        if head.startswith(start):
            return name
    if head[8:9] == b"{":
        return "a safetensors file"
    first_line = (head.decode("utf-8", errors="replace").rstrip("\ufffd").splitlines() or [""])[0][:40]  # the cut may halve a character
    if first_line.strip() and first_line.isprintable() and "\ufffd" not in first_line:
        return f"a text file that starts with {first_line!r}"
    return f"other data, starting with bytes {head[:8].hex(' ')}"


def strerror(error: OSError | ValueError) -> str:
    """What went wrong, without number and file name."""
    return getattr(error, "strerror", None) or str(error)


def part_name(stem: str, number: int, count: int, suffix: str) -> str:
    """The file name of part `number` (from 1 on) of `count`, as converters of both formats write it: `NAME-00001-of-00003.gguf`."""
    return f"{stem}-{number:05d}-of-{count:05d}{suffix}"


def listed(names: list[str]) -> str:
    """The first of the names and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
