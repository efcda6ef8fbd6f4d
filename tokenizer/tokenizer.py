"""Text to token ids and back."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tokenizers

from runtime import UserError
from tokenizer.chat import ChatTemplate


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """A model's vocabulary, and the rules that cut text into its tokens. Built by `tokenizer_from_gguf`."""

    backend: tokenizers.Tokenizer = dataclasses.field(repr=False)  # cuts text; adds no BOS or EOS of its own
    pieces: tuple[bytes, ...] = dataclasses.field(repr=False)  # [V] the exact bytes of every token
    special_ids: frozenset[int]  # tokens that stand for no text: control tokens and the unknown token
    eos_ids: frozenset[int]  # tokens that end an answer: end of text, of turn, of message
    bos_id: int | None = None
    eos_id: int | None = None  # the one of `eos_ids` that ends a text
    pad_id: int | None = None
    adds_bos: bool = False  # the model was trained on prompts that start with BOS
    adds_eos: bool = False
    missing_bytes: bytes = b""  # bytes that no token stands for: text with one of them can't be encoded
    chat: ChatTemplate | None = None

    @property
    def vocab_size(self) -> int:
        """Tokens of the list, padding with no text included."""
        return len(self.pieces)

    def encode(self, text: str, *, add_bos: bool = True, add_eos: bool = True, parse_special: bool = True) -> list[int]:
        """The token ids of `text`.

        Args:
            text: any text; the empty one has no tokens of its own.
            add_bos: put BOS first, where the model asks for one. A BOS that `text` starts with is not doubled. Say False for rendered
                chat text: its template has written all that is to be there (`encode_chat` does).
            add_eos: put EOS last, where the model asks for one (few do).
            parse_special: read `<|im_end|>` and the like as the one special token, as published tokenizers do, in raw prompts as in chats.
                False reads them as ordinary characters: for text from a source that you do not trust. Tokens that the model's
                authors added but did not declare special are one token either way.

        Raises:
            UserError: `text` is no valid text, or holds a character that the vocabulary can't write.
        """
        if not isinstance(text, str):
            raise UserError(f"a prompt must be a string, not {type(text).__name__}: pass token ids to the model directly")
        self._check_encodable(text)
        backend = self.backend if parse_special else self._literal_backend
        ids = backend.encode(text, add_special_tokens=False).ids
        if add_bos and self.adds_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        if add_eos and self.adds_eos and self.eos_id is not None:
            ids = [*ids, self.eos_id]
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> list[int]:
        """The token ids of a conversation: `chat.render(messages, **kwargs)`, encoded with its special tokens and nothing added.

        The text of messages is not told apart from the template's own: `<|im_end|>` in a message ends that message, as it does with
        other inference programs.

        Raises:
            UserError: the model has no chat template, or a message is malformed.
        """
        if self.chat is None:
            raise UserError("this model has no chat template: give a plain prompt, or use a model that was trained for chat")
        return self.encode(self.chat.render(messages, **kwargs), add_bos=False, add_eos=False)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `ids`: their bytes, joined, read as UTF-8. Bytes that are no UTF-8 become U+FFFD.

        Args:
            ids: token ids.
            skip_special: leave special tokens out; else they appear as they are written (`<|im_end|>`).

        Raises:
            UserError: an id that is not in the vocabulary.
        """
        return self.bytes_of(ids, skip_special=skip_special).decode("utf-8", errors="replace")

    def bytes_of(self, ids: Iterable[int], *, skip_special: bool = True) -> bytes:
        """What `decode` reads as UTF-8."""
        skipped = self.special_ids if skip_special else frozenset()
        return b"".join([self.token_bytes(id) for id in ids if id not in skipped])

    def token_bytes(self, id: int) -> bytes:
        """The exact bytes of one token, which may be part of a character only.

        Raises:
            UserError: `id` is not in the vocabulary.
        """
        if not 0 <= id < len(self.pieces):
            raise UserError(f"token id {id} is not in the vocabulary of {len(self.pieces)} tokens: ids go from 0 to {len(self.pieces) - 1}")
        return self.pieces[id]

    def _check_encodable(self, text: str) -> None:
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"the prompt has half a surrogate pair, {text[error.start]!r}, at character {error.start}: it was not valid UTF-8; "
                "pass text in UTF-8"
            ) from error
        if len(data.translate(None, delete=self.missing_bytes)) == len(data):
            return
        # The backend would leave the bytes out without a word.
        missing = set(self.missing_bytes)
        for id in self.special_ids:  # written as one token, whatever its bytes
            special = self.pieces[id].decode("utf-8", errors="replace")
            text = text.replace(special, " " * len(special)) if special else text
        if missing.isdisjoint(text.encode()):
            return
        index, char = next((index, char) for index, char in enumerate(text) if not missing.isdisjoint(char.encode()))
        raise UserError(f"the model's vocabulary has no token for {char!r}, character {index} of the prompt: remove it")

    @functools.cached_property
    def _literal_backend(self) -> tokenizers.Tokenizer:
        """A second backend that takes special tokens for text. The setting is the object's, not the call's, and calls may overlap."""
        backend = tokenizers.Tokenizer.from_str(self.backend.to_str())
        backend.encode_special_tokens = True
        return backend
