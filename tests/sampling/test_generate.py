"""Text in, text out, on a tiny random model."""

import dataclasses
import itertools

import numpy as np
import pytest

from runtime import LEDGER, UserError
from sampling import Completion, SamplingOptions, generate, generate_each, stream
from sampling.generate import Answer
from sampling.loop import LENGTH, RUNNING, Sampled
from tokenizer import Tokenizer

SHAPE = {"capacity": 64, "steps": 4, "batch_size": 2}  # that of test_batch: nothing more is compiled
STREAM = {"capacity": 64, "steps": 4}
PROMPTS = [[3], [40, 41, 42, 5, 9], "the hen", [8, 60], "in the end, 12!"]
OPTIONS = [
    SamplingOptions(max_new_tokens=20, ignore_eos=True),
    SamplingOptions(max_new_tokens=9, temperature=1.5, seed=7, ignore_eos=True),
    SamplingOptions(max_new_tokens=30, temperature=0.9, top_k=40, seed=2, repetition_penalty=1.2),
    SamplingOptions(max_new_tokens=1, temperature=3.0, seed=3),
    SamplingOptions(max_new_tokens=13, temperature=2.0, top_p=0.9, seed=5, presence_penalty=0.5, ignore_eos=True),
]


def essence(completion: Completion) -> tuple:
    """All but the time."""
    return completion.text, completion.tokens, completion.prompt_tokens, completion.finish_reason, completion.logprobs


@pytest.fixture(scope="module")
def completions(lm) -> list[Completion]:
    return generate(lm, PROMPTS, OPTIONS, **SHAPE)


@pytest.mark.parametrize("number", range(len(PROMPTS)))
def test_streamed_pieces_join_to_the_text_that_generate_gives(lm, completions, number):
    pieces = list(stream(lm, PROMPTS[number], OPTIONS[number], **STREAM))
    assert [piece.completion for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert "".join(piece.text for piece in pieces) == pieces[-1].completion.text == completions[number].text
    assert essence(pieces[-1].completion) == essence(completions[number])
    assert all(piece.text for piece in pieces[:-1])


def test_the_text_is_that_of_the_tokens(lm, completions):
    assert [completion.text for completion in completions] == [lm.tokenizer.decode(completion.tokens) for completion in completions]
    assert "\ufffd" in "".join(completion.text for completion in completions), "too easy: no character was left incomplete"


def test_prompts_in_several_groups_keep_their_order(lm, completions):
    alone = [generate(lm, [prompt] * 2, option, **SHAPE)[0] for prompt, option in zip(PROMPTS, OPTIONS, strict=True)]
    assert [essence(completion) for completion in completions] == [essence(completion) for completion in alone]
    backwards = generate(lm, PROMPTS[::-1], OPTIONS[::-1], **SHAPE)
    assert [essence(completion) for completion in backwards[::-1]] == [essence(completion) for completion in completions]


def test_each_answer_is_given_once_when_it_ends(lm, completions):
    given = list(generate_each(lm, PROMPTS, OPTIONS, **SHAPE))
    length = [len(completion.tokens) for completion in completions]
    groups = [sorted(group, key=lambda index: length[index]) for group in ([0, 1], [2, 3], [4])]  # the shorter one of each first
    assert [index for index, _ in given] == [index for group in groups for index in group]
    assert length[0] != length[1]
    assert length[2] != length[3]
    assert {index: essence(completion) for index, completion in given} == dict(enumerate(map(essence, completions)))


def test_one_prompt_gives_one_completion_and_a_list_a_list(lm, completions):
    one = dict(SHAPE, batch_size=1)
    assert essence(generate(lm, PROMPTS[0], OPTIONS[0], **one)) == essence(completions[0])
    assert [essence(completion) for completion in generate(lm, PROMPTS[:1], OPTIONS[0], **one)] == [essence(completions[0])]
    assert essence(generate(lm, "the hen", OPTIONS[2], **one)) == essence(completions[2])
    assert essence(generate(lm, [{"role": "user", "content": "the hen"}], OPTIONS[2], **one)) == essence(completions[2])
    assert generate(lm, []) == []


def test_fields_by_name_change_the_options_of_all(lm, completions):
    changed = generate(lm, PROMPTS[:2], OPTIONS[:2], max_new_tokens=4, **SHAPE)
    assert [completion.tokens for completion in changed] == [completion.tokens[:4] for completion in completions[:2]]


@pytest.mark.parametrize("count", [1, 2, 4, 5, 6, 9, 17])
def test_there_are_exactly_max_new_tokens(lm, count):
    completion = next(iter(generate(lm, [PROMPTS[1]] * 2, max_new_tokens=count, ignore_eos=True, **SHAPE)))
    assert (len(completion.tokens), completion.finish_reason) == (count, "length")
    assert len(completion.timing.inter_token_latencies) == count - 1


def test_a_full_row_ends_the_answer_with_a_reason(lm):
    prompt = list(itertools.islice(itertools.cycle(range(1, 90)), 58))
    whole, full = generate(lm, [prompt, prompt[:10]], ignore_eos=True, **SHAPE)
    assert (len(whole.tokens), whole.finish_reason) == (64 - 58 + 1, "capacity")
    assert (len(full.tokens), full.finish_reason) == (64 - 10 + 1, "capacity")
    # The last token needs no slot: 64 - 58 + 1 of them end by length and not by capacity.
    assert generate(lm, [prompt] * 2, max_new_tokens=7, ignore_eos=True, **SHAPE)[0].finish_reason == "length"


@pytest.mark.parametrize("number, place", [(1, 0), (1, 1), (1, 4), (1, 5), (4, 2), (4, 11)])
def test_an_end_of_sequence_token_ends_the_answer_and_is_its_last_token(lm, with_eos, completions, number, place):
    tokens = completions[number].tokens
    ending, end = with_eos(lm, tokens[place]), tokens.index(tokens[place]) + 1
    prompts = [PROMPTS[number]] * 2
    ended = generate(ending, prompts, OPTIONS[number], ignore_eos=False, **SHAPE)[0]
    assert (ended.tokens, ended.finish_reason) == (tokens[:end], "stop")
    assert ended.text == lm.tokenizer.decode(tokens[:end])
    ignored = generate(ending, prompts, OPTIONS[number], **SHAPE)[0]
    assert essence(ignored) == essence(completions[number])


def test_control_tokens_in_a_prompt_count_only_when_asked(lm):
    end = lm.tokenizer.backend.controls["<|im_end|>"]
    for raw, count in ((True, 0), (False, 1)):  # a chat's turn ends once, by its template
        assert lm.encode("hi<|im_end|>", raw=raw).count(end) == count
        assert lm.encode("hi<|im_end|>", raw=raw, parse_special=True).count(end) == count + 1


def first_with(tokenizer: Tokenizer, tokens: tuple[int, ...], stop: str) -> int:
    """How many tokens it takes until `stop` is in the text."""
    return next(count for count in range(len(tokens) + 1) if stop in tokenizer.decode(tokens[:count]))


@pytest.mark.parametrize("start", [0, 1, 3, 4, 7, 10])
@pytest.mark.parametrize("length", [1, 3, 6])
def test_a_stop_string_cuts_the_text_exactly_also_across_tokens(lm, readable, start, length):
    option, whole = readable
    stop = whole.text[start : start + length]
    count = first_with(lm.tokenizer, whole.tokens, stop)
    [cut, other] = generate(lm, [PROMPTS[1]] * 2, [dataclasses.replace(option, stop=(stop, "never")), option], **SHAPE)
    assert cut.text == whole.text[: whole.text.find(stop)]
    assert (cut.tokens, cut.finish_reason) == (whole.tokens[:count], "stop")
    assert essence(other) == essence(whole)  # its neighbour goes on
    pieces = list(stream(lm, PROMPTS[1], option, stop=stop, **STREAM))
    assert "".join(piece.text for piece in pieces) == cut.text
    assert essence(pieces[-1].completion) == essence(cut)


@pytest.fixture(scope="module")
def readable(lm) -> tuple[SamplingOptions, Completion]:
    """An answer of ASCII text, one to three characters per token."""
    ascii_only = {token: -100.0 for token, piece in enumerate(lm.tokenizer.pieces) if max(piece) > 127 or token in lm.tokenizer.special_ids}
    likelier = {token: 1.0 for token, piece in enumerate(lm.tokenizer.pieces) if len(piece) in (2, 3) and token not in ascii_only}
    option = SamplingOptions(max_new_tokens=20, temperature=1.5, seed=8, logit_bias=ascii_only | likelier)
    completion = generate(lm, [PROMPTS[1]] * 2, option, **SHAPE)[0]
    assert len(completion.text) > 20 and completion.text.isascii()
    return option, completion


def test_the_start_of_a_stop_string_is_given_out_when_the_answer_ends_otherwise(lm, readable):
    option, whole = readable
    pieces = list(stream(lm, PROMPTS[1], option, stop=whole.text[-3:] + "never", **STREAM))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert pieces[-1].completion.finish_reason == "length"
    assert pieces[-1].text.endswith(whole.text[-3:])


def test_text_that_may_become_a_stop_string_is_not_streamed(lm, readable):
    option, whole = readable
    stop = whole.text[2:14]
    given = ""
    for piece in stream(lm, PROMPTS[1], option, stop=stop, **STREAM):
        given += piece.text
        assert whole.text[: whole.text.find(stop)].startswith(given)


def test_logprobs_are_as_many_as_asked_for(lm):
    options = [dataclasses.replace(OPTIONS[1], logprobs=logprobs) for logprobs in (3, None, 0)]
    three, without, chosen = generate(lm, [PROMPTS[1]] * 3, options, **SHAPE)
    assert three.tokens == without.tokens == chosen.tokens
    assert without.logprobs is None
    assert [entry.token for entry in three.logprobs] == list(three.tokens)
    assert [len(entry.top) for entry in three.logprobs] == [3] * 9
    assert [entry.top for entry in chosen.logprobs] == [()] * 9
    np.testing.assert_allclose([entry.logprob for entry in three.logprobs], [entry.logprob for entry in chosen.logprobs], atol=1e-4)
    for entry in three.logprobs:
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True) and entry.logprob <= values[0] + 1e-6 and values[0] < 0
        assert all(value == pytest.approx(entry.logprob) for token, value in entry.top if token == entry.token)


def test_the_same_seed_gives_the_same_answer_and_none_a_fresh_one(lm):
    option = SamplingOptions(max_new_tokens=20, temperature=2.0, ignore_eos=True)
    seeded = [generate(lm, [PROMPTS[1]] * 2, option, seed=9, **SHAPE) for _ in range(2)]
    assert len({completion.tokens for pair in seeded for completion in pair}) == 1
    assert len({completion.tokens for completion in generate(lm, [PROMPTS[1]] * 2, option, **SHAPE)}) == 2


def test_a_stream_may_be_left_and_the_next_one_is_not_disturbed(lm, completions):
    left = stream(lm, PROMPTS[0], OPTIONS[0], **STREAM)
    next(left)
    left.close()
    assert essence(list(stream(lm, PROMPTS[0], OPTIONS[0], **STREAM))[-1].completion) == essence(completions[0])


def test_any_prompts_share_eight_programs(lm):
    rng = np.random.default_rng(3)
    lengths = [1, 2000, *rng.integers(1, 2001, 98)]
    prompts = [rng.integers(0, 97, length).tolist() for length in lengths]
    options = [
        SamplingOptions(
            max_new_tokens=int(rng.integers(1, 12)),
            temperature=float(rng.choice([0.0, 0.7])),
            top_k=int(rng.choice([0, 20])),
            top_p=float(rng.choice([1.0, 0.9])),
            repetition_penalty=float(rng.choice([1.0, 1.1])),
            logit_bias={} if rng.random() < 0.5 else {3: 1.0},
            seed=int(rng.integers(2**32)),
            stop=() if rng.random() < 0.5 else ("x",),
        )
        for _ in prompts
    ]
    mark = len(LEDGER.entries)
    first = generate(lm, prompts, options, batch_size=8, capacity=2048)
    names = sorted(entry.name for entry in LEDGER.programs(mark))
    assert names == ["decode", "first_token", *["prefill"] * 5, "stop_rows"]
    with LEDGER.sealed():
        again = generate(lm, prompts, options, batch_size=8, capacity=2048)
    assert [essence(completion) for completion in again] == [essence(completion) for completion in first]


MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    "prompt, settings, message",
    [
        ("", {}, "the prompt is empty"),
        ([""], {}, "the prompt is empty"),
        ([[]], {}, "the prompt is empty"),
        ([97], {}, "token id 97 is not in the vocabulary: ids go from 0 to 96"),
        ([[3, -1]], {}, "token id -1 is not in the vocabulary"),
        ([1] * 65, {"capacity": 64}, "the prompt has 65 tokens, but the cache holds 64 per row: .* capacity of at least 66"),
        ([1] * 2049, {}, "the prompt has 2049 tokens, but the model's context is 2048: shorten it"),
        ([1] * 2049, {"capacity": 2048}, "the prompt has 2049 tokens, but the model's context is 2048: shorten it"),
        ([1], {"capacity": 2049}, "capacity 2049 is out of range: give 1 to 2048, the model's context"),
        ([1], {"capacity": 0}, "capacity 0 is out of range"),
        ("hi", {"raw": True, "system": "be kind"}, "a system message needs the chat template"),
        (MESSAGES, {"raw": True}, "messages need the chat template"),
        ([{"role": "system", "content": "a"}, *MESSAGES], {"system": "b"}, "hold a system message already"),
        ([1], {"logit_bias": {97: 1.0}}, "logit_bias names token 97, which is not in the vocabulary: ids go from 0 to 96"),
        ([1], {"logit_bias": {-1: 1.0}}, "logit_bias names token -1"),
        ([1], {"temperature": -1}, "temperature -1 is out of range"),
        ([1], {"steps": 0}, "steps per dispatch 0 is below 1"),
        ("zΩ", {"raw": True}, "no token for 'Ω'"),
    ],
)
@pytest.mark.parametrize("call", [stream, generate], ids=["stream", "generate"])
def test_a_bad_request_is_an_error_before_anything_is_generated(lm, call, prompt, settings, message):
    if call is stream and prompt and isinstance(prompt[0], (list, str)) and not isinstance(prompt, str):
        prompt = prompt[0]
    mark = len(LEDGER.entries)
    with pytest.raises(UserError, match=message):
        call(lm, prompt, **{"batch_size": 1} if call is generate else {}, **settings)  # a stream that nobody reads yet, too
    assert not LEDGER.programs(mark)


def test_one_bad_prompt_of_many_is_an_error_before_the_first_is_answered(lm):
    with pytest.raises(UserError, match="the prompt has 65 tokens"):
        generate_each(lm, [[1], [1] * 65], **SHAPE)
    with pytest.raises(UserError, match="there are 2 prompts but 3 options"):
        generate_each(lm, [[1], [2]], [SamplingOptions()] * 3, **SHAPE)
    with pytest.raises(UserError, match="batch_size 0 is below 1"):
        generate_each(lm, [[1]], batch_size=0)


@pytest.mark.parametrize("prompt", [[np.int64(3), np.int64(4)], np.array([3, 4])], ids=["list", "array"])
def test_token_ids_may_be_numpy_integers(lm, prompt):
    option = SamplingOptions(max_new_tokens=3, ignore_eos=True)
    one = dict(SHAPE, batch_size=1)
    assert essence(generate(lm, prompt, option, **one)) == essence(generate(lm, [3, 4], option, **one))


def test_a_system_message_beside_token_ids_is_an_error(lm):
    with pytest.raises(UserError, match="system"):
        lm.encode([3, 4], system="be kind")


def test_a_token_past_the_tokenizers_list_has_no_text(lm):
    """As `Tokenizer.vocab_size` says: logits may be wider than the tokenizer's list."""
    shorter = dataclasses.replace(lm.tokenizer, pieces=lm.tokenizer.pieces[:96])
    option = SamplingOptions(max_new_tokens=3, logit_bias={96: 100.0}, ignore_eos=True)
    completion = generate(dataclasses.replace(lm, tokenizer=shorter), [[3]] * 2, option, **SHAPE)[0]
    assert (completion.tokens, completion.text) == ((96,) * 3, "")


def sampled(*tokens: int, finish: int = RUNNING) -> Sampled:
    """One row's share of a dispatch."""
    column = np.asarray(tokens)[:, None]
    ends = np.full(column.shape, RUNNING)
    ends[max(np.flatnonzero(column[:, 0] >= 0)) :] = finish
    return Sampled(tokens=column, finish=ends)


def test_tokens_of_one_dispatch_share_its_time(lm):
    answer = Answer(lm, SamplingOptions(), prompt_tokens=1)
    answer.take(sampled(1), 0, 0.5)
    answer.take(sampled(1, 2, 3, 4), 0, 0.4)
    answer.take(sampled(1, 2, 3, 4), 0, 0.8)
    assert answer.completion().timing.time_to_first_token == 0.5
    assert answer.completion().timing.inter_token_latencies == pytest.approx([0.1] * 4 + [0.2] * 4)


def test_steps_that_were_not_run_take_no_share_of_the_time(lm):
    answer = Answer(lm, SamplingOptions(), prompt_tokens=1)
    answer.take(sampled(1), 0, 0.5)
    answer.take(sampled(1, 2, -1, -1, finish=LENGTH), 0, 0.2)  # the loop ended after two steps: nobody else was running
    assert answer.completion().timing.inter_token_latencies == pytest.approx([0.1] * 2)


def test_a_cancelled_answer_gives_out_what_was_withheld(lm):
    answer = Answer(lm, SamplingOptions(stop=("abc",)), prompt_tokens=1)
    a, b, half = 0, 1, lm.tokenizer.pieces.index("é".encode()[:1])
    texts = [answer.take(sampled(a), 0, 0.0), answer.take(sampled(b, half), 0, 0.0), answer.cancel()]
    assert texts == ["", "", "ab\ufffd"]
    assert (answer.completion().text, answer.completion().finish_reason) == ("ab\ufffd", "cancelled")
