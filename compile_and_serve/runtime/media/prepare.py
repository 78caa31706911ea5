"""From media as a request gives them to what the engine takes: downloaded, decoded and cut into patches by a few threads."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any

from compile_and_serve.runtime.media.audio import as_audio, decode_audio, samples_key
from compile_and_serve.runtime.media.embedded import embedded_image
from compile_and_serve.runtime.media.fetch import FetchLimits, fetch
from compile_and_serve.runtime.media.images import as_image, decode_image, pillow, pixels_key
from compile_and_serve.runtime.media.info import MediaInfo
from compile_and_serve.runtime.media.pixels import pixel_library
from compile_and_serve.runtime.media.prepared import MediaError, PreparedMedia, content_key
from compile_and_serve.runtime.media.registry import Encode, MediaProcessor, media_processor
from compile_and_serve.runtime.media.sources import MediaSource, data_of_url
from compile_and_serve.runtime.media.videos import as_frames, decode_video, frames_key

DEFAULT_LIMITS: Mapping[str, int] = {"image": 64, "video": 8, "audio": 16}
_MAX_WORKERS = 8
_DOWNLOADS = 16  # at once

ObserveStage = Callable[[str, float], None]  # (stage, seconds): "download", "decode", "preprocess"


class MediaPipeline:
    """Prepares the media of requests. observe: told how long each stage of each item took, from any thread, in the context of
    `start`.
    """

    def __init__(self, processor: MediaProcessor, info: MediaInfo, observe: ObserveStage = lambda stage, seconds: None) -> None:
        self.processor = processor
        self.kinds = frozenset(processor.placeholders.values())
        self._limits: dict[str, int] = {**DEFAULT_LIMITS, **info.limits}
        self._fetch_limits = FetchLimits(domains=tuple(info.domains))
        self._observe, self._reads_rows = observe, info.embeds
        if not self.kinds.isdisjoint(("image", "video")):
            pixel_library()  # which begins to build it
        self._workers = ThreadPoolExecutor(min(_MAX_WORKERS, os.cpu_count() or 1), thread_name_prefix="media")
        self._downloads = ThreadPoolExecutor(_DOWNLOADS, thread_name_prefix="media-download")

    @classmethod
    def of(cls, info: MediaInfo | None, encode: Encode | None, observe: ObserveStage = lambda stage, seconds: None) -> MediaPipeline | None:
        """None for a model that reads only text. encode: ids of a text."""
        processor = media_processor(info, encode)
        return None if processor is None or info is None else cls(processor, info, observe)

    def start(self, sources: Sequence[MediaSource], options: Mapping[str, Any] | None = None) -> list[Future[PreparedMedia]]:
        """Begin to prepare; the futures raise `MediaError`. options: the request's mm_processor_kwargs. Raises `MediaError`."""
        for kind in self.kinds:
            count, limit = sum(source.kind == kind for source in sources), self._limits[kind]
            if count > limit:
                raise MediaError(f"The request has {count} {kind}s, but this server takes {limit} at most (--limit-mm-per-prompt).")
        if any(source.kind != "audio" for source in sources):
            pillow()
        processor = self.processor.with_options(options) if options else self.processor
        return [self._start(source, processor) for source in sources]

    def close(self) -> None:
        """End the threads."""
        for pool in (self._workers, self._downloads):
            pool.shutdown(wait=False, cancel_futures=True)

    def _start(self, source: MediaSource, processor: MediaProcessor) -> Future[PreparedMedia]:
        given = source.given
        if isinstance(given, str) and given[:5].lower() != "data:":
            return self._downloads.submit(copy_context().run, self._download, source, processor)
        return self._workers.submit(copy_context().run, self._prepare, source, processor, given)

    def _download(self, source: MediaSource, processor: MediaProcessor) -> PreparedMedia:
        began = time.monotonic()
        data = fetch(source.given, source.where, self._fetch_limits)
        self._observe("download", time.monotonic() - began)
        return self._workers.submit(copy_context().run, self._prepare, source, processor, data).result()

    def _prepare(self, source: MediaSource, processor: MediaProcessor, given: Any) -> PreparedMedia:
        began = time.monotonic()
        try:
            if isinstance(given, str):
                given = data_of_url(given, source.where)
            settings = f"{source.kind} {processor.settings}"
            if source.kind == "image" and (embedded := embedded_image(given, reads_files=self._reads_rows)) is not None:
                key = content_key("embedded", embedded.array.data, str(embedded.grid), settings)
                return embedded.prepared(processor, key)
            make, own_key = _decoded(source, given, processor, settings)
            if source.uuid is not None:
                key = content_key("uuid", source.uuid, settings)
            else:
                key = content_key("file", given, settings) if isinstance(given, bytes) else own_key()
            decoded = time.monotonic()
            self._observe("decode", decoded - began)
            prepared = make(key)
        except MediaError as error:
            sentence = str(error)
            raise MediaError(sentence if sentence.startswith(source.where) else f"{source.where}: {sentence}") from None
        self._observe("preprocess", time.monotonic() - decoded)
        return prepared


def _decoded(
    source: MediaSource, given: Any, processor: MediaProcessor, settings: str
) -> tuple[Callable[[bytes], PreparedMedia], Callable[[], bytes]]:
    """What prepares a source's decoded content under a key, and the key of that content. Raises `MediaError`."""
    is_file = isinstance(given, bytes)
    if source.kind == "audio":
        samples = decode_audio(given, processor.audio_limits) if is_file else as_audio(given, processor.audio_limits)
        return partial(processor.audio, samples), lambda: samples_key(samples, settings)
    if source.kind == "image":
        image = decode_image(given) if is_file else as_image(given)
        return partial(processor.image, image), lambda: pixels_key(image, settings)
    frames = decode_video(given, processor.sample) if is_file else as_frames(given, processor.sample)
    return partial(processor.frames, frames), lambda: frames_key(frames, settings)
