"""Turns engine outputs into completions: `n` per request, text, stop strings, finish reasons. For the server and `LLM`.

A user request becomes `n` engine requests, each with its own id and seed. `OutputProcessor.process` takes each step's
outputs, passes `CompletionDelta`s to the request's sink, and returns the ids that a stop string has ended, which the caller
aborts in the engine.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from compile_and_serve.runtime.ledger.records import RequestLedger
from compile_and_serve.runtime.lora.request import LoRARequest
from compile_and_serve.runtime.messages import EngineRequest, ErrorKind, FinishReason, Sibling, StepData, Tenant, TokenLogprobs
from compile_and_serve.runtime.messages import RequestOutput as EngineOutput
from compile_and_serve.runtime.pooling_params import Pooled, PoolingParams
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.runtime.text.detokenizer import TextStream, make_detokenizer
from compile_and_serve.runtime.text.input_processor import InputProcessor
from compile_and_serve.runtime.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class CompletionDelta:
    """What one step adds to one completion. index: of the completion within its request."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    num_loaded_tokens: dict[str, int] = field(default_factory=dict)
    num_draft_tokens: int = 0
    num_accepted_drafts: int = 0
    error: str | None = None
    error_kind: ErrorKind = "internal"  # meaningful only with `error`
    queue_seconds: float | None = None
    prefill_seconds: float | None = None
    pooled: Pooled | None = None
    ledger: RequestLedger | None = None
    kv_transfer: dict[str, Any] | None = None

    def extend(self, later: CompletionDelta) -> None:
        """Append the next delta of the same completion, as if one step had produced both."""
        self.text += later.text
        self.token_ids += later.token_ids
        if later.logprobs is not None:
            self.logprobs = [*(self.logprobs or []), *later.logprobs]
        if later.prompt_logprobs is not None:
            self.prompt_logprobs = later.prompt_logprobs
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason
        self.error, self.error_kind = later.error, later.error_kind
        self.pooled, self.kv_transfer = later.pooled, later.kv_transfer
        self.num_cached_tokens = max(self.num_cached_tokens, later.num_cached_tokens)
        self.num_loaded_tokens = self.num_loaded_tokens or later.num_loaded_tokens
        self.num_draft_tokens += later.num_draft_tokens
        self.num_accepted_drafts += later.num_accepted_drafts


Sink = Callable[[CompletionDelta], None]


@dataclass(slots=True)
class CompletionOutput:
    """One completion, finished or not. logprobs: one entry for each token."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    num_loaded_tokens: dict[str, int] = field(default_factory=dict)
    num_draft_tokens: int = 0
    num_accepted_drafts: int = 0
    error: str | None = None
    error_kind: ErrorKind = "internal"  # meaningful only with `error`
    pooled: Pooled | None = None
    kv_transfer: dict[str, Any] | None = None

    def add(self, delta: CompletionDelta) -> None:
        """Append the completion's next delta."""
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
        self.num_loaded_tokens = self.num_loaded_tokens or delta.num_loaded_tokens
        self.num_draft_tokens += delta.num_draft_tokens
        self.num_accepted_drafts += delta.num_accepted_drafts
        self.error, self.error_kind = delta.error, delta.error_kind
        self.pooled, self.kv_transfer = delta.pooled, delta.kv_transfer


class _Sequence:
    """An engine request in flight. prompt_logprobs: those that have come, until the first token."""

    __slots__ = ("include_stop", "index", "prompt_logprobs", "sink", "stream")

    def __init__(self, index: int, sink: Sink, stream: TextStream | None, params: SamplingParams) -> None:
        self.index = index
        self.sink = sink
        self.stream = stream
        self.include_stop = params.include_stop_str_in_output
        self.prompt_logprobs: list[TokenLogprobs | None] = []


class OutputProcessor:
    """The state of all sequences in flight. Not thread-safe. serials: numbers that no other client of the engine uses."""

    def __init__(self, inputs: InputProcessor, serials: Iterator[int] | None = None) -> None:
        self._inputs = inputs
        self._sequences: dict[str, _Sequence] = {}
        self._serials = itertools.count() if serials is None else serials

    def __len__(self) -> int:
        """Number of sequences in flight."""
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
        step_data: StepData | None = None,
        lora: LoRARequest | None = None,
        pooling: PoolingParams | None = None,
        tenant: Tenant | None = None,
    ) -> EngineRequest:
        """Register a request that `InputProcessor.prepare` has prepared. Returns the message to send to the engine, one for all
        completions.

        sink: receives the deltas. The completions have the indices first_index … first_index + n - 1. With a seed, completion
        i draws from seed + i. Engine ids are unique even if `request_id` is not.
        """
        siblings = []
        for i in range(params.n):
            engine_id = f"{request_id}-{next(self._serials):x}"
            stream = self._text_stream(prompt_token_ids, params)
            self._sequences[engine_id] = _Sequence(first_index + i, sink, stream, params)
            siblings.append(Sibling(engine_id, None if params.seed is None else params.seed + i))
        first = siblings.pop(0)
        request = self._inputs.engine_request(
            first.request_id,
            prompt_token_ids,
            msgspec.structs.replace(params, n=1),
            priority=priority,
            cache_salt=cache_salt,
            step_data=step_data,
            lora=lora,
            pooling=pooling,
        )
        request.siblings = siblings
        request.tenant = tenant
        return request

    def process(self, outputs: Iterable[EngineOutput]) -> list[str]:
        """Pass each output of a step to its sink. Returns the engine ids that a stop string has ended, for the caller to abort."""
        to_abort = []
        for output in outputs:
            sequence = self._sequences.get(output.request_id)
            if sequence is None:
                continue  # aborted while the step ran
            if output.prompt_logprobs is not None:
                sequence.prompt_logprobs += output.prompt_logprobs
                if not output.new_token_ids and output.finish_reason is None:
                    continue
            try:
                delta = _delta(sequence, output)
            except Exception:  # an error in one request must not end the others
                logger.exception("Detokenizing request %s failed.", output.request_id)
                delta = CompletionDelta(
                    index=sequence.index,
                    text="",
                    token_ids=[],
                    finish_reason="error",
                    error="The generated tokens could not be turned into text; see the log for details.",
                )
            if delta.finish_reason is not None:
                del self._sequences[output.request_id]
                if output.finish_reason is None:
                    to_abort.append(output.request_id)
            sequence.sink(delta)
        return to_abort

    def forget(self, engine_ids: Iterable[str]) -> list[str]:
        """Drop sequences. Returns the ids of those in flight, for the caller to abort in the engine."""
        return [engine_id for engine_id in engine_ids if self._sequences.pop(engine_id, None) is not None]

    def end_all(self, finish_reason: FinishReason, error: str | None = None) -> list[str]:
        """End all sequences, when the engine dies or shuts down. Returns their engine ids."""
        ended, self._sequences = self._sequences, {}
        for sequence in ended.values():
            sequence.sink(CompletionDelta(index=sequence.index, text="", token_ids=[], finish_reason=finish_reason, error=error))
        return list(ended)

    def _text_stream(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> TextStream | None:
        tokenizer: Tokenizer | None = self._inputs.tokenizer
        if tokenizer is None or not params.detokenize:
            return None
        detokenizer = make_detokenizer(tokenizer, prompt_token_ids, skip_special_tokens=params.skip_special_tokens)
        return TextStream(detokenizer, stop=params.stop, include_stop=params.include_stop_str_in_output, min_tokens=params.min_tokens)


def _delta(sequence: _Sequence, output: EngineOutput) -> CompletionDelta:
    token_ids, logprobs = output.new_token_ids, output.new_logprobs
    finish_reason, stop_reason = output.finish_reason, output.stop_reason
    text = ""
    if sequence.stream is not None:
        # A stop token is not part of the text unless include_stop_str_in_output is set.
        hidden = 1 if finish_reason == "stop" and token_ids and not sequence.include_stop else 0
        text, used = _push(sequence.stream, token_ids, len(token_ids) - hidden, ended=finish_reason is not None)
        if sequence.stream.stopped_by is not None:
            token_ids = token_ids[:used]
            logprobs = None if logprobs is None else logprobs[:used]
            finish_reason, stop_reason = "stop", sequence.stream.stopped_by
    prompt_logprobs = None
    if sequence.prompt_logprobs and finish_reason not in ("error", "abort"):
        prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, []
    return CompletionDelta(
        index=sequence.index,
        text=text,
        token_ids=token_ids,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        num_cached_tokens=output.num_cached_tokens,
        num_loaded_tokens=output.num_loaded_tokens,
        num_draft_tokens=output.num_draft_tokens,
        num_accepted_drafts=min(output.num_accepted_drafts, len(token_ids)),
        error=output.error,
        error_kind=output.error_kind,
        queue_seconds=output.queue_seconds,
        prefill_seconds=output.prefill_seconds,
        pooled=output.pooled,
        ledger=output.ledger,
        kv_transfer=output.kv_transfer,
    )


def _push(stream: TextStream, token_ids: Sequence[int], visible: int, *, ended: bool) -> tuple[str, int]:
    """The text of the first `visible` tokens up to a stop string, and the number of tokens used."""
    parts = []
    for used, token_id in enumerate(token_ids[:visible], start=1):
        parts.append(stream.push(token_id))
        if stream.stopped_by is not None:
            return "".join(parts), used
    if ended:
        parts.append(stream.finish())
    return "".join(parts), len(token_ids)
