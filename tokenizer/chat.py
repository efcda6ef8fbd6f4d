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

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """Writes a conversation as the text that the model was trained on."""

    source: str = dataclasses.field(repr=False)
    tool_source: str | None = dataclasses.field(default=None, repr=False)  # the template for conversations with tools, where it is another
    bos_token: str = ""
    eos_token: str = ""
    pad_token: str = ""
    unk_token: str = ""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The conversation as text, special tokens written out. `Tokenizer.encode_chat` makes token ids of it.

        Args:
            messages: each with `role` (system, developer, user, assistant or tool) and `content`: a string, or a list of
                `{"type": "text", "text": ...}`. An assistant's message with `tool_calls` needs no content. Other keys are the template's to
                read. A template that takes only one of the two kinds of content is given that one, parts joined with a newline.
            add_generation_prompt: end with the start of the assistant's turn, for the model to go on from.
            tools: JSON schemas of the functions that the model may call.
            documents: what the answer shall draw on: each with `title` and `text`, by custom.
            **kwargs: more variables for the template, such as `enable_thinking`.

        Raises:
            UserError: a malformed message, a conversation that the template refuses, or a template that is faulty or reaches for
                Python's internals (it comes with the weights file, so it is run in a sandbox).
        """
        self.check(messages, tools=tools, documents=documents)
        template = _compile(self.tool_source if tools and self.tool_source else self.source)
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        variables = {name: getattr(self, name) for name in names if getattr(self, name)} | kwargs  # one that is missing is undefined
        variables |= {"add_generation_prompt": add_generation_prompt, "tools": tools, "documents": documents}
        shown = [{key: item for key, item in message.items() if item is not None} for message in messages]
        takes = _content_kinds(template) if any("content" in message for message in shown) else {str, list}
        return _run(template, messages=[_as_taken(message, takes) for message in shown], **variables)

    def check(self, messages: Any, *, tools: Any = None, documents: Any = None, **_: Any) -> None:
        """Raises: UserError, unless `messages`, `tools` and `documents` are what `render` takes."""
        _check_messages(messages)
        for name, value in (("tools", tools), ("documents", documents)):
            if value is not None and (isinstance(value, str) or not isinstance(value, Sequence)):
                raise UserError(f"{name} must be a list of dictionaries, not {type(value).__name__}")
            for index, item in enumerate(value or []):
                if not isinstance(item, Mapping):
                    raise UserError(f"item {index} of {name} must be a dictionary, not {type(item).__name__}")


def _check_messages(messages: Any) -> None:
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        raise UserError(f"messages must be a list of {{role, content}}, not {type(messages).__name__}")
    if not messages:
        raise UserError("messages is empty: a conversation needs at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise UserError(f"message {index} must be {{role, content}}, not {type(message).__name__}")
        if "role" not in message:
            raise UserError(f"message {index} has no 'role': each message needs role and content")
        if message["role"] not in ROLES:
            raise UserError(f"message {index} has role {message['role']!r}: known roles are {', '.join(ROLES)}")
        if message.get("content") is None and message["role"] == "assistant" and message.get("tool_calls"):
            continue
        if "content" not in message:
            raise UserError(f"message {index} has no 'content': each message needs role and content")
        content = message["content"]
        if not isinstance(content, str | list):
            raise UserError(f"the content of message {index} must be a string or a list of text parts, not {type(content).__name__}")
        for part in content if isinstance(content, list) else []:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if kind != "text":
                raise UserError(f"the content of message {index} has a part of type {kind!r}: only text is supported")
            if not isinstance(part.get("text"), str):
                raise UserError(f"the content of message {index} has a text part without text: each needs type and text")


def _as_taken(message: dict[str, Any], takes: set[type]) -> dict[str, Any]:
    """`message`, its content turned into what the template takes."""
    content = message.get("content")
    if isinstance(content, list) and list not in takes:
        return {**message, "content": "\n".join(part["text"] for part in content)}
    if isinstance(content, str) and str not in takes:
        return {**message, "content": [{"type": "text", "text": content}]}
    return message


@functools.lru_cache(maxsize=8)
def _content_kinds(template: jinja2.Template) -> set[type]:
    """Which of str and list (of parts) the template shows as text: found by trying."""
    word = "Needle"
    kinds = set()
    for content in (word, [{"type": "text", "text": word}]):
        try:
            shown = _run(template, messages=[{"role": "user", "content": content}], add_generation_prompt=False)
        except UserError:  # such as a template that refuses all that is not its own kind of conversation
            continue
        if word in shown and f"'{word}'" not in shown:  # not the list as Python writes it
            kinds.add(type(content))
    return kinds or {str}


def _run(template: jinja2.Template, **variables: Any) -> str:
    try:
        return template.render(**variables)
    except _Refused as error:
        raise UserError(f"the model's chat template refuses this conversation: {error}") from error
    except jinja2.sandbox.SecurityError as error:
        raise UserError(f"the model's chat template was stopped: {error}; do not trust this file, or give a plain prompt") from error
    except Exception as error:  # it is a program: it may fail in any way that a Python expression can
        raise UserError(f"the model's chat template failed: {type(error).__name__}: {error}; give a plain prompt instead") from error


@functools.lru_cache(maxsize=8)
def _compile(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"the model's chat template is faulty at line {error.lineno}: {error}; give a plain prompt instead") from error


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
