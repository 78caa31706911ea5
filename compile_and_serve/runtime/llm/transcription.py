"""`LLM.transcribe`: recordings to text, without a server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from compile_and_serve.runtime.audio.options import Segment, Transcription, TranscriptionOptions
from compile_and_serve.runtime.audio.transcriber import Decode, Decoded, Transcriber

if TYPE_CHECKING:
    from compile_and_serve.runtime.messages import EngineInfo
    from compile_and_serve.runtime.text.tokenizer import Tokenizer

_Run = Generator[Decode | Segment | Callable[[], Any], Any, Transcription]


class TranscriptionMethods(ABC):
    """The part of `LLM` for models of the Whisper kind."""

    tokenizer: Tokenizer | None

    @property
    @abstractmethod
    def info(self) -> EngineInfo:
        """The engine's limits."""

    @abstractmethod
    def _decode(self, jobs: Sequence[Decode]) -> list[Decoded]:
        """The tokens of all jobs, which run at once."""

    @overload
    def transcribe(
        self, recordings: np.ndarray, options: TranscriptionOptions | None = None, *, word_timestamps: bool = False
    ) -> Transcription: ...

    @overload
    def transcribe(
        self, recordings: Sequence[np.ndarray], options: TranscriptionOptions | None = None, *, word_timestamps: bool = False
    ) -> list[Transcription]: ...

    def transcribe(
        self, recordings: np.ndarray | Sequence[np.ndarray], options: TranscriptionOptions | None = None, *, word_timestamps: bool = False
    ) -> Transcription | list[Transcription]:
        """The text of recordings; windows of different ones are computed together.

        recordings: float32 [N], one channel, 16 kHz, from -1 to 1; one or many. word_timestamps: as `TranscriptionOptions.words`.
        Raises `TranscriptionError`, a `ValueError`, for an option or a recording that the model cannot take, and one for a model that
        transcribes nothing.
        """
        transcriber = Transcriber.of(self.info.media, self.tokenizer)
        if transcriber is None:
            raise ValueError("This model transcribes nothing: load one of the Whisper kind.")
        many = [recordings] if isinstance(recordings, np.ndarray) else list(recordings)
        options = options or TranscriptionOptions()
        if word_timestamps:
            options = replace(options, words=True)
        jobs = [transcriber.job(one, options) for one in many]
        runs: dict[int, _Run] = {number: job.run() for number, job in enumerate(jobs)}
        asked = {number: one for number, run in runs.items() if (one := _next(run, None)) is not None}
        while asked:
            answers = self._decode(list(asked.values()))
            following = {number: _next(runs[number], answer) for number, answer in zip(asked, answers, strict=True)}
            asked = {number: one for number, one in following.items() if one is not None}
        results = [job.result for job in jobs]
        assert None not in results, "a run ended without a result"
        done = [one for one in results if one is not None]
        return done[0] if isinstance(recordings, np.ndarray) else done


def _next(run: _Run, answer: Decoded | None) -> Decode | None:
    """What a run asks for next; None: it has ended."""
    try:
        one = run.send(answer)
        while not isinstance(one, Decode):
            one = run.send(None if isinstance(one, Segment) else one())
    except StopIteration:
        return None
    return one
