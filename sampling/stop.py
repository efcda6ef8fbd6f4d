"""Stop strings in text that arrives in pieces."""

from collections.abc import Sequence


class StopStrings:
    """Passes text through until one of the stop strings appears, however the pieces cut it.

    Law: for any text, cut anywhere, what `push` and `flush` returned, joined, is the text up to its first stop string (the one that
    is complete first; of several that begin at different places and end at the same, the longest); all of it if there is none.
    Text that may still become a stop string is withheld, nothing else is.
    """

    def __init__(self, stops: Sequence[str]):
        # A stop string with another inside, before its last character, is never the first to be complete.
        self._stops = tuple(stop for stop in stops if not any(other in stop[:-1] for other in stops))
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that is certain to come before any stop string; nothing once `stopped`."""
        if self.stopped:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        end, start = min(
            ((at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0),
            default=(-1, -1),
        )
        if end >= 0:
            self.stopped, self._held = True, ""
            return text[:start]
        keep = max(
            (size for stop in self._stops for size in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:size])), default=0
        )
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was withheld: the text has ended, so it is no stop string."""
        held, self._held = self._held, ""
        return held
