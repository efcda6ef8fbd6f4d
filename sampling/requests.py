"""Prompts from files: a JSON object per line, or the messages of one chat."""

import dataclasses
import json
from collections.abc import Iterable
from typing import Any

from runtime import UserError


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt, the sampling options that it sets itself, and what to copy into its result."""

    prompt: Any
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    where: str = ""  # what an error about it starts with, such as `in.jsonl line 3: `


def read_prompt_file(path: str, allowed: Iterable[str]) -> list[Request]:
    """Requests of a file with a JSON object per line; empty lines are passed over.

    Args:
      path: each line has `prompt` (text) or `messages` (of a chat), and may have sampling options and an `id`, which is passed through.
      allowed: the options that a line may set.

    Raises:
      UserError: naming file and line.
    """
    lines = read_text(path).split("\n")  # splitlines() also cuts at U+2028, which JSON strings may hold
    requests = [_parse_line(f"{path} line {number}", line, sorted(allowed)) for number, line in enumerate(lines, 1) if line.strip()]
    if not requests:
        raise UserError(f"{path} holds no prompt: give a JSON object per line")
    return requests


def read_messages(path: str) -> list[Any]:
    """The messages of a chat in a JSON file; `Tokenizer.encode_chat` checks each.

    Raises:
      UserError: the file can't be read, is not JSON, or holds no list with messages.
    """
    return _messages(_parse(read_text(path), path), path)


def read_text(path: str, newline: str | None = None) -> str:
    """A UTF-8 file's text; line ends are read as `open` does it: None makes each one a newline, "" leaves them. Raises: UserError."""
    try:
        with open(path, encoding="utf-8-sig", newline=newline) as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start}): convert it first") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} can't be read: {getattr(error, 'strerror', None) or error}; check the path") from None


def nonempty(prompt: Any, where: str) -> str:
    """`prompt`, if it is text and there is any. Raises: UserError."""
    if not isinstance(prompt, str):
        raise UserError(f"the prompt of {where} is {prompt!r:.40}: give a string")
    if not prompt:
        raise UserError(f"the prompt of {where} is empty: give at least one character")
    return prompt


def _parse_line(where: str, line: str, allowed: list[str]) -> Request:
    fields = _parse(line, where)
    if not isinstance(fields, dict) or ("prompt" in fields) == ("messages" in fields):
        raise UserError(f'{where} needs either "prompt" or "messages": give an object with one of them')
    prompt = nonempty(fields.pop("prompt"), where) if "prompt" in fields else _messages(fields.pop("messages"), where)
    extra = {"id": fields.pop("id")} if "id" in fields else {}
    if unknown := [name for name in fields if name not in allowed]:
        raise UserError(f"{where} has unknown option {unknown[0]!r}: use {', '.join(allowed)}")
    return Request(prompt, fields, extra, f"{where}: ")


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON: {error.msg} at line {error.lineno} column {error.colno}; mend it") from None
    except RecursionError:
        raise UserError(f"{where} is nested too deeply: mend it") from None


def _messages(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise UserError(f'{where} needs a list of messages, not {value!r:.40}: give [{{"role": "user", "content": "..."}}]')
    if not value:
        raise UserError(f"{where} is an empty list of messages: give at least one")
    for index, message in enumerate(value):
        if not isinstance(message, dict):
            raise UserError(f"{where}: message {index} is {message!r:.40}: give an object with role and content")
    return value
