"""Chat templates of hostile checkpoints: bounded time and memory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compile_and_serve.runtime.text.chat_template import ChatTemplateError, render_chat
from compile_and_serve.runtime.text.template_pool import TemplatePool
from compile_and_serve.runtime.text.tokenizer import Tokenizer
from tests.support.processes import children
from tests.support.tokenizers import byte_level_tokenizer

TALK = [{"role": "user", "content": "Hi 🙂"}, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}]
POWER = "{{ messages | length ** 999999999 }}{{ 7 ** (messages | length * 499999999) }}"
FOLDED = "{{ 7 ** 999999999 }}"  # Jinja computes constants when it compiles a template
DOUBLING = "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}"
WIDE = "{{ '%9999999999d' % 1 }}"
DEEP = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_level_tokenizer(["the quick brown fox"])


@pytest.fixture(scope="module")
def templates() -> Iterator[TemplatePool]:
    pool = TemplatePool()
    yield pool
    pool.close()


@pytest.fixture
def impatient() -> Iterator[TemplatePool]:
    pool = TemplatePool(seconds=1.0)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"template": "{% for m in messages %}{{ m.content }}{% endfor %}{{ x }}", "template_kwargs": {"x": [1, None, 2.5]}},
        {"tools": [{"type": "function"}], "documents": [{"a": "b"}], "template": "{{ tools | tojson }}{{ documents }}"},
    ],
)
def test_text_equals_that_of_this_process(templates: TemplatePool, tokenizer: Tokenizer, options: dict[str, Any]) -> None:
    assert templates.render(tokenizer, TALK, **options) == render_chat(tokenizer, TALK, **options)


def test_a_lone_surrogate_in_the_arguments_of_a_call_is_refused(templates: TemplatePool, tokenizer: Tokenizer) -> None:
    function = {"name": "f", "arguments": '{"a": "\\ud800"}'}
    talk = [{"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}]
    template = "{{ messages[0].tool_calls[0].function.arguments.a }}"
    assert templates.render(tokenizer, TALK, template="a") == "a"
    processes = children(os.getpid())
    with pytest.raises(ChatTemplateError, match="surrogate"):
        templates.render(tokenizer, talk, template=template)
    assert templates.render(tokenizer, TALK, template="a") == "a"
    assert children(os.getpid()) == processes


def test_errors_equal_those_of_this_process(templates: TemplatePool, tokenizer: Tokenizer) -> None:
    for messages, template in (([], None), ([{"role": 5}], None), (TALK, "{% if %}"), (TALK, "{{ raise_exception('no') }}")):
        with pytest.raises(ChatTemplateError) as expected:
            render_chat(tokenizer, messages, template=template)  # type: ignore[arg-type]
        with pytest.raises(ChatTemplateError) as found:
            templates.render(tokenizer, messages, template=template)  # type: ignore[arg-type]
        assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("template", [POWER, DOUBLING, WIDE, DEEP])
def test_hostile_template_ends(impatient: TemplatePool, tokenizer: Tokenizer, template: str) -> None:
    started = time.monotonic()
    with pytest.raises(ChatTemplateError) as error:
        impatient.render(tokenizer, TALK, template=template)
    assert time.monotonic() - started < 20
    assert "\n" not in str(error.value)
    impatient.seconds = 30.0
    assert impatient.render(tokenizer, TALK, template="{{ messages[0].content }}") == "Hi 🙂"


def test_hostile_template_is_found_at_start(impatient: TemplatePool) -> None:
    with pytest.raises(ChatTemplateError, match="did not finish"):
        impatient.check(FOLDED)


def test_the_template_sees_no_secrets(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> None:
    monkeypatch.setenv("COMPILE_AND_SERVE_API_KEY", "secret")
    pool = TemplatePool()
    try:
        before = set(children(os.getpid()))
        pool.render(tokenizer, TALK)
        [process] = set(children(os.getpid())) - before
        assert b"secret" not in Path(f"/proc/{process}/environ").read_bytes()
    finally:
        pool.close()
    assert process not in children(os.getpid())
