"""pydantic-ai and OpenAI's Agents SDK: typed outputs, tools over several turns, and streams, on the chat and the Responses route."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from tests.sdk.conftest import MODEL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROUTES = ("chat", "responses")


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Paris", "Rome"]
    sunny: bool


# --- pydantic-ai


@pytest.fixture(params=ROUTES)
def pydantic_model(request: pytest.FixtureRequest, base_url: str) -> Any:
    pytest.importorskip("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    kind = OpenAIChatModel if request.param == "chat" else OpenAIResponsesModel
    return kind(MODEL, provider=OpenAIProvider(base_url=base_url, api_key="none"))


SETTINGS: Any = {"max_tokens": 100, "temperature": 0}


def test_pydantic_ai_holds_a_conversation(pydantic_model: Any) -> None:
    from pydantic_ai import Agent

    agent = Agent(pydantic_model, instructions="Be brief.", model_settings=SETTINGS)
    first = agent.run_sync("Hi")
    second = agent.run_sync("And you?", message_history=first.all_messages())
    assert first.output
    assert second.output
    assert second.usage.input_tokens > first.usage.input_tokens


@pytest.mark.parametrize("kind", ["NativeOutput", "ToolOutput"])
def test_pydantic_ai_parses_outputs(pydantic_model: Any, kind: str) -> None:
    import pydantic_ai

    output: Any = getattr(pydantic_ai, kind)(Weather)
    agent: Any = pydantic_ai.Agent(pydantic_model, output_type=output, model_settings=SETTINGS)
    assert isinstance(agent.run_sync("It is sunny in Paris.").output, Weather)


def test_pydantic_ai_streams(pydantic_model: Any) -> None:
    from pydantic_ai import Agent

    async def run() -> tuple[list[str], int]:
        async with Agent(pydantic_model, model_settings=SETTINGS).run_stream("Hi") as answer:
            parts = [part async for part in answer.stream_text(delta=True, debounce_by=None)]
            return parts, answer.usage.output_tokens

    parts, tokens = asyncio.run(run())
    assert len(parts) > 1
    assert tokens > 1


# --- OpenAI's Agents SDK


@pytest.fixture(params=ROUTES)
def agent_of(request: pytest.FixtureRequest, base_url: str) -> Any:
    agents = pytest.importorskip("agents")
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)

    def make(*, tools: Any = (), output_type: Any = None, **settings: Any) -> Any:
        client = AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)
        kind = agents.OpenAIChatCompletionsModel if request.param == "chat" else agents.OpenAIResponsesModel
        model_settings = agents.ModelSettings(max_tokens=60, temperature=0, **settings)
        model = kind(model=MODEL, openai_client=client)
        return agents.Agent(
            name="a", instructions="Be brief.", model=model, tools=list(tools), output_type=output_type, model_settings=model_settings
        )

    return make


@pytest.fixture
def weather_tool() -> Any:
    agents = pytest.importorskip("agents")

    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather in a city."""
        called.append(city)
        return f"sunny in {city}"

    called: list[str] = []
    tool = agents.function_tool(get_weather)
    tool.called = called
    return tool


def test_agents_sdk_parses_outputs(agent_of: Any) -> None:
    from agents import Runner

    assert isinstance(Runner.run_sync(agent_of(output_type=Weather), "It is sunny in Paris.").final_output, Weather)


def test_agents_sdk_runs_tools_over_turns(agent_of: Any, weather_tool: Any) -> None:
    """A forced call, then the answer to its result, and a further turn with this history."""
    from agents import Runner

    agent = agent_of(tools=[weather_tool], tool_choice="required", parallel_tool_calls=False)
    first = Runner.run_sync(agent, "What is the weather in Paris?")
    assert len(weather_tool.called) == 1
    kinds = [item.get("type", "message") for item in first.to_input_list()]
    assert kinds.count("function_call") == kinds.count("function_call_output") == 1
    second = Runner.run_sync(agent, [*first.to_input_list(), {"role": "user", "content": "And in Rome?"}])
    assert len(weather_tool.called) == 2
    assert second.final_output


def test_agents_sdk_streams_tools(agent_of: Any, weather_tool: Any) -> None:
    from agents import Runner

    async def run() -> set[str]:
        agent = agent_of(tools=[weather_tool], tool_choice="required", parallel_tool_calls=False)
        result = Runner.run_streamed(agent, "What is the weather in Paris?")
        return {getattr(event, "name", event.type) async for event in result.stream_events()}

    assert {"tool_called", "tool_output", "message_output_created"} <= asyncio.run(run())
