"""Random field values on every endpoint with a body give an answer or an error in OpenAI's shape, never a 500."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel

from compile_and_serve.runtime.messages import EngineRequest
from compile_and_serve.serve.protocol.chat import ChatCompletionRequest
from compile_and_serve.serve.protocol.completions import CompletionRequest
from compile_and_serve.serve.protocol.fields import _REFUSED
from compile_and_serve.serve.protocol.tokens import DetokenizeRequest, TokenizeRequest
from tests.serve.conftest import Server

ENDPOINTS: list[tuple[str, type[BaseModel], dict[str, Any]]] = [
    ("/v1/chat/completions", ChatCompletionRequest, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}),
    ("/v1/completions", CompletionRequest, {"prompt": "x", "max_tokens": 5}),
    ("/tokenize", TokenizeRequest, {"prompt": "x"}),
    ("/detokenize", DetokenizeRequest, {"tokens": [5]}),
]
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 20, 21, 2**31, 2**63, 2**64, 10**30, 0.5, 1.0, -0.5, 1e308, float("nan"),
    float("inf"), "", "a", "\ud800", "🙂", "x" * 300, "none", "auto", [], {}, [1], ["a"], [[1]], [None], [[]], [["a"]],
    [-1], [2**70], ["a", 1], {"a": 1}, {"1": 1}, {"1": None}, {"5": float("nan")}, {"type": "text"}, {"type": None},
    {"include_usage": True}, [{"role": "user", "content": "x"}], [{"role": "user"}], [{}], [{"role": 1}],
    [{"role": "assistant", "content": [{"type": "text"}]}], [{"role": "assistant", "tool_calls": [{}]}],
    [{"role": "assistant", "tool_calls": 5}], [{"role": "user", "content": ["x", {"type": "text", "text": "y"}]}],
]  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
async def test_no_request_is_a_500(server: Server, seed: int) -> None:
    generator = random.Random(seed)
    accept = server.engine.add_request

    async def over_the_wire(request: EngineRequest) -> None:
        await accept(msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=EngineRequest))

    server.engine.add_request = over_the_wire  # type: ignore[method-assign]
    codes = set()
    for _ in range(150):
        path, model, valid = generator.choice(ENDPOINTS)
        names = [*model.model_fields, generator.choice(sorted(_REFUSED))]
        body = {**valid, generator.choice(names): generator.choice(VALUES)}
        response = await server.http.post(path, content=json.dumps(body))
        codes.add(response.status_code)
        assert response.status_code in (200, 400, 404), (path, body, response.text)
        if response.status_code != 200:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
            assert len(response.text) < 1500
        else:
            assert '"error"' not in response.text, (path, body, response.text)
    assert {200, 400} <= codes
