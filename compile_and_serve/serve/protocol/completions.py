"""Body of `POST /v1/completions`."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field

from compile_and_serve.serve.errors import ApiError
from compile_and_serve.serve.protocol.fields import GenerationFields

EXAMPLE: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 32, "temperature": 0.0}
PROMPT_SCHEMA: dict[str, Any] = {
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
        description="A text, a list of texts, a list of token ids, or a list of such lists.", json_schema_extra=PROMPT_SCHEMA
    )
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = Field(default=False, description="Begin each completion with its prompt.")
    add_special_tokens: bool | None = True

    def prompts(self) -> list[str | list[int]]:
        """The list of prompts. Raises a 400 for any other form."""
        return prompts_of(self.prompt, "prompt")


def prompts_of(given: Any, name: str) -> list[str | list[int]]:
    """The prompts in a field of that name. Raises a 400 for anything but the forms of `PROMPT_SCHEMA`."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given:
        if _are_ids(given):
            return [given]
        if all(isinstance(p, str) for p in given) or all(isinstance(p, list) and _are_ids(p) for p in given):
            return given
    sentence = f"{name} must be a string, a list of strings, a list of token ids, or a list of lists of token ids."
    raise ApiError(400, sentence, name)


def _are_ids(values: list[Any]) -> bool:
    return all(type(value) is int for value in values)


RESPONSE_EXAMPLE = {
    "id": "cmpl-5f0c",
    "object": "text_completion",
    "created": 1_767_225_600,
    "model": "smollm2-135m",
    "choices": [{"index": 0, "text": ", there was a little girl", "logprobs": None, "finish_reason": "length", "stop_reason": None}],
    "usage": {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10},
}
