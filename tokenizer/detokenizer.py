"""Text while it is being generated."""

import codecs
from collections.abc import Iterable

from tokenizer.tokenizer import Tokenizer


class StreamingDetokenizer:
    """Turns ids into text as they come.

    Law: for any ids, cut anywhere, all that `push` returned and what `flush` returns, joined, equal `tokenizer.decode` of all ids.
    No returned text is ever taken back: the bytes of a character that is not complete yet are withheld, and bytes that can't become one
    are U+FFFD at once.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True):
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that became certain with `ids`.

        Raises:
            UserError: an id that is not in the vocabulary; the ids of this call are then not taken.
        """
        return self._decoder.decode(self._tokenizer.bytes_of(ids, skip_special=self._skip_special))

    def flush(self) -> str:
        """Ends the text: U+FFFD if a character is left incomplete, else nothing. A new text may follow."""
        return self._decoder.decode(b"", final=True)
