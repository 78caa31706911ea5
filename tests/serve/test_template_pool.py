"""Chat templates of hostile checkpoints: bounded time and memory, and the server goes on."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from compile_and_serve.runtime.text.chat_template import ChatTemplateError, render_chat
from compile_and_serve.runtime.text.template_pool import TemplatePool
from compile_and_serve.runtime.text.tokenizer import Tokenizer
from tests.serve.conftest import ANSWER, StartServer
from tests.support.processes import children
from tests.support.tokenizers import byte_level_tokenizer

TALK = [{"role": "user", "content": "Hi 🙂"}, {"role": "assistant", "content": [{"type": "text", "text": "a"}]}]
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}{% endfor %}"
POWER = "{{ messages | length ** 999999999 }}{{ 7 ** (messages | length * 499999999) }}"
FOLDED = "{{ 7 ** 999999999 }}"  # Jinja computes constants when it compiles a template
DOUBLING = "{% set ns = namespace(s='x') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}"
WIDE = "{{ '%9999999999d' % 1 }}"
DEEP = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"


@pytest.fixture
def impatient() -> Any:
    pool = TemplatePool(seconds=1.0)
    yield pool
    pool.close()


@pytest.mark.parametrize(
    "options",
    [
        {}, {"add_generation_prompt": False}, {"add_generation_prompt": False, "continue_final_message": True},
        {"template": "{% for m in messages %}{{ m.content }}{% endfor %}{{ x }}", "template_kwargs": {"x": [1, None, 2.5]}},
        {"tools": [{"type": "function"}], "documents": [{"a": "b"}], "template": "{{ tools | tojson }}{{ documents }}"},
    ],
)  # fmt: skip
def test_text_equals_that_of_this_process(
    templates: TemplatePool, tokenizer: Tokenizer, options: dict[str, Any]
) -> None:
    assert templates.render(tokenizer, TALK, **options) == render_chat(tokenizer, TALK, **options)


def test_errors_equal_those_of_this_process(templates: TemplatePool, tokenizer: Tokenizer) -> None:
    for messages, template in (
        ([], None),
        ([{"role": 5}], None),
        (TALK, "{% if %}"),
        (TALK, "{{ raise_exception('no') }}"),
    ):
        with pytest.raises(ChatTemplateError) as expected:
            render_chat(tokenizer, messages, template=template)  # type: ignore[arg-type]
        with pytest.raises(ChatTemplateError) as found:
            templates.render(tokenizer, messages, template=template)  # type: ignore[arg-type]
        assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("template", [LOOP, POWER, FOLDED, DOUBLING, WIDE, DEEP])
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


async def test_other_requests_are_answered_meanwhile(start_server: StartServer) -> None:
    hostile = byte_level_tokenizer([ANSWER], template=LOOP)
    pool = TemplatePool(seconds=2.0)
    try:
        server = await start_server(with_tokenizer=hostile)
        server.app.state.context.templates = pool
        chats = [asyncio.create_task(server.chat()) for _ in range(8)]
        started = time.monotonic()
        for _ in range(10):
            assert (await server.complete()).status_code == 200
            assert (await server.http.get("/ping")).status_code == 200
        assert not any(chat.done() for chat in chats) or time.monotonic() - started > 2
        for response in await asyncio.gather(*chats):
            assert response.status_code == 400
            assert "did not finish these messages within 2 seconds" in response.json()["error"]["message"]
    finally:
        pool.close()
