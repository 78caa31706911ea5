"""Windows, seams, languages and temperatures of transcripts, with a scripted model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from compile_and_serve.runtime.audio.options import Segment, Transcription, TranscriptionError, TranscriptionOptions
from compile_and_serve.runtime.audio.speech_tokens import SpeechTokens
from compile_and_serve.runtime.audio.transcriber import Decode, Decoded, Transcriber
from compile_and_serve.runtime.messages import TokenLogprobs

END, START, ENGLISH, FRENCH, TRANSCRIBE, TRANSLATE, PREVIOUS, SILENCE, NO_TIMES = 300, 301, 302, 303, 304, 305, 306, 307, 308
ZERO = NO_TIMES + 1


class Bytes:
    """A tokenizer of bytes."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode()


def transcriber(words_refused: str | None = None) -> Transcriber:
    tokens = SpeechTokens(
        start=START,
        end=END,
        previous=PREVIOUS,
        no_speech=SILENCE,
        no_timestamps=NO_TIMES,
        languages={"en": ENGLISH, "fr": FRENCH},
        tasks={"transcribe": TRANSCRIBE, "translate": TRANSLATE},
    )
    return Transcriber(tokens, Bytes(), num_bands=80, num_rows=1500, max_len=448, words_refused=words_refused)


def answer(tokens: Sequence[int], logprob: float = -0.1) -> Decoded:
    return Decoded(list(tokens), [TokenLogprobs(ids=[token], logprobs=[logprob], rank=1) for token in tokens])


def silence(probability: float) -> Decoded:
    return Decoded([7], [TokenLogprobs(ids=[7, SILENCE], logprobs=[-1.0, float(np.log(probability))], rank=1)])


def run(
    seconds: float, options: TranscriptionOptions, decode: Callable[[Decode], Decoded]
) -> tuple[Transcription, list[Segment], list[Decode]]:
    job, asked, segments = transcriber().job(np.zeros(int(seconds * 16000), np.float32), options), [], []
    steps, reply = job.run(), None
    while True:
        try:
            one = steps.send(reply)
        except StopIteration as stop:
            return stop.value, segments, asked
        reply = None
        if isinstance(one, Segment):
            segments.append(one)
        elif isinstance(one, Decode):
            asked.append(one)
            reply = decode(one)
        else:
            reply = one()


def test_a_short_recording_is_one_segment() -> None:
    """The language is detected among those that the model knows; what it says of silence is asked for."""

    def decode(one: Decode) -> Decoded:
        if one.params.allowed_token_ids is not None:
            return answer([FRENCH])
        return silence(0.25) if one.params.logprob_token_ids else answer([*b" bonjour", END])

    result, segments, asked = run(3.0, TranscriptionOptions(wants_no_speech=True, prompt="dit"), decode)
    assert (result.text, result.language, result.duration) == ("bonjour", "fr", 3.0)
    assert [(one.start, one.end, one.text) for one in segments] == [(0.0, 3.0, " bonjour")]
    assert segments[0].no_speech_prob == pytest.approx(0.25)
    assert asked[1].prompt_token_ids == [PREVIOUS, *b" dit", START, FRENCH, TRANSCRIBE, NO_TIMES]
    assert len({one.media[0].key for one in asked}) == 1
    assert asked[0].media[0].length == 1500


def test_windows_meet_at_timestamps() -> None:
    """What follows a window's last pair of timestamps is heard again; one timestamp at the end ends the window."""
    windows = [
        [ZERO, *b" a", ZERO + 500, ZERO + 500, *b" b", ZERO + 1000, ZERO + 1000, *b" c", END],  # goes on at 20 s
        [ZERO, *b" c", ZERO + 250, ZERO + 300, *b" d", ZERO + 1450, END],  # to 50 s
        [ZERO, *b" e", ZERO + 100, END],
    ]
    result, segments, asked = run(54.0, TranscriptionOptions(language="English"), lambda one: answer(windows.pop(0)))
    assert [(one.seek, one.start, one.end, one.text) for one in segments] == [
        (0, 0.0, 10.0, " a"),
        (0, 10.0, 20.0, " b"),
        (2000, 20.0, 25.0, " c"),
        (2000, 26.0, 49.0, " d"),
        (5000, 50.0, 52.0, " e"),
    ]
    assert result.segments == segments
    assert all(one.params.speech_rules is not None and one.params.speech_rules.has_times for one in asked)
    assert asked[0].prompt_token_ids == [START, ENGLISH, TRANSCRIBE]


def test_times_of_words() -> None:
    """The tokens of each window are computed once more. Each attends to its row of a second; what it tells is where the next one begins."""
    windows = [[ZERO, *b" hi yo", ZERO + 400, ZERO + 400], [ZERO, *b" so", ZERO + 200]]

    def decode(one: Decode) -> Decoded:
        if not one.params.aligned_rows:
            return answer([*windows.pop(0), END])
        tokens = one.prompt_token_ids[3:]
        weights = np.full((len(tokens) - 1, 2, one.params.aligned_rows), 1e-4, np.float32)
        for at in range(len(tokens) - 1):
            weights[at, :, 50 * at : 50 * at + 50] = 0.02
        entries = [TokenLogprobs(ids=[0], logprobs=[float(np.log(0.5))], rank=1) for _ in one.prompt_token_ids[1:]]
        for entry, attention in zip(entries[3:], weights, strict=True):
            entry.attention = attention.tobytes()
        return Decoded([7], [], entries)

    _, segments, asked = run(34.0, TranscriptionOptions(language="en", words=True), decode)
    assert [one.params.aligned_rows for one in asked] == [0, 1500, 0, 1300]
    assert asked[1].prompt_token_ids == [START, ENGLISH, TRANSCRIBE, ZERO, *b" hi yo", ZERO + 400, ZERO + 400, END]
    words = [[(one.word, one.start, one.end) for one in segment.words or ()] for segment in segments]
    assert words == [[(" hi", 0.0, 3.0), (" yo", 3.0, 6.0)], [(" so", 8.0, 11.0)]]
    assert segments[0].words is not None
    assert segments[0].words[0].probability == pytest.approx(0.5)


def test_a_window_that_looks_wrong_is_decoded_again() -> None:
    def decode(one: Decode) -> Decoded:
        if one.params.temperature < 0.3:
            return answer([*b" la" * 60, END]) if one.params.temperature == 0.0 else answer(b" no", -2.0)
        return answer([*b" yes", END])

    result, segments, asked = run(2.0, TranscriptionOptions(language="en"), decode)
    assert result.text == "yes"
    assert [one.params.temperature for one in asked] == [0.0, 0.2, 0.4]
    assert segments[0].temperature == 0.4


def test_silence_has_no_segments() -> None:
    decode = lambda one: silence(0.9) if one.params.logprob_token_ids else answer(b" um", -3.0)  # noqa: E731
    result, segments, _ = run(2.0, TranscriptionOptions(language="en", falls_back=False), decode)
    assert (result.text, segments) == ("", [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (TranscriptionOptions(language="klingon"), "does not know the language 'klingon': it knows en, fr"),
        (TranscriptionOptions(task="sing"), "must be transcribe or translate"),
        (TranscriptionOptions(words=True), "Times of words are not computed: it is a test"),
        (TranscriptionOptions(temperature=3.0), r"temperature must be in \[0, 2\]"),
    ],
)
def test_what_the_model_cannot_take_is_refused(options: TranscriptionOptions, message: str) -> None:
    with pytest.raises(TranscriptionError, match=message):
        transcriber(words_refused="it is a test").job(np.zeros(16000, np.float32), options)
    with pytest.raises(TranscriptionError, match="one channel"):
        transcriber().job(np.zeros((2, 16000), np.float32), TranscriptionOptions())
