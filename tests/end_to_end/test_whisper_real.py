"""Whisper tiny.en with its trained weights hears what transformers hears, of speech that espeak-ng speaks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compile_and_serve import LLM
from compile_and_serve.runtime.audio.options import TranscriptionOptions
from tests.support.speech import SENTENCES, VOICES, speak, write_tiny_en

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny-en")
    write_tiny_en(folder)
    return folder


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    from transformers import WhisperForConditionalGeneration

    return WhisperForConditionalGeneration.from_pretrained(folder).eval()


def hear(reference: Any, samples: np.ndarray, **options: Any) -> Any:
    """What transformers' `generate` gives, greedily."""
    from transformers import WhisperFeatureExtractor

    extract = WhisperFeatureExtractor()
    is_long = len(samples) > 30 * 16000
    given: dict[str, Any] = {"truncation": False, "padding": "longest", "return_attention_mask": True} if is_long else {}
    features = extract(samples, sampling_rate=16000, return_tensors="pt", **given)
    if is_long:
        options |= {"attention_mask": features.attention_mask, "condition_on_prev_tokens": False}
    with torch.no_grad():
        return reference.generate(features.input_features, do_sample=False, num_beams=1, **options)


def test_it_hears_what_transformers_hears(folder: Path, reference: Any) -> None:
    """Sentences, all at once, and a recording of several windows with times of segments."""
    spoken = [speak(sentence, VOICES[number % 3]) for number, sentence in enumerate(SENTENCES[:6])]
    long = np.concatenate([part for one in spoken * 3 for part in (one, np.zeros(8000, np.float32))])
    with LLM(str(folder), dtype="float32", max_num_seqs=8, enforce_eager=True) as llm:
        assert llm.tokenizer is not None
        decode = llm.tokenizer.decode
        found = llm.transcribe(spoken, TranscriptionOptions(falls_back=False))
        whole = llm.transcribe(long, TranscriptionOptions(falls_back=False))
    for one, samples in zip(found, spoken, strict=True):
        assert one.text == decode(hear(reference, samples)[0].tolist()).strip()
    segments = hear(reference, long, return_timestamps=True, return_segments=True)["segments"][0]
    assert [one.text for one in whole.segments] == [decode([t for t in one["tokens"].tolist() if t < 50256]) for one in segments]
    for ours, theirs in zip(whole.segments, segments, strict=True):
        assert ours.start == pytest.approx(float(theirs["start"]), abs=0.1)
        assert ours.end == pytest.approx(min(float(theirs["end"]), len(long) / 16000), abs=0.1)
