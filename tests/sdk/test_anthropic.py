"""Anthropic's API through Anthropic's SDK and LiteLLM."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sdk.conftest import MODEL
from tests.sdk.test_clients import Weather

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

QUESTION: list[Any] = [{"role": "user", "content": "It is sunny in Paris. Report the weather."}]
OPTIONS: dict[str, Any] = {"model": MODEL, "max_tokens": 60, "extra_body": {"temperature": 0}}
TOOL: dict[str, Any] = {"name": "Weather", "description": "The weather in a city", "input_schema": Weather.model_json_schema()}
ONE_CALL: list[dict[str, Any]] = [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "Weather"}]


@pytest.fixture(scope="module")
def client(base_url: str) -> Any:
    anthropic = pytest.importorskip("anthropic")
    return anthropic.Anthropic(base_url=base_url.removesuffix("/v1"), api_key="none", max_retries=0)


def test_message(client: Any) -> None:
    message = client.messages.create(messages=QUESTION, system="Be brief.", **OPTIONS)
    assert message.content[0].text
    assert message.stop_reason in ("end_turn", "max_tokens")
    counted = client.messages.count_tokens(messages=QUESTION, system="Be brief.", model=MODEL)
    assert counted.input_tokens == message.usage.input_tokens


def test_a_stream_is_the_whole_message(client: Any) -> None:
    whole = client.messages.create(messages=QUESTION, **OPTIONS)
    with client.messages.stream(messages=QUESTION, **OPTIONS) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text == message.content[0].text == whole.content[0].text
    assert (message.stop_reason, message.usage) == (whole.stop_reason, whole.usage)


@pytest.mark.parametrize("choice", ONE_CALL)
def test_tools(client: Any, choice: Any) -> None:
    options = {**OPTIONS, "tools": [TOOL], "tool_choice": choice}
    message = client.messages.create(messages=QUESTION, **options)
    assert message.stop_reason == "tool_use"
    [block] = message.content
    Weather(**block.input)
    with client.messages.stream(messages=QUESTION, **options) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert kinds.count("input_json") > 3
    assert streamed.content[0].input == block.input
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "noted"}
    history = [*QUESTION, {"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(messages=history, tools=[TOOL], **OPTIONS).content


def test_stop_sequences_and_prefill(client: Any) -> None:
    prefilled = [*QUESTION, {"role": "assistant", "content": "The weather in Paris is"}]
    message = client.messages.create(messages=prefilled, stop_sequences=["."], **OPTIONS)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", ".")
    assert "." not in message.content[0].text


def test_structured_output(client: Any) -> None:
    message = client.messages.parse(messages=QUESTION, output_format=Weather, **OPTIONS)
    assert isinstance(message.parsed_output, Weather)


def test_errors(client: Any) -> None:
    import anthropic

    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(messages=QUESTION, **{**OPTIONS, "extra_body": {"temperature": -1}})
    assert caught.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index,call-overload]
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(messages=QUESTION, **{**OPTIONS, "model": "claude"})
    with pytest.raises(anthropic.BadRequestError, match="context length"):
        client.messages.create(messages=[{"role": "user", "content": "word " * 9000}], stream=True, **OPTIONS)


@pytest.mark.parametrize("stream", [False, True])
def test_litellm(base_url: str, stream: bool) -> None:
    litellm = pytest.importorskip("litellm")
    options = {
        "max_tokens": 60,
        "temperature": 0,
        "model": f"anthropic/{MODEL}",
        "api_base": base_url.removesuffix("/v1"),
        "api_key": "none",
    }
    answer = litellm.completion(messages=QUESTION, stream=stream, **options)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer), messages=QUESTION)
    assert answer.choices[0].message.content
