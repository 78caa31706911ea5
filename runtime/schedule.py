"""What the scheduler tells the model runner for one step, and what comes back. Plain data: it must survive a trip to another process."""

from __future__ import annotations

import msgspec

from runtime.messages import TokenLogprobs
from runtime.sampling_params import SamplingParams


class NewRequestData(msgspec.Struct, kw_only=True):
    """A request that the runner does not hold yet (first scheduled, or resumed after a preemption).

    token_ids: prompt and, after a preemption, what was generated before it; num_prompt_tokens says where the prompt ends.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    stop_token_ids: list[int]
    block_ids: list[int]
    num_computed_tokens: int


class CachedRequestData(msgspec.Struct, kw_only=True):
    """A request that the runner holds already."""

    request_id: str
    new_block_ids: list[int]
    num_computed_tokens: int


class SchedulerOutput(msgspec.Struct, kw_only=True):
    """One step. `num_scheduled_tokens` has every request of the step, in batch order (running decodes first)."""

    step: int
    new_requests: list[NewRequestData]
    cached_requests: list[CachedRequestData]
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    finished_request_ids: list[str]  # ended (or preempted) since the last step: the runner forgets them first


class ModelRunnerOutput(msgspec.Struct, kw_only=True):
    """What a step sampled. A request whose prefill is not complete has no entry in sampled_token_ids."""

    step: int
    sampled_token_ids: dict[str, int]
    logprobs: dict[str, TokenLogprobs]
    prompt_logprobs: dict[str, list[TokenLogprobs]]  # of the prompt positions that this step computed, in order
    errors: dict[str, str]  # request → sentence; that request ends with finish_reason "error"
