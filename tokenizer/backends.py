"""The two libraries that cut text into tokens, behind one interface."""

import base64
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import tokenizers
from tokenizers import models

from runtime import UserError

Part = str | int  # text to be encoded as it is, or the id of a control token that stands in its place

# Stands where a control token was cut out. Unicode reserves it for use inside a program: it is no character of any text.
PLACEHOLDER = "\ufdef"
CONTROL_LOOK = re.compile("<[|\uff5c].*[|\uff5c]>")  # what is written so is a control token, though a file may not say so

_TOKEN_FIELDS = ("content", "special", "lstrip", "rstrip", "normalized", "single_word")


class Backend(Protocol):
    """Cuts text into token ids; adds no BOS or EOS of its own.

    Control tokens are those that end a turn, start an image and the like. Tokens that the model's authors added but did not declare
    special (`<think>`, runs of spaces) are not control tokens: they are read as one token wherever they stand.
    """

    controls: Mapping[str, int]  # the control tokens, as they are written

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, in which control tokens count as such."""

    def split(self, text: str) -> list[Part]:
        """`text`, its control tokens replaced by their ids."""

    def encode_parts(self, parts: Sequence[Part]) -> list[int]:
        """The ids of a text whose control tokens are given: those written out in the strings are ordinary characters."""

    def state(self) -> dict[str, Any]:
        """What `restore` makes an equal backend of."""


def restore(state: Mapping[str, Any]) -> Backend:
    """The backend whose `state()` this is.

    Raises:
        KeyError, ValueError and what the libraries raise: it is not the state of a backend.
    """
    kinds = {"tokenizers": TokenizersBackend.restore, "sentencepiece": SentencePieceBackend.restore}
    return kinds[state["kind"]](state)


class TokenizersBackend:
    """The `tokenizers` package: byte-level BPE, and whatever else a `tokenizer.json` describes. Without truncation and padding."""

    def __init__(self, native: tokenizers.Tokenizer):
        self.native = native
        self.controls = {token.content: id for id, token in native.get_added_tokens_decoder().items() if token.special}

    def encode(self, text: str) -> list[int]:
        return self.native.encode(text, add_special_tokens=False).ids

    def split(self, text: str) -> list[Part]:
        encoding = self.native.encode(text, add_special_tokens=False)
        written = {id: token for token, id in self.controls.items()}
        parts, done = [], 0
        for id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if written.get(id, "\0") in text[start:end]:  # else the unknown token, in the place of other text
                parts += [text[done:start], id]
                done = end
        return [part for part in [*parts, text[done:]] if part != ""]

    def encode_parts(self, parts: Sequence[Part]) -> list[int]:
        """One call for the whole, so that a rule for a text's first word is not applied to every part."""
        cut_out = [part for part in parts if isinstance(part, int)]
        if not cut_out:
            return self._literal.encode("".join(parts), add_special_tokens=False).ids
        if any(isinstance(part, str) and PLACEHOLDER in part for part in parts):
            raise UserError("the text holds U+FDEF, which is no character but reserved for programs: remove it")
        text = "".join(PLACEHOLDER if isinstance(part, int) else part for part in parts)
        native, placeholder = self._joining
        ids, given = native.encode(text, add_special_tokens=False).ids, iter(cut_out)
        return [next(given) if id == placeholder else id for id in ids]

    def state(self) -> dict[str, Any]:
        return {"kind": "tokenizers", "definition": self.native.to_str()}

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> "TokenizersBackend":
        return cls(tokenizers.Tokenizer.from_str(state["definition"]))

    @functools.cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """A second tokenizer that takes control tokens for text: the setting is the object's, not the call's, and calls may overlap."""
        native = tokenizers.Tokenizer.from_str(self.native.to_str())
        native.encode_special_tokens = True
        return native

    @functools.cached_property
    def _joining(self) -> tuple[tokenizers.Tokenizer, int]:
        """Likewise, with one token more: what stands in for those that were cut out, and its id."""
        native = tokenizers.Tokenizer.from_str(self.native.to_str())
        native.encode_special_tokens = True
        native.add_tokens([tokenizers.AddedToken(PLACEHOLDER, special=False, normalized=False)])
        return native, native.token_to_id(PLACEHOLDER)


class SentencePieceBackend:
    """The `sentencepiece` package: unigram and scored BPE (Kudo and Richardson 2018).

    SentencePiece itself never reads a control token in a text. These, and tokens that were added to the vocabulary later, are cut out
    of the text first.
    """

    def __init__(self, model: bytes, added: Mapping[int, tokenizers.AddedToken], prefix: str):
        """Args:
            model: a serialized ModelProto.
            added: the tokens that are cut out of the text, by id; the special ones are control tokens.
            prefix: whether a space is put before the text where the model asks for one: of its `first` part, or of `each` part
                between such tokens.

        Raises:
            RuntimeError: the model is faulty.
        """
        from sentencepiece import sentencepiece_model_pb2

        self.proto = sentencepiece_model_pb2.ModelProto.FromString(model)
        self.added = dict(sorted(added.items(), key=lambda item: not item[1].special))  # the cutters take one kind after the other
        self.controls = {token.content: id for id, token in self.added.items() if token.special}
        self._prefix = prefix if self.proto.normalizer_spec.add_dummy_prefix else "none"
        self._plain = self._processor(add_dummy_prefix=False)
        self._prefixing = self._plain if self._prefix == "none" else self._processor(add_dummy_prefix=True)
        self._ids = [-1, *self.added]  # by the ids of the cutters
        self._cut_all, self._cut_literal = self._cutter(False), self._cutter(True)

    @property
    def adds_prefix(self) -> bool:
        return self._prefix != "none"

    @property
    def unknown_id(self) -> int:
        return self._plain.unk_id()

    def encode(self, text: str) -> list[int]:
        return self.encode_parts(self.split(text))

    def split(self, text: str) -> list[Part]:
        written = set(self.controls.values())
        parts: list[Part] = []
        for part in self._cut(self._cut_all, text):
            if isinstance(part, tuple):
                part = part[0] if part[0] in written else part[1]
            if isinstance(part, str) and parts and isinstance(parts[-1], str):
                parts[-1] += part
            else:
                parts.append(part)
        return parts

    def encode_parts(self, parts: Sequence[Part]) -> list[int]:
        ids: list[int] = []
        for part in parts:
            for piece in [(part, "")] if isinstance(part, int) else self._cut(self._cut_literal, part):
                if isinstance(piece, tuple):
                    ids.append(piece[0])
                else:
                    prefixed = self._prefix == "each" or (self._prefix == "first" and not ids)
                    ids += (self._prefixing if prefixed else self._plain).encode(piece)
        return ids

    def state(self) -> dict[str, Any]:
        model = base64.b64encode(self.proto.SerializeToString(deterministic=True)).decode()
        added = [{"id": id, **{name: getattr(token, name) for name in _TOKEN_FIELDS}} for id, token in self.added.items()]
        return {"kind": "sentencepiece", "model": model, "prefix": self._prefix, "added": added}

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> "SentencePieceBackend":
        added = {token["id"]: tokenizers.AddedToken(**{name: token[name] for name in _TOKEN_FIELDS}) for token in state["added"]}
        return cls(base64.b64decode(state["model"], validate=True), added, state["prefix"])

    def _processor(self, add_dummy_prefix: bool) -> Any:
        import sentencepiece

        proto = type(self.proto)()
        proto.CopyFrom(self.proto)
        proto.normalizer_spec.add_dummy_prefix = add_dummy_prefix
        return sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())

    def _cutter(self, literal: bool) -> tokenizers.Tokenizer:
        """Finds the added tokens: its id 0 is the text between them, the others are theirs in order."""
        cutter = tokenizers.Tokenizer(models.WordLevel({PLACEHOLDER: 0}, unk_token=PLACEHOLDER))
        cutter.add_special_tokens([token for token in self.added.values() if token.special])
        cutter.add_tokens([token for token in self.added.values() if not token.special])
        cutter.encode_special_tokens = literal
        return cutter

    def _cut(self, cutter: tokenizers.Tokenizer, text: str) -> list[str | tuple[int, str]]:
        """`text` between added tokens, and these, each with its id."""
        encoding = cutter.encode(text, add_special_tokens=False)
        parts, done = [], 0
        for id, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if start >= done:  # a token that takes the spaces beside it along may overlap with one that is spaces
                parts.append(text[start:end] if id == 0 else (self._ids[id], text[start:end]))
                done = end
        return parts
