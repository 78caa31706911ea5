"""Audio from files and arrays, as mono float32 samples. PyAV is an extra: without it, a sentence names it.

Files are decoded piece by piece, and no further than the longest audio that is taken: what a header declares costs no memory.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from compile_and_serve.runtime.media.prepared import MediaError, content_key

MISSING = 'Audio needs the extra "audio": pip install "compile-and-serve[audio]".'
MIN_SECONDS = 0.1
MIN_RATE, MAX_RATE = 1_000, 768_000  # Hz
MAX_CHANNELS = 32
_MAX_SAMPLE = 100.0  # of floating samples, which should lie in -1 … 1
# FFmpeg's names of containers. Playlists and others that name further files or addresses are not among them.
_FORMATS = (
    "wav,w64,rf64,aiff,au,caf,flac,mp3,ogg,aac,mov,matroska,webm,asf,avi,amr,amrnb,amrwb,ac3,eac3,mpegts,mpeg,opus,tta,ape,wv,flv,aa,dts"
)
_EXPECTED = "expected a file such as WAV, MP3, FLAC, OGG, M4A or WebM"


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioLimits:
    """rate: samples per second that the model reads. max_seconds: the longest audio that is taken."""

    rate: int
    max_seconds: float

    @property
    def max_samples(self) -> int:
        return int(self.max_seconds * self.rate)


def pyav() -> Any:
    """The package av. Raises `MediaError` without it."""
    try:
        import av
    except ImportError:
        raise MediaError(MISSING) from None
    return av


def decode_audio(data: bytes, limits: AudioLimits) -> np.ndarray:
    """The first audio stream of a file: float32 [samples], the mean of its channels, at `limits.rate`. Damaged pieces are left out.

    Raises `MediaError`.
    """
    av = pyav()
    try:
        with av.open(io.BytesIO(data), metadata_errors="ignore", options={"format_whitelist": _FORMATS}) as container:
            if not container.streams.audio:
                raise MediaError(f"The file has no audio: {_EXPECTED}.")
            stream = container.streams.audio[0]
            if stream.sample_rate or stream.channels:  # else its frames say it
                _check_stream(stream.sample_rate, stream.channels)
            resampler = av.AudioResampler(format="fltp", rate=limits.rate)
            samples = _gathered(_resampled(container, stream, resampler, av), limits)
    except MediaError:
        raise
    except Exception as error:  # a decoder may raise anything on a damaged file
        raise MediaError(f"The audio cannot be decoded ({type(error).__name__}): {_EXPECTED}.") from None
    return _checked(samples, limits)


def as_audio(given: Any, limits: AudioLimits) -> np.ndarray:
    """Samples of an array, floating or int16, [samples] or [channels, samples]; with its rate: (array, rate). As `decode_audio`.

    Raises `MediaError`.
    """
    rate: Any = limits.rate
    if isinstance(given, (tuple, list)) and len(given) == 2 and not isinstance(given[1], (list, np.ndarray)):
        given, rate = given
    if isinstance(given, Mapping) and "array" in given:
        given, rate = given["array"], given.get("sampling_rate", rate)
    if hasattr(given, "numpy"):  # a tensor
        given = given.numpy()
    if isinstance(given, list) and given and isinstance(given[0], float):
        given = np.asarray(given, dtype=np.float32)
    is_array = isinstance(given, np.ndarray) and given.ndim in (1, 2) and given.size
    if not is_array or (given.dtype.kind != "f" and given.dtype != np.int16):
        raise MediaError("Audio must be a file, or an array of floats or int16 [samples] or [channels, samples], or (array, rate).")
    if isinstance(rate, bool) or not isinstance(rate, (int, np.integer)):
        raise MediaError(f"The rate of audio must be samples per second, got {rate!r:.50}.")
    array: np.ndarray = given
    _check_stream(int(rate), 1 if array.ndim == 1 else len(array))
    if array.shape[-1] > limits.max_seconds * int(rate):
        raise MediaError(_too_long(limits))
    samples = array.astype(np.float32) / (32768.0 if array.dtype == np.int16 else 1.0)
    samples = samples if samples.ndim == 1 else samples.mean(axis=0)
    if int(rate) != limits.rate:
        av = pyav()
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples[None], dtype=np.float32), format="flt", layout="mono")
        frame.sample_rate = int(rate)
        resampler = av.AudioResampler(format="flt", layout="mono", rate=limits.rate)
        pieces = [one.to_ndarray()[0] for given_frame in (frame, None) for one in resampler.resample(given_frame)]
        samples = np.concatenate([np.zeros(0, np.float32), *pieces])
    return _checked(samples, limits)


def samples_key(samples: np.ndarray, settings: str) -> bytes:
    """The key of samples."""
    return content_key("samples", samples.tobytes(), settings)


def _resampled(container: Any, stream: Any, resampler: Any, av: Any) -> Iterator[np.ndarray]:
    """Raises the last decoder's error if nothing could be decoded."""
    failure: Exception | None = None
    found = False
    for packet in container.demux(stream):
        try:
            frames = packet.decode()
        except av.error.InvalidDataError as error:
            failure = error
            continue
        for frame in frames:
            if not found:
                _check_stream(frame.sample_rate, frame.layout.nb_channels)
                found = True
            for one in resampler.resample(frame):
                yield one.to_ndarray().mean(axis=0)
    if not found:
        raise failure or MediaError("The file has no audio that can be decoded.")
    for one in resampler.resample(None):
        yield one.to_ndarray().mean(axis=0)


def _gathered(pieces: Iterator[np.ndarray], limits: AudioLimits) -> np.ndarray:
    found: list[np.ndarray] = []
    total = 0
    for piece in pieces:
        found.append(piece)
        total += len(piece)
        if total > limits.max_samples:
            raise MediaError(_too_long(limits))
    return np.concatenate(found) if found else np.zeros(0, np.float32)


def _check_stream(rate: int | None, channels: int | None) -> None:
    if not rate or not MIN_RATE <= rate <= MAX_RATE:
        raise MediaError(f"Audio must have {MIN_RATE} to {MAX_RATE} samples per second, this one has {rate or 0}.")
    if not channels or not 1 <= channels <= MAX_CHANNELS:
        raise MediaError(f"Audio must have 1 to {MAX_CHANNELS} channels, this one has {channels or 0}.")


def _checked(samples: np.ndarray, limits: AudioLimits) -> np.ndarray:
    if len(samples) < MIN_SECONDS * limits.rate:
        raise MediaError(f"The audio is too short: {len(samples) / limits.rate:.3f} seconds, but {MIN_SECONDS} is the least.")
    if len(samples) > limits.max_samples:
        raise MediaError(_too_long(limits))
    largest = float(np.abs(samples).max())
    if not largest <= _MAX_SAMPLE:  # NaN, too
        raise MediaError(f"The audio has samples that are no numbers or up to {largest:g}: expected floats in -1 … 1.")
    return samples


def _too_long(limits: AudioLimits) -> str:
    return f"The audio is longer than {limits.max_seconds:g} seconds, which is the most that is taken here."
