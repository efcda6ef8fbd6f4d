"""Requests in rows: how prompts are cut, what a row may hold, and that rows do not disturb one another."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import LEDGER, UserError
from sampling import SamplingOptions
from sampling.batch import BUCKETS, CHUNK, Batch, plan_capacity, plan_chunks
from sampling.generate import Answer, run
from sampling.loop import CAPACITY, STOP

PROMPT = [40, 41, 42, 5, 9, 13, 77, 20, 21, 22, 23]
OTHER = [8, 60, 60, 3]
OPTION = SamplingOptions(max_new_tokens=30, repetition_penalty=1.3, frequency_penalty=0.2, ignore_eos=True)
SEEDED = SamplingOptions(max_new_tokens=30, temperature=1.0, seed=5, ignore_eos=True)


@pytest.fixture
def batch(lm):
    """Two rows of 64 slots, four tokens per dispatch: one shape for all tests here and in test_generate."""
    return lambda: Batch(lm, 2, 64, steps=4)


def answer(batch, row, first, dispatches=0):
    """The tokens of a row: its first, and those of so many more dispatches."""
    parts = [first.tokens[:, 0]]
    for _ in range(dispatches):
        batch.dispatch()
        parts.append(batch.read().tokens[:, row])
    return np.concatenate(parts).tolist()


@given(length=st.integers(0, 5 * CHUNK))
def test_chunks_cover_the_prompt_in_order_in_the_smallest_buckets(length):
    chunks = plan_chunks(length)
    assert [token for chunk in chunks for token in range(chunk.start, chunk.start + chunk.count)] == list(range(length))
    for chunk in chunks:
        assert chunk.count >= 1
        assert chunk.bucket == min(bucket for bucket in BUCKETS if bucket >= chunk.count)
    assert all(chunk.count == CHUNK for chunk in chunks[:-1])  # cuts are at multiples of CHUNK: where they are depends on nothing else


@given(need=st.integers(1, 10**7), context=st.integers(1, 2**20))
def test_the_capacity_is_one_of_few_that_hold_the_need_or_the_whole_context(need, context):
    capacity = plan_capacity(need, context)
    assert min(need, context) <= capacity <= context
    assert capacity == context or capacity in [512 * 2**power for power in range(15)]
    assert capacity == context or capacity == 512 or capacity < 4 * need


@pytest.mark.parametrize("option", [OPTION, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("held", [1, 4, 10])
def test_a_row_that_holds_a_prefix_answers_as_one_that_starts_from_nothing(batch, option, held):
    scratch, reused = batch(), batch()
    expected = answer(scratch, 1, scratch.start(1, PROMPT, option), 3)
    # What it held before goes on after the prefix: a first answer, which the new request drops.
    answer(reused, 1, reused.start(1, PROMPT[:held], SEEDED), 2)
    assert answer(reused, 1, reused.start(1, PROMPT[held:], option, held=PROMPT[:held]), 3) == expected
    assert np.asarray(reused.cache.lengths).tolist() == np.asarray(scratch.cache.lengths).tolist() == [0, len(PROMPT) + 12]


def test_starting_a_row_leaves_a_running_one_alone(batch):
    alone = batch()
    expected = answer(alone, 0, alone.start(0, PROMPT, OPTION), 5)
    both = batch()
    tokens = answer(both, 0, both.start(0, PROMPT, OPTION), 2)
    other = both.start(1, OTHER, SEEDED)
    tokens += answer(both, 0, other, 3)[1:]
    assert tokens == expected


def test_a_request_that_starts_late_answers_as_it_does_alone(batch):
    alone = batch()
    expected = answer(alone, 0, alone.start(0, OTHER, SEEDED), 3)
    both = batch()
    answer(both, 0, both.start(0, PROMPT, OPTION), 2)
    assert answer(both, 1, both.start(1, OTHER, SEEDED), 3) == expected


def complete(lm, batch, requests, **kwargs):
    answers = {}
    for row, (prompt, option) in enumerate(requests):
        answers[row] = Answer(lm, option, len(prompt))
        answers[row].take(batch.start(row, prompt, option), 0, 0.0)
    texts = [[], []]
    for row, text in run(batch, answers, **kwargs):
        texts[row].append(text)
    return [(tuple(answer.tokens), answer.finish_reason, "".join(text)) for answer, text in zip(answers.values(), texts, strict=True)]


def test_how_far_the_dispatches_run_ahead_changes_nothing(lm, batch):
    requests = [(PROMPT, OPTION), (OTHER, SamplingOptions(max_new_tokens=7, temperature=1.0, seed=2, ignore_eos=True))]
    results = [complete(lm, batch(), requests, run_ahead=run_ahead) for run_ahead in (0, 1, 3)]
    assert results[0] == results[1] == results[2]
    assert [len(tokens) for tokens, _, _ in results[0]] == [30, 7]


def test_a_batch_serves_again_after_its_rows_ended(lm, batch):
    used = batch()
    complete(lm, used, [(OTHER, SEEDED), (PROMPT, SEEDED)])
    assert not used.pending
    assert complete(lm, used, [(PROMPT, OPTION), (OTHER, SEEDED)]) == complete(lm, batch(), [(PROMPT, OPTION), (OTHER, SEEDED)])


def test_a_prompt_as_long_as_the_row_gets_one_token_and_a_longer_one_is_an_error(batch):
    made = batch()
    full = list(itertools.islice(itertools.cycle(PROMPT), 64))
    first = made.start(0, full, OPTION)
    assert first.tokens.shape == first.finish.shape == (1, 1) and first.finish.item() == CAPACITY
    with pytest.raises(UserError, match=r"the prompt has 65 tokens, but a row of the cache holds 64 .*context is 2048.*shorten it"):
        made.start(0, [*full, 1], OPTION)
    with pytest.raises(UserError, match="the prompt has 65 tokens"):
        made.start(0, full, OPTION, held=[1])


def test_an_error_leaves_the_running_rows_and_settings_as_they_were(batch):
    alone, made = batch(), batch()
    expected = answer(alone, 0, alone.start(0, OTHER, SEEDED), 2)
    first = made.start(0, OTHER, SEEDED)
    with pytest.raises(UserError, match="the prompt has 65 tokens"):
        made.start(0, [1] * 65, OPTION)
    assert answer(made, 0, first, 2) == expected


@pytest.mark.parametrize(
    "arguments, message", [({"steps": 0}, "steps per dispatch 0"), ({"size": 0}, "batch 0"), ({"capacity": 0}, "capacity 0")]
)
def test_an_impossible_batch_is_an_error(lm, arguments, message):
    with pytest.raises(UserError, match=message):
        Batch(lm, **{"size": 1, "capacity": 64, **arguments})


def test_a_request_without_a_seed_takes_a_fresh_one(batch):
    made = batch()
    option = SamplingOptions(temperature=2.0, max_new_tokens=50, ignore_eos=True)
    first, second = made.start(0, PROMPT, option), made.start(1, PROMPT, option)
    made.dispatch(), made.dispatch()
    tokens = np.concatenate([made.read().tokens, made.read().tokens])
    # One of 97 tokens, nine times over: that both rows agree by chance would take a lottery.
    assert [first.tokens.item(), *tokens[:, 0]] != [second.tokens.item(), *tokens[:, 1]]


def test_rows_without_a_request_stay_silent(batch):
    made = batch()
    made.start(1, PROMPT, OPTION)
    made.dispatch()
    sampled = made.read()
    assert (sampled.tokens[:, 0] == -1).all() and (sampled.finish[:, 0] == STOP).all()
    assert (sampled.tokens[:, 1] >= 0).all()


def test_what_a_row_wrote_for_its_last_request_is_not_read_as_the_next_ones(batch):
    alone, made = batch(), batch()
    expected = answer(alone, 0, alone.start(0, OTHER, OPTION), 1)
    made.start(0, PROMPT, OPTION)
    made.dispatch()  # in flight while the row gets another request
    tokens = answer(made, 0, made.start(0, OTHER, OPTION), 2)
    assert tokens[1:5] == [-1] * 4  # what was in flight is nobody's
    assert [tokens[0], *tokens[5:]] == expected


@pytest.mark.parametrize("asked, compiled", [(None, None), (0, 0), (1, 20), (20, 20)])
def test_any_number_of_logprobs_shares_one_program(lm, asked, compiled):
    assert Batch(lm, 1, 64, logprobs=asked).logprobs == compiled


def test_a_batch_that_was_built_compiles_no_program_more(lm):
    made = Batch(lm, 2, 96, steps=2)  # a shape of its own
    made.build([40])
    mark = len(LEDGER.entries)
    answer(made, 0, made.start(0, PROMPT * 4, OPTION), 2)
    made.start(1, PROMPT * 5, SEEDED)
    assert not LEDGER.programs(mark)
