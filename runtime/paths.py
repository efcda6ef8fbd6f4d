"""Where Diptych keeps files between runs."""

import os
from pathlib import Path

from runtime.errors import UserError


def cache_dir() -> Path:
    """The folder of downloaded models and compiled programs; it need not exist yet.

    `DIPTYCH_CACHE` if set, else `diptych` in `XDG_CACHE_HOME`, else `~/.cache/diptych`. As the XDG base directory specification
    asks, a relative `XDG_CACHE_HOME` is ignored.

    Raises:
        UserError: neither variable is set and the home folder is unknown.
    """
    try:
        if given := os.environ.get("DIPTYCH_CACHE"):
            return Path(given).expanduser().absolute()
        xdg = os.environ.get("XDG_CACHE_HOME", "")
        return (Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache") / "diptych"
    except RuntimeError as error:
        raise UserError("the home folder is unknown, so there is no place for the cache: set DIPTYCH_CACHE to a folder") from error
