"""Requests that go from one engine to another after their prompt, as the scheduler sees them.

The engine that computes the prompt samples one token. The other engine continues as after a preemption: prompt and token are known, and
most of their blocks come from the first engine.
"""

from __future__ import annotations

from collections.abc import Callable

from compile_and_serve.runtime.connector.handover.params import direction_of, read_taken
from compile_and_serve.runtime.messages import FinishReason, RequestOutput
from compile_and_serve.runtime.scheduler.request import Request
from compile_and_serve.runtime.scheduler.transfers import Transfers


class Handovers:
    """transfers: None: no request comes from another engine, or goes to one. given: what other engines have sampled for new requests."""

    def __init__(self, transfers: Transfers | None) -> None:
        self._transfers = transfers
        self.given: list[RequestOutput] = []

    def take(self) -> list[RequestOutput]:
        """What is in `given`."""
        given, self.given = self.given, []
        return given

    def close(self) -> None:
        """The engine stops."""
        if self._transfers is not None:
            self._transfers.close()

    def begin(self, request: Request, finish: Callable[[Request, FinishReason | None], None]) -> bool:
        """A request has arrived. Let it end after its first token, or begin after the one that another engine sampled. → whether that one
        has ended it: then `finish` was called.
        """
        params = request.kv_transfer
        if params is None:
            return False
        assert self._transfers is not None, "the engine checks it"
        self._transfers.arrived(request, params)
        if direction_of(params) == "take" and read_taken(params).own.early:
            self._transfers.load_early(request)
            self.given.append(RequestOutput(request_id=request.request_id, finish_reason="length"))
            finish(request, "length")
            return True
        if direction_of(params) == "give":
            request.max_total_tokens = min(request.max_total_tokens, request.num_prompt_tokens + 1)
            request.decode_end = request.max_total_tokens - 1
            request.end_len = min(request.end_len, request.max_total_tokens)
            return False
        own = read_taken(params).own
        request.was_refused_load = not own.lease
        if not own.token_ids:
            return False
        output = RequestOutput(request_id=request.request_id, new_logprobs=own.logprobs)
        request.token_ids = request.token_ids.copy()  # the prompt's list is shared
        request.append_tokens(own.token_ids.copy(), output)
        request.num_given_tokens = len(own.token_ids)
        self.given.append(output)
        if output.finish_reason is not None:
            finish(request, output.finish_reason)
        return output.finish_reason is not None

    def end(self, request: Request, output: RequestOutput) -> None:
        """The step that computed a request's prompt has ended the request: tell the engine that continues it, if one does."""
        if request.kv_transfer is not None and direction_of(request.kv_transfer) == "give":
            assert self._transfers is not None
            output.kv_transfer = self._transfers.hand_over(request, output)
