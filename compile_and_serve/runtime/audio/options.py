"""What a transcription is asked for, and what it is."""

from __future__ import annotations

from dataclasses import dataclass, field

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


class TranscriptionError(ValueError):
    """A recording or an option that the model cannot take, in one sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TranscriptionOptions:
    """task: "translate" gives English. language: ISO 639-1 or its English name; None: the model says. prompt: text that stands before the
    recording's. temperature: 0 rises by 0.2 while a window's result looks wrong, if `falls_back`; another number is that alone.
    timestamps: the model says where segments begin and end; recordings of more than one window always have them.
    words: times of words, and so of segments. seed: of temperatures above 0. wants_no_speech: `Segment.no_speech_prob` of every segment.
    previous_text: a window's text is the next one's prompt.

    A window's result looks wrong if it compresses by more than `compression_limit`, or its tokens' mean log-probability is below
    `logprob_limit`. It is silence if that is so and the model gives "no speech" more than `no_speech_limit`.
    """

    task: str = "transcribe"
    language: str | None = None
    prompt: str | None = None
    temperature: float = 0.0
    falls_back: bool = True
    timestamps: bool = False
    words: bool = False
    seed: int | None = None
    wants_no_speech: bool = False
    previous_text: bool = False
    compression_limit: float = 2.4
    logprob_limit: float = -1.0
    no_speech_limit: float = 0.6

    def verify(self) -> None:
        """Raise `TranscriptionError` for an option out of range."""
        if self.task not in ("transcribe", "translate"):
            raise TranscriptionError(f"The task must be transcribe or translate, got {self.task!r:.100}.")
        if not 0.0 <= self.temperature <= 2.0:
            raise TranscriptionError(f"temperature must be in [0, 2], got {self.temperature}.")


@dataclass(kw_only=True, slots=True)
class Word:
    """start, end: seconds."""

    word: str
    start: float
    end: float
    probability: float


@dataclass(kw_only=True, slots=True)
class Segment:
    """seek: where its window begins, in frames of 10 ms. start, end: seconds. tokens: with those of times. The others are of its window."""

    id: int
    seek: int
    start: float
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float = 0.0
    words: list[Word] | None = None


@dataclass(kw_only=True, slots=True)
class Transcription:
    """language: ISO 639-1 code. duration: of the recording, in seconds."""

    task: str
    language: str
    duration: float
    segments: list[Segment] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Of all segments."""
        return "".join(segment.text for segment in self.segments).strip()
