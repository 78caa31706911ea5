"""Which requests can never run, and which cannot wait."""

from __future__ import annotations

from collections.abc import Container

from compile_and_serve.runtime.messages import EngineRequest


class QueueFullError(RuntimeError):
    """As many requests run and wait as may; try again later (HTTP 503)."""


def check_queue(request: EngineRequest, num_unfinished: int, limit: int | None) -> None:
    """Raise QueueFullError if the request's sequences would be beyond the limit. None: there is none."""
    num_added = len(request.request_ids)
    if limit is not None and num_unfinished + num_added > limit:
        raise QueueFullError(
            f"{num_unfinished} sequences are running or waiting, and this request adds {num_added}; the limit is {limit}. Try again later."
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
