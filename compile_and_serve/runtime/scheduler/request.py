"""One sequence as the scheduler sees it."""

from __future__ import annotations

from enum import IntEnum, auto

from compile_and_serve.runtime.messages import EngineRequest, FinishReason, RequestOutput, TokenLogprobs


class RequestStatus(IntEnum):
    """WAITING: holds no blocks (new, or preempted). RUNNING: holds blocks and a seat. FINISHED: for ever."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Request:
    """State of one request between steps.

    token_ids: prompt and every generated token whose value is known here.
    num_computed_tokens: tokens whose keys and values are in the cache once every *scheduled* step has run. It leads
        what `update` has seen by the steps in flight; a decode's computed tokens may therefore reach beyond
        `token_ids`.
    prefill_end: tokens to compute before the request decodes; more than the prompt after a preemption.
    decode_end: number of computed tokens at which no further decode may be scheduled (the length limit is reached by
        what is in flight).
    fast_until: below that number of computed tokens a decode needs neither a block nor a check; 0 while the request
        prefills.
    num_pending_tokens: for a preempted request, sampled tokens of steps in flight; it cannot resume before they are
        known.
    """

    __slots__ = (
        "arrival_time", "block_hashes", "block_ids", "decode_end", "end_ids", "fast_until", "finish_reason",
        "first_scheduled_time", "key", "max_total_tokens", "min_total_tokens", "next_cache_len", "num_cached_blocks",
        "num_cached_tokens", "num_computed_tokens", "num_pending_tokens", "num_preemptions", "num_prompt_tokens",
        "prefill_end", "prompt_logprobs", "request_id", "root_hash", "sampling_params", "status", "stop_ids",
        "token_ids", "wants_prompt_logprobs",
    )  # fmt: skip

    def __init__(self, request: EngineRequest, *, key: tuple[float, ...], max_len: int, now: float) -> None:
        """key: place in the queues, smaller first, unique. max_len: tokens that prompt and output may have together."""
        params = request.sampling_params
        self.request_id = request.request_id
        self.sampling_params = params
        self.key = key
        self.arrival_time = request.arrival_time or now
        self.first_scheduled_time = 0.0

        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.max_total_tokens = max_len
        if params.max_tokens is not None:
            self.max_total_tokens = min(max_len, self.num_prompt_tokens + params.max_tokens)
        self.min_total_tokens = self.num_prompt_tokens + params.min_tokens
        self.end_ids = frozenset() if params.ignore_eos else frozenset(request.eos_token_ids)
        self.stop_ids = self.end_ids | frozenset(request.stop_token_ids)

        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.num_computed_tokens = 0
        self.prefill_end = self.num_prompt_tokens
        self.decode_end = self.max_total_tokens - 1  # the last token of all is sampled, and never computed
        self.fast_until = 0
        self.num_pending_tokens = 0
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        self.wants_prompt_logprobs = params.prompt_logprobs is not None  # False again once they are complete

        # The block manager's part.
        self.block_ids: list[int] = []
        self.block_hashes: list[bytes] = []  # of the leading full blocks of token_ids; may lag behind, never ahead
        self.root_hash = b""
        self.num_cached_blocks = 0  # leading blocks that need no further look from the prefix cache
        self.next_cache_len = 0  # number of computed tokens at which the next block is full

    def add_prompt_logprobs(self, start: int, entries: list[TokenLogprobs]) -> None:
        """Take the entries of tokens start+1 …, of a step that computed positions start …; none is taken twice."""
        if self.wants_prompt_logprobs:
            have = len(self.prompt_logprobs) - 1
            assert start <= have, (self.request_id, start, have)
            self.prompt_logprobs.extend(entries[have - start :])

    def append_token(self, token_id: int, output: RequestOutput) -> bool:
        """Append a sampled token, to `output` as well; True, and `output.finish_reason` set, when it is the last one."""
        self.token_ids.append(token_id)
        output.new_token_ids = [token_id]
        num_tokens = len(self.token_ids)
        if token_id in self.stop_ids and num_tokens >= self.min_total_tokens:
            output.finish_reason = "stop"
            output.stop_reason = None if token_id in self.end_ids else token_id
            return True
        if num_tokens >= self.max_total_tokens:
            output.finish_reason = "length"
            return True
        return False
