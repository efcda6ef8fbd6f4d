"""The committed text that perplexities are measured on and calibrations read: `configs/text/`."""

import hashlib
import importlib.resources

from runtime.errors import UserError

HALVES = ("calibration", "evaluation")  # in the order of the file
SEPARATOR = "\f"
_FILE = ("text", "pydoc_topics.txt")
_SHA256 = "e4037261906207d9d792a23903e83aa3c1b852aef81be2eaeba8b33d91b33f69"


def corpus(half: str) -> str:
    """English prose with examples of code: one half of the topics of Python's own help.

    Args:
      half: "calibration" or "evaluation". They share no paragraph, so that what is fitted to the one is not judged by the same text.

    Raises:
      UserError: the file is not the one that was committed, so that its figures would compare with no others.
    """
    if half not in HALVES:
        raise ValueError(f"half={half!r} is not known: use one of {', '.join(HALVES)}")
    data = importlib.resources.files("configs").joinpath(*_FILE).read_bytes()
    if (found := hashlib.sha256(data).hexdigest()) != _SHA256:
        raise UserError(f"configs/{'/'.join(_FILE)} has sha256 {found}, not {_SHA256}: restore the committed file")
    return data.decode("utf-8").split(SEPARATOR)[HALVES.index(half)]
