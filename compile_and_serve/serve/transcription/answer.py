"""What answers to transcriptions look like: JSON, text, subtitles and events."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fastapi import Response

from compile_and_serve.runtime.audio.options import Segment, Transcription
from compile_and_serve.runtime.audio.speech_tokens import LANGUAGES
from compile_and_serve.serve.http.responses import event, json_response
from compile_and_serve.serve.protocol.audio import AudioFormat

_PLAIN = "text/plain; charset=utf-8"


def answer(found: Transcription, form: AudioFormat, granularities: Sequence[str]) -> Response:
    """The whole answer. granularities: of verbose_json."""
    if form == "json":
        return json_response({"text": found.text, "usage": usage(found)})
    if form == "verbose_json":
        return json_response(_verbose(found, granularities))
    text = {"text": lambda: found.text + "\n", "srt": lambda: _srt(found.segments), "vtt": lambda: _vtt(found.segments)}[form]()
    return Response(text, media_type=_PLAIN)


def usage(found: Transcription) -> dict[str, Any]:
    """OpenAI's usage of models that are paid by the second."""
    return {"type": "duration", "seconds": math.ceil(found.duration)}


class TextEvents:
    """The events of a stream. The deltas together are the text of its end."""

    def __init__(self) -> None:
        self._sent = ""
        self._space = ""  # at the end, which the whole text has only if more follows

    def delta(self, segment: Segment) -> bytes:
        """Of one more segment; empty if it adds no text."""
        text = self._space + segment.text if self._sent else segment.text.lstrip()
        shown = text.rstrip()
        if not shown:
            self._space = text if self._sent else ""
            return b""
        self._space = text[len(shown) :]
        self._sent += shown
        return event({"type": "transcript.text.delta", "delta": shown})

    def done(self, found: Transcription) -> bytes:
        """The last one."""
        return event({"type": "transcript.text.done", "text": found.text, "usage": usage(found)})


def _verbose(found: Transcription, granularities: Sequence[str]) -> dict[str, Any]:
    body: dict[str, Any] = {
        "task": found.task,
        "language": LANGUAGES.get(found.language, found.language),
        "duration": found.duration,
        "text": found.text,
    }
    if "word" in granularities:
        body["words"] = [
            {"word": word.word.strip(), "start": word.start, "end": word.end} for one in found.segments for word in one.words or ()
        ]
    if "segment" in granularities or not granularities:
        body["segments"] = [
            {
                "id": one.id,
                "seek": one.seek,
                "start": one.start,
                "end": one.end,
                "text": one.text,
                "tokens": list(one.tokens),
                "temperature": one.temperature,
                "avg_logprob": one.avg_logprob,
                "compression_ratio": one.compression_ratio,
                "no_speech_prob": one.no_speech_prob,
            }
            for one in found.segments
        ]
    return {**body, "usage": usage(found)}


def _srt(segments: Sequence[Segment]) -> str:
    return "".join(
        f"{number}\n{_time(one.start, ',')} --> {_time(one.end, ',')}\n{_line(one)}\n\n" for number, one in enumerate(_spoken(segments), 1)
    )


def _vtt(segments: Sequence[Segment]) -> str:
    return "WEBVTT\n\n" + "".join(f"{_time(one.start, '.')} --> {_time(one.end, '.')}\n{_line(one)}\n\n" for one in _spoken(segments))


def _spoken(segments: Sequence[Segment]) -> list[Segment]:
    return [one for one in segments if one.text.strip()]


def _line(segment: Segment) -> str:
    """A cue's text, in which an arrow would be read as times."""
    return segment.text.strip().replace("-->", "->")


def _time(seconds: float, point: str) -> str:
    """00:00:00,000"""
    milliseconds = round(max(0.0, seconds) * 1000)
    hours, rest = divmod(milliseconds, 3_600_000)
    minutes, rest = divmod(rest, 60_000)
    whole, thousandths = divmod(rest, 1000)
    return f"{hours:02d}:{minutes:02d}:{whole:02d}{point}{thousandths:03d}"
