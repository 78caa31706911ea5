"""Tool calls and structured outputs through OpenAI's SDK, LangChain, Instructor and LiteLLM."""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict

from tests.sdk.conftest import MODEL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Weather(BaseModel):
    """The weather in a city."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "London", "Rome"]
    sunny: bool


QUESTION: list[Any] = [{"role": "user", "content": "It is sunny in Paris. Report the weather."}]
OPTIONS: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 100}


@pytest.fixture(scope="module")
def openai_client(base_url: str) -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)


def test_openai_parse(openai_client: Any) -> None:
    answer = openai_client.chat.completions.parse(messages=QUESTION, response_format=Weather, **OPTIONS)
    assert isinstance(answer.choices[0].message.parsed, Weather)


def test_openai_parses_strict_tools(openai_client: Any) -> None:
    import openai

    tool = openai.pydantic_function_tool(Weather)
    answer = openai_client.chat.completions.parse(
        messages=QUESTION, tools=[tool], tool_choice="required", parallel_tool_calls=False, **OPTIONS
    )
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert isinstance(choice.message.tool_calls[0].function.parsed_arguments, Weather)


def test_openai_stream_of_tools(openai_client: Any) -> None:
    import openai

    tool = openai.pydantic_function_tool(Weather)
    choice: Any = {"type": "function", "function": {"name": "Weather"}}
    with openai_client.chat.completions.stream(messages=QUESTION, tools=[tool], tool_choice=choice, **OPTIONS) as stream:
        kinds = [event.type for event in stream]
        message = stream.get_final_completion().choices[0].message
    assert kinds.count("tool_calls.function.arguments.delta") > 3
    assert kinds.count("tool_calls.function.arguments.done") == 1
    assert isinstance(message.tool_calls[0].function.parsed_arguments, Weather)


def test_openai_stream_of_content(openai_client: Any) -> None:
    with openai_client.chat.completions.stream(messages=QUESTION, response_format=Weather, **OPTIONS) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert {"content.delta", "content.done"} <= kinds
    assert isinstance(message.parsed, Weather)


@pytest.mark.exhaustive
def test_openai_sends_the_call_back(openai_client: Any) -> None:
    import openai

    tool = openai.pydantic_function_tool(Weather)
    first = (
        openai_client.chat.completions.create(messages=QUESTION, tools=[tool], tool_choice="required", parallel_tool_calls=False, **OPTIONS)
        .choices[0]
        .message
    )
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "noted"}
    history = [*QUESTION, first, result, {"role": "user", "content": "Thanks."}]
    second = openai_client.chat.completions.create(messages=history, tools=[tool], **OPTIONS)
    assert second.choices[0].message.content or second.choices[0].message.tool_calls


@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_langchain_structured_output(base_url: str, method: Any) -> None:
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(base_url=base_url, api_key="none", model=MODEL, temperature=0, max_tokens=100)
    structured = chat.with_structured_output(Weather, method=method)
    assert isinstance(structured.invoke(QUESTION[0]["content"]), Weather)


def test_langchain_streams_tools(base_url: str) -> None:
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(base_url=base_url, api_key="none", model=MODEL, temperature=0, max_tokens=100)
    whole: Any = None
    for chunk in chat.bind_tools([Weather], tool_choice="Weather").stream(QUESTION[0]["content"]):
        whole = chunk if whole is None else whole + chunk
    [call] = whole.tool_calls
    Weather(**call["args"])


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor(openai_client: Any, mode: str) -> None:
    instructor = pytest.importorskip("instructor")
    client = instructor.from_openai(openai_client, mode=getattr(instructor.Mode, mode))
    answer = client.chat.completions.create(messages=QUESTION, response_model=Weather, max_retries=0, **OPTIONS)
    assert isinstance(answer, Weather)


@pytest.mark.parametrize("stream", [False, True])
def test_litellm_tools(base_url: str, stream: bool) -> None:
    litellm = pytest.importorskip("litellm")
    tool = {"type": "function", "function": {"name": "Weather", "parameters": Weather.model_json_schema()}}
    options = {**OPTIONS, "model": f"openai/{MODEL}", "tools": [tool], "tool_choice": "required"}
    options |= {"parallel_tool_calls": False, "stream": stream}
    answer = litellm.completion(messages=QUESTION, api_base=base_url, api_key="none", **options)
    if stream:
        answer = litellm.stream_chunk_builder(list(answer), messages=QUESTION)
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "Weather"
    Weather(**json.loads(call.function.arguments))
