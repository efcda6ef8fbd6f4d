"""Text while it is being generated."""

import codecs
from collections.abc import Iterable

from tokenizer.tokenizer import Tokenizer


class StreamingDetokenizer:
    """Turns ids into text as they come.

    Law: for any ids, cut anywhere, all that `push` returned and what `flush` returns, joined, equal `tokenizer.decode` of all ids.
    No returned text is ever taken back: the bytes of a character that is not complete yet are withheld, and bytes that can't become one
    are U+FFFD at once. Time and memory do not depend on how much text came before.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = True):
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = False  # whether any byte of the text was there

    def push(self, ids: Iterable[int]) -> str:
        """The text that became certain with `ids`.

        Raises:
            UserError: an id that is not in the vocabulary; the ids of this call are then not taken.
        """
        data = self._tokenizer.bytes_of(ids, skip_special=self._skip_special)
        text, self._begun = (data if self._begun else self._tokenizer.without_prefix(data)), self._begun or bool(data)
        return self._decoder.decode(text)

    def flush(self) -> str:
        """Ends the text: U+FFFD if a character is left incomplete, else nothing. A new text may follow."""
        self._begun = False
        return self._decoder.decode(b"", final=True)
