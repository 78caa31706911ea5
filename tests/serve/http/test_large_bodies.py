"""A large body is prepared in a thread, so that the event loop is not blocked."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from compile_and_serve.runtime.text.template_pool import TemplatePool
from compile_and_serve.runtime.text.tokenizer import Tokenizer
from tests.serve.conftest import Server, eventually

LONG = "word " * 2000
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Gate:
    """Blocks calls of the wrapped function until `opened` is set."""

    def __init__(self, function: Any) -> None:
        self._function = function
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.reached.set()
        assert self.opened.wait(60), "the event loop is blocked"
        return self._function(*args, **kwargs)


@pytest.mark.parametrize(
    "path,body,held",
    [
        (CHAT, {"messages": [{"role": "user", "content": LONG}], "truncate_prompt_tokens": -1}, "encode"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}] * 200, "truncate_prompt_tokens": -1}, "render"),
        (COMPLETIONS, {"prompt": LONG, "truncate_prompt_tokens": -1}, "encode"),
        (COMPLETIONS, {"prompt": [5] * 3000, "truncate_prompt_tokens": -1, "bad_words": ["fox"]}, "encode"),
        ("/tokenize", {"prompt": LONG}, "encode"),
        ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}, "render"),
        ("/detokenize", {"tokens": [5] * 5000}, "decode"),
    ],
)
async def test_other_requests_are_answered_while_a_large_body_is_prepared(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], held: str
) -> None:
    if held == "render":
        gate = Gate(server.app.state.context.prompts.templates.render)
        monkeypatch.setattr(TemplatePool, held, lambda self, *args, **kwargs: gate(*args, **kwargs))
    else:
        gate = Gate(getattr(server.tokenizer, held))
        monkeypatch.setattr(Tokenizer, held, lambda self, *args, **kwargs: gate(*args, **kwargs))
    answer = asyncio.create_task(server.http.post(path, json=body))
    await eventually(gate.reached.is_set)
    assert (await server.http.get("/ping")).status_code == 200
    assert not answer.done()
    gate.opened.set()
    assert (await answer).status_code == 200, answer.result().text
