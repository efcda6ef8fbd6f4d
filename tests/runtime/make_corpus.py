"""Makes `configs/text/pydoc_topics.txt` again: `python tests/runtime/make_corpus.py FILE`, with the Python that `SOURCE_SHA256` names.

`pydoc_data.topics` quotes itself: whole statements stand both in a topic of their own and in a longer one. A topic most of which stands
in a longer one is left out, and the calibration half leaves out every paragraph that the evaluation half has, so that what is
calibrated on the one has not seen the other.
"""

import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from runtime.corpus import SEPARATOR

SOURCE_SHA256 = "37b51a0283fe86090af40650ef680bba22b90f74777f29909eceb83e57cc7ff1"  # of CPython 3.11.7's topics as sorted JSON
SHORTEST = 80  # characters of a paragraph that counts as a quotation; shorter ones are headings and one-line examples


def source_sha256(topics: Mapping[str, str]) -> str:
    return hashlib.sha256(json.dumps(topics, sort_keys=True).encode("utf-8")).hexdigest()


def paragraphs(text: str) -> list[str]:
    """Those that are long enough to count."""
    return [paragraph for paragraph in text.split("\n\n") if len(paragraph) >= SHORTEST]


def make(topics: Mapping[str, str]) -> str:
    """The two halves, calibration first, with the separator between them."""
    longest_first = sorted(topics, key=lambda name: (-len(topics[name]), name))
    halves: tuple[list[str], list[str]] = ([], [])
    seen: set[str] = set()
    sizes = [0, 0]
    for name in longest_first:
        own = paragraphs(topics[name])
        if sum(len(paragraph) for paragraph in own if paragraph in seen) > 0.25 * len(topics[name]):
            continue
        seen.update(own)
        lighter = sizes.index(min(sizes))
        halves[lighter].append(name)
        sizes[lighter] += len(topics[name])
    evaluation, calibration = ([topics[name].strip("\n") for name in sorted(half)] for half in halves)
    held_out = {paragraph for text in evaluation for paragraph in paragraphs(text)}
    calibration = ["\n\n".join(p for p in text.split("\n\n") if p not in held_out) for text in calibration]
    return "\n\n\n".join(calibration) + "\n" + SEPARATOR + "\n\n\n".join(evaluation) + "\n"


if __name__ == "__main__":
    from pydoc_data.topics import topics

    if source_sha256(topics) != SOURCE_SHA256:
        sys.exit(f"these topics have sha256 {source_sha256(topics)}, not {SOURCE_SHA256}: use CPython 3.11.7")
    Path(sys.argv[1]).write_text(make(topics), encoding="utf-8", newline="\n")
