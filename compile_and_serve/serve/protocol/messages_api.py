"""Bodies of Anthropic's `POST /v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from compile_and_serve.runtime.sampling_params import MAX_STOP_STRINGS
from compile_and_serve.serve.protocol.fields import Objects, RequestModel, SamplingFields, Strings

EXAMPLE: dict[str, Any] = {
    "max_tokens": 64,
    "system": "You answer in one sentence.",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
}


class Thinking(BaseModel):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = Field(
        default=None, description="With enabled: tokens after which the thinking is ended; needs a reasoning parser."
    )


class ToolChoice(BaseModel):
    """Which tools the answer may or must use."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(default=None, description="With the type tool: the function.")
    disable_parallel_tool_use: bool | None = Field(default=False, description="true: at most one call.")


class OutputConfig(BaseModel):
    """The form of the answer."""

    format: dict[str, Any] | None = Field(default=None, description='{"type": "json_schema", "schema": {…}}.')
    effort: str | None = Field(default=None, description="Passed to the chat template as reasoning_effort.")


class PromptFields(RequestModel):
    """Fields that decide how a conversation becomes a prompt."""

    messages: Objects = Field(
        min_length=1,
        description='Objects with "role" (user, assistant or system) and "content": a text, or blocks of the types text, '
        "tool_use, tool_result, thinking, document and search_result. If the last message is the assistant's, the answer continues it.",
        examples=[EXAMPLE["messages"]],
    )
    system: str | Objects | None = Field(default=None, description="A text, or blocks of the type text.")
    tools: Objects | None = Field(
        default=None, description="Objects with name, description, input_schema and strict; those of Anthropic's servers are left out."
    )
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = Field(default=None, description="Without it, or disabled, the template gets enable_thinking=false.")
    chat_template_kwargs: dict[str, Any] | None = None


class CountTokensRequest(PromptFields):
    """Anthropic's body for counting the tokens of a prompt."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"messages": EXAMPLE["messages"]}]})


class MessagesRequest(PromptFields, SamplingFields):
    """Anthropic's message request, with the sampling fields of the other endpoints."""

    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE]})

    max_tokens: int = Field(ge=1, lt=2**31)
    stream: bool | None = False
    stop_sequences: Strings | None = Field(
        default=None, description=f"At most {MAX_STOP_STRINGS} texts, none empty.", json_schema_extra={"maxItems": MAX_STOP_STRINGS}
    )
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = Field(default=None, description="The older name of output_config.format.")
    metadata: dict[str, Any] | None = Field(default=None, description="user_id: who of the API key's users it is, for --fair-by-user.")
    container: Any = Field(default=None, description="Accepted without effect: this server runs no code.")
    mcp_servers: Any = Field(default=None, description="Accepted without effect: this server calls no tools itself.")
    context_management: Any = Field(default=None, description="Accepted without effect.")


RESPONSE_EXAMPLE = {
    "id": "msg_5f0c",
    "type": "message",
    "role": "assistant",
    "model": "smollm2-135m",
    "content": [{"type": "text", "text": "The capital of France is Paris."}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": {"input_tokens": 31, "output_tokens": 8},
}
