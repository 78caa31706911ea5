"""Body of `POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import ConfigDict, Field, PrivateAttr, model_validator

from compile_and_serve.runtime.media.sources import TakenMedia
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.serve.errors import ApiError
from compile_and_serve.serve.protocol.fields import GenerationFields, Objects, RequestModel, sampling_params

EXAMPLE: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "You answer in one sentence."},
        {"role": "user", "content": "What is the capital of France?"},
    ],
    "max_tokens": 64,
    "temperature": 0.0,
}


class ChatFields(RequestModel):
    """Fields that decide how a conversation becomes a prompt."""

    messages: Objects = Field(description='Objects with "role" and "content" (a text or a list of parts).', examples=[EXAMPLE["messages"]])
    tools: Objects | None = None
    tool_choice: str | dict[str, Any] | None = Field(
        default=None, description="'none', 'auto' (the default), 'required' or an object that names a function."
    )
    parallel_tool_calls: bool | None = Field(default=True, description="false: at most one call per answer.")
    documents: Objects | None = None
    add_generation_prompt: bool | None = Field(
        default=None, description="End the prompt with the start of the assistant's turn; true unless continue_final_message is set."
    )
    continue_final_message: bool | None = False
    add_special_tokens: bool | None = Field(default=False, description="Add the tokenizer's special tokens to the rendered template.")
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = Field(default=None, description="Passed to the chat template.")
    mm_processor_kwargs: dict[str, Any] | None = Field(default=None, description="Settings of the image processor, such as max_pixels.")
    _taken_media: TakenMedia | None = PrivateAttr(default=None)

    @property
    def taken_media(self) -> TakenMedia | None:
        """The media for which marks stand in the messages."""
        return self._taken_media

    def with_media(self, taken: TakenMedia | None) -> Self:
        """This request, with the media for which marks stand in its messages."""
        self._taken_media = taken
        return self

    def template_options(self) -> dict[str, Any]:
        """Keyword arguments of `TemplatePool.render`."""
        continues = bool(self.continue_final_message)
        opens = self.add_generation_prompt
        variables = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", self.reasoning_effort)
        return {
            "add_generation_prompt": (not continues) if opens is None else opens,
            "continue_final_message": continues,
            "documents": self.documents,
            "template_kwargs": variables,
        }


class ChatCompletionRequest(ChatFields, GenerationFields):
    """OpenAI's chat completion request with vLLM's additions."""

    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE]})

    input: str | Objects | None = Field(
        default=None, description="The conversation in the form of the Responses API, in place of messages, as Cursor sends it."
    )
    max_completion_tokens: int | None = Field(default=None, description="By default, as many as the model's limit allows.")
    logprobs: bool | None = False
    top_logprobs: int | None = None
    include_reasoning: bool | None = Field(default=True, description="false: leave the reasoning out of the answer.")
    thinking_token_budget: int | None = Field(
        default=None, ge=-1, lt=2**31, description="Tokens after which the reasoning is ended; -1: no limit."
    )
    unnorm_key: str | None = Field(
        default=None, description="Of models that move robots: the dataset in whose units the answer's `action` is."
    )
    echo: bool | None = Field(default=False, description="Begin the answer with the last message if that has the answer's role.")

    @model_validator(mode="before")
    @classmethod
    def _input_replaces_messages(cls, given: Any) -> Any:
        has_input = isinstance(given, dict) and given.get("messages") is None and given.get("input") is not None
        return {**given, "messages": []} if has_input else given

    @classmethod
    def known_fields(cls) -> set[str]:
        return super().known_fields() | {"instructions", "max_output_tokens", "reasoning", "text"}

    def params(self, defaults: Mapping[str, float | int], *, open_schemas: bool) -> SamplingParams:
        """The request's `SamplingParams`, verified. defaults: values of missing fields. open_schemas: see `structured_params`."""
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return sampling_params(
            self, defaults, max_tokens=max_tokens, logprobs=self._num_logprobs(), names=self.names(), open_schemas=open_schemas
        )

    def names(self) -> dict[str, str]:
        """Field names of other endpoints and of the engine → this request's names for them."""
        names = super().names() | {"prompt": "messages", "logprobs": "top_logprobs"}
        return names if self.max_completion_tokens is None else names | {"max_tokens": "max_completion_tokens"}

    def _num_logprobs(self) -> int | None:
        """Number of most likely tokens per position; None: no logprobs."""
        if not self.logprobs:
            if self.top_logprobs:
                raise ApiError(400, "top_logprobs needs logprobs=true.", "top_logprobs")
            return None
        return self.top_logprobs or 0


RESPONSE_EXAMPLE = {
    "id": "chatcmpl-5f0c",
    "object": "chat.completion",
    "created": 1_767_225_600,
    "model": "smollm2-135m",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "The capital of France is Paris."},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ],
    "usage": {"prompt_tokens": 31, "completion_tokens": 8, "total_tokens": 39},
}
