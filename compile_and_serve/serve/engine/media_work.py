"""`MediaWork`: images and videos of requests, prepared off the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from compile_and_serve.runtime.actions import ActionSpace
from compile_and_serve.runtime.media.info import MediaInfo
from compile_and_serve.runtime.media.prepare import MediaPipeline
from compile_and_serve.runtime.media.prepared import MediaError, MediaKind, PreparedMedia
from compile_and_serve.runtime.media.registry import MediaProcessor
from compile_and_serve.runtime.media.sources import TakenMedia, take_media
from compile_and_serve.runtime.text.tokenizer import Tokenizer
from compile_and_serve.serve.errors import ApiError
from compile_and_serve.serve.ledger.record import current_record, stage


class MediaWork:
    """info: None: the model reads only text, and parts with media stay in messages, where they are refused or described.

    texts: what stands for media in a prompt's text. actions: what answers mean for a robot; None: the model gives none.
    """

    def __init__(self, info: MediaInfo | None, tokenizer: Tokenizer | None, observe: Callable[[str, float], None]) -> None:
        self._observe = observe
        self._pipeline = None
        if tokenizer is not None:
            encode = partial(tokenizer.encode, add_special_tokens=False)
            self._pipeline = MediaPipeline.of(info, encode, self._observe_from_thread)
        self._loop: asyncio.AbstractEventLoop | None = None
        self.texts: dict[MediaKind, str] = {}
        self.actions = ActionSpace.of(info)
        if self._pipeline is not None and tokenizer is not None:
            placeholders = self._pipeline.processor.placeholders
            self.texts = {kind: tokenizer.backend.id_to_token(token) or "" for token, kind in placeholders.items()}

    @property
    def processor(self) -> MediaProcessor | None:
        """None for a model that reads only text."""
        return None if self._pipeline is None else self._pipeline.processor

    def take(self, messages: Any, name: str) -> tuple[Any, TakenMedia | None]:
        """See `take_media`. Raises a 400."""
        if self._pipeline is None:
            return messages, None
        try:
            marked, taken = take_media(messages, self._pipeline.kinds, name)
        except MediaError as error:
            raise ApiError(400, str(error), name) from None
        return (marked, taken) if taken.sources else (messages, None)

    async def prepare(self, taken: TakenMedia | None, options: Mapping[str, Any] | None, name: str) -> Sequence[PreparedMedia]:
        """The media of a conversation, in order. options: the request's mm_processor_kwargs. name: of the field. Raises a 400."""
        if taken is None or self._pipeline is None:
            return ()
        self._loop = asyncio.get_running_loop()
        try:
            futures = self._pipeline.start(taken.sources, options)
            with stage("media"):
                try:
                    return await asyncio.gather(*(asyncio.wrap_future(future) for future in futures))
                finally:
                    for future in futures:
                        future.cancel()
        except MediaError as error:
            raise ApiError(400, str(error), name) from None

    def close(self) -> None:
        """End the threads."""
        if self._pipeline is not None:
            self._pipeline.close()

    def _observe_from_thread(self, stage: str, seconds: float) -> None:
        """Metrics are counted on the event loop."""
        if (record := current_record.get()) is not None:
            now = time.monotonic()
            record.add_stage(f"media.{stage}", now - seconds, now)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._observe, stage, seconds)
