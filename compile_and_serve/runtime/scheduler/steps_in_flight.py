"""What the scheduler remembers of a step until its result is there."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from compile_and_serve.runtime.ledger.records import RequestLedger
from compile_and_serve.runtime.messages import RequestOutput
from compile_and_serve.runtime.scheduler.encoder_cache import EncoderCache
from compile_and_serve.runtime.scheduler.kv_cache_manager import KVCacheManager
from compile_and_serve.runtime.scheduler.request import Request, RequestStatus
from compile_and_serve.runtime.scheduler.step_messages import ModelRunnerOutput, SchedulerOutput


@dataclass(slots=True)
class Chunk:
    """A part of a prefill in a step. prefill_step: the prefill's first step. prefill_start: the tokens that it found in the prefix
    cache. num_preemptions: the request's count then; it has other blocks if that has changed. step: number of the step.
    """

    request: Request
    start: int
    end: int
    samples: bool
    num_preemptions: int
    prefill_step: int
    prefill_start: int
    step: int = 0

    def take(self, scheduled: SchedulerOutput, result: ModelRunnerOutput) -> RequestOutput | None:
        """Take what the step computed for the request; what is new for it, or None. `finish_reason` says whether it has ended."""
        request = self.request
        request.num_beside_tokens += scheduled.total_num_scheduled_tokens - (self.end - self.start)
        if result.ran.encode and any(one.arrays and one.request_id == request.request_id for one in scheduled.encodes):
            request.encode_seconds += result.ran.encode
        if request.status is RequestStatus.FINISHED:
            return None
        request_id = request.request_id
        entries = None
        if request.wants_prompt_logprobs:
            entries = request.new_prompt_logprobs(self.start, result.prompt_logprobs.get(request_id, [])) or None
        if not self.samples:
            return None if entries is None else RequestOutput(request_id=request_id, prompt_logprobs=entries)
        if self.num_preemptions != request.num_preemptions:
            request.num_pending_steps -= 1

        output = RequestOutput(request_id=request_id)
        if request.clock is not None:
            output.ledger = ledger_of(request, self)
        if len(request.token_ids) == request.num_prompt_tokens + request.num_given_tokens:
            output.num_cached_tokens = request.num_cached_tokens
            if 0 < sum(request.loaded_tokens.values()) <= request.num_cached_tokens:
                output.num_loaded_tokens = request.loaded_tokens
            output.queue_seconds = max(0.0, request.first_scheduled_time - request.arrival_time)
            output.prefill_seconds = max(0.0, time.time() - request.first_scheduled_time)
        if request.wants_prompt_logprobs:
            assert request.num_prompt_logprobs == request.num_prompt_tokens, (request_id, request.num_prompt_logprobs)
            output.prompt_logprobs = entries
            request.wants_prompt_logprobs = False
            # The runner must not compute them again, without a limit of rows, when the request resumes after a preemption.
            request.sampling_params = msgspec.structs.replace(request.sampling_params, prompt_logprobs=None)
        if request.pooling is not None:
            output.pooled, output.finish_reason = result.pooled[request_id], "stop"
        elif request.max_total_tokens == request.num_prompt_tokens:
            output.finish_reason = "length"  # max_tokens=0: only the prompt was of interest
        else:
            request.append_tokens(result.sampled_token_ids[request_id], output)
            if request_id in result.logprobs:
                output.new_logprobs = result.logprobs[request_id]
        return output


@dataclass(slots=True)
class StepInFlight:
    """Holds requests, not their ids: an id may belong to another request by the time the step is over. was_drafting: whether the step
    could have drafts. is_ahead: of `SchedulerOutput`. prompt_rows_left: how many more prompt logprobs it may compute. num_prompt_rows: how
    many it computes. encoder: None: the model has none. is_last_poll: nothing can run, and nobody waits for the transfers that keep blocks.
    """

    step: int
    prompt_rows_left: int
    encoder: EncoderCache | None = None
    decodes: list[Request] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    drafts: dict[str, list[int]] = field(default_factory=dict)
    was_drafting: bool = False
    is_ahead: bool = False
    is_last_poll: bool = False
    num_prompt_rows: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of output that it needs, at most."""
        return len(self.decodes) + sum(chunk.samples for chunk in self.chunks) + self.num_prompt_rows

    def has_rows(self, request: Request) -> bool:
        """Whether the step may compute a token of the request's prompt: prompt logprobs have a limit."""
        return self.prompt_rows_left > 0 or not request.wants_prompt_logprobs

    def chunk_end(self, request: Request, budget: int, manager: KVCacheManager) -> int:
        """Where the next chunk of a prefill ends, unless prompt logprobs or the encoder are at their limit."""
        return min(manager.chunk_limit(request), request.num_computed_tokens + budget)

    def can_read(self, request: Request, start: int, budget: int) -> bool:
        """Whether it may compute token `start` of the request's prompt: the encoder has a limit, too. budget: of the chunk's tokens."""
        if request.wants_prompt_logprobs:
            budget = min(budget, self.prompt_rows_left)
        return self.encoder is None or self.encoder.has_room(request, start, budget)

    def add_chunk(self, request: Request, budget: int, scheduled: dict[str, int], manager: KVCacheManager) -> list[list[int]] | None:
        """Put the next tokens of a prefill into the step, and their number into `scheduled`. Returns the blocks that it got for them."""
        start = request.num_computed_tokens
        num_tokens = self.chunk_end(request, budget, manager) - start
        if request.wants_prompt_logprobs:
            num_tokens = min(num_tokens, self.prompt_rows_left)
        if self.encoder is not None:
            num_tokens = self.encoder.take(request, start, start + num_tokens) - start
            assert num_tokens > 0, "see `can_read`"
        if request.wants_prompt_logprobs:
            self.prompt_rows_left -= num_tokens
            self.num_prompt_rows += num_tokens
        end = request.num_computed_tokens = start + num_tokens
        request.num_chunks += 1
        if request.num_preemptions:
            request.num_recomputed_tokens += num_tokens
        new_ids = manager.grow_for_chunk(request, start, end)
        if end >= request.next_cache_len:
            manager.cache_blocks(request, end, self.step)
        samples = end == request.prefill_end
        self.chunks.append(
            Chunk(request, start, end, samples, request.num_preemptions, request.prefill_step, request.num_prefix_tokens, self.step)
        )
        scheduled[request.request_id] = num_tokens
        return new_ids

    def sampling(self) -> list[Request]:
        """The requests that it samples for."""
        return [*self.decodes, *(chunk.request for chunk in self.chunks if chunk.samples)]

    def samples_for(self, request: Request) -> bool:
        """Whether the step samples for what the request runs now."""
        return request in self.decodes or any(
            chunk.request is request and chunk.samples and chunk.num_preemptions == request.num_preemptions for chunk in self.chunks
        )

    def take_back_rejected(self, scheduled: Mapping[str, int], result: ModelRunnerOutput) -> None:
        """Let requests have computed only the drafts that were accepted. scheduled: tokens of each request in this step."""
        for request in self.decodes:
            if request.status is RequestStatus.RUNNING:
                request_id = request.request_id
                request.num_computed_tokens -= scheduled[request_id] - len(result.sampled_token_ids[request_id])

    def drop(self, request: Request) -> None:
        """Ignore what the step returns for the request."""
        self.decodes = [decode for decode in self.decodes if decode is not request]
        self.chunks = [chunk for chunk in self.chunks if chunk.request is not request]


def ledger_of(request: Request, last: Chunk) -> RequestLedger:
    """The ledger of a request whose prompt is computed. last: the chunk that completed it."""
    clock = request.clock
    assert clock is not None
    clock.end_prefill(time.monotonic())
    contents = request.prompt.contents
    return RequestLedger(
        transport=clock.transport,
        preparing=clock.preparing,
        queue=clock.queue.copy(),
        prefill=clock.prefill or 0.0,
        prefill_steps=last.step - request.prefill_step + 1,
        chunks=request.num_chunks,
        beside_tokens=request.num_beside_tokens,
        encode=request.encode_seconds,
        computed_tokens=request.num_prompt_tokens - request.num_cached_tokens,
        cached_tokens=request.num_cached_tokens,
        loaded_tokens=request.loaded_tokens,
        encoded_items=0 if contents is None else len(contents.media),
        preemptions=request.num_preemptions,
        preempted=clock.preempted,
        recomputed=clock.recomputed,
        recomputed_tokens=request.num_recomputed_tokens,
        misses=request.misses,
    )
