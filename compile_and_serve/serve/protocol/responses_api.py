"""Body of OpenAI's `POST /v1/responses`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from compile_and_serve.serve.protocol.fields import Objects, SamplingFields, Stop, Strings

EXAMPLE: dict[str, Any] = {
    "instructions": "You answer in one sentence.",
    "input": "What is the capital of France?",
    "max_output_tokens": 64,
}
MAX_METADATA = 16  # entries, as in OpenAI's API


class TextOptions(BaseModel):
    """The form of the answer's text."""

    format: dict[str, Any] | None = Field(
        default=None, description='{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "name": …, "schema": {…}}.'
    )
    verbosity: str | None = Field(default=None, description="Accepted without effect.")


class ReasoningOptions(BaseModel):
    """How the model reasons."""

    effort: str | None = Field(default=None, description="Passed to the chat template as reasoning_effort.")
    summary: str | None = Field(default=None, description="Accepted without effect: answers have the reasoning itself, and no summary.")


class ResponsesRequest(SamplingFields):
    """OpenAI's request for a response, with the sampling fields of the other endpoints."""

    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE]})

    input: str | Objects = Field(
        description="A text, or items of the types message, function_call, function_call_output, custom_tool_call, "
        "custom_tool_call_output and reasoning; others are left out. Content is a text, or a list of text parts.",
        examples=[EXAMPLE["input"]],
    )
    instructions: str | None = Field(default=None, description="A system message before the conversation.")
    max_output_tokens: int | None = Field(default=None, ge=1, lt=2**31, description="By default, as many as the model's limit allows.")
    stream: bool | None = False
    stream_options: dict[str, Any] | None = Field(default=None, description="Accepted without effect.")
    tools: Objects | None = Field(
        default=None,
        description='Functions: {"type": "function", "name": …, "parameters": …}, custom tools, and namespaces of these; '
        "others are left out.",
    )
    tool_choice: str | dict[str, Any] | None = Field(
        default=None, description="'none', 'auto', 'required', {'type': 'function', 'name': …} or allowed_tools."
    )
    parallel_tool_calls: bool | None = Field(default=True, description="false: at most one call per answer.")
    max_tool_calls: int | None = Field(default=None, description="Accepted without effect: there are no built-in tools.")
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    stop: Stop | None = None
    include: Strings | None = Field(
        default=None,
        description="message.output_text.logprobs: return the log-probabilities of a message's tokens. Others have no effect. "
        "Reasoning is returned as text and may be sent back.",
    )
    top_logprobs: int | None = Field(
        default=None, ge=0, description="Most likely tokens per token; has an effect only where include has message.output_text.logprobs."
    )
    truncation: Literal["auto", "disabled"] | None = Field(default=None, description="auto: a prompt that is too long keeps its end.")
    store: bool | None = Field(default=None, description="By default true if the server was started with --response-store, else false.")
    previous_response_id: str | None = Field(
        default=None, max_length=256, description="Continue this stored response. Its instructions are not repeated."
    )
    background: bool | None = Field(default=False, description="Answer at once; needs a stored response and no stream.")
    metadata: dict[str, str] | None = Field(default=None, max_length=MAX_METADATA, description="Returned with the response.")
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: int | None = Field(
        default=None, ge=-1, lt=2**31, description="Tokens after which the reasoning is ended; -1: no limit."
    )
    user: str | None = Field(default=None, description="Who of the API key's users it is, for --fair-by-user.")
    conversation: Any = Field(default=None, description="Refused unless null: use previous_response_id.")
    prompt: Any = Field(default=None, description="Refused unless null: this server keeps no prompt templates.")
    context_management: Any = Field(default=None, description="Accepted without effect.")


RESPONSE_EXAMPLE = {
    "id": "resp_5f0c",
    "object": "response",
    "created_at": 1_767_225_600,
    "status": "completed",
    "model": "smollm2-135m",
    "output": [
        {
            "id": "msg_5f0c",
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "output_text", "text": "The capital of France is Paris.", "annotations": []}],
        }
    ],
    "usage": {"input_tokens": 31, "output_tokens": 8, "total_tokens": 39},
}
