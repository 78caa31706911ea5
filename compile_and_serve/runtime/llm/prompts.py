"""Prompts of `LLM`, and the images and audio in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NotRequired, TypedDict

from compile_and_serve.custom_ops.step_data import MediaItem, StepArray
from compile_and_serve.runtime.media.prepare import MediaPipeline
from compile_and_serve.runtime.media.prepared import MediaKind, PreparedMedia
from compile_and_serve.runtime.media.sources import MediaSource, TakenMedia, show_marks, take_media
from compile_and_serve.runtime.messages import EngineInfo
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.runtime.text.input_processor import InputProcessor


class _WithMedia(TypedDict):
    """multi_modal_data: "image" → one or a list of PIL images, uint8 arrays, files' bytes or URLs; "audio" → of arrays, (array, rate),
    files' bytes or URLs; in the order of the placeholders.

    multi_modal_uuids: names of the content, as many, in place of a hash. mm_processor_kwargs: settings of the image processor.
    """

    multi_modal_data: NotRequired[Mapping[str, Any] | None]
    multi_modal_uuids: NotRequired[Mapping[str, Any] | None]
    mm_processor_kwargs: NotRequired[Mapping[str, Any] | None]


class TextPrompt(_WithMedia):
    """A text, with the model's placeholder of each image."""

    prompt: str


class TokensPrompt(_WithMedia):
    """A prompt that is already tokenized. prompt: its text, if known. step_arrays, media: see `EngineRequest`."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str | None]
    step_arrays: NotRequired[dict[str, StepArray]]
    media: NotRequired[list[MediaItem]]


Prompt = str | TextPrompt | TokensPrompt
Message = Mapping[str, Any]


@dataclass(slots=True)
class ReadPrompt:
    """text: None: only token ids were given."""

    text: str | None
    prompt: str | list[int]
    params: SamplingParams
    step_arrays: dict[str, StepArray] = field(default_factory=dict)
    media: list[MediaItem] = field(default_factory=list)


@dataclass(slots=True)
class StartedPrompt:
    """A prompt whose media threads prepare. media: in the order of the prompt; empty: it has none."""

    read: ReadPrompt
    media: list[Future[PreparedMedia]] = field(default_factory=list)

    @property
    def is_ready(self) -> bool:
        """Whether `PromptReader.finish` waits for nothing."""
        return all(one.done() for one in self.media)

    def cancel(self) -> None:
        """Prepare no more of it."""
        for one in self.media:
            one.cancel()


class PromptReader:
    """Reads the prompts of an `LLM`: `start` each, then `finish` each, so that the media of many are prepared at once."""

    def __init__(self, inputs: InputProcessor, info: EngineInfo) -> None:
        self._inputs = inputs
        encode = None if inputs.tokenizer is None else partial(inputs.tokenizer.encode, add_special_tokens=False)
        self._pipeline = MediaPipeline.of(info.media, encode)

    def start(self, prompt: Prompt, params: SamplingParams) -> StartedPrompt:
        """Begin to prepare a prompt's media. Raises `ValueError` with one sentence."""
        if isinstance(prompt, str):
            return StartedPrompt(ReadPrompt(prompt, prompt, params))
        if not isinstance(prompt, Mapping) or not isinstance(prompt.get("prompt_token_ids", prompt.get("prompt")), (str, Sequence)):
            raise ValueError(f'A prompt must be a string, {{"prompt": "..."}} or {{"prompt_token_ids": [...]}}, got {prompt!r:.200}.')
        given: Any = prompt
        ids = given.get("prompt_token_ids")
        read = ReadPrompt(given.get("prompt"), given["prompt"] if ids is None else list(ids), params)
        read.step_arrays, read.media = given.get("step_arrays", {}), given.get("media", [])
        if params.truncate_prompt_tokens is not None and (read.step_arrays or read.media):
            raise ValueError("A prompt with step_arrays or media cannot be truncated: leave out truncate_prompt_tokens.")
        if not (sources := _sources(given)):
            return StartedPrompt(read)
        if read.step_arrays or read.media:
            raise ValueError("A prompt has multi_modal_data, and media of its own: leave out one of them.")
        if self._pipeline is None:
            raise ValueError("A prompt has multi_modal_data, but this model reads only text.")
        return StartedPrompt(read, self._pipeline.start(sources, given.get("mm_processor_kwargs")))

    def finish(self, started: StartedPrompt) -> ReadPrompt:
        """The prompt, with its media in their places. Raises `ValueError` with one sentence."""
        read = started.read
        if started.media:
            assert self._pipeline is not None
            prepared = [one.result() for one in started.media]
            placed = self._inputs.place(read.prompt, prepared, self._pipeline.processor, read.params)
            read.prompt, read.media, read.params = placed
        return read

    def take(self, messages: Sequence[Message]) -> tuple[Sequence[Message], TakenMedia]:
        """See `take_media`."""
        if self._pipeline is None:
            return messages, TakenMedia()
        return take_media(list(messages), self._pipeline.kinds, "messages")

    def show(self, messages: Sequence[Message], taken: TakenMedia) -> Sequence[Message]:
        """See `show_marks`."""
        if self._pipeline is None or not taken.sources:
            return messages
        backend = self._inputs.require_tokenizer("a conversation").backend
        texts: dict[MediaKind, str] = {
            kind: backend.id_to_token(token) or "" for token, kind in self._pipeline.processor.placeholders.items()
        }
        return show_marks(messages, taken, texts)

    def of_chat(self, text: str, taken: TakenMedia, options: Mapping[str, Any] | None) -> TokensPrompt:
        """The prompt of a rendered conversation. Its media are in the order of their kind."""
        ids = self._inputs.encode(text, add_special_tokens=False)
        data: dict[str, list[MediaSource]] = {}
        for source in taken.sources:
            data.setdefault(source.kind, []).append(source)
        return {"prompt": text, "prompt_token_ids": ids, "multi_modal_data": data, "mm_processor_kwargs": options}

    def close(self) -> None:
        """End the threads that prepare media."""
        if self._pipeline is not None:
            self._pipeline.close()


def _sources(prompt: Mapping[str, Any]) -> list[MediaSource]:
    sources: list[MediaSource] = []
    uuids = prompt.get("multi_modal_uuids") or {}
    for kind, given in (prompt.get("multi_modal_data") or {}).items():
        if kind not in ("image", "video", "audio"):
            raise ValueError(f"multi_modal_data takes image, video and audio, got {kind!r:.100}.")
        several = given if isinstance(given, list) else [given]
        names = uuids.get(kind)
        names = names if isinstance(names, list) else [names] * len(several) if names is None else [names]
        if len(names) != len(several):
            raise ValueError(f"multi_modal_uuids has {len(names)} names of {len(several)} {kind}s.")
        for index, (one, name) in enumerate(zip(several, names, strict=True)):
            source = MediaSource(kind=kind, where=f"multi_modal_data[{kind!r}][{index}]", given=one, uuid=name)
            sources.append(one if isinstance(one, MediaSource) else source)
    return sources
