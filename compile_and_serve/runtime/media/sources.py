"""Media in messages: which parts they are, and what stands for them until the prompt is rendered.

The text of a part's place is a mark: digits that no client can guess, and a number. Translations of other APIs, tools' results and the
hiding of special tokens pass it on like any text. Before the template runs, `show_marks` makes parts for the template of the marks.
"""

from __future__ import annotations

import base64
import binascii
import re
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from compile_and_serve.runtime.media.prepared import MediaError, MediaKind

_MAX_DEPTH = 6  # of parts within parts
_CONTENT = ("content", "output")  # fields of messages, of tools' results and of items that hold parts
_KINDS: Mapping[str, MediaKind] = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "image_pil": "image",
    "image_embeds": "image",
    "video_url": "video",
    "video": "video",
    "input_audio": "audio",
    "audio_url": "audio",
    "audio": "audio",
}
_DATA_URL = re.compile(r"data:([\w.+/-]*)(?:;[\w.+=-]+)*?(;base64)?,")


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaSource:
    """where: its path in the request, for errors. given: a URL, a file's bytes, or what `as_image`, `as_frames` and `as_audio` take. uuid:
    names the content in place of a hash.
    """

    kind: MediaKind
    where: str
    given: Any
    uuid: str | None = None


@dataclass(kw_only=True, slots=True)
class TakenMedia:
    """The media of a conversation, in order."""

    sources: list[MediaSource] = field(default_factory=list)
    nonce: str = field(default_factory=lambda: f"{secrets.randbelow(10**15):015d}")

    def mark(self, source: MediaSource) -> str:
        """The text that stands for one more source."""
        self.sources.append(source)
        return f"{self.nonce}{len(self.sources) - 1:04d}"

    def pieces(self, text: str) -> list[str | MediaSource]:
        """A text without marks, and the sources in their places. Where translations joined parts by line breaks, these go."""
        parts = re.split(rf"\n?{self.nonce}(\d{{4}})\n?", text)
        found: list[str | MediaSource] = []
        for index, part in enumerate(parts):
            if index % 2:
                found.append(self.sources[int(part)])
            elif part:
                found.append(part)
        return found


def take_media(messages: Any, kinds: Collection[MediaKind], name: str) -> tuple[Any, TakenMedia]:
    """Messages, or items of another API, with a text part in place of each part with media of these kinds. name: of the field.

    Raises `MediaError` for a part that says that it has media and has none.
    """
    taken = TakenMedia()
    return _taken(messages, kinds, taken, name, 0), taken


def _taken(value: Any, kinds: Collection[MediaKind], taken: TakenMedia, where: str, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        return value
    if isinstance(value, list):
        return [_taken(one, kinds, taken, f"{where}[{index}]", depth + 1) for index, one in enumerate(value)]
    if not isinstance(value, Mapping):
        return value
    source = _source(value, where) if isinstance(value.get("type"), str) else None
    if source is not None and source.kind in kinds:
        return {"type": "text", "text": taken.mark(source)}
    changed = {
        name: _taken(value[name], kinds, taken, f"{where}.{name}", depth + 1) for name in _CONTENT if isinstance(value.get(name), list)
    }
    return {**value, **changed} if changed else value


def _source(part: Mapping[str, Any], where: str) -> MediaSource | None:
    """The media of a part: OpenAI's image_url, input_image and input_audio, Anthropic's image, vLLM's video_url and so on."""
    kind = _KINDS.get(part["type"])
    if kind is None:
        return None
    given = part.get(part["type"]) if part["type"] != "input_image" else part.get("image_url")
    if part["type"] == "image_embeds":
        given = given if given is None or isinstance(given, Mapping) else {"image_embeds": given}
    elif part["type"] == "input_audio":
        given = _input_audio(given, where)
    elif isinstance(given, Mapping) and "array" not in given:
        given = given.get("url")
    source = part.get("source")
    if given is None and isinstance(source, Mapping):  # Anthropic's
        given = _anthropic(source, where)
    if given is None and isinstance(part.get("url"), str):
        given = part["url"]
    if given is None:
        reason = "file_id names a file, but this server keeps none" if part.get("file_id") else "it has no URL and no data"
        raise MediaError(f"{where} cannot be read: {reason}.")
    uuid = part.get("uuid")
    return MediaSource(kind=kind, where=where, given=given, uuid=uuid if isinstance(uuid, str) else None)


def _input_audio(given: Any, where: str) -> bytes:
    """The file in {"data": base64, "format": …}. The content says itself which format it has."""
    if not isinstance(given, Mapping) or not isinstance(given.get("data"), str):
        raise MediaError(f"{where}.input_audio must have data, a file in base64, and its format.")
    data = given["data"]
    return data_of_url(data, f"{where}.input_audio.data") or from_base64(data, f"{where}.input_audio.data")


def _anthropic(source: Mapping[str, Any], where: str) -> Any:
    if source.get("type") == "base64" and isinstance(source.get("data"), str):
        return from_base64(source["data"], where)
    if source.get("type") == "url" and isinstance(source.get("url"), str):
        return source["url"]
    raise MediaError(f"{where}.source must have the type base64 with data, or url with a URL.")


def data_of_url(url: str, where: str) -> bytes | None:
    """The bytes in a data: URL; None: it is another URL. Raises `MediaError`."""
    if url[:5].lower() != "data:":
        return None
    head = _DATA_URL.match(url[:300])
    if head is None or head[2] is None:
        raise MediaError(f"{where} has a data: URL that is not in base64: expected data:image/png;base64,… or the like.")
    return from_base64(url[head.end() :], where)


def from_base64(text: str, where: str) -> bytes:
    """Raises `MediaError`."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        pass
    try:  # with line breaks, or with the letters of URLs, and without padding
        clean = re.sub(r"\s", "", text).translate(str.maketrans("-_", "+/")).rstrip("=")
        return base64.b64decode(clean + "=" * (-len(clean) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise MediaError(f"{where} has data that are not base64.") from None


def show_marks(messages: Sequence[Any], taken: TakenMedia, texts: Mapping[MediaKind, str]) -> list[Any]:
    """Messages with parts {"type": "image", "placeholder": …} in place of marks.

    texts: what stands for media in the prompt, for templates that take texts.
    """
    return [_shown(message, taken, texts) for message in messages] if taken.sources else list(messages)


def _shown(message: Any, taken: TakenMedia, texts: Mapping[MediaKind, str]) -> Any:
    if not isinstance(message, Mapping):
        return message
    content = message.get("content")
    given = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(given, list):
        return message
    parts: list[Any] = []
    for part in given:
        text = part.get("text") if isinstance(part, Mapping) else part
        pieces = taken.pieces(text) if isinstance(text, str) else []
        if any(isinstance(piece, MediaSource) for piece in pieces):
            parts += [_part(piece, texts) for piece in pieces]
        else:
            parts.append(part)
    return message if parts == given else {**message, "content": parts}


def _part(piece: str | MediaSource, texts: Mapping[MediaKind, str]) -> dict[str, str]:
    return {"type": "text", "text": piece} if isinstance(piece, str) else {"type": piece.kind, "placeholder": texts[piece.kind]}
