"""The bytes that each token stands for, in the two ways that vocabularies write them."""

import functools
from collections.abc import Collection, Sequence

SPACE = "\u2581"  # SentencePiece writes a space as this block
BYTES = {f"<0x{byte:02X}>": bytes([byte]) for byte in range(256)}  # and a byte that has no character token so


def byte_level_pieces(tokens: Sequence[str], literal: Collection[int]) -> tuple[bytes, ...]:
    """Of a byte-level BPE vocabulary (GPT-2). Tokens in `literal` are text; in the others each character stands for one byte."""
    table = {ord(char): byte for byte, char in enumerate(byte_alphabet())}
    pieces = []
    for id, token in enumerate(tokens):
        try:
            # Mapped to U+0000..U+00FF, which Latin-1 encodes as the byte of that number.
            pieces.append(token.encode() if id in literal else token.translate(table).encode("latin-1"))
        except UnicodeEncodeError:  # a character that stands for no byte: such a token is text as well
            pieces.append(token.encode())
    return tuple(pieces)


def sentencepiece_pieces(tokens: Sequence[str], literal: Collection[int]) -> tuple[bytes, ...]:
    """Of a SentencePiece vocabulary (Kudo and Richardson 2018). Tokens in `literal` are text; `<0x0A>` is the byte 0A."""
    return tuple(
        token.encode() if id in literal else BYTES.get(token) or token.replace(SPACE, " ").encode() for id, token in enumerate(tokens)
    )


@functools.cache
def byte_alphabet() -> list[str]:
    """The character that stands for each byte in byte-level BPE (GPT-2; Radford et al. 2019).

    Printable characters of Latin-1 stand for themselves. The other bytes, in order, take the characters from U+0100 on, so that no token
    holds a space or a control character.
    """
    shown = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in shown else next(spare)) for byte in range(256)]
