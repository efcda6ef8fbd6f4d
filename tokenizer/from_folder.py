"""The tokenizer of a Hugging Face model folder."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models

from runtime import UserError
from tokenizer.backends import CONTROL_LOOK, Backend, SentencePieceBackend, TokenizersBackend
from tokenizer.chat import ChatTemplate
from tokenizer.pieces import byte_alphabet, byte_level_pieces, sentencepiece_pieces
from tokenizer.tokenizer import Tokenizer

DOWNLOAD_AGAIN = "download it again"
_FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")


def tokenizer_from_folder(folder: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a model folder as Hugging Face lays it out.

    `tokenizer.json` is taken where there is one, else `tokenizer.model` (SentencePiece). The other files add to it where they exist:
    `tokenizer_config.json`, `special_tokens_map.json`, `added_tokens.json`, `generation_config.json`, `config.json`,
    `chat_template.jinja` and `additional_chat_templates/tool_use.jinja`. BOS and EOS are added as `tokenizer_config.json` says; where it
    does not, as the post-processor of `tokenizer.json` does, or BOS alone for a `tokenizer.model`. Spaces are not cleaned up in decoded
    text, whatever the files say.

    Raises:
        UserError: a file is missing or damaged, or of a kind that is not supported; names it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder: give the folder of a model")
    files = _Files(folder)
    if (folder / "tokenizer.json").is_file():
        return _from_tokenizer_json(files)
    if (folder / "tokenizer.model").is_file():
        return _from_sentencepiece(files)
    raise UserError(f"{folder} holds neither tokenizer.json nor tokenizer.model: download one of them from where the model came from")


class _Files:
    """The folder's small files, read once."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = self._json("tokenizer_config.json")
        self.special = self._json("special_tokens_map.json")
        self.added = self._json("added_tokens.json")
        self.model = self._json("config.json")
        self.generation = self._json("generation_config.json")

    def _json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        if not path.is_file():
            return {}
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"{path} can't be read as JSON ({error}): {DOWNLOAD_AGAIN}") from error
        if not isinstance(value, dict):
            raise UserError(f"{path} holds a {type(value).__name__}, not an object: {DOWNLOAD_AGAIN}")
        return value

    def token(self, name: str) -> str | None:
        """What `bos`, `eos`, `pad` or `unk` is written like."""
        for source, file in ((self.config, "tokenizer_config.json"), (self.special, "special_tokens_map.json")):
            value = source.get(f"{name}_token")
            value = value.get("content") if isinstance(value, dict) else value
            if isinstance(value, str):
                return value
            if value is not None:
                raise UserError(f"{self.folder / file} has a {name}_token that is no text: {DOWNLOAD_AGAIN}")
        return None

    def flag(self, name: str) -> bool | None:
        value = self.config.get(name)
        if value is not None and not isinstance(value, bool):
            raise UserError(f"{self.folder / 'tokenizer_config.json'} has {name} {value!r}, not true or false: {DOWNLOAD_AGAIN}")
        return value

    def ids(self, name: str, vocab_size: int) -> list[int]:
        """The ids that `generation_config.json` and `config.json` give for `bos`, `eos` or `pad`, in this order."""
        found: list[int] = []
        for source, file in ((self.generation, "generation_config.json"), (self.model, "config.json")):
            inner = source.get("text_config")
            value = source.get(f"{name}_token_id", inner.get(f"{name}_token_id") if isinstance(inner, dict) else None)
            for id in value if isinstance(value, list) else [] if value is None else [value]:
                if not isinstance(id, int) or isinstance(id, bool) or not 0 <= id < vocab_size:
                    raise UserError(
                        f"{self.folder / file} has {name}_token_id {id!r}, but the tokenizer's ids go from 0 to {vocab_size - 1}: "
                        "the files do not belong together; download all of them again"
                    )
                found.append(id)
        return found

    def added_tokens(self) -> dict[int, tokenizers.AddedToken]:
        """Those that the small files list, by id: the vocabulary's own file may not have them."""
        added: dict[int, tokenizers.AddedToken] = {}
        named = {self.token(name) for name in ("bos", "eos", "pad", "unk")}
        try:
            for content, id in self.added.items():
                added[int(id)] = tokenizers.AddedToken(content, special=content in named, normalized=False)
            for id, token in self.config.get("added_tokens_decoder", {}).items():
                flags = {flag: bool(token[flag]) for flag in _FLAGS if flag in token}
                added[int(id)] = tokenizers.AddedToken(token["content"], **flags)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            names = "tokenizer_config.json or added_tokens.json"
            raise UserError(f"{self.folder}: {names} lists added tokens wrongly ({error}): {DOWNLOAD_AGAIN}") from error
        return dict(sorted(added.items()))

    def chat(self) -> ChatTemplate | None:
        tokens = {f"{name}_token": self.token(name) or "" for name in ("bos", "eos", "pad", "unk")}
        named = self.config.get("chat_template")
        if isinstance(named, list):
            try:
                named = {item["name"]: item["template"] for item in named}
            except (KeyError, TypeError) as error:
                raise UserError(f"{self.folder / 'tokenizer_config.json'} lists chat templates wrongly: {DOWNLOAD_AGAIN}") from error
        named = dict(named) if isinstance(named, dict) else {} if named is None else {"default": named}
        for name, file in (("default", "chat_template.jinja"), ("tool_use", "additional_chat_templates/tool_use.jinja")):
            path = self.folder / file
            if path.is_file():
                try:
                    named[name] = path.read_text(encoding="utf-8")
                except (OSError, ValueError) as error:
                    raise UserError(f"{path} can't be read ({error}): {DOWNLOAD_AGAIN}") from error
        for text in named.values():
            if not isinstance(text, str):
                raise UserError(f"{self.folder / 'tokenizer_config.json'} has a chat template that is no text: {DOWNLOAD_AGAIN}")
        if not named:
            return None
        if "default" not in named:
            raise UserError(f"{self.folder} has chat templates named {', '.join(sorted(named))}, but none named default: {DOWNLOAD_AGAIN}")
        return ChatTemplate(named["default"], named.get("tool_use"), **tokens)


def _from_tokenizer_json(files: _Files) -> Tokenizer:
    path = files.folder / "tokenizer.json"
    try:
        native = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exception
        raise UserError(f"{path} is no tokenizer that the tokenizers package can read ({error}): {DOWNLOAD_AGAIN}") from error
    native.no_truncation()  # a file may ask for both
    native.no_padding()
    own = native.get_added_tokens_decoder()
    for id, token in files.added_tokens().items():
        if native.token_to_id(token.content) not in (None, id):
            raise UserError(
                f"{files.folder / 'tokenizer_config.json'} gives token {token.content!r} id {id}, but in tokenizer.json it has "
                f"{native.token_to_id(token.content)}: the files do not belong together; download all of them again"
            )
        if id not in own:
            (native.add_special_tokens if token.special else native.add_tokens)([token])
            if native.token_to_id(token.content) != id:
                raise UserError(
                    f"{files.folder} lists added token {token.content!r} with id {id}, but the next id of its vocabulary is "
                    f"{native.token_to_id(token.content)}: the files do not belong together; download all of them again"
                )
    named = {name for name in map(files.token, ("bos", "eos", "pad", "unk")) if name is not None}
    undeclared = {
        id
        for id, token in native.get_added_tokens_decoder().items()
        if not token.special and (token.content in named or CONTROL_LOOK.fullmatch(token.content))
    }
    if undeclared:
        native = _declared_special(native, undeclared)

    added = native.get_added_tokens_decoder()
    vocab = native.get_vocab(with_added_tokens=True)
    tokens = [""] * (max(vocab.values(), default=-1) + 1)  # ids may have gaps, which stand for no text
    for token, id in vocab.items():
        tokens[id] = token
    rules = _rules(native.decoder)
    byte_level = "ByteLevel" in rules
    unknown = getattr(native.model, "unk_token", None)
    if isinstance(native.model, models.Unigram):
        unknown = files.token("unk") or "<unk>"
    byte_fallback = "ByteFallback" in rules
    if unsupported := set(rules) - {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip", "Sequence"}:
        raise UserError(f"{path} decodes with {', '.join(sorted(unsupported))}, which is not supported: use another model")
    if not rules:
        raise UserError(f"{path} does not say how tokens are decoded, so their text is not known: use another model")
    if not byte_level and not byte_fallback and unknown is None:
        raise UserError(f"{path} leaves characters that are not in its vocabulary out without a word: use another model")
    known = set(tokens)
    literal = set(added)
    prefix, suffix = _around(native, path)
    return _assemble(
        files,
        backend=TokenizersBackend(native),
        pieces=(byte_level_pieces if byte_level else sentencepiece_pieces)(tokens, literal),
        missing_bytes=bytes(byte for byte, char in enumerate(byte_alphabet()) if char not in known) if byte_level else b"",
        ids=vocab,
        special={id for id, token in added.items() if token.special},
        unknown_id=None if unknown is None or byte_fallback else vocab.get(unknown),
        prefix=prefix,
        suffix=suffix,
        drops_space="Strip" in rules or rules.get("Metaspace", {}).get("prepend_scheme", "never") != "never",
    )


def _from_sentencepiece(files: _Files) -> Tokenizer:
    path = files.folder / "tokenizer.model"
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except Exception as error:  # protobuf's own, or the file system's
        raise UserError(f"{path} is no SentencePiece model ({error}): {DOWNLOAD_AGAIN}") from error
    kinds = type(model).SentencePiece
    tokens = [piece.piece for piece in model.pieces]
    types = [piece.type for piece in model.pieces]
    control = {id for id, type in enumerate(types) if type in (kinds.CONTROL, kinds.UNKNOWN)}
    added = {id: tokenizers.AddedToken(tokens[id], special=True, normalized=False) for id in control if tokens[id]}
    for id, token in files.added_tokens().items():
        tokens += [""] * (id + 1 - len(tokens))
        if tokens[id] not in ("", token.content):
            raise UserError(
                f"{files.folder} gives id {id} to token {token.content!r}, but in tokenizer.model it is {tokens[id]!r}: "
                "the files do not belong together; download all of them again"
            )
        tokens[id], added[id] = token.content, token
    try:
        # As transformers reads these folders: with "legacy": true each part between control tokens has a space put first.
        backend = SentencePieceBackend(model.SerializeToString(), added, prefix="each" if files.flag("legacy") else "first")
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{path} is no SentencePiece model ({error}): {DOWNLOAD_AGAIN}") from error
    ids = {token: id for id, token in enumerate(tokens) if token}
    config_bos, config_eos = (files.flag(f"add_{name}_token") for name in ("bos", "eos"))
    return _assemble(
        files,
        backend=backend,
        pieces=sentencepiece_pieces(tokens, {*added, *control}),
        missing_bytes=b"",
        ids=ids,
        special={id for id, token in added.items() if token.special} | control,
        unknown_id=None if model.trainer_spec.byte_fallback else backend.unknown_id,
        prefix=[ids.get(files.token("bos") or "<s>", -1)] if config_bos is not False else [],
        suffix=[ids.get(files.token("eos") or "</s>", -1)] if config_eos else [],
        drops_space=backend.adds_prefix,
    )


def _assemble(
    files: _Files,
    *,
    backend: Backend,
    pieces: tuple[bytes, ...],
    missing_bytes: bytes,
    ids: Mapping[str, int],
    special: set[int],
    unknown_id: int | None,
    prefix: list[int],
    suffix: list[int],
    drops_space: bool,
) -> Tokenizer:
    """Args: prefix, suffix: what is put around a text where tokenizer_config.json does not say; the rest as in `Tokenizer`."""
    found: dict[str, int | None] = {}
    for name, default in (("bos", prefix), ("eos", suffix), ("pad", [])):
        token, configured = files.token(name), files.ids(name, len(pieces))
        if token is not None and token not in ids:
            raise UserError(
                f"{files.folder} names {token!r} as {name.upper()} token, but the vocabulary has none such: "
                "the files do not belong together; download all of them again"
            )
        found[name] = next(iter([*([ids[token]] if token is not None else []), *configured, *[id for id in default if id >= 0]]), None)
    adds = {}
    for name, default in (("bos", prefix), ("eos", suffix)):
        asked = files.flag(f"add_{name}_token")
        adds[name] = bool(default) if asked is None else asked
        if adds[name] and found[name] is None:
            raise UserError(f"{files.folder} asks for a {name.upper()} token but names none: download its files again")
        if asked is None and default not in ([], [found[name]]):
            raise UserError(f"{files.folder} puts ids {default} around a text, not its {name.upper()} token: use another model")
    return Tokenizer(
        backend=backend,
        pieces=pieces,
        special_ids=frozenset(special if unknown_id is None else special | {unknown_id}),
        eos_ids=frozenset([*files.ids("eos", len(pieces)), *([] if found["eos"] is None else [found["eos"]])]),
        bos_id=found["bos"],
        eos_id=found["eos"],
        pad_id=found["pad"],
        unknown_id=unknown_id,
        adds_bos=adds["bos"],
        adds_eos=adds["eos"],
        drops_space=drops_space,
        missing_bytes=missing_bytes,
        chat=files.chat(),
    )


def _declared_special(native: tokenizers.Tokenizer, ids: set[int]) -> tokenizers.Tokenizer:
    """`native` with these added tokens declared special, which the package allows only while it reads a definition."""
    definition = json.loads(native.to_str())
    for token in definition["added_tokens"]:
        token["special"] |= token["id"] in ids
    return tokenizers.Tokenizer.from_str(json.dumps(definition))


def _around(native: tokenizers.Tokenizer, path: Path) -> tuple[list[int], list[int]]:
    """The ids that the post-processor puts before and after a text."""
    text = native.encode("a", add_special_tokens=False).ids
    whole = native.encode("a", add_special_tokens=True).ids
    for start in range(len(whole) - len(text) + 1):
        if whole[start : start + len(text)] == text:
            return whole[:start], whole[start + len(text) :]
    raise UserError(f"{path} has a post-processor that changes the text's own tokens, which is not supported: use another model")


def _rules(decoder: Any) -> dict[str, dict[str, Any]]:
    """The steps of a decoder, by type."""
    if decoder is None:
        return {}
    rule = json.loads(decoder.__getstate__())
    steps = rule["decoders"] if rule["type"] == "Sequence" else [rule]
    return {step["type"]: step for step in steps}
