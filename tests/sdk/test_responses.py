"""OpenAI's Responses API through OpenAI's SDK, LangChain and LiteLLM."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.sdk.conftest import MODEL
from tests.sdk.test_clients import Weather

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

QUESTION = "It is sunny in Paris. Report the weather."
OPTIONS: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_output_tokens": 60}
SHORT = OPTIONS | {"max_output_tokens": 16}


@pytest.fixture(scope="module")
def client(base_url: str) -> Any:
    openai = pytest.importorskip("openai")
    return openai.OpenAI(base_url=base_url, api_key="none", max_retries=0)


def test_text(client: Any) -> None:
    response = client.responses.create(input=QUESTION, instructions="Be brief.", **OPTIONS)
    assert response.status in ("completed", "incomplete")
    assert response.output_text
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


def test_a_stream_is_the_whole_text(client: Any) -> None:
    whole = client.responses.create(input=QUESTION, **SHORT)
    with client.responses.stream(input=QUESTION, **SHORT) as stream:
        events = list(stream)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == events[-1].response.output_text
    assert text == whole.output_text


def test_parse(client: Any) -> None:
    response = client.responses.parse(input=QUESTION, text_format=Weather, **OPTIONS)
    assert isinstance(response.output_parsed, Weather)
    with client.responses.stream(input=QUESTION, text_format=Weather, **OPTIONS) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_response().output_parsed == response.output_parsed
    assert {"response.output_text.delta", "response.output_text.done", "response.completed"} <= kinds


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "Weather"}])
@pytest.mark.exhaustive_cases(but=["required"])
def test_tools(client: Any, choice: Any) -> None:
    import openai

    tool: Any = {"type": "function", **openai.pydantic_function_tool(Weather)["function"]}
    options = {**OPTIONS, "tools": [tool], "tool_choice": choice, "parallel_tool_calls": False}
    response = client.responses.parse(input=QUESTION, **options)
    [call] = response.output
    assert (call.type, call.name) == ("function_call", "Weather")
    Weather(**json.loads(call.arguments))
    with client.responses.stream(input=QUESTION, **options) as stream:
        kinds = [event.type for event in stream]
        [streamed] = stream.get_final_response().output
    assert kinds.count("response.function_call_arguments.delta") > 3
    assert streamed.arguments == call.arguments
    history = [
        {"role": "user", "content": QUESTION},
        {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
        {"type": "function_call_output", "call_id": call.call_id, "output": "noted"},
        {"role": "user", "content": "Thanks."},
    ]
    assert client.responses.create(input=history, tools=[tool], **OPTIONS).output


def test_stored_responses(client: Any) -> None:
    import openai

    first = client.responses.create(input="My name is Ada.", **SHORT)
    assert client.responses.retrieve(first.id).output_text == first.output_text
    second = client.responses.create(input="What is my name?", previous_response_id=first.id, **SHORT)
    texts = [item.content[0].text for item in client.responses.input_items.list(second.id, order="asc")]
    assert texts == ["My name is Ada.", first.output_text, "What is my name?"]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    dropped = client.responses.create(input="Hi", store=False, **SHORT)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(dropped.id)


def test_background_responses(client: Any) -> None:
    response = client.responses.create(
        input="Count to a thousand.", background=True, extra_body={"ignore_eos": True}, **{**OPTIONS, "max_output_tokens": 1500}
    )
    assert response.status == "in_progress"
    assert client.responses.cancel(response.id).status == "cancelled"
    assert client.responses.retrieve(response.id).status == "cancelled"


def test_errors(client: Any) -> None:
    import openai

    picture = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo=", "detail": "auto"}
    with pytest.raises(openai.BadRequestError, match="input_image"):
        client.responses.create(input=[{"role": "user", "content": [picture]}], **OPTIONS)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(input="Hi", model="gpt-5")


def test_tools_that_run_elsewhere_are_left_out(client: Any) -> None:
    assert client.responses.create(input="Hi", tools=[{"type": "web_search"}], **OPTIONS).output_text


def test_langchain(base_url: str) -> None:
    langchain = pytest.importorskip("langchain_openai")
    chat = langchain.ChatOpenAI(base_url=base_url, api_key="none", model=MODEL, temperature=0, max_tokens=100, use_responses_api=True)
    answer = chat.invoke(QUESTION)
    assert answer.text
    whole: Any = None
    for chunk in chat.stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert str(whole.text) == str(answer.text)
    assert isinstance(chat.with_structured_output(Weather, method="json_schema").invoke(QUESTION), Weather)
    [call] = chat.bind_tools([Weather], tool_choice="Weather").invoke(QUESTION).tool_calls
    Weather(**call["args"])


@pytest.mark.parametrize("stream", [False, True])
def test_litellm(base_url: str, stream: bool) -> None:
    litellm = pytest.importorskip("litellm")
    options = {**OPTIONS, "model": f"openai/{MODEL}", "api_base": base_url, "api_key": "none", "stream": stream}
    answer = litellm.responses(input=QUESTION, **options)
    if stream:
        *_, last = list(answer)
        answer = last.response
    assert answer.output[0].content[0].text
