"""Engine outputs → what users see: fan-out of `n`, text, stop strings, finish reasons. Shared by the server and `LLM`.

One user request becomes `n` engine requests with ids and seeds of their own. Each step's outputs come in through
`OutputProcessor.process`, leave as `CompletionDelta`s through the request's sink, and a stop string that was found comes back
as an id to abort in the engine.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from compile_and_serve.runtime.messages import EngineRequest, ErrorKind, FinishReason, TokenLogprobs
from compile_and_serve.runtime.messages import RequestOutput as EngineOutput
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.runtime.text.detokenizer import TextStream, make_detokenizer
from compile_and_serve.runtime.text.input_processor import InputProcessor
from compile_and_serve.runtime.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class CompletionDelta:
    """What one step brought for one completion. `index`: which of the request's completions."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    error_kind: ErrorKind = "internal"  # with `error`: whose fault it is
    queue_seconds: float | None = None
    prefill_seconds: float | None = None

    def extend(self, later: CompletionDelta) -> None:
        """Take in the next delta of the same completion, as if one step had brought both."""
        self.text += later.text
        self.token_ids += later.token_ids
        if later.logprobs is not None:
            self.logprobs = [*(self.logprobs or []), *later.logprobs]
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = later.prompt_logprobs
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason
        self.error, self.error_kind = later.error, later.error_kind
        self.num_cached_tokens = max(self.num_cached_tokens, later.num_cached_tokens)


Sink = Callable[[CompletionDelta], None]


@dataclass(slots=True)
class CompletionOutput:
    """One completion, complete or so far. logprobs: one entry a token of token_ids."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    error: str | None = None

    def add(self, delta: CompletionDelta) -> None:
        """Append one delta of the same completion."""
        self.text += delta.text
        self.token_ids += delta.token_ids
        if delta.logprobs is not None:
            if self.logprobs is None:
                self.logprobs = []
            self.logprobs += delta.logprobs
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
        self.error = delta.error


class _Sequence:
    """One engine request in flight."""

    __slots__ = ("include_stop", "index", "sink", "stream")

    def __init__(self, index: int, sink: Sink, stream: TextStream | None, params: SamplingParams) -> None:
        self.index = index
        self.sink = sink
        self.stream = stream
        self.include_stop = params.include_stop_str_in_output


class OutputProcessor:
    """State of every sequence in flight. Not thread-safe: one owner feeds it."""

    def __init__(self, inputs: InputProcessor) -> None:
        self._inputs = inputs
        self._sequences: dict[str, _Sequence] = {}
        self._serial = itertools.count()

    def __len__(self) -> int:
        """Sequences in flight."""
        return len(self._sequences)

    def add(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        sink: Sink,
        *,
        first_index: int = 0,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> list[EngineRequest]:
        """Register a prepared request (see `InputProcessor.prepare`); the result goes to the engine.

        Its completions get the indices first_index … first_index + n - 1. With a seed, completion i draws from seed + i.
        Engine ids are unique even where `request_id` is not.
        """
        requests = []
        for i in range(params.n):
            seed = None if params.seed is None else params.seed + i
            child = msgspec.structs.replace(params, n=1, seed=seed)
            engine_id = f"{request_id}-{next(self._serial):x}"
            stream = self._text_stream(prompt_token_ids, child)
            self._sequences[engine_id] = _Sequence(first_index + i, sink, stream, child)
            requests.append(
                self._inputs.engine_request(
                    engine_id, prompt_token_ids, child, priority=priority, cache_salt=cache_salt
                )
            )
        return requests

    def process(self, outputs: Iterable[EngineOutput]) -> list[str]:
        """Hand every output of a step to its sink; returns the engine ids that a stop string ended, to be aborted."""
        to_abort = []
        for output in outputs:
            sequence = self._sequences.get(output.request_id)
            if sequence is None:
                continue  # aborted while the step ran
            try:
                delta = _delta(sequence, output)
            except Exception:  # one request's text must not take the others down
                logger.exception("Making text of request %s failed.", output.request_id)
                delta = CompletionDelta(
                    index=sequence.index,
                    text="",
                    token_ids=[],
                    finish_reason="error",
                    error="The generated tokens could not be turned into text; the log has the details.",
                )
            if delta.finish_reason is not None:
                del self._sequences[output.request_id]
                if output.finish_reason is None:
                    to_abort.append(output.request_id)
            sequence.sink(delta)
        return to_abort

    def forget(self, engine_ids: Iterable[str]) -> list[str]:
        """Drop sequences that nobody waits for; returns those which were still in flight, to be aborted in the engine."""
        return [engine_id for engine_id in engine_ids if self._sequences.pop(engine_id, None) is not None]

    def end_all(self, finish_reason: FinishReason, error: str | None = None) -> list[str]:
        """End every sequence (engine death, shutdown); returns their engine ids."""
        ended, self._sequences = self._sequences, {}
        for sequence in ended.values():
            sequence.sink(
                CompletionDelta(index=sequence.index, text="", token_ids=[], finish_reason=finish_reason, error=error)
            )
        return list(ended)

    def _text_stream(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> TextStream | None:
        tokenizer: Tokenizer | None = self._inputs.tokenizer
        if tokenizer is None or not params.detokenize:
            return None
        detokenizer = make_detokenizer(tokenizer, prompt_token_ids, skip_special_tokens=params.skip_special_tokens)
        return TextStream(
            detokenizer,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )


def _delta(sequence: _Sequence, output: EngineOutput) -> CompletionDelta:
    token_ids, logprobs = output.new_token_ids, output.new_logprobs
    finish_reason, stop_reason = output.finish_reason, output.stop_reason
    text = ""
    if sequence.stream is not None:
        # The stop token ends the text and is no part of it, unless asked for.
        hidden = 1 if finish_reason == "stop" and token_ids and not sequence.include_stop else 0
        text, used = _push(sequence.stream, token_ids, len(token_ids) - hidden, ended=finish_reason is not None)
        if sequence.stream.stopped_by is not None:
            token_ids = token_ids[:used]
            logprobs = None if logprobs is None else logprobs[:used]
            finish_reason, stop_reason = "stop", sequence.stream.stopped_by
    return CompletionDelta(
        index=sequence.index,
        text=text,
        token_ids=token_ids,
        logprobs=logprobs,
        prompt_logprobs=output.prompt_logprobs,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        num_cached_tokens=output.num_cached_tokens,
        error=output.error,
        error_kind=output.error_kind,
        queue_seconds=output.queue_seconds,
        prefill_seconds=output.prefill_seconds,
    )


def _push(stream: TextStream, token_ids: Sequence[int], visible: int, *, ended: bool) -> tuple[str, int]:
    """Text of the first `visible` tokens, up to a stop string; and how many tokens that took."""
    parts = []
    for used, token_id in enumerate(token_ids[:visible], start=1):
        parts.append(stream.push(token_id))
        if stream.stopped_by is not None:
            return "".join(parts), used
    if ended:
        parts.append(stream.finish())
    return "".join(parts), len(token_ids)
