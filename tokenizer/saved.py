"""The tokenizer that `Tokenizer.save` wrote."""

import json
import os
from pathlib import Path
from typing import Any

from runtime import UserError
from tokenizer.backends import restore
from tokenizer.chat import ChatTemplate
from tokenizer.tokenizer import SAVED_AS, SAVED_VERSION, Tokenizer


def tokenizer_from_saved(folder: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer that `Tokenizer.save` wrote into `folder`, equal to the one that was saved.

    Raises:
        UserError: there is no such file, it is of another version, or it is damaged.
    """
    path = Path(folder) / SAVED_AS
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror}): save the tokenizer again, or name the folder that holds it") from error
    except ValueError as error:
        raise UserError(f"{path} is no JSON ({error}): it is damaged; save the tokenizer again") from error
    if not isinstance(data, dict) or data.pop("format", None) != "diptych tokenizer":
        raise UserError(f"{path} is no saved tokenizer: save it again")
    if (version := data.pop("version", None)) != SAVED_VERSION:
        raise UserError(f"{path} is of version {version}, but this program reads version {SAVED_VERSION}: save the tokenizer again")
    try:
        return _restored(data)
    except Exception as error:  # the libraries raise bare Exception for a backend that they can't make sense of
        raise UserError(f"{path} is damaged ({type(error).__name__}: {error}): save the tokenizer again") from error


def _restored(data: dict[str, Any]) -> Tokenizer:
    return Tokenizer(
        **data
        | {
            "backend": restore(data["backend"]),
            "pieces": tuple(piece.encode("latin-1") for piece in data["pieces"]),
            "missing_bytes": data["missing_bytes"].encode("latin-1"),
            "special_ids": frozenset(data["special_ids"]),
            "eos_ids": frozenset(data["eos_ids"]),
            "chat": None if data["chat"] is None else ChatTemplate(**data["chat"]),
        }
    )
