"""What the scheduler tells the model runner for one step, what comes back, and what a worker says of itself: plain data that
can cross processes.

The runner keeps, for each request that it holds, the token ids, the block ids and `num_computed_tokens`. It advances
these by itself, so that a step of unchanged decodes says almost nothing:
- `num_computed_tokens` grows by `num_scheduled_tokens[id]` with every step that has the request (also when its tokens
  are unknown yet).
- A request samples in a step when its computed tokens then reach all tokens that it has: `num_computed_tokens +
  num_scheduled_tokens[id] == len(token_ids)`, `token_ids` growing by the one sampled. An earlier step of a prefill
  samples nothing.
- Steps run on the device in the order of `step`. With async scheduling, step k+1 arrives before step k's tokens were
  read back: its decodes take as input the token that step k left on the device. A freed block may be written by the
  step that comes next, never earlier.
"""

from __future__ import annotations

import msgspec

from compile_and_serve.runtime.messages import TokenLogprobs
from compile_and_serve.runtime.sampling_params import SamplingParams

NOTHING_LEFT = (
    "No token can follow: allowed_token_ids, bad_words, logit_bias and min_tokens together exclude every one."
)


class NewRequestData(msgspec.Struct, kw_only=True):
    """A request that the runner does not hold yet (first scheduled, or resumed after a preemption).

    token_ids: prompt and, after a preemption, what was generated before it; num_prompt_tokens says where that ends.
    stop_token_ids: every id that ends the request, the model's end ids among them (what min_tokens must mask).
    block_ids: blocks for all of token_ids, the first `num_computed_tokens` of which are in the cache already.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    stop_token_ids: list[int]
    block_ids: list[int]
    num_computed_tokens: int


class CachedRequestData(msgspec.Struct, kw_only=True):
    """Blocks to append to those of a request that the runner holds already."""

    request_id: str
    new_block_ids: list[int]


class SchedulerOutput(msgspec.Struct, kw_only=True):
    """One step. `num_scheduled_tokens` has every request of the step, in batch order: decodes, then prefill chunks.

    cached_requests: only the requests that got new blocks; the others go on as they are.
    finished_request_ids: ended or preempted since the last step. The runner forgets them before it takes in
        `new_requests`: one id may be in both.
    """

    step: int
    new_requests: list[NewRequestData]
    cached_requests: list[CachedRequestData]
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    finished_request_ids: list[str]


class ModelRunnerOutput(msgspec.Struct, kw_only=True):
    """What a step sampled. A request whose prefill is not complete has no entry in sampled_token_ids.

    prompt_logprobs: for a request that asks for them and whose step computed positions a … b-1 of a prompt of P
        tokens: the entries of the prompt tokens a+1 … min(b, P-1), in order (a position's logits speak of the token
        after it). May be left out when empty.
    errors: request → sentence; that request ends with finish_reason "error" and needs no other entry. NOTHING_LEFT is the
        user's mistake, everything else ours.
    """

    step: int
    sampled_token_ids: dict[str, int]
    logprobs: dict[str, TokenLogprobs]
    prompt_logprobs: dict[str, list[TokenLogprobs]]
    errors: dict[str, str]


class WorkerInfo(msgspec.Struct, kw_only=True):
    """What a rank knows once its weights are loaded. num_blocks: KV blocks that it has room for."""

    num_blocks: int
    device_type: str
    device: str
    dtype: str
    max_model_len: int
    vocab_size: int
    compile_report: dict[str, int | float | str]


class WorkerStats(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Counters since the start. decode_misses: steps of decodes for which a CUDA graph would have been of use. steps_on_device: those
    that found their inputs on the device.
    """

    padded_tokens: int = 0
    decode_misses: int = 0
    steps_on_device: int = 0
    graph_replays: dict[str, int] = {}
