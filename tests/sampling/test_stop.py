"""Stop strings: nothing of them gets out, and nothing else is kept back."""

import functools
import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sampling.stop import StopStrings

texts = st.text("ab", max_size=12)
stops = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)
cuts = st.lists(st.integers(0, 12), max_size=6)


def cut_at(text: str, places: list[int]) -> list[str]:
    bounds = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(bounds)]


def before_first_stop(text: str, stops: list[str]) -> tuple[str, bool]:
    """By the words of the law: the first place at which a stop string is complete, and of those that end there the longest."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


@settings(deadline=None, max_examples=500)
@given(text=texts, stops=stops, cuts=cuts)
@example(text="aab", stops=["aaa", "ab"], cuts=[1, 2])
@example(text="abab", stops=["bab", "ab"], cuts=[])
def test_any_text_cut_anywhere_ends_before_its_first_stop_string(text, stops, cuts):
    passing = StopStrings(stops)
    out = "".join(passing.push(piece) for piece in cut_at(text, cuts)) + passing.flush()
    assert (out, passing.stopped) == before_first_stop(text, stops)


def common_prefix(a: str, b: str) -> str:
    return next((a[:end] for end in range(len(a), 0, -1) if b.startswith(a[:end])), "")


def can_all_be_first(stops: list[str]) -> bool:
    """No stop string ends inside another one, which then could never be reached."""
    return not any(inner in stop[:-1] for stop in stops for inner in stops)


@settings(deadline=None, max_examples=300)
@given(text=texts, stops=stops.filter(can_all_be_first), cuts=cuts)
def test_what_is_withheld_is_what_some_continuation_would_still_take_back(text, stops, cuts):
    longest = max(map(len, stops), default=1)
    continuations = ["".join(chars) for size in range(longest) for chars in itertools.product("ab", repeat=size)]
    passing, pushed, out = StopStrings(stops), "", ""
    for piece in cut_at(text, cuts):
        pushed += piece
        out += passing.push(piece)
        certain = functools.reduce(common_prefix, [before_first_stop(pushed + more, stops)[0] for more in continuations])
        assert out == certain
        assert passing.stopped or len(pushed) - len(out) <= longest - 1


def test_a_stop_string_that_can_not_be_reached_withholds_nothing():
    assert StopStrings(["a", "baa"]).push("b") == "b"


@given(text=texts, cuts=cuts)
def test_without_stop_strings_every_piece_passes_at_once(text, cuts):
    passing = StopStrings(())
    assert [passing.push(piece) for piece in cut_at(text, cuts)] == cut_at(text, cuts)
    assert passing.flush() == "" and not passing.stopped


def test_nothing_comes_after_a_stop_string():
    passing = StopStrings(["end"])
    assert [passing.push("the en"), passing.push("d of it"), passing.push("more"), passing.flush()] == ["the ", "", "", ""]
    assert passing.stopped


@pytest.mark.parametrize("stop", ["日本", "🙂"])
def test_a_stop_string_of_any_script_is_found(stop):
    passing = StopStrings([stop])
    assert "".join(passing.push(char) for char in f"é{stop}x") == "é"


def test_a_flushed_text_did_not_stop():
    passing = StopStrings(["ab"])
    assert (passing.push("ca"), passing.flush(), passing.stopped) == ("c", "a", False)
