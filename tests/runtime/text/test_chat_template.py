"""Chat templates against transformers, and the error messages."""

from __future__ import annotations

from typing import Any

import pytest

from compile_and_serve.runtime.text.chat_template import ChatTemplateError, render_chat
from compile_and_serve.runtime.text.tokenizer import Tokenizer
from tests.support.tokenizers import byte_level_tokenizer

CHATML = (
    "{%- for message in messages %}\n"
    "    {{- '<|start|>' + message.role + '\\n' + message['content'] | trim + '<|end|>\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if tools %}\n{{ tools | tojson(indent=2) }}\n{%- endif %}\n"
    "{%- if add_generation_prompt %}{{ bos_token }}assistant"
    "{% if enable_thinking is defined and not enable_thinking %} quick{% endif %}{% endif %}"
)
LOOPS = (
    "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{% generation %}"
    "{% set shout = m.content | upper %}{{ shout }};{% endgeneration %}{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}"
)
PARTS = "{% for m in messages %}{% for part in m['content'] %}[{{ part.type }}:{{ part.text }}]{% endfor %}{% endfor %}"
ASSIGNED = "{% for m in messages %}{% set c = m.content %}{% for part in c %}[{{ part.text }}]{% endfor %}{% endfor %}"
TALK = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": "<b>Hi</b> & 'bye' é"},
    {"role": "assistant", "content": "Hello  "},
]
TOOLS = [{"type": "function", "function": {"name": "f<1>", "parameters": {"é": 1}}}]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_level_tokenizer([])


def reference(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered, _ = render_jinja_template(conversations=[messages], chat_template=template, **options)
    return rendered[0]


@pytest.mark.parametrize("template", [CHATML, LOOPS])
@pytest.mark.parametrize(
    "options", [{"add_generation_prompt": True}, {"add_generation_prompt": False}, {"add_generation_prompt": True, "tools": TOOLS}]
)
def test_rendering_equals_transformers(tokenizer: Tokenizer, template: str, options: dict[str, Any]) -> None:
    expected = reference(template, TALK, **options, **tokenizer.special_tokens)
    assert render_chat(tokenizer, TALK, template=template, **options) == expected


@pytest.mark.parametrize("template", [CHATML, CHATML.replace(" | trim", "")])
def test_continued_message_equals_transformers(tokenizer: Tokenizer, template: str) -> None:
    options = {"continue_final_message": True, "add_generation_prompt": False}
    expected = reference(template, TALK, **options, **tokenizer.special_tokens)
    assert render_chat(tokenizer, TALK, template=template, **options) == expected


def test_further_variables_reach_the_template(tokenizer: Tokenizer) -> None:
    text = render_chat(tokenizer, TALK, template=CHATML, template_kwargs={"enable_thinking": False})
    assert text.endswith("<|start|>assistant quick")


@pytest.mark.parametrize("template,expected", [(PARTS, "[text:a][text:b]"), (ASSIGNED, "[a][b]")])
def test_parts_are_kept_if_the_template_iterates_over_them(tokenizer: Tokenizer, template: str, expected: str) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert render_chat(tokenizer, [message], template=template) == expected
    assert "a\nb" in render_chat(tokenizer, [message], template=CHATML)


def test_arguments_of_tool_calls_are_objects_in_the_template(tokenizer: Tokenizer) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    template = "{% for m in messages %}{{ m.tool_calls[0].function.arguments.x + 1 }}{{ m.content }}{% endfor %}"
    assert render_chat(tokenizer, messages, template=template) == "2"
    assert call["function"]["arguments"] == '{"x": 1}'  # the caller's object is not changed


def test_developer_becomes_system_unless_the_template_knows_it(tokenizer: Tokenizer) -> None:
    messages = [{"role": "developer", "content": "x"}]
    assert render_chat(tokenizer, messages, template="{{ messages[0].role }}") == "system"
    unrelated = "{# developer #}developer{% set developer_mode = 'developers' %} {{ messages[0].role }}"
    assert render_chat(tokenizer, messages, template=unrelated).endswith(" system")
    knows = "{{ messages[0].role }}{% if messages[0]['role'] == 'developer' %}!{% endif %}"
    assert render_chat(tokenizer, messages, template=knows) == "developer!"


def test_a_role_must_be_a_string_of_the_template(tokenizer: Tokenizer) -> None:
    """Parts of the template's source are not roles."""
    template = "{% for message in messages %}{% if message.role in ['ipython', 'x'] %}I{% endif %}{% endfor %}"
    assert render_chat(tokenizer, [{"role": "ipython", "content": ""}], template=template) == "I"
    for role in ("message", "endfor", "python", "{%", "i", "role"):
        with pytest.raises(ChatTemplateError, match="role must be one of"):
            render_chat(tokenizer, [{"role": role, "content": ""}], template=template)


def test_the_tool_template_is_used_with_tools(tokenizer: Tokenizer) -> None:
    both = Tokenizer(tokenizer.backend, special_tokens={}, chat_templates={"default": "D", "tool_use": "T"})
    assert render_chat(both, TALK) == "D"
    assert render_chat(both, TALK, tools=TOOLS) == "T"


@pytest.mark.parametrize(
    "template,messages,says",
    [
        ("{{ raise_exception('system first') }}", TALK, "system first"),
        ("{{ messages[0].content + 5 }}", TALK, "TypeError"),
        ("{% for %}", TALK, "not valid Jinja"),
        ("{{ messages.append(1) }}", TALK, "refused|unsafe|not safe"),
        ("{{ ''.__class__.__mro__ }}", TALK, "refused|unsafe|not safe"),
        (CHATML, [], "at least one message"),
        (CHATML, [{"role": "user", "content": 5}], r"messages\[0\].content"),
        (CHATML, [{"role": "user", "content": [{"type": "audio"}]}], "only reads text"),
        (CHATML, [{"role": "assistant", "content": "", "tool_calls": 5}], "must be a list"),
        (CHATML, [{"role": "wizard", "content": "x"}], "must be one of system"),
    ],
)
def test_errors_are_one_sentence(tokenizer: Tokenizer, template: str, messages: list[Any], says: str) -> None:
    with pytest.raises(ChatTemplateError, match=says):
        render_chat(tokenizer, messages, template=template)


def test_variables_of_the_conversation_cannot_be_replaced(tokenizer: Tokenizer) -> None:
    with pytest.raises(ChatTemplateError, match="messages"):
        render_chat(tokenizer, TALK, template=CHATML, template_kwargs={"messages": []})


def test_model_without_template_says_what_to_do() -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        render_chat(byte_level_tokenizer([], template=None), TALK)
