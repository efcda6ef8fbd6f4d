"""The tokenizer that a GGUF file carries in its metadata (keys `tokenizer.ggml.*`)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

from runtime import UserError
from tokenizer.chat import ChatTemplate
from tokenizer.tokenizer import Tokenizer

# Values of `tokenizer.ggml.token_type`. The others (normal, unused, byte) need no treatment here.
UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
DOWNLOAD_AGAIN = "download it again"


def _smollm(add_prefix_space: bool) -> pre_tokenizers.PreTokenizer:
    """Every digit is a word of its own; the rest is cut by GPT-2's pattern."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=True)
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])


# By `tokenizer.ggml.pre`: how text is cut into words, inside which byte pairs are then merged.
PRE_TOKENIZERS: dict[str, Callable[[bool], pre_tokenizers.PreTokenizer]] = {"smollm": _smollm}


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that `metadata` describes.

    Args:
        metadata: of a GGUF file, as plain Python values.

    Raises:
        UserError: there is no tokenizer in it, its kind is not supported, or its parts do not fit together.
    """
    kind = _require(metadata, "model", str)
    if kind != "gpt2":
        raise UserError(f"tokenizer kind {kind!r} is not supported (supported: 'gpt2', byte-level BPE): use another model")
    pre = _get(metadata, "pre", str, "default")
    if pre not in PRE_TOKENIZERS:
        raise UserError(f"pre-tokenizer {pre!r} is not supported (supported: {', '.join(map(repr, PRE_TOKENIZERS))}): use another model")
    tokens = _require(metadata, "tokens", list)
    types = _get(metadata, "token_type", list, [1] * len(tokens))
    if len(types) != len(tokens):
        raise UserError(f"the tokenizer has {len(tokens)} tokens but {len(types)} token types: the file is damaged; {DOWNLOAD_AGAIN}")

    backend = tokenizers.Tokenizer(_bpe(tokens, _require(metadata, "merges", list)))
    backend.pre_tokenizer = PRE_TOKENIZERS[pre](_get(metadata, "add_space_prefix", bool, False))
    control = [id for id, type in enumerate(types) if type in (UNKNOWN, CONTROL)]
    added = [id for id, type in enumerate(types) if type == USER_DEFINED]
    backend.add_special_tokens([tokenizers.AddedToken(tokens[id], special=True, normalized=False) for id in control])
    backend.add_tokens([tokenizers.AddedToken(tokens[id], special=False, normalized=False) for id in added])

    ids = {name: _token_id(metadata, name, len(tokens)) for name in ("bos", "eos", "eot", "eom", "padding")}
    adds = {name: _get(metadata, f"add_{name}_token", bool, False) for name in ("bos", "eos")}
    for name, wanted in adds.items():
        if wanted and ids[name] is None:
            raise UserError(f"the tokenizer asks for a {name.upper()} token but names none: the file is damaged; {DOWNLOAD_AGAIN}")
    known = set(tokens)
    return Tokenizer(
        backend=backend,
        pieces=_pieces(tokens, {*control, *added}),
        missing_bytes=bytes(byte for byte, char in enumerate(byte_alphabet()) if char not in known),
        special_ids=frozenset(control),
        eos_ids=frozenset(ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None),
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        pad_id=ids["padding"],
        adds_bos=adds["bos"],
        adds_eos=adds["eos"],
        chat=_chat_template(metadata, tokens, ids["bos"], ids["eos"]),
    )


def _chat_template(metadata: Mapping[str, Any], tokens: Sequence[str], bos_id: int | None, eos_id: int | None) -> ChatTemplate | None:
    source = metadata.get("tokenizer.chat_template")
    if not source:
        return None
    if not isinstance(source, str):
        raise UserError(f"the chat template is a {type(source).__name__}, not text: the file is damaged; {DOWNLOAD_AGAIN}")
    bos_token, eos_token = ("" if id is None else tokens[id] for id in (bos_id, eos_id))
    return ChatTemplate(source, bos_token=bos_token, eos_token=eos_token)


def _get(metadata: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    key = f"tokenizer.ggml.{name}"
    value = metadata.get(key, default)
    if value is not default and not isinstance(value, kind):
        raise UserError(f"{key} is a {type(value).__name__}, not a {kind.__name__}: the file is damaged; {DOWNLOAD_AGAIN}")
    return value


def _require(metadata: Mapping[str, Any], name: str, kind: type) -> Any:
    """A string, or a list of strings, that a tokenizer can't be without."""
    value = _get(metadata, name, kind, None)
    if not value:
        raise UserError(f"the file holds no tokenizer (no tokenizer.ggml.{name}): use a file that was converted with its tokenizer")
    if not all(isinstance(item, str) for item in value):
        raise UserError(f"tokenizer.ggml.{name} holds other things than text: the file is damaged; {DOWNLOAD_AGAIN}")
    return value


def _token_id(metadata: Mapping[str, Any], name: str, vocab_size: int) -> int | None:
    id = _get(metadata, f"{name}_token_id", int, None)
    if id is not None and not 0 <= id < vocab_size:
        raise UserError(f"tokenizer.ggml.{name}_token_id is {id}, but there are {vocab_size} tokens: the file is damaged; {DOWNLOAD_AGAIN}")
    return id


def _bpe(tokens: Sequence[str], merges: Sequence[str]) -> models.BPE:
    vocab = {token: id for id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for id, token in enumerate(tokens) if vocab[token] != id)
        raise UserError(f"the tokenizer lists token {twice!r} twice: the file is damaged; {DOWNLOAD_AGAIN}")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    try:
        return models.BPE(vocab, pairs)
    except Exception as error:  # the package raises bare Exception
        raise UserError(f"the tokenizer's merges do not fit its tokens ({error}): the file is damaged; {DOWNLOAD_AGAIN}") from error


def _pieces(tokens: Sequence[str], literal: set[int]) -> tuple[bytes, ...]:
    """The bytes of every token. Tokens in `literal` are text; in the others each character stands for one byte."""
    table = {ord(char): byte for byte, char in enumerate(byte_alphabet())}
    pieces = []
    for id, token in enumerate(tokens):
        try:
            # Mapped to U+0000..U+00FF, which Latin-1 encodes as the byte of that number.
            pieces.append(token.encode() if id in literal else token.translate(table).encode("latin-1"))
        except UnicodeEncodeError:  # a character that stands for no byte: such a token is text as well
            pieces.append(token.encode())
    return tuple(pieces)


def byte_alphabet() -> list[str]:
    """The character that stands for each byte in byte-level BPE (GPT-2; Radford et al. 2019).

    Printable characters of Latin-1 stand for themselves. The other bytes, in order, take the characters from U+0100 on, so that no token
    holds a space or a control character.
    """
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in shown else next(spare)) for byte in range(256)]
