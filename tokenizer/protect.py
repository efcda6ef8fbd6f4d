"""Control tokens in text that a chat template is about to work on: marked, so that they can be told from the template's own."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from runtime import UserError

# Unicode reserves these for use inside a program: they are no characters of any text, and neither white space nor letters, so that
# templates pass them on.
NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDEF)]


@dataclasses.dataclass(frozen=True)
class Mark:
    """The character that was put into the text; nothing in the text itself looks like it."""

    char: str

    @property
    def escaped(self) -> str:
        """What JSON and Python's `repr` make of it."""
        return f"\\u{ord(self.char):04x}"

    def remove(self, text: str) -> str:
        return text.replace(self.char, "").replace(self.escaped, "")


def protect(value: Any, controls: Collection[str]) -> tuple[Any, Mark | None]:
    """`value` with a mark inside every control token that its strings hold, or begin with the end of, or end with the beginning of.

    So no control token remains in it, and none comes about where a template puts text of its own beside it: what a tokenizer finds in
    the rendered text is the template's. `<|im_end|>` becomes `<` mark `|im_end|>`; a content that ends with `<|im` gets its mark after
    that `<`, in case the template goes on with `_end|>`. White space around the content may be trimmed as before. Names (`user`,
    `function`), which templates compare, have no mark unless they hold a whole control token; a control token that the template
    puts together around a name is its own doing (`'<|' + message.role + '|>'`).

    Args:
        value: dicts, lists, strings and other values, which are left alone.
        controls: the control tokens, as they are written.

    Returns:
        The marked value, and the mark, or None when nothing was marked.

    Raises:
        UserError: a string holds a control token of one character, which has no inside, or all 31 possible marks.
    """
    places = _places(tuple(filter(None, controls)))
    if not any(places(text) for text in _strings(value)):
        return value, None
    everything = "\n".join(_strings(value))
    mark = next((mark for mark in map(Mark, NONCHARACTERS) if mark.char not in everything and mark.escaped not in everything), None)
    if mark is None:
        raise UserError("the messages hold all of U+FDD0 to U+FDEE, which are no characters but reserved for programs: remove them")

    def put(text: str) -> str:
        if single := next((control for control in controls if len(control) == 1 and control in text), None):
            raise UserError(f"the messages hold the control token {single!r}: remove it, or have control tokens in messages parsed")
        return mark.char.join(text[start:end] for start, end in itertools.pairwise([0, *places(text), len(text)]))

    return _map(value, put), mark


def _map(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map(key, change): _map(item, change) for key, item in value.items()}
    return [_map(item, change) for item in value] if isinstance(value, list | tuple) else value


def _strings(value: Any) -> list[str]:
    found: list[str] = []
    _map(value, lambda text: found.append(text) or text)
    return found


@functools.lru_cache(maxsize=8)
def _places(controls: tuple[str, ...]) -> Callable[[str], list[int]]:
    """The function that says where a text needs marks."""
    firsts = "".join(sorted({re.escape(control[0]) for control in controls}))  # most characters begin none: a quick test first
    whole = re.compile(rf"(?=[{firsts}])(?={'|'.join(map(re.escape, controls))})" if controls else r"(?!)")  # overlapping ones as well
    beginnings = {control[:size] for control in controls for size in range(1, len(control))}
    ends = {control[size:] for control in controls for size in range(1, len(control))}
    longest = max(map(len, controls), default=1) - 1

    def places(text: str) -> list[int]:
        found = {match.start() + 1 for match in whole.finditer(text)}
        if not re.fullmatch(r"[\w.-]*", text):
            left, right = len(text) - len(text.lstrip()), len(text.rstrip())
            found |= {right - size + 1 for size in range(1, min(longest, right - left) + 1) if text[right - size : right] in beginnings}
            if any(text[left : left + size] in ends for size in range(1, min(longest, right - left) + 1)):
                found.add(left)
        return sorted(found)

    return places
