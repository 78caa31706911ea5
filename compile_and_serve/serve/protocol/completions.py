"""Body of `POST /v1/completions`."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field

from compile_and_serve.serve.errors import ApiError
from compile_and_serve.serve.protocol.fields import GenerationFields

EXAMPLE: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 32, "temperature": 0.0}
_PROMPT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ],
    "examples": [EXAMPLE["prompt"]],
}
MAX_SEQUENCES = 4096  # completions per request
MAX_PROMPT_TOKENS = 1 << 20  # tokens of all prompts of a request


class CompletionRequest(GenerationFields):
    """OpenAI's completion request with vLLM's additions."""

    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE]})

    # A union type would try each of its four forms on every token id.
    prompt: Any = Field(
        description="A text, a list of texts, a list of token ids, or a list of such lists.",
        json_schema_extra=_PROMPT_SCHEMA,
    )
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = Field(default=False, description="Begin each completion with its prompt.")
    add_special_tokens: bool | None = True

    def prompts(self) -> list[str | list[int]]:
        """The list of prompts. Raises a 400 for any other form."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not isinstance(prompt, list) or not prompt:
            raise _wrong_prompt()
        if _are_ids(prompt):
            return [prompt]
        if all(isinstance(p, str) for p in prompt) or all(isinstance(p, list) and _are_ids(p) for p in prompt):
            return prompt
        raise _wrong_prompt()


def _are_ids(values: list[Any]) -> bool:
    return all(type(value) is int for value in values)


def _wrong_prompt() -> ApiError:
    sentence = "prompt must be a string, a list of strings, a list of token ids, or a list of lists of token ids."
    return ApiError(400, sentence, "prompt")


RESPONSE_EXAMPLE = {
    "id": "cmpl-5f0c",
    "object": "text_completion",
    "created": 1_767_225_600,
    "model": "smollm2-135m",
    "choices": [
        {
            "index": 0,
            "text": ", there was a little girl",
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ],
    "usage": {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10},
}
