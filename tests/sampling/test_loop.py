"""The decode loop on four rows of a tiny model: steps of any number give the same, and each row has its own end."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

import kv
from model import prefill
from sampling import DecodeState, SamplingOptions, SamplingParams, decode, first_token
from sampling.loop import CAPACITY, LENGTH, RUNNING, STOP

LOGPROBS = 5
CAPACITY_SLOTS = 48
PROMPT_SLOTS = 16  # padded length of a prompt
NEVER = 10**6  # tokens: more than any of these rows can hold


@dataclasses.dataclass(frozen=True)
class Request:
    prompt: list[int]
    option: SamplingOptions
    max_new_tokens: int = NEVER
    stop_tokens: tuple[int, ...] = ()


MIXED = {
    "greedy": Request([5, 9, 70, 5], SamplingOptions()),
    "seeded": Request([3], SamplingOptions(temperature=1.2, top_k=50, top_p=0.95, min_p=0.01, seed=17)),
    "penalized": Request([8, 8, 30, 61, 2, 44, 8], SamplingOptions(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.6)),
    "biased": Request(
        list(range(40, 56)), SamplingOptions(temperature=0.7, seed=17, logit_bias={7: 1.5, 96: -100.0}, repetition_penalty=0.9)
    ),
}
GREEDY = {name: dataclasses.replace(request, option=SamplingOptions()) for name, request in MIXED.items()}


class Run:
    """Rows driven as a caller of the jitted functions drives them; `all` is what every dispatch sampled, one after the other."""

    def __init__(self, lm, requests, idle=0):
        self.lm, self.names, size, V = lm, list(requests), len(requests) + idle, lm.config.vocab_size
        options = [*(request.option for request in requests.values()), *[SamplingOptions()] * idle]
        self.sampling = SamplingParams.stack([dataclasses.replace(option, seed=option.seed or 0) for option in options], [])
        tokens, counts = np.zeros((size, PROMPT_SLOTS), np.int32), np.zeros(size, np.int32)
        for row, request in enumerate(requests.values()):
            tokens[row, : len(request.prompt)], counts[row] = request.prompt, len(request.prompt)
            self.sampling.stop_tokens[row, : len(request.stop_tokens)] = request.stop_tokens
        logits, self.cache = prefill(lm.model, lm.params, kv.init(lm.config, size, CAPACITY_SLOTS, lm.kv_format), tokens, counts)
        self.state = DecodeState.init(size, V)
        firsts = []
        for row, request in enumerate(requests.values()):
            seen = np.isin(np.arange(V), request.prompt)
            numbers = (np.int32(number) for number in (request.max_new_tokens, len(request.prompt), CAPACITY_SLOTS))
            first, self.state = first_token(
                self.state, self.sampling, logits[row : row + 1], np.int32(row), seen, *numbers, logprobs=LOGPROBS
            )
            firsts.append(first)
        first = jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *firsts)
        self.sampled = [
            jax.tree.map(lambda part: np.pad(part, [(0, 0), (0, idle), *[(0, 0)] * (part.ndim - 2)], constant_values=-1), first)
        ]

    def steps(self, count):
        sampled, self.state, self.cache = decode(
            self.lm.model, self.lm.params, self.cache, self.state, self.sampling, steps=count, logprobs=LOGPROBS
        )
        self.sampled.append(jax.tree.map(np.array, sampled))
        return self

    @property
    def all(self):
        return jax.tree.map(lambda *parts: np.concatenate(parts), *self.sampled)

    def tokens(self, name):
        """The answer of one row."""
        column = self.all.tokens[:, self.names.index(name)]
        count = int((column >= 0).sum())
        assert (column[:count] >= 0).all(), "tokens after the end"
        return column[:count].tolist()

    def held(self):
        """Copies of all that each row holds: {row: its slots of every store, length, finish, counts and so on}."""
        values = jax.tree.map(np.array, (self.cache, self.state))
        stores = jax.tree.leaves(values[0].stores)  # [L, B, ...]
        per_row = [values[0].lengths, *jax.tree.leaves(values[1])]  # [B, ...]
        return {row: [*(array[:, row] for array in stores), *(array[row] for array in per_row)] for row in range(len(per_row[0]))}


@pytest.fixture(scope="module")
def by_steps(lm):
    """by_steps(k): 24 more tokens of four rows with different settings, k at a time."""

    @functools.cache
    def run(k):
        made = Run(lm, MIXED)
        for _ in range(24 // k):
            made.steps(k)
        return made

    return run


def answers(run, requests):
    """What `expect_tokens` takes."""
    return {name: (requests[name].prompt, requests[name].option, run.tokens(name)) for name in run.names}


def same(a, b):
    assert len(a) == len(b)
    for left, right in zip(a, b, strict=True):
        np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("k", [3, 8])
def test_steps_at_once_give_what_one_at_a_time_gives(by_steps, k):
    one, many = by_steps(1), by_steps(k)
    np.testing.assert_array_equal(one.all.tokens, many.all.tokens)
    np.testing.assert_array_equal(one.all.finish, many.all.finish)
    np.testing.assert_allclose(one.all.logprobs, many.all.logprobs, atol=1e-4)
    np.testing.assert_array_equal(one.cache.lengths, many.cache.lengths)
    np.testing.assert_array_equal(one.state.counts, many.state.counts)


def test_greedy_rows_write_the_argmax_of_the_full_forward(lm, expect_tokens):
    run = Run(lm, GREEDY).steps(8).steps(8).steps(8)
    assert [len(run.tokens(name)) for name in run.names] == [25] * 4
    assert len(set(run.all.tokens.ravel())) > 8, "too easy: the answers repeat themselves"
    expect_tokens(answers(run, GREEDY))


def test_rows_with_any_settings_write_what_the_full_forward_and_a_sorting_sampler_give(by_steps, expect_tokens):
    expect_tokens(answers(by_steps(8), MIXED))


def test_a_row_in_a_batch_writes_what_it_writes_alone(lm, by_steps, expect_tokens):
    for name, request in MIXED.items():
        alone = Run(lm, {name: request}).steps(8).steps(8).steps(8)
        if alone.tokens(name) != by_steps(8).tokens(name):  # the shapes differ: a tie within rounding may, and nothing else
            expect_tokens(answers(alone, MIXED))
            expect_tokens(answers(by_steps(8), MIXED))


def test_a_row_does_not_depend_on_its_slot(lm, by_steps):
    moved = Run(lm, {name: MIXED[name] for name in ("biased", "greedy", "penalized", "seeded")}).steps(8).steps(8).steps(8)
    assert {name: moved.tokens(name) for name in MIXED} == {name: by_steps(8).tokens(name) for name in MIXED}


def test_counts_are_of_the_answer_and_seen_of_the_prompt(by_steps):
    run = by_steps(8)
    for row, (name, request) in enumerate(MIXED.items()):
        np.testing.assert_array_equal(run.state.counts[row], np.bincount(run.tokens(name), minlength=97))
        assert set(np.flatnonzero(run.state.seen[row])) == set(request.prompt)
        assert run.cache.lengths[row] == len(request.prompt) + 24  # the last token is not cached yet
        assert run.state.tokens[row] == run.tokens(name)[-1]
        assert run.state.remaining[row] == NEVER - 25


def test_logprobs_are_those_of_the_model_before_penalties_and_filters(by_steps, full_forward):
    run = by_steps(8)
    rows = full_forward([[*request.prompt, *run.tokens(name)[:-1]] for name, request in MIXED.items()])
    for row, ((name, request), logits) in enumerate(zip(MIXED.items(), rows, strict=True)):
        logits = logits[len(request.prompt) - 1 :].astype(np.float64)
        expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))  # [25, V]
        np.testing.assert_allclose(run.all.logprobs[:, row], expected[np.arange(25), run.tokens(name)], atol=1e-4)
        best = -np.sort(-expected, axis=-1)[:, :LOGPROBS]
        np.testing.assert_allclose(run.all.top_logprobs[:, row], best, atol=1e-4)
        np.testing.assert_allclose(np.take_along_axis(expected, run.all.top_tokens[:, row], -1), best, atol=1e-4)
        assert (np.diff(run.all.top_logprobs[:, row], axis=-1) <= 0).all()


ENDING = ("greedy", "seeded", "biased")  # by an end-of-sequence token, by length, by capacity; the fourth slot has no request


def start_ending(lm, stop):
    changes = {"greedy": {"stop_tokens": (stop,)}, "seeded": {"max_new_tokens": 6}, "biased": {}}
    return Run(lm, {name: dataclasses.replace(MIXED[name], **changes[name]) for name in ENDING}, idle=1)


@pytest.fixture(scope="module")
def ending(lm):
    """Rows that end for three reasons, stepped one by one until the last has ended, and then by eight more.

    Returns: the run, what was held after the first tokens and after each dispatch, and the greedy row's answer.
    """
    greedy = Run(lm, GREEDY).steps(8).tokens("greedy")
    stop = next(token for number, token in enumerate(greedy) if number >= 3 and token not in greedy[:number])
    run = start_ending(lm, stop)
    history = [run.held()]
    while (np.asarray(run.state.finish) == RUNNING).any() and len(history) <= CAPACITY_SLOTS:
        history.append(run.steps(1).held())
    history.append(run.steps(8).held())
    return run, history, greedy[: greedy.index(stop) + 1]


def test_each_row_ends_where_it_should_and_says_why(ending):
    run, _, until_stop = ending
    assert run.tokens("greedy") == until_stop
    assert len(run.tokens("seeded")) == 6
    assert len(run.tokens("biased")) == CAPACITY_SLOTS - len(MIXED["biased"].prompt) + 1  # the last one needs no slot
    for row, (name, reason) in enumerate(zip(ENDING, (STOP, LENGTH, CAPACITY), strict=True)):
        last = len(run.tokens(name)) - 1
        finish = run.all.finish[:-8, row]
        assert (finish[:last] == RUNNING).all() and (finish[last:] == reason).all(), name
        assert (run.all.tokens[last + 1 :, row] == -1).all()
        assert run.state.finish[row] == reason


def test_a_row_that_ended_keeps_every_bit(ending):
    run, history, _ = ending
    for row, name in enumerate(ENDING):
        end = len(run.tokens(name)) - 1
        same(history[end][row], history[-1][row])
        assert any((a != b).any() for a, b in zip(history[end - 1][row], history[end][row], strict=True))


def test_a_row_without_a_request_stays_empty(ending):
    run, history, _ = ending
    same(history[0][3], history[-1][3])
    assert run.cache.lengths[3] == 0 and not np.asarray(run.state.counts[3]).any()
    assert all(not np.asarray(array[:, 3]).any() for array in jax.tree.leaves(run.cache.stores))
    assert (run.all.tokens[:, 3] == -1).all() and run.state.finish[3] == STOP


def test_a_dispatch_after_all_rows_ended_changes_nothing(ending):
    run, history, _ = ending
    for row in range(4):
        same(history[-2][row], history[-1][row])
    assert (run.sampled[-1].tokens == -1).all()


def test_steps_that_were_not_needed_say_why_each_row_ended(ending):
    run, _, _ = ending
    assert run.sampled[-1].finish.tolist() == [[STOP, LENGTH, CAPACITY, STOP]] * 8


def test_an_end_inside_a_dispatch_is_where_single_steps_put_it(lm, ending):
    run, _, until_stop = ending
    once = start_ending(lm, until_stop[-1])
    for _ in range(CAPACITY_SLOTS // 8):
        once.steps(8)
    assert {name: once.tokens(name) for name in ENDING} == {name: run.tokens(name) for name in ENDING}
    length = len(run.tokens("biased"))
    np.testing.assert_array_equal(once.all.finish[:length], run.all.finish[:length])


@pytest.mark.parametrize(
    "remaining, stop, reason",
    [(1, False, LENGTH), (NEVER, True, STOP), (1, True, STOP)],
    ids=["one token", "end of sequence", "both"],
)
def test_the_first_token_may_be_the_last(lm, remaining, stop, reason):
    first = Run(lm, {"greedy": MIXED["greedy"]}).tokens("greedy")
    request = dataclasses.replace(MIXED["greedy"], max_new_tokens=remaining, stop_tokens=tuple(first) if stop else ())
    run = Run(lm, {"greedy": request})
    assert (run.tokens("greedy"), run.all.finish.tolist()) == (first, [[reason]])
    before = run.held()
    assert run.steps(8).tokens("greedy") == first
    same(run.held()[0], before[0])
