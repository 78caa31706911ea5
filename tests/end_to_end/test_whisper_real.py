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
    elif "return_token_timestamps" in options:  # the frames that are no padding
        options |= {"attention_mask": extract(samples, sampling_rate=16000, return_attention_mask=True, return_tensors="pt").attention_mask}
    with torch.no_grad():
        return reference.generate(features.input_features, do_sample=False, num_beams=1, **options)


def test_times_of_words_are_those_of_transformers(folder: Path, reference: Any) -> None:
    """Of two sentences, and of a recording of two windows."""
    spoken = [speak(sentence, VOICES[number]) for number, sentence in enumerate(SENTENCES[1:3])]
    spoken.append(np.concatenate([part for one in spoken * 4 for part in (one, np.zeros(8000, np.float32))]))
    with LLM(str(folder), dtype="float32", max_num_seqs=8, enforce_eager=True) as llm:
        assert llm.tokenizer is not None
        decode = llm.tokenizer.decode
        found = llm.transcribe(spoken, TranscriptionOptions(falls_back=False), word_timestamps=True)
    reference.set_attn_implementation("eager")
    for one, samples in zip(found, spoken, strict=True):
        segments = hear(reference, samples, return_timestamps=True, return_segments=True, return_token_timestamps=True)["segments"][0]
        assert len(segments) == len(one.segments) > 0
        for ours, theirs in zip(one.segments, segments, strict=True):
            ends = theirs["token_timestamps"].tolist()
            tokens = theirs["tokens"].tolist()
            texts = [decode([token]) if token < 50256 else "" for token in tokens]
            assert ours.words is not None
            assert "".join(word.word for word in ours.words) == ours.text
            assert all(word.start <= word.end for word in ours.words)
            said, wanted = "", {}  # text up to there → the time at which it ends
            for text, end in zip(texts, ends, strict=True):
                said += text
                if text:
                    wanted[said] = end
            said = ""
            for word in ours.words:
                said += word.word
                assert word.end == pytest.approx(min(wanted[said], len(samples) / 16000), abs=0.02)
            assert all(word.probability > 0.1 for word in ours.words)


def test_a_recording_of_42_seconds_begins_at_its_beginning(folder: Path) -> None:
    """Each window's segments have times of the recording, and what is said first is in the first one."""
    spoken = [speak(sentence) for sentence in SENTENCES]
    long = np.concatenate([part for one in spoken for part in (one, np.zeros(8000, np.float32))])[: 42 * 16000]
    with LLM(str(folder), dtype="float32", max_num_seqs=8, enforce_eager=True) as llm:
        found = llm.transcribe(long)
    starts = [one.start for one in found.segments]
    assert starts[0] < 1.0
    assert starts == sorted(starts)
    assert found.segments[0].text.strip().startswith("The quick")
    assert found.segments[-1].end > 35.0


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
