"""Whether two machines hold the same model, without reading gigabytes."""

import glob
import hashlib
import os
from pathlib import Path

from checkpoint.gguf_file import PART
from runtime import UserError

HEAD = 1 << 20  # bytes: a GGUF file's metadata with its tokenizer, or a safetensors header, begin here
DESCRIBING = frozenset({".json", ".jinja", ".model", ".txt"})  # manifests, configs, tokenizers: small, and they decide what a run does


def fingerprint(path: str | os.PathLike[str]) -> dict[str, list[int | str]]:
    """Of each file of a model: its size and the SHA-256 of its head (of all of it, where it describes the weights).

    Weights that differ in nothing but numbers behind the head are taken for the same; other sizes, tensors or configs are not.

    Args:
      path: a .gguf file (any part of a split one stands for all), or a folder, whose hidden files and folders do not count.

    Returns:
      file's path relative to the folder (or the file's name) -> [bytes, hash], in the order of names.

    Raises:
      UserError: it can't be read.
    """
    root = Path(os.path.expanduser(path))
    try:
        if not root.is_dir():
            return {file.name: _of_file(file) for file in _parts(root)}
        found = {}
        for folder, folders, names in os.walk(root, onerror=_raise):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for file in (Path(folder) / name for name in names if not name.startswith(".")):
                found[file.relative_to(root).as_posix()] = _of_file(file)
    except OSError as error:
        raise UserError(f"{error.filename or root} can't be read: {error.strerror or error}; check the path and its permissions") from error
    return dict(sorted(found.items()))


def _parts(file: Path) -> list[Path]:
    """All files of a split model, or the one."""
    part = PART.fullmatch(file.name)
    if part is None:
        return [file]
    pattern = f"{glob.escape(part['stem'])}-[0-9]*-of-{part['count']}{file.suffix}"
    return sorted(file.parent.glob(pattern))


def _of_file(file: Path) -> list[int | str]:
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        data = stream.read() if file.suffix in DESCRIBING else stream.read(HEAD)
    return [size, hashlib.sha256(data).hexdigest()]


def _raise(error: OSError) -> None:
    raise error
