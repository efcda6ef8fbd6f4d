"""The tokenizer that a GGUF file carries in its metadata (keys `tokenizer.ggml.*`)."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import models, normalizers

from runtime import UserError
from tokenizer.backends import CONTROL_LOOK, Backend, SentencePieceBackend, TokenizersBackend
from tokenizer.chat import ChatTemplate
from tokenizer.pieces import byte_alphabet, byte_level_pieces, sentencepiece_pieces
from tokenizer.pre_tokenizers import PRE_TOKENIZERS
from tokenizer.tokenizer import Tokenizer

# Values of `tokenizer.ggml.token_type`, those of SentencePiece.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
KINDS = {"gpt2": "byte-level BPE", "llama": "SentencePiece BPE"}
# Control tokens that end a turn. Files made before `eot_token_id` existed name none.
TURN_ENDS = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>")
DOWNLOAD_AGAIN = "download it again"


def tokenizer_from_gguf(metadata: Mapping[str, Any], path: str | os.PathLike[str] | None = None) -> Tokenizer:
    """The tokenizer that `metadata` describes.

    Args:
        metadata: of a GGUF file, as plain Python values.
        path: of that file, for errors.

    Raises:
        UserError: there is no tokenizer in it, its kind is not supported, or its parts do not fit together.
    """
    try:
        return _build(metadata)
    except UserError as error:
        if path is None:
            raise
        raise UserError(f"{os.fspath(path)}: {error}") from error


def _build(metadata: Mapping[str, Any]) -> Tokenizer:
    kind = _require(metadata, "model", str)
    if kind not in KINDS:
        supported = ", ".join(f"{name!r}, {what}" for name, what in KINDS.items())
        raise UserError(f"tokenizer kind {kind!r} is not supported (supported: {supported}): use another model")
    tokens = _require(metadata, "tokens", list)
    types = list(_get(metadata, "token_type", list, [NORMAL] * len(tokens)))
    if len(types) != len(tokens):
        raise UserError(f"the tokenizer has {len(tokens)} tokens but {len(types)} token types: the file is damaged; {DOWNLOAD_AGAIN}")
    for id, token in enumerate(tokens):
        if types[id] == USER_DEFINED and CONTROL_LOOK.fullmatch(token):  # so do older files mark the tokens of chats
            types[id] = CONTROL

    backend, adds_bos = _byte_level(metadata, tokens, types) if kind == "gpt2" else _sentencepiece(metadata, tokens, types)
    ids = {name: _token_id(metadata, name, len(tokens)) for name in ("bos", "eos", "eot", "eom", "padding")}
    if ids["eot"] is None:
        ids["eot"] = next((id for id, token in enumerate(tokens) if types[id] == CONTROL and token in TURN_ENDS), None)
    adds = {
        "bos": _get(metadata, "add_bos_token", bool, adds_bos and ids["bos"] is not None),
        "eos": _get(metadata, "add_eos_token", bool, False),
    }
    for name, wanted in adds.items():
        if wanted and ids[name] is None:
            raise UserError(f"the tokenizer asks for a {name.upper()} token but names none: the file is damaged; {DOWNLOAD_AGAIN}")

    literal = {id for id, type in enumerate(types) if type in (UNKNOWN, CONTROL, USER_DEFINED)}
    known = set(tokens)
    missing = bytes(byte for byte, char in enumerate(byte_alphabet()) if char not in known) if kind == "gpt2" else b""
    return Tokenizer(
        backend=backend,
        pieces=(byte_level_pieces if kind == "gpt2" else sentencepiece_pieces)(tokens, literal),
        missing_bytes=missing,
        special_ids=frozenset(id for id, type in enumerate(types) if type in (UNKNOWN, CONTROL)),
        eos_ids=frozenset(ids[name] for name in ("eos", "eot", "eom") if ids[name] is not None),
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        pad_id=ids["padding"],
        unknown_id=backend.unknown_id if isinstance(backend, SentencePieceBackend) else None,
        adds_bos=adds["bos"],
        adds_eos=adds["eos"],
        drops_space=isinstance(backend, SentencePieceBackend) and backend.adds_prefix,
        chat=_chat_template(metadata, tokens, ids),
    )


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> tuple[Backend, bool]:
    """The backend, and whether such models want BOS where the file does not say."""
    pre = _get(metadata, "pre", str, None)
    if pre is None:
        raise UserError("the file does not say how text is cut into words (no tokenizer.ggml.pre): use a newer conversion of the model")
    if pre not in PRE_TOKENIZERS:
        raise UserError(f"pre-tokenizer {pre!r} is not supported (supported: {', '.join(map(repr, PRE_TOKENIZERS))}): use another model")
    rule = PRE_TOKENIZERS[pre]
    native = tokenizers.Tokenizer(_bpe(tokens, _require(metadata, "merges", list), rule.ignore_merges))
    native.pre_tokenizer = rule.build()
    if _get(metadata, "add_space_prefix", bool, False):
        native.normalizer = normalizers.Prepend(" ")
    added = _added(tokens, types)
    native.add_special_tokens([token for token in added.values() if token.special])
    native.add_tokens([token for token in added.values() if not token.special])
    return TokenizersBackend(native), rule.adds_bos


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str], types: list[int]) -> tuple[Backend, bool]:
    """Likewise. The file holds what a SentencePiece model does, so that library gets it back and its merges are the original ones."""
    from sentencepiece import sentencepiece_model_pb2

    scores = _get(metadata, "scores", list, None)
    if scores is None or len(scores) != len(tokens):
        raise UserError(f"the tokenizer has {len(tokens)} tokens but {len(scores or [])} scores: the file is damaged; {DOWNLOAD_AGAIN}")
    unknown = _token_id(metadata, "unknown", len(tokens))
    if unknown is None:
        unknown = next((id for id, type in enumerate(types) if type == UNKNOWN), None)
    if unknown is None:
        raise UserError(f"the tokenizer names no unknown token: the file is damaged; {DOWNLOAD_AGAIN}")
    added = _added(tokens, types, strips=metadata.get("general.architecture") == "phi3")
    model = sentencepiece_model_pb2.ModelProto()
    for id, (token, score, type) in enumerate(zip(tokens, scores, types, strict=True)):
        kind = UNKNOWN if id == unknown else CONTROL if type in (UNKNOWN, USER_DEFINED) else type
        model.pieces.add(piece=token, score=score, type=kind)  # user-defined tokens are cut out before
    model.trainer_spec.model_type = sentencepiece_model_pb2.TrainerSpec.BPE
    model.trainer_spec.byte_fallback = BYTE in types
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.remove_extra_whitespaces = False
    model.normalizer_spec.add_dummy_prefix = _get(metadata, "add_space_prefix", bool, True)
    try:
        return SentencePieceBackend(model.SerializeToString(), added, prefix="each"), True
    except RuntimeError as error:
        raise UserError(f"the tokenizer's tokens do not fit together ({error}): the file is damaged; {DOWNLOAD_AGAIN}") from error


def _added(tokens: Sequence[str], types: Sequence[int], strips: bool = False) -> dict[int, tokenizers.AddedToken]:
    """The tokens that are found in a text before it is cut into words. With `strips`, white space after control tokens goes (Phi-3)."""
    kinds = {UNKNOWN: True, CONTROL: True, USER_DEFINED: False}
    keeps = ("<unk>", "<s>", "<|endoftext|>")  # of Phi-3's
    return {
        id: tokenizers.AddedToken(
            token, special=kinds[types[id]], normalized=False, rstrip=strips and kinds[types[id]] and token not in keeps
        )
        for id, token in enumerate(tokens)
        if types[id] in kinds and token
    }


def _chat_template(metadata: Mapping[str, Any], tokens: Sequence[str], ids: Mapping[str, int | None]) -> ChatTemplate | None:
    source, tool_source = (metadata.get(f"tokenizer.chat_template{name}") or None for name in ("", ".tool_use"))
    for text in (source, tool_source):
        if text is not None and not isinstance(text, str):
            raise UserError(f"the chat template is a {type(text).__name__}, not text: the file is damaged; {DOWNLOAD_AGAIN}")
    if source is None:
        return None
    ids = {**ids, "unknown": _token_id(metadata, "unknown", len(tokens))}
    bos, eos, pad, unk = ("" if ids[name] is None else tokens[ids[name]] for name in ("bos", "eos", "padding", "unknown"))
    return ChatTemplate(source, tool_source, bos_token=bos, eos_token=eos, pad_token=pad, unk_token=unk)


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


def _bpe(tokens: Sequence[str], merges: Sequence[str], ignore_merges: bool) -> models.BPE:
    vocab = {token: id for id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for id, token in enumerate(tokens) if vocab[token] != id)
        raise UserError(f"the tokenizer lists token {twice!r} twice: the file is damaged; {DOWNLOAD_AGAIN}")
    pairs = [tuple(merge.split(" ")) for merge in merges]
    try:
        return models.BPE(vocab, pairs, ignore_merges=ignore_merges)
    except Exception as error:  # the package raises bare Exception
        raise UserError(f"the tokenizer's merges do not fit its tokens ({error}): the file is damaged; {DOWNLOAD_AGAIN}") from error
