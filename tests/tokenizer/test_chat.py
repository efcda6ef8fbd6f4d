"""Chat templates: the field's dialect, in a sandbox."""

import datetime
import json
import re
from pathlib import Path

import pytest

from runtime import UserError
from tokenizer import ChatTemplate

RECORDED = json.loads((Path(__file__).parent / "chats.json").read_text(encoding="utf-8"))["cases"]
USER = [{"role": "user", "content": "Hi <there>"}]


def render(source, messages=USER, **kwargs):
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(messages, **kwargs)


@pytest.mark.parametrize("case", RECORDED, ids=[case["name"] for case in RECORDED])
def test_published_kinds_of_templates_render_as_in_transformers(case):
    assert render(case["template"], case["messages"], **case["arguments"]) == case["rendered"]


@pytest.mark.parametrize("case", RECORDED, ids=[case["name"] for case in RECORDED])
def test_the_recorded_texts_are_those_of_the_transformers_that_is_installed(case):
    module = pytest.importorskip("transformers.utils.chat_template_utils")
    arguments = {"add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>", **case["arguments"]}
    messages = [{key: item for key, item in message.items() if item is not None} for message in case["messages"]]
    texts, _ = module.render_jinja_template([messages], chat_template=case["template"], **arguments)
    assert texts == [case["rendered"]]


PARTS = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
FOR_PARTS = (
    "{% for m in messages %}{% for part in m.content %}{% if part.type == 'text' %}<{{ part.text }}>{% endif %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    "source, messages, expected",
    [
        ("{{ messages[0].content }}", PARTS, "one\ntwo"),
        ("{{ messages[0].content + '!' }}", PARTS, "one\ntwo!"),
        (FOR_PARTS, PARTS, "<one><two>"),
        (FOR_PARTS, USER, "<Hi <there>>"),
        ("{% if messages[0].content is string %}{{ messages[0].content }}{% else %}" + FOR_PARTS + "{% endif %}", PARTS, "<one><two>"),
        ("{% if messages|length != 2 %}{{ raise_exception('two') }}{% endif %}{{ messages[0].content }}", PARTS + USER, "one\ntwo"),
    ],
)
def test_content_is_given_as_the_template_takes_it(source, messages, expected):
    assert render(source, messages) == expected


def test_a_call_needs_no_content():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    for message in (call, {key: item for key, item in call.items() if key != "content"}):
        assert render("{{ messages[0].content is defined }} {{ messages[0].tool_calls[0].function.name }}", [message]) == "False f"


def test_tools_have_a_template_of_their_own_where_there_is_one():
    chat = ChatTemplate("plain", "{{ tools | length }} tools")
    assert chat.render(USER) == chat.render(USER, tools=[]) == "plain"
    assert chat.render(USER, tools=[{"name": "f"}]) == "1 tools"
    assert ChatTemplate("plain").render(USER, tools=[{"name": "f"}]) == "plain"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"tools": "f"}, "tools must be a list of dictionaries, not str"),
        ({"tools": {"name": "f"}}, "tools must be a list of dictionaries, not dict"),
        ({"tools": [render]}, "item 0 of tools must be a dictionary, not function"),
        ({"documents": [{}, "x"]}, "item 1 of documents must be a dictionary, not str"),
    ],
)
def test_tools_and_documents_are_checked(arguments, message):
    with pytest.raises(UserError, match=re.escape(message)):
        render("x", **arguments)


def test_a_token_that_the_model_lacks_is_undefined():
    assert ChatTemplate("{{ bos_token is defined }}{{ pad_token }}", pad_token="<pad>").render(USER) == "False<pad>"


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
        ([{"role": "robot", "content": "Hi"}], "message 0 has role 'robot': known roles are system, developer, user, assistant, tool"),
        ([{"role": "user", "content": None}], "the content of message 0 must be a string or a list of text parts, not NoneType"),
        ([{"role": "user", "content": [{"type": "text"}]}], "message 0 has a text part without text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "message 0 has a part of type 'image_url': only text is supported"),
        ([{"role": "user", "content": ["Hi"]}], "message 0 has a part of type 'str'"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "the content of message 0 must be a string or a list"),
        ([{"role": ["user"], "content": "Hi"}], "message 0 has role ['user']"),
    ],
)
def test_a_malformed_conversation_is_an_error_that_says_where(messages, message):
    with pytest.raises(UserError, match=re.escape(message)):
        render("x", messages)
