"""Chat templates: the Jinja programs that checkpoints carry, in the dialect that Hugging Face's `apply_chat_template` defined."""

import dataclasses
import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jinja2
import jinja2.ext
import jinja2.sandbox

from runtime import UserError

ROLES = ("system", "user", "assistant", "tool")


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """Writes a conversation as the text that the model was trained on."""

    source: str = dataclasses.field(repr=False)
    bos_token: str = ""
    eos_token: str = ""

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """The conversation as text, special tokens written out. Encode it without adding BOS: the template writes one where it belongs.

        Args:
            messages: each with `role` (system, user, assistant or tool) and `content`, a string. Other keys, such as `tool_calls`, are
                the template's to read.
            add_generation_prompt: end with the start of the assistant's turn, for the model to go on from.
            **kwargs: more variables for the template, such as `tools` or `enable_thinking`.

        Raises:
            UserError: a malformed message, a conversation that the template refuses, or a template that is faulty or reaches for
                Python's internals (it comes with the weights file, so it is run in a sandbox).
        """
        _check(messages)
        variables = {"tools": None, "documents": None, "bos_token": self.bos_token, "eos_token": self.eos_token, **kwargs}
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **variables)
        except _Refused as error:
            raise UserError(f"the model's chat template refuses this conversation: {error}") from error
        except jinja2.sandbox.SecurityError as error:
            raise UserError(f"the model's chat template was stopped: {error}; do not trust this file, or give a plain prompt") from error
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"the model's chat template is faulty at line {error.lineno}: {error}; give a plain prompt instead") from error
        except Exception as error:  # it is a program: it may fail in any way that a Python expression can
            raise UserError(f"the model's chat template failed: {type(error).__name__}: {error}; give a plain prompt instead") from error

    @functools.cached_property
    def _template(self) -> jinja2.Template:
        return _environment().from_string(self.source)


def _check(messages: Sequence[Mapping[str, Any]]) -> None:
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise UserError(f"messages must be a list of {{role, content}}, not {type(messages).__name__}")
    if not messages:
        raise UserError("messages is empty: a conversation needs at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise UserError(f"message {index} must be {{role, content}}, not {type(message).__name__}")
        for key in ("role", "content"):
            if key not in message:
                raise UserError(f"message {index} has no {key!r}: each message needs role and content")
        if message["role"] not in ROLES:
            raise UserError(f"message {index} has role {message['role']!r}: known roles are {', '.join(ROLES)}")
        if not isinstance(message["content"], str):
            raise UserError(f"the content of message {index} must be a string, not {type(message['content']).__name__}")


class _Refused(Exception):
    """A template called `raise_exception`."""


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        """Jinja would go on with an undefined value, which prints as nothing."""
        raise jinja2.sandbox.SecurityError(f"it reads {attribute!r} of a {type(obj).__name__}")


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it is its body."""

    tags: ClassVar = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation])
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Jinja's own filter escapes `<`, `>` and `&` for HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise _Refused(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
