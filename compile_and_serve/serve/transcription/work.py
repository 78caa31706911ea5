"""`TranscriptionWork`: audio files of requests, decoded off the event loop and transcribed by the engine."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from typing import TypeVar

from compile_and_serve.runtime.audio.options import TranscriptionError, TranscriptionOptions
from compile_and_serve.runtime.audio.transcriber import Transcriber, TranscriptionJob
from compile_and_serve.runtime.media.audio import AudioLimits, decode_audio
from compile_and_serve.runtime.media.prepared import MediaError
from compile_and_serve.serve.errors import ApiError
from compile_and_serve.serve.ledger.record import stage
from compile_and_serve.serve.tenants.turns import FairTurns
from compile_and_serve.serve.transcription.room import AudioRoom

DEFAULT_MAX_SECONDS = 3600.0
_MAX_WORKERS = 4
_FILES_AT_ONCE = 4  # of the longest audio, decoded, that are held at a time

T = TypeVar("T")


@dataclass(slots=True)
class HeldJob:
    """A job, and the room that its audio takes. release: gives the room back; may be called more than once."""

    job: TranscriptionJob
    seconds: float
    room: AudioRoom

    def release(self) -> None:
        """See the class."""
        self.room.give_back(self.seconds)
        self.seconds = 0.0


class TranscriptionWork:
    """transcriber: None: the model transcribes nothing. max_seconds: of one file. observe: told how long each stage took."""

    def __init__(self, transcriber: Transcriber | None, max_seconds: float | None, observe: Callable[[str, float], None]) -> None:
        self._transcriber, self._observe = transcriber, observe
        self._max_seconds = max_seconds or DEFAULT_MAX_SECONDS
        self._room = AudioRoom(_FILES_AT_ONCE * self._max_seconds)
        workers = min(_MAX_WORKERS, os.cpu_count() or 1)
        self._workers = ThreadPoolExecutor(workers, thread_name_prefix="audio")
        self._turns = FairTurns(workers)

    def require(self) -> Transcriber:
        """What transcribes. Raises a 400."""
        if self._transcriber is None:
            raise ApiError(400, "This model transcribes no audio: serve a speech model such as Whisper.", "model")
        return self._transcriber

    async def begin(self, data: bytes, options: TranscriptionOptions) -> HeldJob:
        """The transcription of a file, to be run and released. Raises a 400.

        Files wait while the server holds much decoded audio: how long one is shows only when it is decoded, so that each begins with room
        for the longest.
        """
        transcriber = self.require()
        with stage("media"):
            return await self._begin(data, options, transcriber)

    async def _begin(self, data: bytes, options: TranscriptionOptions, transcriber: Transcriber) -> HeldJob:
        held = self._max_seconds
        with stage("media.room"):
            await self._room.take(held)
        try:
            limits = AudioLimits(rate=transcriber.sample_rate, max_seconds=self._max_seconds)
            samples = await self._run("decode", lambda: decode_audio(data, limits), "file")
            seconds = len(samples) / limits.rate
            self._room.give_back(held - seconds)
            held = seconds
            job = await self._run("preprocess", lambda: transcriber.job(samples, options), None)
        except BaseException:
            self._room.give_back(held)
            raise
        return HeldJob(job, held, self._room)

    def close(self) -> None:
        """End the threads."""
        self._workers.shutdown(wait=False, cancel_futures=True)

    async def _run(self, name: str, work: Callable[[], T], param: str | None) -> T:
        """The result of `work`, in a thread. param: the field that is wrong if it raises."""
        with stage(f"media.{name}"):
            async with self._turns.turn():
                began = time.monotonic()
                try:
                    return await asyncio.get_running_loop().run_in_executor(self._workers, copy_context().run, work)
                except MediaError as error:
                    raise ApiError(400, f"{param or 'file'}: {error}", param or "file") from None
                except TranscriptionError as error:
                    raise ApiError(400, str(error), param) from None
                finally:
                    self._observe(name, time.monotonic() - began)
