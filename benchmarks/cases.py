"""What is measured: one prompt read (`prefill-512`), or tokens written while a cache holds some (`decode-1024`, `decode-128x8`)."""

import dataclasses
import random
import re

from runtime import UserError

DEFAULT = ("prefill-128", "prefill-512", "prefill-2048", "decode-128", "decode-1024", "decode-4096", "decode-128x8", "decode-128x32")


@dataclasses.dataclass(frozen=True)
class Case:
    """One measurement's shape.

    Attributes:
      kind: "prefill" or "decode".
      held: tokens of the prompt: read (prefill), or in every row's cache before the first step (decode).
      batch: rows.
      steps: tokens that each row is given; a prefill gives the first.
    """

    kind: str
    held: int
    batch: int
    steps: int

    @property
    def name(self) -> str:
        return f"{self.kind}-{self.held}" + (f"x{self.batch}" if self.batch > 1 else "")

    @property
    def counted(self) -> int:
        """Tokens that one measurement counts: the prompt's, or all rows' new ones."""
        return self.held if self.kind == "prefill" else self.batch * self.steps

    def request(self, vocab_size: int) -> dict:
        """What every worker is asked: the same random prompt, which depends on the case alone."""
        draw = random.Random(self.name)
        tokens = [draw.randrange(vocab_size) for _ in range(self.held)]
        return {"op": "prefill", "tokens": tokens} if self.kind == "prefill" else self._decode(tokens)

    def _decode(self, tokens: list[int]) -> dict:
        return {"op": "decode", "tokens": tokens, "batch": self.batch, "steps": self.steps}


def parse(name: str) -> Case:
    """The case of a name.

    Raises:
      UserError: no such form, or a count of 0.
    """
    found = re.fullmatch(r"prefill-(\d+)|decode-(\d+)(?:x(\d+))?", name)
    if not found or any(count is not None and int(count) < 1 for count in found.groups()):
        raise UserError(f"case {name!r} is not known: give prefill-TOKENS, decode-HELD or decode-HELDxBATCH, such as {', '.join(DEFAULT)}")
    prompt, held, batch = (None if count is None else int(count) for count in found.groups())
    if prompt is not None:
        return Case("prefill", prompt, batch=1, steps=1)
    # A wide batch takes longer per step, and a measurement is long enough with half as many.
    return Case("decode", held, batch=batch or 1, steps=32 if (batch or 1) == 1 else 16)
