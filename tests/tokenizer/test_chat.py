"""Chat templates: the field's dialect, in a sandbox."""

import datetime
import re

import pytest

from runtime import UserError
from tokenizer import ChatTemplate

USER = [{"role": "user", "content": "Hi <there>"}]


def render(source, messages=USER, **kwargs):
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(messages, **kwargs)


def test_the_default_models_chats_render_as_in_transformers(smollm2, golden):
    chats = [record for record in golden if record["kind"] == "chat"]
    assert chats
    for record in chats:
        assert smollm2.chat.render([{"role": "user", "content": record["prompt"]}]) == record["rendered"]


def test_a_conversation_of_several_turns_renders(smollm2):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": ""},
    ]
    turns = "".join(f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages)
    assert smollm2.chat.render(messages) == turns + "<|im_start|>assistant\n"
    assert smollm2.chat.render(messages, add_generation_prompt=False) == turns


@pytest.mark.parametrize(
    "source, expected",
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s>Hi <there></s>"),
        ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ [1, 2] | tojson(indent=1) }}", "[\n 1,\n 2\n]"),
        ("{% generation %}x{{ 1 + 1 }}{% endgeneration %}y", "x2y"),
        ("{{ 'tools' if tools is not none else 'no tools' }}", "no tools"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{{ undefined_name }}", ""),
    ],
)
def test_the_dialect_is_that_of_published_templates(source, expected):
    assert render(source) == expected


def test_further_variables_reach_the_template():
    assert render("{{ enable_thinking }} {{ tools[0].name }}", enable_thinking=False, tools=[{"name": "add"}]) == "False add"


def test_other_keys_of_a_message_reach_the_template():
    assert render("{{ messages[0].name }}", [{"role": "tool", "content": "4", "name": "add"}]) == "add"


def test_templates_can_ask_for_the_date():
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.datetime.now().year + offset) for offset in (-1, 0)}


def test_a_template_can_refuse_a_conversation():
    with pytest.raises(UserError, match="refuses this conversation: roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ ''['__class__'] }}",
        "{{ '' | attr('__class__') }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
    ],
)
def test_a_template_can_not_leave_the_sandbox(source):
    messages = [dict(message) for message in USER]
    with pytest.raises(UserError, match="chat template was stopped"):
        render(source, messages)
    assert messages == USER


@pytest.mark.parametrize(
    "source, message",
    [
        ("a\n{% if %}", "is faulty at line 2"),
        ("{% include 'x' %}", "failed: TypeError"),
        ("{{ nothing.at.all }}", "failed: UndefinedError"),
        ("{{ 1 / 0 }}", "failed: ZeroDivisionError"),
        ("{{ range(10 ** 9) | list }}", "failed: OverflowError"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "failed: RecursionError"),
    ],
)
def test_a_faulty_template_is_one_line_with_a_remedy(source, message):
    with pytest.raises(UserError, match=re.escape(message) + ".*give a plain prompt"):
        render(source)


@pytest.mark.parametrize(
    "messages, message",
    [
        ([], "messages is empty"),
        ("Hi", "messages must be a list of {role, content}, not str"),
        (USER[0], "messages must be a list of {role, content}, not dict"),
        (None, "not NoneType"),
        ([*USER, "Hi"], "message 1 must be {role, content}, not str"),
        ([{"content": "Hi"}], "message 0 has no 'role'"),
        ([*USER, {"role": "user"}], "message 1 has no 'content'"),
        ([{"role": "robot", "content": "Hi"}], "message 0 has role 'robot': known roles are system, user, assistant, tool"),
        ([{"role": "user", "content": None}], "the content of message 0 must be a string, not NoneType"),
        ([{"role": "user", "content": [{"type": "text"}]}], "the content of message 0 must be a string, not list"),
        ([{"role": ["user"], "content": "Hi"}], "message 0 has role ['user']"),
    ],
)
def test_a_malformed_conversation_is_an_error_that_says_where(messages, message):
    with pytest.raises(UserError, match=re.escape(message)):
        render("x", messages)
