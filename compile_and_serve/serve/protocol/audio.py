"""The form of `POST /v1/audio/transcriptions` and `/v1/audio/translations`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from compile_and_serve.serve.errors import ApiError
from compile_and_serve.serve.protocol.fields import MAX_ID, RequestModel

AudioFormat = Literal["json", "text", "srt", "vtt", "verbose_json"]
MAX_PROMPT = 1 << 16  # characters
_GRANULARITIES = "timestamp_granularities"
_STREAMED = ("json", "text")
# Fields of OpenAI's other models: field → (values without effect, why others are refused).
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "include": ((), "include is not supported: this server gives no logprobs of transcriptions."),
    "known_speaker_names": ((), "known_speaker_names are not supported: this server does not tell speakers apart."),
    "known_speaker_references": ((), "known_speaker_references are not supported: this server does not tell speakers apart."),
    "chunking_strategy": (("auto",), 'chunking_strategy must be "auto": the model cuts long audio itself.'),
}


class TranslationRequest(RequestModel):
    """OpenAI's form, without its file."""

    prompt: str | None = Field(default=None, max_length=MAX_PROMPT, description="Text before the audio, or words that it may have.")
    response_format: AudioFormat = "json"
    temperature: float | None = Field(
        default=None, ge=0.0, le=1.0, description="By default 0, and higher ones for pieces whose text is unlikely or repeats itself."
    )
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    stream: bool | None = Field(default=False, description="Server-sent events: `transcript.text.delta` and `transcript.text.done`.")
    request_id: str | None = Field(default=None, max_length=MAX_ID)
    user: str | None = Field(default=None, description="Who of the API key's users it is, for --fair-by-user.")

    def check(self) -> None:
        """Raise a 400 for fields that do not go together, and for those of other models."""
        if self.stream and self.response_format not in _STREAMED:
            raise ApiError(400, f"A stream has text alone: response_format must be json or text, got {self.response_format}.", "stream")
        for name, (allowed, sentence) in _REFUSED.items():
            value = (self.model_extra or {}).get(name)
            if value is not None and value not in allowed:
                raise ApiError(400, sentence, name)


class TranscriptionRequest(TranslationRequest):
    """OpenAI's form, without its file."""

    language: str | None = Field(
        default=None, max_length=50, description="Of the audio, as en or English; by default the model detects it."
    )
    timestamp_granularities: list[Literal["segment", "word"]] | None = Field(
        default=None, description="In the form `timestamp_granularities[]`; needs the response_format verbose_json. By default segment."
    )

    def check(self) -> None:
        super().check()
        if self.timestamp_granularities and self.response_format != "verbose_json":
            sentence = f"{_GRANULARITIES} needs the response_format verbose_json, got {self.response_format}."
            raise ApiError(400, sentence, _GRANULARITIES)


def form_schema(model: type[RequestModel]) -> dict[str, Any]:
    """The OpenAPI schema of a multipart form with the model's fields and a file."""
    schema = model.model_json_schema(ref_template="#/components/schemas/{model}")
    properties = dict(schema["properties"])
    if (granularities := properties.pop(_GRANULARITIES, None)) is not None:
        properties[f"{_GRANULARITIES}[]"] = granularities
    properties = {
        "file": {"type": "string", "format": "binary", "description": "WAV, MP3, FLAC, OGG, M4A, WebM or the like."},
        **properties,
    }
    content = {"schema": {"type": "object", "required": ["file"], "properties": properties}}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": content}}}
