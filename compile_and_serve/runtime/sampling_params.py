"""`SamplingParams`: how the tokens of one request are chosen. Names and defaults are those of vLLM."""

from __future__ import annotations

from typing import Literal

import msgspec

from compile_and_serve.runtime.speech_rules import SpeechRules
from compile_and_serve.runtime.structured.params import StructuredOutputsParams

MAX_LOGPROB_TOKEN_IDS = 128
MAX_FACTOR = 1_000_000  # of temperature and repetition_penalty: float32 must hold a logit divided or multiplied by it
MAX_STOP_STRINGS = 16
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 256  # of one bad word
MAX_PATTERN_SIZE = 256
MAX_REPEATED_TOKENS = 4096  # that every step may have to compare
MAX_BAD_TOKENS = 16384  # of all bad words of a request; every step compares them with its output


class RepetitionDetectionParams(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """When the output repeats itself: it ends with `min_count` copies of a pattern of min_pattern_size to max_pattern_size tokens.

    max_pattern_size: 0 is off. min_pattern_size: 0 is 1.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def verify(self) -> None:
        """Raise `SamplingParamsError` for a value out of range."""
        name, most = "repetition_detection", self.max_pattern_size
        _check(0 <= most <= MAX_PATTERN_SIZE, name, f"given max_pattern_size in [0, {MAX_PATTERN_SIZE}]", most)
        _check(0 <= self.min_pattern_size <= most, name, f"given min_pattern_size in [0, {most}]", self.min_pattern_size)
        if most:
            limit = MAX_REPEATED_TOKENS // most
            _check(2 <= self.min_count <= limit, name, f"given min_count in [2, {limit}]", self.min_count)


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Sampling options of one request. `verify()` raises `SamplingParamsError` for a value out of range.

    n: completions of the prompt. temperature: 0 is greedy. top_k: 0 or -1 is off. min_p: 0 is off.
    max_tokens: None is the model's limit. min_tokens: the request cannot stop before that many tokens.
    stop: strings that end the text. stop_token_ids: ids that end it. include_stop_str_in_output: keep the stop string.
    ignore_eos: the model's end-of-sequence ids do not end the request.
    logprobs, prompt_logprobs: None is off; k returns the chosen token and the k likeliest; -1 the whole vocabulary. The engine's
        max_logprobs limits them.
    logprob_token_ids: return the log-probabilities of these tokens with each generated token, instead of the likeliest ones; needs
        `logprobs`.
    logit_bias: token id → value added to its logit. allowed_token_ids: sample only these.
    bad_words: strings that must not occur: at most MAX_BAD_WORDS of at most MAX_BAD_WORD_TOKENS tokens each, and at most
        MAX_BAD_TOKENS tokens together. bad_words_token_ids: their token sequences, filled in by `InputProcessor`.
    truncate_prompt_tokens: keep only k tokens of the prompt; -1 keeps as many as fit. truncation_side: where tokens are cut off.
    seed: of the request's own random stream, which is the same alone and in a batch; None draws a seed from the engine.
    detokenize: False returns token ids without text.
    structured_outputs: the form that the output must have, e.g. a JSON schema.
    repetition_detection: ends an output that repeats itself, with the finish reason "repetition".
    speculate: False keeps the request out of speculative decoding, which changes no token.
    speech_rules: of a transcript. aligned_rows: R, rows of the encoder for `TokenLogprobs.attention` of `prompt_logprobs`; 0: none. Both
        are set by the engine's own clients.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] = []
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []
    bad_words_token_ids: list[list[int]] = []
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "left"
    detokenize: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    speculate: bool = True
    speech_rules: SpeechRules | None = None
    aligned_rows: int = 0

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always chosen."""
        return self.temperature < 1e-5

    @property
    def changes_logits(self) -> bool:
        """Whether logits are changed before a token is chosen, for some tokens of the output at least."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        objects = (self.structured_outputs, self.speech_rules)
        lists = (self.logit_bias, self.allowed_token_ids, self.bad_words_token_ids)
        changed = penalties != (1.0, 0.0, 0.0) or self.min_tokens > 0
        return changed or any(lists) or any(one is not None for one in objects)

    def verify(self) -> None:
        """Raise `SamplingParamsError`, a `ValueError`, that names the first parameter out of range, its limits and its value."""
        _check(self.n >= 1, "n", "at least 1", self.n)
        _check(0.0 <= self.temperature <= MAX_FACTOR, "temperature", f"in [0, {MAX_FACTOR}]", self.temperature)
        _check(0.0 < self.top_p <= 1.0, "top_p", "in (0, 1]", self.top_p)
        _check(self.top_k >= -1, "top_k", "-1 (off), 0 (off) or positive", self.top_k)
        _check(0.0 <= self.min_p <= 1.0, "min_p", "in [0, 1]", self.min_p)
        _check(-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "in [-2, 2]", self.presence_penalty)
        _check(-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "in [-2, 2]", self.frequency_penalty)
        _check(0.01 <= self.repetition_penalty <= MAX_FACTOR, "repetition_penalty", f"in [0.01, {MAX_FACTOR}]", self.repetition_penalty)
        _check(self.max_tokens is None or self.max_tokens >= 0, "max_tokens", "at least 0", self.max_tokens)
        _check(self.min_tokens >= 0, "min_tokens", "at least 0", self.min_tokens)
        if self.max_tokens is not None:
            _check(self.min_tokens <= self.max_tokens, "min_tokens", f"at most max_tokens={self.max_tokens}", self.min_tokens)
        _check(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} strings", len(self.stop))
        _check(all(self.stop), "stop", "without empty strings", self.stop)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _check(value is None or value >= -1, name, "-1 (the whole vocabulary) or at least 0", value)
        count = len(self.logprob_token_ids)
        _check(count <= MAX_LOGPROB_TOKEN_IDS, "logprob_token_ids", f"at most {MAX_LOGPROB_TOKEN_IDS} ids", f"{count} ids")
        _check(count == 0 or self.logprobs is not None, "logprob_token_ids", "given together with logprobs", "no logprobs")
        _check(self.allowed_token_ids is None or len(self.allowed_token_ids) > 0, "allowed_token_ids", "not empty", "[]")
        _check(len(self.bad_words) <= MAX_BAD_WORDS, "bad_words", f"at most {MAX_BAD_WORDS} words", len(self.bad_words))
        _check(all(self.bad_words), "bad_words", "without empty strings", self.bad_words)
        _check(
            self.truncate_prompt_tokens is None or self.truncate_prompt_tokens == -1 or self.truncate_prompt_tokens >= 1,
            "truncate_prompt_tokens",
            "-1 (as many as fit) or positive",
            self.truncate_prompt_tokens,
        )
        _check(self.truncation_side in ("left", "right"), "truncation_side", "left or right", self.truncation_side)
        if self.repetition_detection is not None:
            self.repetition_detection.verify()


class SamplingParamsError(ValueError):
    """A sampling parameter is out of range. param: its name, which OpenAI's error format requires."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


def _check(ok: bool, param: str, limits: str, value: object) -> None:
    if not ok:
        raise SamplingParamsError(param, f"{param} must be {limits}, got {value!r:.200}.")
