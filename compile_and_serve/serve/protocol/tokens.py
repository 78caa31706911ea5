"""Bodies of `POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

from pydantic import ConfigDict, Field

from compile_and_serve.serve.protocol.chat import ChatFields
from compile_and_serve.serve.protocol.fields import Integers, Objects, RequestModel

MAX_DETOKENIZED = 1 << 17  # token ids per request; a token may have more than 100 characters


class TokenizeRequest(ChatFields):
    """Either `prompt` or `messages`. By default special tokens are added to a prompt and not to messages."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"prompt": "Hello world"}]})

    prompt: str | None = None
    messages: Objects | None = None  # type: ignore[assignment]
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = False


class DetokenizeRequest(RequestModel):
    """Token ids to decode."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"tokens": [19556, 905]}]})

    tokens: Integers = Field(max_length=MAX_DETOKENIZED)
    skip_special_tokens: bool | None = False
