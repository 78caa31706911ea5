"""`repetition_detection` of requests and of the server, on every API that generates."""

from __future__ import annotations

from typing import Any

import pytest
import pytest_asyncio

from compile_and_serve.runtime.sampling_params import RepetitionDetectionParams
from compile_and_serve.serve.settings import parse_repetition_detection
from tests.serve.conftest import Server, StartServer
from tests.support.fake_engine import says

DETECT = {"max_pattern_size": 40, "min_count": 4}
MESSAGES = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 100},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 100},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 100},
    "/v1/responses": {"input": "Hi", "max_output_tokens": 100},
}


@pytest_asyncio.fixture
async def endless(start_server: StartServer, tokenizer: Any) -> Server:
    """Writes the same two letters for ever."""
    server: Server = await start_server(script=says(tokenizer, "ab", end=False))
    return server


def reason(path: str, answer: dict[str, Any]) -> tuple[str, Any]:
    if path == "/v1/messages":
        return answer["content"][0]["text"], answer["stop_reason"]
    if path == "/v1/responses":
        return answer["output"][0]["content"][0]["text"], answer["status"]
    [choice] = answer["choices"]
    return choice.get("text") or choice["message"]["content"], (choice["finish_reason"], choice["stop_reason"])


ENDS = {"/v1/messages": "max_tokens", "/v1/responses": "incomplete"}


@pytest.mark.parametrize("path", BODIES)
async def test_output_that_repeats_ends(endless: Server, path: str) -> None:
    answer = (await endless.http.post(path, json={**BODIES[path], "repetition_detection": DETECT})).json()
    assert reason(path, answer) == ("abababab", ENDS.get(path, ("repetition", "repetition_detected")))
    for off in (None, {"max_pattern_size": 0}, {}):
        answer = (await endless.http.post(path, json={**BODIES[path], "repetition_detection": off})).json()
        assert len(reason(path, answer)[0]) == 100


@pytest.mark.parametrize("path", BODIES)
async def test_servers_own_detection(start_server: StartServer, tokenizer: Any, path: str) -> None:
    detection = RepetitionDetectionParams(**DETECT)
    server = await start_server(script=says(tokenizer, "ab", end=False), default_sampling={"repetition_detection": detection})
    assert len(reason(path, (await server.http.post(path, json=BODIES[path])).json())[0]) == 8
    own = {**DETECT, "min_count": 6}
    assert len(reason(path, (await server.http.post(path, json={**BODIES[path], "repetition_detection": own})).json())[0]) == 12
    off = {"max_pattern_size": 0}
    assert len(reason(path, (await server.http.post(path, json={**BODIES[path], "repetition_detection": off})).json())[0]) == 100


async def test_streams_and_metrics_have_the_reason(endless: Server) -> None:
    answer = await endless.chat(stream=True, repetition_detection=DETECT)
    assert '"finish_reason":"repetition","stop_reason":"repetition_detected"' in answer.text.replace(" ", "")
    assert 'finished_reason="repetition"' in (await endless.http.get("/metrics")).text


@pytest.mark.parametrize("wrong", [{"max_pattern_size": 8, "min_count": 1}, {"max_pattern_size": 999}, {"min_pattern_size": 2}, "on", [1]])
async def test_wrong_values_are_400(endless: Server, wrong: Any) -> None:
    answer = await endless.chat(repetition_detection=wrong)
    assert (answer.status_code, answer.json()["error"]["param"].split(".")[0]) == (400, "repetition_detection")


def test_the_flags_value() -> None:
    assert parse_repetition_detection('{"max_pattern_size": 8, "min_count": 3}') == RepetitionDetectionParams(
        max_pattern_size=8, min_count=3
    )
    for wrong in ("8", "on", '{"max": 8}', '{"max_pattern_size": "8"}', '{"max_pattern_size": 8}'):
        with pytest.raises(ValueError, match="repetition.detection must be"):
            parse_repetition_detection(wrong)
