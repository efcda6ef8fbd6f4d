"""Text to token ids and back."""

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from runtime import UserError
from runtime.files import replacing
from tokenizer.backends import Backend
from tokenizer.chat import ChatTemplate
from tokenizer.protect import protect

SAVED_AS = "diptych_tokenizer.json"
SAVED_VERSION = 1


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A model's vocabulary, and the rules that cut text into its tokens.

    Built by `tokenizer_from_gguf`, `tokenizer_from_folder` or `tokenizer_from_saved`.
    """

    backend: Backend = dataclasses.field(repr=False)  # cuts text; adds no BOS or EOS of its own
    pieces: tuple[bytes, ...] = dataclasses.field(repr=False)  # [V] the exact bytes of every token
    special_ids: frozenset[int]  # tokens that stand for no text: control tokens and the unknown token
    eos_ids: frozenset[int]  # tokens that end an answer: end of text, of turn, of message
    bos_id: int | None = None
    eos_id: int | None = None  # the one of `eos_ids` that ends a text
    pad_id: int | None = None
    unknown_id: int | None = None  # what the backend makes of a character that the vocabulary can't write
    adds_bos: bool = False  # the model was trained on prompts that start with BOS
    adds_eos: bool = False
    drops_space: bool = False  # the backend puts a space before a text, so decoding leaves a text's first space out
    missing_bytes: bytes = b""  # bytes that no token stands for: text with one of them can't be encoded
    chat: ChatTemplate | None = None

    @property
    def vocab_size(self) -> int:
        """Tokens of the list, padding with no text included."""
        return len(self.pieces)

    def encode(self, text: str, *, add_bos: bool = True, add_eos: bool = True, parse_special: bool = False) -> list[int]:
        """The token ids of `text`.

        Args:
            text: any text; the empty one has no tokens of its own.
            add_bos: put BOS first, where the model asks for one. A BOS that `text` starts with and that is read as such is not doubled.
            add_eos: put EOS last, where the model asks for one (few do).
            parse_special: read `<|im_end|>` and the like as the one control token. By default they are ordinary characters, so that no
                text can end a turn. Tokens that the model's authors added but did not declare special are one token either way.

        Raises:
            UserError: `text` is no valid text, or holds a character that the vocabulary can't write.
        """
        self._check_text(text)
        ids = self._checked(text, self.backend.encode(text)) if parse_special else self._encode_parts([text] if text else [])
        if add_bos and self.adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        if add_eos and self.adds_eos and self.eos_id is not None:
            ids = [*ids, self.eos_id]
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], *, parse_special: bool = False, **kwargs: Any) -> list[int]:
        """The token ids of a conversation: `chat.render(messages, **kwargs)`, encoded with its control tokens and nothing added.

        The template's control tokens count; those that messages, tools or documents hold are ordinary characters. So that the two can be
        told apart after the template has done what it likes with the text, control tokens are marked before it is rendered and the
        marks are taken out when its own control tokens have been found (`protect`).

        Args:
            messages, kwargs: as for `ChatTemplate.render`.
            parse_special: control tokens count wherever they stand: `<|im_end|>` in a message then ends that message.

        Raises:
            UserError: the model has no chat template, or a message is malformed.
        """
        if self.chat is None:
            raise UserError("this model has no chat template: give a plain prompt, or use a model that was trained for chat")
        self.chat.check(messages, **kwargs)
        marked, mark = ([messages, kwargs], None) if parse_special else protect([messages, kwargs], self.backend.controls)
        if mark is None:
            return self.encode(self.chat.render(messages, **kwargs), add_bos=False, add_eos=False, parse_special=True)
        messages, kwargs = marked
        text = self.chat.render(messages, **kwargs)
        self._check_text(text)
        return self._encode_parts([part if isinstance(part, int) else mark.remove(part) for part in self.backend.split(text)])

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids`: their bytes, joined, read as UTF-8. Bytes that are no UTF-8 become U+FFFD.

        Where `encode` puts a space before a text (SentencePiece's rule), a space that the text begins with is left out.

        Args:
            ids: token ids.
            skip_special: leave special tokens out; else they appear as they are written (`<|im_end|>`).

        Raises:
            UserError: an id that is not in the vocabulary.
        """
        return self.without_prefix(self.bytes_of(ids, skip_special=skip_special)).decode("utf-8", errors="replace")

    def bytes_of(self, ids: Iterable[int], *, skip_special: bool = True) -> bytes:
        """The bytes of `ids`, joined: what `decode` reads as UTF-8, but for the space that it drops."""
        skipped = self.special_ids if skip_special else frozenset()
        return b"".join([self.token_bytes(id) for id in ids if id not in skipped])

    def without_prefix(self, data: bytes) -> bytes:
        """The bytes of a text, less the space that `encode` put before it."""
        return data.removeprefix(b" ") if self.drops_space else data

    def token_bytes(self, id: int) -> bytes:
        """The exact bytes of one token, which may be part of a character only.

        Raises:
            UserError: `id` is not in the vocabulary.
        """
        if not 0 <= id < len(self.pieces):
            raise UserError(f"token id {id} is not in the vocabulary of {len(self.pieces)} tokens: ids go from 0 to {len(self.pieces) - 1}")
        return self.pieces[id]

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Writes `diptych_tokenizer.json`, of which `tokenizer_from_saved` restores an equal tokenizer, whatever this one was made from.

        Returns:
            The file's path. Equal tokenizers give equal bytes.

        Raises:
            UserError: it can't be written.
        """
        plain = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain |= {
            "backend": self.backend.state(),
            "pieces": [piece.decode("latin-1") for piece in self.pieces],  # a character a byte
            "missing_bytes": self.missing_bytes.decode("latin-1"),
            "special_ids": sorted(self.special_ids),
            "eos_ids": sorted(self.eos_ids),
            "chat": None if self.chat is None else dataclasses.asdict(self.chat),
        }
        path = Path(folder) / SAVED_AS
        with replacing(str(path)) as file:
            json.dump({"format": "diptych tokenizer", "version": SAVED_VERSION, **plain}, file)
        return path

    def _encode_parts(self, parts: Sequence[str | int]) -> list[int]:
        literal = "".join(part for part in parts if isinstance(part, str))
        if not set(self.missing_bytes).isdisjoint(literal.encode()):
            raise self._no_token(literal)
        ids = self.backend.encode_parts(parts)
        given = [part for part in parts if isinstance(part, int)]
        if self.unknown_id is not None and ids.count(self.unknown_id) > given.count(self.unknown_id):
            raise self._no_token(literal)
        controls = self.backend.controls
        for control in set(controls.values()).intersection(ids):
            if ids.count(control) > given.count(control):
                name = next(name for name, id in controls.items() if id == control)
                raise UserError(f"the vocabulary has no way to write {name!r} other than as a control token: remove it from the text")
        return ids

    def _checked(self, text: str, ids: list[int]) -> list[int]:
        """`ids` of `text`, unless the backend left something out of it, or put the unknown token in its place."""
        unknown = self.unknown_id
        if unknown is not None and ids.count(unknown) > text.count(self.pieces[unknown].decode("utf-8", errors="replace")):
            raise self._no_token(text)
        if not set(self.missing_bytes).isdisjoint(text.encode()):
            for name in self.backend.controls:  # written as one token, whatever its bytes
                text = text.replace(name, " " * len(name))
            if not set(self.missing_bytes).isdisjoint(text.encode()):
                raise self._no_token(text)
        return ids

    def _no_token(self, text: str) -> UserError:
        missing = set(self.missing_bytes)
        for index, char in enumerate(text):
            if not missing.isdisjoint(char.encode()) or self.unknown_id in self.backend.encode_parts([char]):
                return UserError(f"the model's vocabulary has no token for {char!r}, character {index} of the prompt: remove it")
        return UserError("the model's vocabulary has no tokens for a part of the prompt: use another model")

    def _check_text(self, text: str) -> None:
        if not isinstance(text, str):
            raise UserError(f"a prompt must be a string, not {type(text).__name__}: pass token ids to the model directly")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"the prompt has half a surrogate pair, {text[error.start]!r}, at character {error.start}: it was not valid UTF-8; "
                "pass text in UTF-8"
            ) from error
