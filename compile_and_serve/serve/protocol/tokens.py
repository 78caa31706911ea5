"""Bodies of `POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict, Field

from compile_and_serve.serve.protocol.chat import ChatFields
from compile_and_serve.serve.protocol.fields import RequestModel


class TokenizeRequest(ChatFields):
    """Either `prompt` or `messages`. By default special tokens are added to a prompt and not to messages."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "Hello world"}]})

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None  # type: ignore[assignment]
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False


class DetokenizeRequest(RequestModel):
    """Token ids to decode."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"tokens": [19556, 905]}]})

    tokens: list[int] = Field(max_length=1_000_000)
    skip_special_tokens: bool | None = False
