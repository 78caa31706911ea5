"""Random field values on every endpoint with a body give an answer or an error in OpenAI's shape, never a 500."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest
from pydantic import BaseModel

from compile_and_serve.runtime.messages import EngineRequest
from compile_and_serve.runtime.pooling_params import PoolingInfo
from compile_and_serve.serve.protocol.chat import ChatCompletionRequest
from compile_and_serve.serve.protocol.completions import CompletionRequest
from compile_and_serve.serve.protocol.fields import _REFUSED
from compile_and_serve.serve.protocol.messages_api import CountTokensRequest, MessagesRequest
from compile_and_serve.serve.protocol.pooling import EmbeddingRequest, PoolingRequest, RerankRequest, ScoreRequest
from compile_and_serve.serve.protocol.responses_api import ResponsesRequest
from compile_and_serve.serve.protocol.tokens import DetokenizeRequest, TokenizeRequest
from tests.serve.conftest import StartServer

ENDPOINTS: list[tuple[str, type[BaseModel], dict[str, Any]]] = [
    ("/v1/chat/completions", ChatCompletionRequest, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}),
    ("/v1/completions", CompletionRequest, {"prompt": "x", "max_tokens": 5}),
    ("/v1/completions", CompletionRequest, {"prompt": "x", "max_tokens": 2, "use_beam_search": True}),
    ("/invocations", CompletionRequest, {"prompt": "x", "max_tokens": 5}),
    ("/v1/responses", ResponsesRequest, {"input": "x", "max_output_tokens": 5}),
    ("/v1/messages", MessagesRequest, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}),
    ("/v1/messages/count_tokens", CountTokensRequest, {"messages": [{"role": "user", "content": "x"}]}),
    ("/tokenize", TokenizeRequest, {"prompt": "x"}),
    ("/detokenize", DetokenizeRequest, {"tokens": [5]}),
]
POOLING_ENDPOINTS: list[tuple[str, type[BaseModel], dict[str, Any]]] = [
    ("/v1/embeddings", EmbeddingRequest, {"input": "x"}),
    ("/pooling", PoolingRequest, {"input": "x"}),
    ("/score", ScoreRequest, {"text_1": "x", "text_2": "y"}),
    ("/rerank", RerankRequest, {"query": "x", "documents": ["y"]}),
]
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 20, 21, 2**31, 2**63, 2**64, 10**30, 0.5, 1.0, -0.5, 1e308, float("nan"),
    float("inf"), "", "a", "\ud800", "🙂", "x" * 300, "none", "auto", [], {}, [1], ["a"], [[1]], [None], [[]], [["a"]],
    [-1], [2**70], ["a", 1], {"a": 1}, {"1": 1}, {"1": None}, {"5": float("nan")}, {"type": "text"}, {"type": None},
    {"include_usage": True}, [{"role": "user", "content": "x"}], [{"role": "user"}], [{}], [{"role": 1}],
    [{"role": "assistant", "content": [{"type": "text"}]}], [{"role": "assistant", "tool_calls": [{}]}],
    [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": [5]}]}], {"type": "tool"},
    [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]}],
    [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "[]"}], {"format": {"type": "json_object"}},
    [{"name": "f", "input_schema": {"type": "text"}}], {"type": "enabled", "budget_tokens": 1},
    [{"role": "assistant", "tool_calls": 5}], [{"role": "user", "content": ["x", {"type": "text", "text": "y"}]}],
]  # fmt: skip


@pytest.mark.slow_cases
@pytest.mark.parametrize("seed", range(5))
async def test_no_request_is_a_500(start_server: StartServer, seed: int) -> None:
    pools = seed == 4
    server = await start_server(engine={"pooling": PoolingInfo(kind="embed", width=4) if pools else None})
    endpoints = POOLING_ENDPOINTS if pools else ENDPOINTS
    generator = random.Random(seed)
    accept = server.engine.add_request

    async def over_the_wire(request: EngineRequest) -> None:
        await accept(msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=EngineRequest))

    server.engine.add_request = over_the_wire  # type: ignore[method-assign]
    codes = set()
    for _ in range(250):
        path, model, valid = generator.choice(endpoints)
        names = [*model.model_fields, generator.choice(sorted(_REFUSED))]
        body = {**valid, generator.choice(names): generator.choice(VALUES)}
        response = await server.http.post(path, content=json.dumps(body))
        codes.add(response.status_code)
        assert response.status_code in (200, 400, 404), (path, body, response.text)
        if response.status_code != 200:
            fields = {"message", "type"} if path.startswith("/v1/messages") else {"message", "type", "param", "code"}
            assert set(response.json()["error"]) == fields
            assert len(response.text) < 1500
        else:
            assert '"error":{' not in response.text, (path, body, response.text)
    assert {200, 400} <= codes
