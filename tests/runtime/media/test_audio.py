"""Audio from files and arrays: all formats give the same samples, and hostile files get a sentence while memory stays flat."""

from __future__ import annotations

import base64
import io
import itertools
import os
import resource
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compile_and_serve.runtime.media.audio import AudioLimits, as_audio, decode_audio
from compile_and_serve.runtime.media.fetch import FetchLimits, fetch
from compile_and_serve.runtime.media.prepared import MediaError
from compile_and_serve.runtime.media.sources import take_media

av: Any = pytest.importorskip("av")

LIMITS = AudioLimits(rate=16_000, max_seconds=30.0)
SECONDS = 2.0


def tone(rate: int, seconds: float = SECONDS) -> np.ndarray:
    """float32: 440 Hz, in the left of two channels twice as loud as in the mean."""
    return (0.25 * np.sin(2 * np.pi * 440 * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


def encoded(container: str, codec: str, rate: int, *, stereo: bool = False, seconds: float = SECONDS) -> bytes:
    """A file of the tone."""
    buffer = io.BytesIO()
    layout = "stereo" if stereo else "mono"
    with av.open(buffer, "w", format=container) as out:
        stream = out.add_stream(codec, rate=rate, layout=layout)
        samples = tone(rate, seconds)
        channels = np.stack([2 * samples, 0 * samples]) if stereo else samples[None]
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(channels), format="fltp", layout=layout)
        frame.sample_rate = rate
        resampler = av.AudioResampler(format=stream.format, layout=layout, rate=rate, frame_size=stream.frame_size or 0)
        for one in (*resampler.resample(frame), *resampler.resample(None), None):
            out.mux(stream.encode(one))
    return buffer.getvalue()


def wav(data: bytes, *, rate: int = 16_000, channels: int = 1, bits: int = 16, kind: int = 1, declared: int | None = None) -> bytes:
    size = len(data) if declared is None else declared
    width = channels * bits // 8
    head = struct.pack("<HHIIHH", kind, channels, rate, rate * width & 0xFFFFFFFF, width & 0xFFFF, bits)
    return b"RIFF" + struct.pack("<I", (36 + size) & 0xFFFFFFFF) + b"WAVEfmt \x10\0\0\0" + head + b"data" + struct.pack("<I", size) + data


FORMATS = [
    ("wav", "pcm_s16le"),
    ("wav", "pcm_f32le"),
    ("flac", "flac"),
    ("mp3", "libmp3lame"),
    ("ogg", "libopus"),
    ("mp4", "aac"),
    ("webm", "libopus"),
]


@pytest.mark.parametrize("container, codec", FORMATS, ids=[f"{one} {two}" for one, two in FORMATS])
def test_formats(container: str, codec: str) -> None:
    rate = 48_000 if codec == "libopus" else 22_050
    samples = decode_audio(encoded(container, codec, rate, stereo=codec == "flac"), LIMITS)
    assert samples.dtype == np.float32
    assert len(samples) == pytest.approx(SECONDS * LIMITS.rate, abs=0.1 * LIMITS.rate)
    middle = samples[8000:24000] * np.hanning(16000)
    spectrum = np.abs(np.fft.rfft(middle))
    assert spectrum.argmax() == 440
    assert samples[8000:24000].std() == pytest.approx(0.25 / np.sqrt(2), rel=0.1)


def test_samples_of_16_khz_are_as_they_are_written() -> None:
    values = np.random.default_rng(0).integers(-30000, 30000, 16_000, dtype=np.int16)
    expected = values.astype(np.float32) / 32768
    np.testing.assert_array_equal(decode_audio(wav(values.tobytes()), LIMITS), expected)
    np.testing.assert_array_equal(as_audio(values, LIMITS), expected)
    np.testing.assert_array_equal(as_audio((expected, 16_000), LIMITS), expected)
    np.testing.assert_allclose(as_audio(np.stack([expected, 0 * expected]), LIMITS), expected / 2)
    assert len(as_audio((expected, 8_000), LIMITS)) == pytest.approx(32_000, abs=200)


GOOD = {f"{container} {codec}": encoded(container, codec, 48_000, seconds=0.5) for container, codec in FORMATS}
SILENCE = bytes(64_000)
FILES: dict[str, bytes] = {
    "nothing": b"",
    "one byte": b"\0",
    "zeros": bytes(1 << 16),
    "a wav of 4 GiB that ends": wav(SILENCE[:3000], declared=2**32 - 1),
    "a wav without samples": wav(b""),
    "a wav of 5 samples": wav(bytes(10)),
    "0 Hz": wav(SILENCE, rate=0),
    "1 Hz": wav(SILENCE, rate=1),
    "4 GHz": wav(SILENCE, rate=2**32 - 1),
    "no channels": wav(SILENCE, channels=0),
    "1000 channels": wav(SILENCE, channels=1000),
    "65535 channels": wav(SILENCE, channels=65535),
    "0 bits": wav(SILENCE, bits=0),
    "7 bits": wav(SILENCE, bits=7),
    "codec 65535": wav(SILENCE, kind=65535),
    "NaN": wav(np.full(16_000, np.nan, np.float32).tobytes(), bits=32, kind=3),
    "infinity": wav(np.full(16_000, np.inf, np.float32).tobytes(), bits=32, kind=3),
    "1e30": wav(np.full(16_000, 1e30, np.float32).tobytes(), bits=32, kind=3),
    "an hour of 8 bits": wav(bytes(3_600 * 1000), rate=1000, bits=8),
    "an mp3 that is text": b"ID3\x04\0\0\0\0\0\0" + b"hello " * 1000,
    "a tag of 256 MiB": b"ID3\x04\0\0\x7f\x7f\x7f\x7f" + bytes(1000),
    "html": b"<html><audio src=http://127.0.0.1/></html>",
    "playlist": b"#EXTM3U\n#EXT-X-MEDIA-SEQUENCE:0\n#EXTINF:10.0,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
    "concat": b"ffconcat version 1.0\nfile /etc/passwd\n",
    "sdp": b"v=0\no=- 0 0 IN IP4 127.0.0.1\nm=audio 9 RTP/AVP 0\n",
    "a picture": b"\x89PNG\r\n\x1a\n" + bytes(100),
    "elf": b"\x7fELF" + bytes(60),
    "zip": b"PK\x03\x04" + bytes(30),
}


def test_hostile_files() -> None:
    """Each is decoded or refused by a sentence, and memory does not grow with what headers declare."""
    cut = {f"{name} cut at {part}": data[: len(data) * part // 8] for (name, data), part in itertools.product(GOOD.items(), (1, 2, 4))}
    mixed = {f"{a} with a head of {b}": GOOD[b][:16] + GOOD[a][16:] for a, b in itertools.permutations(GOOD, 2)}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sentences = {}
    for name, data in (FILES | cut | mixed).items():
        try:
            samples = decode_audio(data, LIMITS)
        except MediaError as error:
            sentences[name] = str(error)
            assert len(sentences[name]) < 400, name
            assert "passwd" not in sentences[name], name
        else:
            assert np.isfinite(samples).all(), name
            assert 1600 <= len(samples) <= LIMITS.max_samples, name
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10
    assert FILES.keys() - sentences.keys() == {"7 bits"}  # read as 8
    for name, part in {"an hour of 8 bits": "longer than 30 seconds", "NaN": "no numbers", "a wav of 5 samples": "too short"}.items():
        assert part in sentences[name], name


@pytest.mark.parametrize(
    "given, sentence",
    [
        (np.zeros(100, np.float32), "too short"),
        (np.zeros(31 * 16_000, np.float32), "longer than 30 seconds"),
        (np.zeros((2, 2, 2), np.float32), "must be a file, or an array"),
        (np.zeros(16_000, np.uint8), "must be a file, or an array"),
        ((np.zeros(16_000, np.float32), 0), "samples per second, this one has 0"),
        ((np.zeros(16_000, np.float32), 1.5), "must be samples per second"),
        (np.zeros((33, 16_000), np.float32), "1 to 32 channels"),
        (np.full(16_000, np.nan, np.float32), "no numbers"),
        ("text", "must be a file, or an array"),
    ],
)
def test_wrong_arrays(given: Any, sentence: str) -> None:
    with pytest.raises(MediaError, match=sentence):
        as_audio(given, LIMITS)


def test_paths_are_never_opened(tmp_path: Path) -> None:
    """A pipe would hang whoever opened it."""
    os.mkfifo(tmp_path / "pipe")
    for path in (str(tmp_path / "pipe"), f"file://{tmp_path / 'pipe'}"):
        with pytest.raises(MediaError, match="must be a data: URL"):
            fetch(path, "here", FetchLimits(domains=("*",)))


def test_parts_of_messages() -> None:
    data = base64.b64encode(b"abc").decode()
    for part, given in (
        ({"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}, b"abc"),
        ({"type": "input_audio", "input_audio": {"data": f"data:audio/wav;base64,{data}", "format": "wav"}}, b"abc"),
        ({"type": "audio_url", "audio_url": {"url": "http://a/b.wav"}}, "http://a/b.wav"),
        ({"type": "audio", "audio": "http://a/b.wav"}, "http://a/b.wav"),
        ({"type": "audio", "audio": ([0.5], 8000)}, ([0.5], 8000)),
    ):
        _, taken = take_media([{"role": "user", "content": [part]}], {"audio"}, "messages")
        assert [(source.kind, source.given) for source in taken.sources] == [("audio", given)]
    for wrong in ({"format": "wav"}, "abc", None, {"data": 1}):
        with pytest.raises(MediaError, match="input_audio must have data"):
            take_media([{"role": "user", "content": [{"type": "input_audio", "input_audio": wrong}]}], {"audio"}, "messages")
