"""`Transcriber`: turns recordings into text with a model of the Whisper kind, window by window. It does no I/O.

`Transcriber.job` gives a `TranscriptionJob`, whose `run` yields what the engine is to decode, and takes the tokens back.

Shape legend: N samples, F frames of 10 ms, M mel bands.
"""

from __future__ import annotations

import json
import zlib
from asyncio import to_thread
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from compile_and_serve.custom_ops.step_data import MediaItem, StepArray
from compile_and_serve.runtime.audio.alignment import token_rows, word_spans
from compile_and_serve.runtime.audio.mel import FRAMES_PER_SECOND, HOP, SAMPLE_RATE, log_mel
from compile_and_serve.runtime.audio.options import TEMPERATURES, Segment, Transcription, TranscriptionError, TranscriptionOptions, Word
from compile_and_serve.runtime.audio.speech_tokens import ALIGNMENT_REFUSED, SECONDS_PER_TIMESTAMP, SpeechTokens
from compile_and_serve.runtime.media.info import MediaInfo
from compile_and_serve.runtime.messages import TokenLogprobs
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.runtime.speech_rules import SpeechRules

ARCHITECTURES = ("WhisperForConditionalGeneration",)
_FRAMES_PER_ROW = 2  # of the encoder


class SpeechTokenizer(Protocol):
    """What is needed of `Tokenizer`."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


class Completed(Protocol):
    """What is needed of `CompletionOutput`."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    prompt_logprobs: list[TokenLogprobs | None] | None


@dataclass(frozen=True, slots=True)
class Decode:
    """What the engine is asked for."""

    prompt_token_ids: list[int]
    params: SamplingParams
    media: list[MediaItem]


@dataclass(frozen=True, slots=True)
class Decoded:
    """The answer: generated tokens, and an entry for each. prompt: for each token of the prompt behind the first, if that was asked for."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    prompt: list[TokenLogprobs] = field(default_factory=list)

    @classmethod
    def of(cls, completion: Completed) -> Decoded:
        """Of a completion."""
        prompt = [one for one in completion.prompt_logprobs or () if one is not None]
        return cls(list(completion.token_ids), list(completion.logprobs or ()), prompt)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Result:
    """Of a window. begin: the prompt. tokens: without the one that ends a transcript."""

    begin: list[int]
    tokens: list[int]
    text: str
    temperature: float
    avg_logprob: float
    compression_ratio: float


class Transcriber:
    """Of one model. sample_rate: of recordings, in Hz. window_seconds: of what the model hears at once."""

    sample_rate = SAMPLE_RATE

    def __init__(
        self,
        tokens: SpeechTokens,
        tokenizer: SpeechTokenizer,
        *,
        num_bands: int,
        num_rows: int,
        max_len: int,
        words_refused: str | None = None,
    ) -> None:
        """num_bands: M. num_rows: of the encoder, for a window. max_len: tokens of prompt and transcript of a window. words_refused: why
        times of words are not computed, as a clause.
        """
        self.tokens, self.tokenizer, self.words_refused = tokens, tokenizer, words_refused
        self.num_bands, self.num_rows, self.max_len = num_bands, num_rows, max_len

    @classmethod
    def of(cls, info: MediaInfo | None, tokenizer: SpeechTokenizer | None) -> Transcriber | None:
        """None for a model that transcribes nothing. Raises `TranscriptionError` for files that lack what is needed."""
        config = {} if info is None else json.loads(info.config)
        if info is None or not set(config.get("architectures") or ()) & set(ARCHITECTURES):
            return None
        if tokenizer is None:
            raise TranscriptionError("Transcription needs the model's tokenizer: leave out --skip-tokenizer-init.")
        return cls(
            SpeechTokens.read(Path(info.folder)),
            tokenizer,
            num_bands=int(config["num_mel_bins"]),
            num_rows=int(config["max_source_positions"]),
            max_len=int(config["max_target_positions"]),
            words_refused=config.get(ALIGNMENT_REFUSED),
        )

    @property
    def window_frames(self) -> int:
        return self.num_rows * _FRAMES_PER_ROW

    @property
    def window_seconds(self) -> float:
        return self.window_frames / FRAMES_PER_SECOND

    def job(self, samples: np.ndarray, options: TranscriptionOptions) -> TranscriptionJob:
        """Compute the features of a recording. samples: float32 [N], mono, 16 kHz, from -1 to 1. Raises `TranscriptionError`."""
        return TranscriptionJob(self, samples, options)


class TranscriptionJob:
    """One recording. result: once `run` or `segments` has ended."""

    def __init__(self, transcriber: Transcriber, samples: np.ndarray, options: TranscriptionOptions) -> None:
        options.verify()
        if samples.ndim != 1 or len(samples) < HOP:
            raise TranscriptionError(f"A recording is one channel of at least {HOP} samples, got an array of shape {list(samples.shape)}.")
        tokens = transcriber.tokens
        if options.task != "transcribe" and options.task not in tokens.tasks:
            raise TranscriptionError("The model knows English alone, so it cannot translate: transcribe instead.")
        if options.words and transcriber.words_refused is not None:
            raise TranscriptionError(
                f"Times of words are not computed: {transcriber.words_refused}. "
                "Ask for those of segments (timestamp_granularities=segment)."
            )
        self.transcriber, self.options = transcriber, options
        self.result: Transcription | None = None
        self._language = None if options.language is None else tokens.language_of(options.language)
        self._prompt = [] if not options.prompt else transcriber.tokenizer.encode(" " + options.prompt.strip(), add_special_tokens=False)
        self._duration = len(samples) / SAMPLE_RATE
        self._num_frames = len(samples) // HOP
        self._is_short = self._num_frames <= transcriber.window_frames
        if self._is_short:  # silence follows; what follows a longer recording is zeros
            size = transcriber.window_frames * HOP
            samples = np.pad(samples, (0, max(0, size - len(samples))))[:size]
        self._mel_FM = log_mel(samples, transcriber.num_bands)

    async def segments(self, decode: Callable[[Decode], Awaitable[Decoded]]) -> AsyncIterator[Segment]:
        """The segments, each as soon as it is known. decode: asks the engine."""
        run = self.run()
        answer: Any = None
        while True:
            try:
                one = run.send(answer)
            except StopIteration:
                return
            answer = None
            if isinstance(one, Segment):
                yield one
            elif isinstance(one, Decode):
                answer = await decode(one)
            else:
                answer = await to_thread(one)

    def run(self) -> Generator[Decode | Segment | Callable[[], Any], Any, Transcription]:
        """Yields what the engine is to decode and what is to be called, to be answered by `send`, and segments. Returns the whole."""
        size = self.transcriber.window_frames
        has_times = self.options.timestamps or self.options.words or not self._is_short
        result = Transcription(task=self.options.task, language=self._language or "en", duration=self._duration)
        prompt, seek = self._prompt, 0
        while seek < self._num_frames:
            num_frames = min(size, self._num_frames - seek)
            item = self._item(seek)
            if self._language is None:
                self._language = result.language = yield from self._detect(item)
            found = yield from self._window(item, prompt, has_times)
            silence = 0.0
            if self.options.wants_no_speech or found.avg_logprob < self.options.logprob_limit:
                silence = yield from self._no_speech(item)
            if silence > self.options.no_speech_limit and found.avg_logprob < self.options.logprob_limit:
                seek += num_frames
                continue
            token_words = (yield from self._words(found, item, seek, num_frames)) if self.options.words else None
            pieces, passed = self._cut(found.tokens, seek, num_frames) if has_times else ([(found.tokens, 0.0, self._duration)], num_frames)
            behind = 0
            for tokens, start, end in pieces:
                first, behind = behind, behind + len(tokens)
                text = self._text(tokens)
                if not text.strip() or (has_times and start == end):
                    continue
                segment = Segment(
                    id=len(result.segments),
                    seek=seek,
                    start=round(start, 2),
                    end=round(min(end, self._duration), 2),
                    text=text,
                    tokens=tokens,
                    temperature=found.temperature,
                    avg_logprob=found.avg_logprob,
                    compression_ratio=found.compression_ratio,
                    no_speech_prob=silence,
                    words=None if token_words is None else [word for at, word in token_words if first <= at < behind],
                )
                result.segments.append(segment)
                yield segment
            if self.options.previous_text and found.temperature <= 0.5:
                prompt = [*prompt, *(token for token in found.tokens if token < self.transcriber.tokens.end)]
            else:
                prompt = []
            seek += passed or num_frames
        self.result = result
        return result

    def _item(self, seek: int) -> MediaItem:
        """The window that begins at frame `seek`."""
        size = self.transcriber.window_frames
        mel_FM = self._mel_FM[seek : seek + size]
        if len(mel_FM) < size:
            mel_FM = np.concatenate([mel_FM, np.zeros((size - len(mel_FM), mel_FM.shape[1]), dtype=np.float32)])
        rows = StepArray.of(mel_FM.reshape(self.transcriber.num_rows, _FRAMES_PER_ROW, -1))
        key = sha256(rows.data).digest()
        return MediaItem(key=key, position=0, length=self.transcriber.num_rows, is_beside=True, arrays={"mel": rows})

    def _start(self, has_times: bool) -> list[int]:
        tokens = self.transcriber.tokens
        begin = [tokens.start]
        if tokens.languages:
            assert self._language is not None
            begin += [tokens.languages[self._language], tokens.tasks[self.options.task]]
        return begin if has_times else [*begin, tokens.no_timestamps]

    def _detect(self, item: MediaItem) -> Generator[Decode, Decoded | None, str]:
        """The language of the recording's first window."""
        languages = self.transcriber.tokens.languages
        if not languages:
            return "en"
        params = SamplingParams(
            temperature=0.0, max_tokens=1, allowed_token_ids=list(languages.values()), ignore_eos=True, detokenize=False
        )
        answer = yield Decode([self.transcriber.tokens.start], params, [item])
        assert answer is not None
        return next(code for code, token in languages.items() if token == answer.token_ids[0])

    def _no_speech(self, item: MediaItem) -> Generator[Decode, Decoded | None, float]:
        """The probability that the window has no speech."""
        tokens = self.transcriber.tokens
        params = SamplingParams(
            temperature=0.0, max_tokens=1, logprobs=0, logprob_token_ids=[tokens.no_speech], ignore_eos=True, detokenize=False
        )
        answer = yield Decode([tokens.start], params, [item])
        assert answer is not None
        entry = answer.logprobs[0]
        return float(np.exp(entry.logprobs[entry.ids.index(tokens.no_speech, 1)]))

    def _window(self, item: MediaItem, prompt: list[int], has_times: bool) -> Generator[Decode, Decoded | None, _Result]:
        options, tokens = self.options, self.transcriber.tokens
        begin = self._start(has_times)
        if prompt and tokens.previous is not None:
            begin = [tokens.previous, *prompt[-(self.transcriber.max_len // 2 - 1) :], *begin]
        temperatures: Sequence[float] = (options.temperature,)
        if options.temperature == 0.0 and options.falls_back:
            temperatures = TEMPERATURES
        rules = SpeechRules(
            suppressed=tokens.suppressed,
            suppressed_first=tokens.suppressed_first,
            end=tokens.end,
            no_timestamps=tokens.no_timestamps,
            has_times=has_times,
            max_initial=tokens.max_initial,
        )
        for temperature in temperatures:
            params = SamplingParams(
                temperature=temperature,
                max_tokens=self.transcriber.max_len - len(begin),
                logprobs=0,
                stop_token_ids=[tokens.end],
                ignore_eos=True,
                seed=options.seed,
                detokenize=False,
                speech_rules=rules,
            )
            answer = yield Decode(begin, params, [item])
            assert answer is not None
            found = self._judge(begin, answer, temperature)
            if found.compression_ratio <= options.compression_limit and found.avg_logprob >= options.logprob_limit:
                break
        return found

    def _words(
        self, found: _Result, item: MediaItem, seek: int, num_frames: int
    ) -> Generator[Decode | Callable[[], Any], Any, list[tuple[int, Word]]]:
        """The words of a window, each with the place of its first token. Its tokens are computed once more, as a prompt."""
        tokens, size = self.transcriber.tokens, len(found.begin)
        prompt = [*found.begin, *found.tokens, tokens.end][: self.transcriber.max_len - 1]
        rows = max(1, num_frames // _FRAMES_PER_ROW)
        params = SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=0, aligned_rows=rows, ignore_eos=True, detokenize=False, speculate=False
        )
        answer: Decoded | None = yield Decode(prompt, params, [item])
        assert answer is not None
        entries = answer.prompt
        if len(entries) <= size:
            return []
        weights_TAR = np.stack([np.frombuffer(one.attention, np.float32).reshape(-1, rows) for one in entries[size:]])
        begins: np.ndarray = yield lambda: token_rows(weights_TAR)
        # A token's row of weights belongs to what is said behind it: it ends where that begins.
        ends = seek / FRAMES_PER_SECOND + np.append(begins, begins[-1]) * SECONDS_PER_TIMESTAMP
        chances = np.exp([one.logprobs[0] for one in entries[size - 1 :]])
        words, at = [], 0
        for is_text, run in groupby(found.tokens[: len(chances)], lambda token: token < tokens.end):
            piece = list(run)
            for text, first, behind in word_spans(piece, self._text, self._language or "en") if is_text else ():
                start = ends[at + first - 1] if at + first else seek / FRAMES_PER_SECOND
                word = Word(
                    word=text,
                    start=round(min(float(start), self._duration), 2),
                    end=round(min(float(ends[min(at + behind, len(ends)) - 1]), self._duration), 2),
                    probability=float(chances[at + first : at + behind].mean()),
                )
                words.append((at + first, word))
            at += len(piece)
        return words

    def _judge(self, begin: list[int], answer: Decoded, temperature: float) -> _Result:
        end = self.transcriber.tokens.end
        tokens = [token for token in answer.token_ids if token != end]
        text = self._text(tokens)
        raw = text.encode()
        return _Result(
            begin=begin,
            tokens=tokens,
            text=text,
            temperature=temperature,
            avg_logprob=sum(entry.logprobs[0] for entry in answer.logprobs) / (len(tokens) + 1),
            compression_ratio=len(raw) / len(zlib.compress(raw)) if raw else 0.0,
        )

    def _cut(self, tokens: list[int], seek: int, num_frames: int) -> tuple[list[tuple[list[int], float, float]], int]:
        """The segments of a window, as (tokens, start, end), and how many frames are done with it.

        A pair of timestamps ends a segment and begins the next one. What follows the last pair is heard again in the next window, unless
        one timestamp alone ends it.
        """
        zero = self.transcriber.tokens.timestamps
        begin = seek / FRAMES_PER_SECOND
        is_time = [token >= zero for token in tokens]
        ends_alone = is_time[-2:] == [False, True]
        seams = [i for i in range(1, len(tokens)) if is_time[i] and is_time[i - 1]]
        if not seams:
            times = [token for token in tokens if token >= zero]
            duration = num_frames / FRAMES_PER_SECOND
            if times and times[-1] != zero:
                duration = (times[-1] - zero) * SECONDS_PER_TIMESTAMP
            return [(tokens, begin, begin + duration)], num_frames
        if ends_alone:
            seams.append(len(tokens))
        pieces, last = [], 0
        for seam in seams:
            piece = tokens[last:seam]
            start, end = ((token - zero) * SECONDS_PER_TIMESTAMP for token in (piece[0], piece[-1]))
            pieces.append((piece, begin + start, begin + end))
            last = seam
        return pieces, num_frames if ends_alone else (tokens[last - 1] - zero) * _FRAMES_PER_ROW

    def _text(self, tokens: Sequence[int]) -> str:
        return self.transcriber.tokenizer.decode([token for token in tokens if token < self.transcriber.tokens.end])
