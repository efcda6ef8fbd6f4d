"""Streaming text: whole characters only, and all of them in the end."""

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime import UserError
from tokenizer import StreamingDetokenizer

pytestmark = pytest.mark.filterwarnings("error")
any_case = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def stream(tokenizer, chunks, **options):
    detokenizer = StreamingDetokenizer(tokenizer, **options)
    return [*(detokenizer.push(chunk) for chunk in chunks), detokenizer.flush()]


def cut_at(ids, cuts):
    """`ids` cut into chunks, some of them empty, at the given places (taken modulo the length)."""
    places = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[start:end] for start, end in itertools.pairwise(places)]


def test_a_character_comes_with_its_last_byte(toy):
    assert stream(toy, [[0xE6], [0x97], [0xA5], [97]]) == ["", "", "日", "a", ""]


def test_a_byte_that_can_not_go_on_is_replaced_at_once(toy):
    assert stream(toy, [[0xE6], [97], [0xFF]]) == ["", "\ufffda", "\ufffd", ""]


def test_an_incomplete_end_is_flushed(toy):
    assert stream(toy, [[97, 0xF0, 0x9F]]) == ["a", "\ufffd"]


def test_after_a_flush_a_new_text_may_follow(toy):
    detokenizer = StreamingDetokenizer(toy)
    assert detokenizer.push([0xE6]) + detokenizer.flush() == "\ufffd"
    assert detokenizer.push([97]) == "a"
    assert detokenizer.flush() == ""


def test_special_tokens_are_skipped_even_inside_a_character(toy):
    assert stream(toy, [[0xE6, 258], [259, 0x97], [0xA5]]) == ["", "", "日", ""]
    assert stream(toy, [[258, 97]], skip_special=False) == ["<s>a", ""]


def test_an_id_outside_the_vocabulary_is_an_error_and_its_chunk_is_not_taken(toy):
    detokenizer = StreamingDetokenizer(toy)
    with pytest.raises(UserError, match="token id 261"):
        detokenizer.push([97, 261])
    assert detokenizer.push([98]) + detokenizer.flush() == "b"


@any_case
@given(ids=st.lists(st.integers(0, 260), max_size=60), cuts=st.lists(st.integers(0, 60)), skip=st.booleans())
def test_any_bytes_cut_anywhere_join_to_the_whole_decode(toy, ids, cuts, skip):
    assert "".join(stream(toy, cut_at(ids, cuts), skip_special=skip)) == toy.decode(ids, skip_special=skip)


@any_case
@given(ids=st.lists(st.integers(0, 49_151), max_size=60), cuts=st.lists(st.integers(0, 60)), skip=st.booleans())
def test_any_ids_of_the_default_model_cut_anywhere_join_to_the_whole_decode(smollm2, ids, cuts, skip):
    assert "".join(stream(smollm2, cut_at(ids, cuts), skip_special=skip)) == smollm2.decode(ids, skip_special=skip)


@any_case
@given(text=st.text(st.sampled_from("日本語漢字🙂👩‍👩‍👧é̈ a1<|im_end|>\n")), cuts=st.lists(st.integers(0, 200)))
def test_text_comes_back_without_a_replacement_character(smollm2, text, cuts):
    ids = smollm2.encode(text, parse_special=False)
    chunks = stream(smollm2, cut_at(ids, cuts))
    assert "".join(chunks) == text
    assert not any("\ufffd" in chunk for chunk in chunks)
