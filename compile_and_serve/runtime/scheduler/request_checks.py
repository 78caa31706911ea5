"""Which requests can never run, and which cannot wait."""

from __future__ import annotations

from collections.abc import Container, Iterable

from msgspec.structs import replace

from compile_and_serve.runtime.config import SchedulerConfig
from compile_and_serve.runtime.messages import NOBODY, EngineInfo, EngineRequest, Tenant
from compile_and_serve.runtime.sampling.checks import verify_token_ids, with_vocabulary
from compile_and_serve.runtime.scheduler.fair_queue import FairQueue


def check_config(config: SchedulerConfig) -> None:
    """Raise ValueError for limits with which nothing could run."""
    if config.max_num_seqs < 1 or config.token_budget < 1:
        raise ValueError(
            f"max_num_seqs and max_num_batched_tokens must be at least 1, got {config.max_num_seqs} and {config.token_budget}."
        )


def for_engine(request: EngineRequest, info: EngineInfo) -> EngineRequest:
    """The request with what the model's vocabulary and pooling say. Raises `ValueError` with one sentence for one that can never run."""
    if (request.pooling is None) != (info.pooling is None):
        does, asked = ("pools", "generate") if info.pooling else ("generates tokens", "pool")
        raise ValueError(f"This engine {does}, so it cannot {asked}: see --runner.")
    if request.pooling is not None and request.pooling.pooling is None:
        assert info.pooling is not None
        request = replace(request, pooling=replace(request.pooling, pooling=info.pooling.pooling))
    params, vocab_size = request.sampling_params, info.vocab_size
    params.verify()
    params = with_vocabulary(params, vocab_size)
    verify_token_ids(params, request.stop_token_ids, vocab_size)
    prompt = request.prompt_token_ids
    if prompt and (min(prompt) < 0 or max(prompt) >= vocab_size):
        wrong = next(token for token in prompt if not 0 <= token < vocab_size)
        raise ValueError(f"The prompt has token id {wrong}, but the model's ids are 0 to {vocab_size - 1}.")
    return replace(request, sampling_params=params)


class QueueFullError(RuntimeError):
    """As many requests run and wait as may; try again later (HTTP 503)."""


class TenantLimitError(QueueFullError):
    """As many requests of the API key run and wait as may (HTTP 429)."""


def check_queue(request: EngineRequest, queue: FairQueue, limit: int | None, max_running: int) -> None:
    """Raise QueueFullError if the request's sequences would be beyond the limit of all keys, or of its own.

    limit: None: there is none. max_running: sequences that run at once.
    """
    tenant = request.tenant or NOBODY
    account = queue.accounts.get(tenant.name)
    own = 0 if account is None else account.num_unfinished
    others = [(other.tenant, other.num_unfinished) for other in queue.accounts.values() if other is not account]
    check_places(tenant, len(request.request_ids), own, others, limit, max_running)


def check_places(
    tenant: Tenant, num_added: int, num_own: int, others: Iterable[tuple[Tenant, int]], limit: int | None, max_running: int
) -> None:
    """Raise QueueFullError if a key's `num_added` new sequences would be beyond a limit.

    Where keys have filled the queue together, a key may still have its share of the places: the key that fills the queue first does not
    keep the others out. num_own: unfinished sequences of the key. others: the other keys that have some, and how many.
    """
    own_limit = None if tenant.max_waiting is None else min(max_running, tenant.max_running or max_running) + tenant.max_waiting
    if own_limit is not None and num_own + num_added > own_limit:
        raise TenantLimitError(
            f"{num_own} sequences of this API key are running or waiting, and this request adds {num_added}; its limit is {own_limit}. "
            "Try again later."
        )
    if limit is None:
        return
    others = list(others)
    total = num_own + sum(count for _, count in others)
    places = int(limit * tenant.weight / (tenant.weight + sum(other.weight for other, _ in others)))
    if total + num_added > limit and (not others or num_own + num_added > places):
        raise QueueFullError(
            f"{total} sequences are running or waiting, and this request adds {num_added}; the limit is {limit}. Try again later."
        )


def check_request(request: EngineRequest, known_ids: Container[str], *, max_model_len: int, max_len: int, whole_prompts: bool) -> None:
    """Raise ValueError with one sentence for a request that a scheduler can never run.

    known_ids: of the requests that it has. max_model_len, max_len: tokens of the model and of the whole cache. whole_prompts: of
    `WorkerInfo`.
    """
    num_prompt_tokens = len(request.prompt_token_ids)
    num_needed = num_prompt_tokens + (request.sampling_params.max_tokens != 0)
    if num_prompt_tokens == 0:
        raise ValueError("The prompt has no tokens; give at least one.")
    for request_id in request.request_ids:
        if request_id in known_ids:
            raise ValueError(f"A request with id {request_id!r} is being processed; ids must be unique.")
    if num_needed > max_model_len:
        raise ValueError(
            f"The prompt has {num_prompt_tokens} tokens, which leaves no room for output in the model's {max_model_len}; shorten it."
        )
    if num_needed > max_len:
        raise ValueError(
            f"The prompt has {num_prompt_tokens} tokens, but the whole KV cache holds {max_len}; shorten it or give the cache more memory."
        )
    if whole_prompts and request.sampling_params.prompt_logprobs is not None:
        raise ValueError("prompt_logprobs are computed in parts of a prompt, which this model cannot cut: leave them out.")
