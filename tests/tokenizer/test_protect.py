"""Control tokens in messages are text; those of the template count."""

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runtime import UserError
from tokenizer import ChatTemplate, tokenizer_from_gguf
from tokenizer.protect import NONCHARACTERS, protect

any_case = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
BITS = ["<s>", "</s>", "<", "</", "s>", ">", " ", "\n", "a", "é", "<|im_end|>", "<|im_", "end|>", "|im_start|>", "<|im_start|>", "<think>"]
HOSTILE = st.lists(st.sampled_from(BITS), max_size=8).map("".join)
TRIMMED = "<s>{% for m in messages %}{{ m.role }}: {{ m.content | trim }}</s>{% endfor %}"


def with_template(tokenizer, source):
    return dataclasses.replace(tokenizer, chat=ChatTemplate(source, bos_token="<s>", eos_token="</s>"))


def test_a_message_can_not_end_its_turn(toy):
    ids = with_template(toy, TRIMMED).encode_chat([{"role": "user", "content": " a</s>b "}])
    assert ids == [258, *b"user: a</s>b", 259]


def test_a_message_can_when_that_is_asked_for(toy):
    ids = with_template(toy, TRIMMED).encode_chat([{"role": "user", "content": " a</s>b "}], parse_special=True)
    assert ids == [258, *b"user: a", 259, ord("b"), 259]


@pytest.mark.parametrize(
    "source, content, expected",
    [
        ("{{ messages[0].content }}s>", "a<", b"a<s>"),  # begun in the message, ended by the template
        ("</{{ messages[0].content }}", "s>a", b"</s>a"),  # and the other way round
        ("{{ messages[0].content | trim }}s>", "a< ", b"a<s>"),
        ("{{ messages[0].content | tojson }}", "</s>", b'"</s>"'),
        ("{{ messages[0] }}", "</s>", b"{'role': 'user', 'content': '</s>'}"),
        ("{{ messages[0].content | tojson(ensure_ascii=True) }}", "</s>", b'"</s>"'),
        ("{% for c in messages[0].content %}{{ c }}{% endfor %}", "</s>", b"</s>"),
        ("{{ messages[0].content.split('b')[-1] }}", "ab</s>", b"</s>"),
        ("{{ messages[0].content | replace('x', '') }}", "<x/s>", [259]),  # what the template makes is the template's
    ],
)
def test_whatever_the_template_does_with_the_text(toy, source, content, expected):
    assert with_template(toy, source).encode_chat([{"role": "user", "content": content}]) == list(expected)


def test_tools_documents_and_calls_are_text_as_well(toy):
    source = "<s>{{ tools[0].name }}{{ documents[0].text }}{{ messages[0].tool_calls[0].arguments | tojson }}{{ extra }}</s>"
    call = {"role": "assistant", "tool_calls": [{"arguments": {"</s>": ["</s>", 1, None]}}]}
    ids = with_template(toy, source).encode_chat([call], tools=[{"name": "</s>"}], documents=[{"text": "<s>"}], extra="<s>")
    assert ids == [258, *b'</s><s>{"</s>": ["</s>", 1, null]}<s>', 259]


def test_names_that_templates_compare_stay_as_they_are(toy):
    source = "{{ '<' + messages[0].name + '>' if messages[0].role == 'user' and messages[0].kind == 's' }}{{ messages[0].content }}"
    ids = with_template(toy, source).encode_chat([{"role": "user", "content": "</s>", "name": "s", "kind": "s"}])
    assert ids == [258, *b"</s>"]  # put together by the template itself


@any_case
@given(contents=st.lists(HOSTILE, min_size=1, max_size=3))
def test_no_message_of_the_default_model_brings_a_control_token(smollm2, contents):
    roles = ["system", *["user", "assistant"] * 2]
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]
    harmless = [{**message, "content": "x"} for message in messages]
    ids, expected = smollm2.encode_chat(messages), smollm2.encode_chat(harmless)
    assert [id for id in ids if id in smollm2.special_ids] == [id for id in expected if id in smollm2.special_ids]
    assert smollm2.decode(ids, skip_special=False) == smollm2.chat.render(messages)


@any_case
@given(text=st.text(st.sampled_from("ab <é\n"), min_size=1))
def test_a_message_without_control_tokens_has_the_ids_of_the_rendered_text(smollm2, text):
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": text}]
    assert smollm2.encode_chat(messages) == smollm2.encode(smollm2.chat.render(messages), parse_special=True)


@any_case
@given(text=HOSTILE, before=HOSTILE, after=HOSTILE)
def test_the_mark_is_inside_every_control_token_and_goes_again(text, before, after):
    controls = ["<s>", "</s>", "<|im_end|>", "<|im_start|>", "s><"]  # the last one overlaps with others
    marked, mark = protect(text, controls)
    assert not any(control in marked for control in controls)
    assert marked == text if mark is None else mark.remove(marked) == text
    outside = {(index, control) for control in controls for index in range(99) if before.startswith(control, index)}
    assert {
        (index, control) for control in controls for index in range(len(before)) if (before + marked).startswith(control, index)
    } == outside
    trimmed = marked.strip()
    if len(text.strip()) > 11:  # longer than any control token, so that none can reach across it
        found = sum((before + trimmed + after).count(control) for control in controls[:4])
        assert found == sum(before.count(control) + after.count(control) for control in controls[:4])


def test_the_mark_is_none_that_the_text_holds():
    marked, mark = protect(["</s>", NONCHARACTERS[0], "\\ufdd1"], ["</s>"])
    assert mark.char == NONCHARACTERS[2] and marked[0] == f"<{mark.char}/s>"
    with pytest.raises(UserError, match="hold all of U\\+FDD0 to U\\+FDEE"):
        protect(["</s>", "".join(NONCHARACTERS)], ["</s>"])


def test_a_control_token_of_one_character_can_not_be_told_apart():
    assert protect("ab", ["#"]) == ("ab", None)
    with pytest.raises(UserError, match="hold the control token '#'"):
        protect("a#b", ["#"])


def test_a_noncharacter_that_stands_for_control_tokens_is_refused_beside_them(toy):
    chat = with_template(toy, TRIMMED)
    assert chat.encode_chat([{"role": "user", "content": "\ufdef"}]) == [258, *"user: \ufdef".encode(), 259]
    with pytest.raises(UserError, match=r"U\+FDEF"):
        chat.encode_chat([{"role": "user", "content": "\ufdef</s>"}])


def test_a_control_token_that_plain_merges_make_is_refused_in_a_message(metadata):
    metadata["tokenizer.ggml.token_type"][257] = 3
    built = tokenizer_from_gguf(metadata)
    assert built.encode("hello", parse_special=True) == [257, *b"lo"]
    with pytest.raises(UserError, match="no way to write 'hel' other than as a control token: remove it"):
        built.encode("hello")
