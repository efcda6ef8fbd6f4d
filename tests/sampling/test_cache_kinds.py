"""Generation over every layout of the KV cache: the same answers, and what a pool of pages adds (sharing, and running out)."""

import dataclasses

import numpy as np
import pytest

import kv
from model import Transformer
from runtime import UserError
from sampling import Conversation, SamplingOptions, generate, report
from sampling.batch import Batch
from tests.sampling.conftest import random_params

SYSTEM = [5, 9, 13, 77, 20, 21, 22, 23, 40, 41, 42, 8, 60, 60, 3, 31, 32]
PROMPTS = [[*SYSTEM, 50, 51], [*SYSTEM, 52], [7, 8, 9], [*SYSTEM, 50, 51]]
OPTIONS = [
    SamplingOptions(max_new_tokens=22, ignore_eos=True),
    SamplingOptions(max_new_tokens=9, temperature=1.0, seed=3, ignore_eos=True),
    SamplingOptions(max_new_tokens=30, temperature=0.8, seed=5, ignore_eos=True),
    SamplingOptions(max_new_tokens=5, ignore_eos=True),
]
SIZES = {"batch_size": 2, "capacity": 64, "steps": 4}


@pytest.fixture(scope="session")
def windowed(lm):
    """The tiny model with a window of 9 tokens in its first layer."""
    first, second = lm.config.layers
    first = dataclasses.replace(first, attention=dataclasses.replace(first.attention, window=9))
    config = dataclasses.replace(lm.config, layers=(first, second))
    return dataclasses.replace(lm, model=Transformer(config), params=random_params(config, seed=0))


def stored(lm, **format):
    return dataclasses.replace(lm, kv_format=kv.Format(**format))


def answers(lm, **more):
    return generate(lm, PROMPTS, OPTIONS, **SIZES | more)


@pytest.fixture(scope="session")
def expected(lm):
    return [answer.tokens for answer in answers(lm)]


@pytest.fixture(scope="session")
def expected_windowed(windowed):
    """From a cache that keeps every token: the margin is the capacity."""
    lm = stored(windowed, margin=64)
    assert kv.rewind_margin(lm.config, 64, lm.kv_format) is None
    return [answer.tokens for answer in answers(lm)]


def test_pages_answer_as_slots_do(lm, expected):
    got = answers(stored(lm, page_size=8))
    assert [answer.tokens for answer in got] == expected
    assert [answer.cached_tokens for answer in got] == [0] * 4


def test_prompts_that_begin_alike_share_pages_and_answer_the_same(lm, expected):
    batches = []
    got = answers(stored(lm, page_size=8), prefix_cache=True, inspect=batches.append)
    assert [answer.tokens for answer in got] == expected
    assert [answer.cached_tokens for answer in got] == [0, 16, 0, 16]
    (batch,) = batches
    assert batch.pager.tree.counters.hit_tokens == 32
    assert "4 lookups, 32 tokens hit, 27 missed" in report.cache_table(batch)


def test_a_row_ends_where_the_pool_ends_and_what_it_gives_back_serves_the_others(lm, expected):
    lm = stored(lm, page_size=8)
    # Both prompts take 3 pages each, so one is left, and the first row gets it. The second's 18 tokens and 6 more fill its three, and the
    # seventh is sampled but has no place.
    got = answers(lm, pages=7)
    assert [(answer.finish_reason, len(answer.tokens)) for answer in got[:2]] == [("length", 22), ("capacity", 7)]
    for answer, full in zip(got, expected, strict=True):
        assert answer.tokens == full[: len(answer.tokens)]
    assert got[2].tokens == expected[2]  # of the next two prompts, both fit
    assert got[3].tokens == expected[3]


def test_a_prompt_that_the_pool_can_not_hold_names_the_flag(lm):
    with pytest.raises(UserError, match=r"the prompt has 19 tokens, but the pool of 2 pages of 8 tokens holds 16: give at least 4 pages"):
        answers(stored(lm, page_size=8), pages=2)
    with pytest.raises(UserError, match=r"needs pages up to token 18, but the pool of 4 pages of 8 tokens has none left .*--kv_pages"):
        answers(stored(lm, page_size=8), pages=4)  # one prompt fits, not both


@pytest.mark.parametrize("more", [{"pages": 4}, {"prefix_cache": True}])
def test_options_of_pages_need_pages(lm, more):
    with pytest.raises(UserError, match="needs a paged KV cache: add --cache=paged"):
        answers(lm, **more)


RINGS = [
    pytest.param({"margin": 20}, id="ring"),
    pytest.param(
        {"page_size": 4, "margin": 20}, id="paged", marks=pytest.mark.slow
    ),  # as in the next test, which has a prefix cache besides
]


@pytest.mark.parametrize("format", RINGS)
def test_layers_with_a_window_keep_no_more_than_they_need_and_answer_the_same(windowed, expected_windowed, format):
    lm, batches = stored(windowed, **format), []
    got = answers(lm, inspect=batches.append)
    assert [answer.tokens for answer in got] == expected_windowed
    whole = kv.nbytes(lm.config, 2, 64, kv.Format(margin=64))
    assert sum(store.reserved for store in kv.stores(batches[0].cache)) < whole


def test_a_prefix_hit_is_one_that_layers_with_a_window_honour_too(windowed, expected_windowed):
    got = answers(stored(windowed, page_size=4, margin=20), prefix_cache=True)
    assert [answer.tokens for answer in got] == expected_windowed
    assert [answer.cached_tokens for answer in got][1] == 16


@pytest.mark.slow
def test_a_row_goes_back_by_the_margin_and_by_more_only_if_it_starts_anew(windowed):
    """Twelve tokens of run-ahead fit the margin; a rewind to the beginning does not."""
    lm = stored(windowed, margin=13)
    batch = Batch(lm, 1, 64, steps=4)
    batch.build([len(PROMPTS[0])])
    batch.start(0, PROMPTS[0], OPTIONS[0])
    for _ in range(3):
        batch.dispatch()
        batch.read()
    assert int(batch.cache.lengths[0]) == 31
    assert (batch.keeps(0, 18), batch.keeps(0, 17)) == (18, 0)
    held, rest = PROMPTS[0][:18], PROMPTS[0][18:]
    again = batch.start(0, rest, OPTIONS[0], held=held)
    fresh = Batch(lm, 1, 64, steps=4).start(0, PROMPTS[0], OPTIONS[0])
    np.testing.assert_array_equal(again.tokens, fresh.tokens)
    assert batch.keeps(0, 17) == 0  # the 31 tokens that it once held count, not the 19 of now
    with pytest.raises(ValueError, match="can't go back to 17 tokens"):
        batch.start(0, PROMPTS[0][17:], OPTIONS[0], held=PROMPTS[0][:17])


@pytest.mark.slow
def test_a_chat_that_would_go_back_too_far_is_read_anew(windowed, ascii_option):
    def second_turn(margin):
        chat = Conversation(stored(windowed, margin=margin), ascii_option, capacity=64, steps=4)
        first, second = ([piece.completion for piece in chat.say(text)][-1] for text in ("a b", "c d"))
        assert first.cached_tokens == 0
        return second

    anew, kept = second_turn(margin=0), second_turn(margin=64)
    assert anew.cached_tokens == 0 < kept.cached_tokens
    assert anew.tokens == kept.tokens
