"""A chat that keeps its cache answers as one that reads everything anew."""

import dataclasses

import pytest

from runtime import UserError
from sampling import Conversation, SamplingOptions, generate

SHAPE = {"capacity": 64, "steps": 4}  # that of the streams in test_generate


@pytest.fixture
def option(ascii_option) -> SamplingOptions:
    return ascii_option


@pytest.fixture
def chat(lm, option) -> Conversation:
    return Conversation(lm, option, **SHAPE)


def say(chat, text):
    *_, last = pieces = list(chat.say(text))
    assert "".join(piece.text for piece in pieces) == last.completion.text
    return last.completion


def anew(lm, option, messages):
    return generate(lm, messages, option, batch_size=1, **SHAPE)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def test_each_turn_is_answered_as_if_all_was_read_anew(lm, option, chat):
    first = say(chat, "a")
    assert first.tokens == anew(lm, option, [user("a")]).tokens and first.cached_tokens == 0
    second = say(chat, "b")
    messages = [user("a"), assistant(first.text), user("b")]
    assert second.tokens == anew(lm, option, messages).tokens
    assert chat.messages == [*messages, assistant(second.text)]
    assert second.cached_tokens >= first.prompt_tokens and second.prompt_tokens > second.cached_tokens
    assert chat.held == second.prompt_tokens + len(second.tokens) - 1


def test_a_system_message_comes_first(lm, option):
    chat = Conversation(lm, option, system="c", **SHAPE)
    answer = say(chat, "a")
    assert answer.tokens == anew(lm, option, [{"role": "system", "content": "c"}, user("a")]).tokens


@pytest.mark.parametrize("read", [1, 2])
def test_an_answer_that_is_cut_short_stays_as_far_as_it_came(lm, option, chat, read):
    whole = anew(lm, option, [user("a")])
    pieces = chat.say("a")
    given = "".join(next(pieces).text for _ in range(read))
    pieces.close()
    assert chat.messages == [user("a"), assistant(given)] and 0 < len(given) < len(whole.text) and whole.text.startswith(given)
    assert say(chat, "b").tokens == anew(lm, option, [user("a"), assistant(given), user("b")]).tokens


def test_a_turn_that_nobody_reads_was_not_taken(lm, option, chat):
    chat.say("a")
    assert chat.messages == [] and chat.held == 0
    assert say(chat, "b").tokens == anew(lm, option, [user("b")]).tokens


def test_a_turn_that_can_not_be_answered_leaves_the_chat_as_it_was(lm, option, chat):
    first = say(chat, "a")
    before = [*chat.messages], chat.held
    for text, message in (
        ("", "the message is empty"),
        (" \n", "the message is empty"),
        ("x" * 60, "the chat has grown to .* holds 64"),
        ("Ω", "no token"),
    ):
        with pytest.raises(UserError, match=message):
            chat.say(text)
        assert (chat.messages, chat.held) == before
    assert say(chat, "b").tokens == anew(lm, option, [user("a"), assistant(first.text), user("b")]).tokens


@pytest.mark.parametrize("token", [97, -1])
def test_a_bias_outside_the_vocabulary_is_an_error(lm, token):
    with pytest.raises(UserError, match=f"logit_bias names token {token}"):
        list(Conversation(lm, SamplingOptions(logit_bias={token: 1.0}), **SHAPE).say("a"))


def test_a_turn_that_was_left_open_ends_when_the_next_one_begins(lm, option):
    option = dataclasses.replace(option, max_new_tokens=4)
    chat = Conversation(lm, option, **SHAPE)
    left = chat.say("a")
    given = next(left).text
    second = say(chat, "b")
    left.close()  # as the garbage collector may do at any time
    messages = [user("a"), assistant(given), user("b"), assistant(second.text)]
    assert chat.messages == messages
    assert say(chat, "c").tokens == anew(lm, option, [*messages, user("c")]).tokens
