"""An engine client that plays a script: no model, no process. Everything else is the real server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np

from compile_and_serve.runtime.engine.connection import EngineDeadError
from compile_and_serve.runtime.ledger.records import LastStep, Miss, RequestLedger, StepTotals
from compile_and_serve.runtime.lora.request import LoRARequest
from compile_and_serve.runtime.media.info import MediaInfo
from compile_and_serve.runtime.messages import (
    REPETITION,
    EngineInfo,
    EngineRequest,
    EngineStats,
    ErrorKind,
    RequestOutput,
    StepOutputs,
    TokenLogprobs,
    UtilityOptions,
)
from compile_and_serve.runtime.pooling_params import Pooled, PoolingInfo
from compile_and_serve.runtime.scheduler.repetition import repeats
from compile_and_serve.runtime.text.tokenizer import Tokenizer

Script = Callable[[EngineRequest], Sequence[int]]


class FakeEngineClient:
    """Answers each request with the tokens of `script(request)`, one per step, then finishes as a real engine does.

    pause: seconds between steps. hold: an event; no step runs while it is cleared. `aborted`: ids that the server aborted.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        script: Script,
        *,
        max_model_len: int = 256,
        max_in_flight: int | None = None,
        pause: float = 0.0,
        pooling: PoolingInfo | None = None,
        max_logprobs: int = 20,
        media: MediaInfo | None = None,
    ) -> None:
        self.info = EngineInfo(
            max_model_len=max_model_len,
            vocab_size=tokenizer.vocab_size,
            num_kv_blocks=1000,
            block_size=16,
            dtype="float32",
            device="cpu",
            max_in_flight=max_in_flight,
            compile_report={"stages.capture": 1.0, "stages.compile": 0.5, "distinct_pieces": 3, "pieces": 31, "artifact": "hit"},
            pooling=pooling,
            max_logprobs=max_logprobs,
            media=media,
        )
        self.tokenizer = tokenizer
        self.script = script
        self.pause = pause
        self.requests: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.calls: list[tuple[str, LoRARequest | None]] = []
        self.refuse_adapters: str | None = None
        self.steps = 0
        self.is_asleep = False
        self.hold = asyncio.Event()
        self.hold.set()
        self.num_others = 0
        self.dead_reason: str | None = None
        self.problem: str | None = None  # of `health_problem`
        self.stopped = False
        self.fail_requests: str | None = None
        self.fail_kind: ErrorKind = "internal"
        self.misses: list[Miss] = []  # of every request
        self._refused: list[RequestOutput] = []
        self._running: dict[str, tuple[EngineRequest, list[int], int]] = {}
        self._wake = asyncio.Event()

    @property
    def num_running(self) -> int:
        return len(self._running)

    async def add_request(self, request: EngineRequest) -> None:
        self._check()
        self._wake.set()
        for sequence in request.sequences():
            self._add(sequence)

    def _add(self, request: EngineRequest) -> None:
        self.requests.append(request)
        of_key = [one for one, _, _ in self._running.values() if one.tenant == request.tenant]
        if self.info.max_in_flight is not None and len(of_key) >= self.info.max_in_flight:
            full = RequestOutput(request_id=request.request_id, finish_reason="error", error="Full.", error_kind="overloaded")
            self._refused.append(full)
            return
        self._running[request.request_id] = (request, list(self.script(request)), 0)

    async def abort(self, request_ids: list[str]) -> None:
        self._check()
        self.aborted += request_ids
        for request_id in request_ids:
            self._running.pop(request_id, None)

    async def utility(
        self, method: str, adapter: LoRARequest | None = None, options: UtilityOptions | None = None
    ) -> dict[str, int | float | str | bool | None]:
        self._check()
        self.calls.append((method, adapter))
        if self.refuse_adapters is not None:
            raise ValueError(self.refuse_adapters)
        if method == "sleep":  # after the requests that were accepted
            while self._running:
                await asyncio.sleep(0.005)
            self.is_asleep = True
        elif method == "wake_up":
            self.is_asleep = False
        return {"ok": True, "is_sleeping": self.is_asleep}

    async def flush(self) -> None:
        self._check()

    def health_problem(self) -> str | None:
        return self.dead_reason or self.problem

    async def shutdown(self, drain: bool = True, timeout: float | None = None) -> None:
        self.stopped = True
        self._wake.set()

    def die(self, reason: str) -> None:
        """The engine process ends; `outputs` and every later call fail."""
        self.dead_reason = reason
        self.hold.set()
        self._wake.set()

    async def outputs(self) -> AsyncIterator[StepOutputs]:
        while not self.stopped:
            await self.hold.wait()
            self._check()
            if self._refused:
                refused, self._refused = self._refused, []
                yield StepOutputs(outputs=refused)
            if not self._running:
                self._wake.clear()
                await self._wake.wait()
                continue
            self.steps += 1
            outputs = [self._step(request_id) for request_id in list(self._running)]
            stats = EngineStats(num_running=len(self._running), kv_cache_usage=0.25, step_tokens=len(outputs))
            stats.stage_wait_seconds = 0.25 * self.steps
            stats.steps = StepTotals(steps={"plain": self.steps}, seconds={"plain": 0.001 * self.steps}, tokens=self.steps)
            stats.last_step = LastStep(self.steps, time.time(), 0.001, "plain", len(outputs), 0, len(outputs), 0)
            yield StepOutputs(outputs=outputs, stats=stats)
            await asyncio.sleep(self.pause)

    def _step(self, request_id: str) -> RequestOutput:
        request, tokens, position = self._running[request_id]
        params = request.sampling_params
        output = RequestOutput(request_id=request_id)
        if self.fail_requests is not None:
            del self._running[request_id]
            return RequestOutput(request_id=request_id, finish_reason="error", error=self.fail_requests, error_kind=self.fail_kind)
        if position == 0:
            output.queue_seconds, output.prefill_seconds = 0.01, 0.02
            output.ledger = RequestLedger(queue={"slots": 0.01}, prefill=0.02, chunks=1, prefill_steps=1, misses=self.misses)
            output.num_cached_tokens = len(request.prompt_token_ids) // 2
            if params.prompt_logprobs is not None:
                rest = [self.logprobs(i, params.prompt_logprobs) for i in request.prompt_token_ids[1:]]
                output.prompt_logprobs = [None, *rest]
        if request.pooling is not None and self.info.pooling is not None:
            rows = fake_rows(request.prompt_token_ids, self.info.pooling.width)
            rows = rows if (request.pooling.pooling or self.info.pooling.pooling) == "all" else rows[-1:]
            output.pooled, output.finish_reason = Pooled(len(rows), rows.tobytes()), "stop"
        elif params.max_tokens == 0:
            output.finish_reason = "length"
        else:
            token = tokens[position % len(tokens)]
            output.new_token_ids = [token]
            if params.logprobs is not None:
                output.new_logprobs = [self.logprobs(token, params.logprobs)]
            if token in request.stop_token_ids:
                output.finish_reason = "stop"
                output.stop_reason = None if token in request.eos_token_ids else token
            elif position + 1 == params.max_tokens:
                output.finish_reason = "length"
            elif params.repetition_detection is not None and repeats(
                [tokens[i % len(tokens)] for i in range(position + 1)], 0, position + 1, params.repetition_detection
            ):
                output.finish_reason, output.stop_reason = "repetition", REPETITION
        self._running[request_id] = (request, tokens, position + 1)
        if output.finish_reason is not None:
            del self._running[request_id]
        return output

    def logprobs(self, token: int, count: int) -> TokenLogprobs:
        others = [(token + offset) % self.info.vocab_size for offset in range(count)]
        return TokenLogprobs([token, *others], [-0.5] + [-0.5 - offset for offset in range(count)], 1)

    def _check(self) -> None:
        if self.dead_reason is not None:
            raise EngineDeadError(self.dead_reason)


def fake_rows(token_ids: Sequence[int], width: int) -> np.ndarray:
    """float32 [T, width]: what the engine pools of a prompt. A row depends on the tokens up to its own."""
    sums = np.cumsum(np.array(token_ids))
    return np.sin(np.outer(sums, np.arange(1, width + 1))).astype(np.float32)


def says(tokenizer: Tokenizer, text: str, *, end: bool = True) -> Script:
    """A script that answers every request with `text`, then (unless `end` is false, when it starts over) the end token."""
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return lambda request: [*tokens, tokenizer.eos_token_ids[0]] if end else tokens
