"""Files that are written whole or not at all."""

import contextlib
import os
import pathlib
import stat
import tempfile
from collections.abc import Iterator
from typing import TextIO

from runtime.errors import UserError


def check_writable(path: str, flag: str) -> None:
    """Tries whether `replacing(path)` will work, and leaves no trace.

    Raises:
      UserError: a folder, a device, no permission, no such folder, a name that is too long, a full disk.
    """
    target = pathlib.Path(path).resolve()
    reason = None
    try:
        if target.exists() and not target.is_file():
            reason = "it is a folder" if target.is_dir() else "it is no regular file"
        elif target.exists() and not os.access(target, os.W_OK):
            reason = "no write permission"
        elif not target.parent.is_dir():
            reason = f"{target.parent} is no folder" if target.parent.exists() else f"{target.parent} does not exist"
        else:
            with _temporary_beside(target):  # tells more than permission bits: a read-only disk, a full one, root's exceptions
                pass
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
    if reason is not None:
        raise UserError(f"--{flag}={path} can't be written ({reason}): give a file in a folder that you may write to")


@contextlib.contextmanager
def replacing(path: str) -> Iterator[TextIO]:
    """A text file that takes the place of `path` (of what it points to, for a symbolic link) when it is complete, with its permissions.

    Raises:
      UserError: it can't be written; what was there before is untouched.
    """
    target = pathlib.Path(path).resolve()
    try:
        with _temporary_beside(target) as (file, name):
            yield file
            file.flush()
            if target.exists():
                os.chmod(name, stat.S_IMODE(target.stat().st_mode))
            os.replace(name, target)
    except OSError as error:
        raise UserError(f"{path} can't be written: {error.strerror or error}; it is as it was before") from error


@contextlib.contextmanager
def _temporary_beside(target: pathlib.Path) -> Iterator[tuple[TextIO, str]]:
    """A new file in the same folder, with the permissions that new files get; gone at the end unless it was moved away."""
    with contextlib.suppress(FileNotFoundError):
        os.stat(target)  # a name that is too long is found here and not when all is done
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=".diptych-", suffix=".partial")
    try:
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        with open(handle, "w", encoding="utf-8") as file:
            yield file, name
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
