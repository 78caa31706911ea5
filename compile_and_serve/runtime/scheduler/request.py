"""One sequence as the scheduler sees it."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from copy import copy
from enum import IntEnum, auto
from hashlib import sha256
from types import MappingProxyType
from typing import Any

from compile_and_serve.runtime.ledger.records import Miss, Preparation
from compile_and_serve.runtime.ledger.waits import RequestClock
from compile_and_serve.runtime.messages import REPETITION, EngineRequest, FinishReason, RequestOutput, TokenLogprobs
from compile_and_serve.runtime.scheduler.prefix_keys import root_key
from compile_and_serve.runtime.scheduler.repetition import repeats
from compile_and_serve.runtime.scheduler.shares import UserShare

NOTHING: Mapping[Future[Any], Preparation] = MappingProxyType({})


class RequestStatus(IntEnum):
    """WAITING: holds no blocks (new, or preempted). RUNNING: holds blocks and a batch slot. FINISHED: for ever."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Prompt:
    """A prompt, shared by the sequences that continue it. token_ids is never changed.

    contents: what stands beside its tokens; None where there is nothing. salt: of its request, hashed, if there is
        something.
    lora_name: of the adapter, if it has one. cache_salt: of its request.
    keys: prefix-cache keys of its leading full blocks, computed as far as they were needed.
    deferred_step, num_new_blocks: the last step that deferred a sequence which had generated nothing yet, and the free
        blocks that this sequence needed.
    """

    __slots__ = (
        "_lengths", "cache_salt", "contents", "deferred_step", "keys", "lora_name", "num_new_blocks", "root_key", "salt",
        "token_ids",
    )  # fmt: skip

    def __init__(self, request: EngineRequest) -> None:
        self.token_ids = request.prompt_token_ids
        self.root_key = root_key(request.cache_salt, request.prefix_key, request.step_data)
        self.contents = request.contents()
        self.cache_salt = request.cache_salt
        self.lora_name = None if request.lora is None else request.lora.lora_name
        self.salt = b"" if self.contents is None else sha256((request.cache_salt or "").encode()).digest()
        self.keys: list[bytes] = []
        self.deferred_step = -1
        self.num_new_blocks = 0
        self._lengths: dict[int, Prompt] = {}

    def of_length(self, length: int) -> Prompt:
        """The same prompt with the keys of sequences that are computed as of so many tokens (`ROPE_LENGTH_DATUM`)."""
        if length not in self._lengths:
            other = self._lengths[length] = copy(self)
            other.root_key = sha256(b"length" + length.to_bytes(8) + self.root_key).digest()
            other.keys = []
        return self._lengths[length]


class Request:
    """State of one sequence between steps.

    token_ids: the prompt and every generated token that is known here. Until the request runs it is the prompt's list,
        which must not be changed.
    num_computed_tokens: tokens whose keys and values are in the cache once every *scheduled* step has run; with draft
        tokens, an upper bound. It leads what `update` has seen by the steps in flight, so it may exceed the length of
        `token_ids`.
    prefill_end: tokens to compute before the request decodes; more than the prompt after a preemption.
    prefill_step: number of the prefill's first step.
    decode_end: number of computed tokens at which what is in flight may reach the length limit. No further decode is
        scheduled then, except in a step that runs ahead.
    num_held_tokens: tokens that the request's blocks have room for: the least of all groups.
    fast_until: below this number of computed tokens, a decode needs neither a block nor a check. 0 during the prefill.
    num_pending_steps: of a preempted request, the steps in flight that sample for it. It cannot resume before their
        tokens are known.
    waits_for: what is prepared for the request: its grammar, its adapter, blocks that are being loaded. It cannot start before all
        of it is done.
    can_draft: whether the request takes part in speculative decoding. draft_ends: tokens at which its drafts end, themselves excluded.
    end_len: from so many tokens on, any token may be the last.
    repetition: the repetition that ends it, of its sampling parameters; None: none does.
    changes_logits: of its sampling parameters. costs_extra: whether its decodes may take longer than those of other requests.
    adapter: the number of its LoRA adapter.
    kv_transfer: what goes to another engine with the request, or came from one. num_given_tokens: behind the prompt, that another engine
        sampled.
    may_load: whether a connector may be asked for more of its prefix. loaded_tokens: of its prefix, that a connector loaded, by tier.
    share: of the key and user whose request it is. num_charged_tokens: tokens that it had before it was last preempted.
    held_seconds: of `EngineRequest`. clock: of its waits; None: nobody asks. num_chunks: parts in which its prompt was computed so far.
    num_beside_tokens: that the steps of these computed for others. encode_seconds: of its media. misses: what it could not reuse.
    was_refused_load: blocks that it waited for did not come.
    paused_until: time.monotonic() before which it does not decode while other keys have requests.
    """

    __slots__ = (
        "adapter", "arrival_time", "block_ids", "can_draft", "changes_logits", "clock", "costs_extra", "cuts", "decode_end",
        "draft_ends", "encode_seconds", "end_ids", "end_len", "fast_until", "finish_reason", "first_scheduled_time", "held_seconds", "key",
        "keys", "kv_transfer", "loaded_tokens", "max_total_tokens", "may_load", "min_total_tokens", "misses", "next_cache_len",
        "num_beside_tokens", "num_cached_blocks", "num_cached_tokens", "num_charged_tokens", "num_chunks",
        "num_computed_tokens", "num_freed_blocks", "num_given_tokens", "num_held_tokens", "num_pending_steps",
        "num_preemptions", "num_prefix_tokens", "num_promised_blocks", "num_prompt_logprobs", "num_prompt_tokens", "num_recomputed_tokens",
        "paused_until", "pooling", "prefill_end", "prefill_step", "prompt", "repetition", "request_id",
        "sampling_params", "share", "status", "step_data", "stop_ids", "token_ids", "waits_for", "wants_prompt_logprobs",
        "was_refused_load",
    )  # fmt: skip

    def __init__(self, request: EngineRequest, prompt: Prompt, *, key: tuple[float, ...], max_len: int, now: float) -> None:
        """key: place in the queues, smaller first, unique. max_len: limit of prompt and output together, in tokens."""
        params = request.sampling_params
        self.request_id = request.request_id
        self.sampling_params = params
        self.pooling = request.pooling
        self.kv_transfer = request.kv_transfer
        self.num_given_tokens = 0
        self.step_data = request.step_data
        self.key = key
        self.arrival_time, self.held_seconds = request.arrival_time or now, request.held_seconds
        self.first_scheduled_time = 0.0

        self.prompt = prompt
        self.token_ids = prompt.token_ids
        self.num_prompt_tokens = len(self.token_ids)
        self.max_total_tokens = max_len
        if params.max_tokens is not None:
            self.max_total_tokens = min(max_len, self.num_prompt_tokens + params.max_tokens)
        self.min_total_tokens = self.num_prompt_tokens + params.min_tokens
        is_structured = params.structured_outputs is not None and not params.structured_outputs.is_free
        if is_structured:  # the masks see to min_tokens, where the grammar allows it
            self.min_total_tokens = self.num_prompt_tokens
        self.end_ids = frozenset() if params.ignore_eos and not is_structured else frozenset(request.eos_token_ids)
        detection = params.repetition_detection
        self.repetition = detection if detection is not None and detection.max_pattern_size else None
        self.end_len = self.max_total_tokens if self.repetition is None else 0
        self.stop_ids = self.end_ids | frozenset(request.stop_token_ids)

        structured = params.structured_outputs
        # Where a grammar begins only the runner knows, so no draft goes beyond the end of a marker.
        self.draft_ends = frozenset() if structured is None else structured.draft_ends
        self.changes_logits = params.changes_logits
        has_extras = self.changes_logits or params.logprobs is not None or self.repetition is not None
        self.costs_extra = has_extras or request.lora is not None
        self.can_draft = params.speculate and (structured is None or structured.thinking_token_budget is None)

        self.status = RequestStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.waits_for: list[Future[Any]] = []
        self.may_load = True
        self.was_refused_load = False
        self.loaded_tokens: dict[str, int] = {}
        self.share: UserShare
        self.clock: RequestClock | None = None
        self.num_chunks = self.num_recomputed_tokens = self.num_beside_tokens = 0
        self.encode_seconds = 0.0
        self.misses: list[Miss] = []
        self.num_charged_tokens = 0
        self.paused_until = 0.0
        self.adapter = None if request.lora is None else request.lora.lora_int_id
        self.num_computed_tokens = 0
        self.prefill_end = self.num_prompt_tokens
        self.prefill_step = -1
        self.decode_end = self.max_total_tokens - 1  # the last token of all is sampled, and need not be computed
        self.fast_until = 0
        self.num_pending_steps = 0
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self.num_prompt_logprobs = 0  # entries that were sent
        self.wants_prompt_logprobs = params.prompt_logprobs is not None  # False again once they are complete

        # Set by the block manager.
        self.block_ids: list[list[int]] = []  # one list per group
        self.num_freed_blocks: list[int] = []  # per group: leading entries of block_ids that are placeholders
        self.num_cached_blocks: list[int] = []  # per group: leading blocks that the prefix cache has seen
        self.num_promised_blocks = 0  # blocks that the rest of the prefill may need
        self.num_held_tokens = 0
        self.num_prefix_tokens = 0  # tokens that the prefix cache had when it was admitted
        self.cuts: list[int] = []  # lengths at which the rest of its prefill leaves snapshots
        self.next_cache_len = 0  # number of computed tokens at which the next block is full
        self.keys = prompt.keys  # of the leading full blocks of token_ids; shared until they reach beyond the prompt

    @property
    def reads_all_tokens(self) -> bool:
        """Whether the request wants something of every prompt token, which the prefix cache does not have."""
        return self.wants_prompt_logprobs or (self.pooling is not None and self.pooling.reads_all_tokens)

    @property
    def is_ready(self) -> bool:
        """Whether what was prepared for the request while it waits is done. What has failed never is: the engine ends the request."""
        waits_for = self.waits_for
        if waits_for:
            waits_for[:] = [future for future in waits_for if not _has_succeeded(future)]
        return not waits_for

    def wait_for(self, futures: Mapping[Future[Any], Preparation]) -> None:
        """Let the request wait until all of these are done."""
        self.waits_for = list(futures)
        if self.clock is not None:
            for future, what in futures.items():
                self.clock.prepare(what, future)

    @property
    def has_ended(self) -> bool:
        """Whether it is finished for ever."""
        return self.status is RequestStatus.FINISHED

    def new_prompt_logprobs(self, start: int, entries: list[TokenLogprobs]) -> list[TokenLogprobs | None]:
        """Of the entries of tokens start+1 …, from a step that computed positions start …, those that were not sent yet. The first token
        has None.
        """
        have = self.num_prompt_logprobs
        known = max(have, 1) - 1
        assert start <= known, (self.request_id, start, known)
        new = [*([] if have else [None]), *entries[known - start :]]
        self.num_prompt_logprobs += len(new)
        return new

    def append_tokens(self, new_ids: list[int], output: RequestOutput) -> bool:
        """Append sampled tokens, to `output` as well. Returns True, and sets `output.finish_reason`, when one of them ends the
        request; the tokens after it are dropped.
        """
        self.token_ids += new_ids
        output.new_token_ids = new_ids
        return self.end(output)

    def end(self, output: RequestOutput) -> bool:
        """Look among the tokens of `output`, which are the last ones, for the first that ends the request."""
        token_ids = self.token_ids
        num_before = len(token_ids) - len(output.new_token_ids)
        for num_tokens in range(num_before + 1, len(token_ids) + 1):
            token_id = token_ids[num_tokens - 1]
            if token_id in self.stop_ids and num_tokens >= self.min_total_tokens:
                output.finish_reason = "stop"
                output.stop_reason = None if token_id in self.end_ids else token_id
            elif num_tokens >= self.max_total_tokens:
                output.finish_reason = "length"
            elif self._repeats(num_tokens):
                output.finish_reason, output.stop_reason = "repetition", REPETITION
            else:
                continue
            del token_ids[num_tokens:]
            output.new_token_ids = output.new_token_ids[: num_tokens - num_before]
            return True
        return False

    def _repeats(self, num_tokens: int) -> bool:
        if self.repetition is None or num_tokens < self.min_total_tokens:
            return False
        return repeats(self.token_ids, self.num_prompt_tokens, num_tokens, self.repetition)


def _has_succeeded(future: Future[Any]) -> bool:
    return future.done() and not future.cancelled() and future.exception() is None
