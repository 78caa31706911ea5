"""`LedgerBook`: the records of the requests in flight and of those that ended last, and the steps that ran meanwhile."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Any

from starlette.types import Scope

from compile_and_serve.runtime.ledger.records import LastStep
from compile_and_serve.runtime.messages import EngineStats
from compile_and_serve.runtime.text.tokenizer import Tokenizer
from compile_and_serve.serve.errors import path_of
from compile_and_serve.serve.ledger.record import RequestRecord, current_record
from compile_and_serve.serve.ledger.summary import Decode, summarize

logger = logging.getLogger("compile_and_serve.ledger")

KEPT_REQUESTS = 300
KEPT_STEPS = 4000


class LedgerBook:
    """Of one API process. tokenizer: for the text at which prompts differ; None: token ids are shown. bandwidth: of `summarize`."""

    def __init__(self, tokenizer: Tokenizer | None, bandwidth: float = 0.0) -> None:
        self.live: dict[int, RequestRecord] = {}  # by id()
        self.ended: deque[RequestRecord] = deque(maxlen=KEPT_REQUESTS)
        self.steps: deque[tuple[int, LastStep]] = deque(maxlen=KEPT_STEPS)  # with the replica
        self._decode: Decode | None = None
        if tokenizer is not None:
            self._decode = lambda tokens: tokenizer.decode(list(tokens), skip_special_tokens=False)
        self._bandwidth = bandwidth

    def begin(self, scope: Scope, request_id: str) -> RequestRecord | None:
        """The record of a request to the API; None for probes and pages."""
        record = RequestRecord(request_id, path_of(scope)[:200]) if scope["method"] == "POST" else None
        current_record.set(record)
        if record is not None:
            self.live[id(record)] = record
        return record

    def end(self, record: RequestRecord, status: int) -> None:
        """The response has ended. status: of HTTP, 0 if none was sent."""
        del self.live[id(record)]
        record.ended, record.status = time.monotonic(), status
        if not record.sequences:
            return
        self.ended.append(record)
        if logger.isEnabledFor(logging.DEBUG):
            said = self.summary(record)
            logger.debug("%s: %s", record.request_id, said["why"], extra={"request_id": record.request_id, "ledger": said})

    def observe(self, stats: EngineStats, replica: int) -> None:
        """Note the step that sent these stats."""
        if stats.last_step is not None and (not self.steps or self.steps[-1] != (replica, stats.last_step)):
            self.steps.append((replica, stats.last_step))

    def summary(self, record: RequestRecord, *, with_prefix: bool = True) -> dict[str, Any]:
        """See `summarize`."""
        return summarize(record, decode=self._decode, with_prefix=with_prefix, bandwidth=self._bandwidth)
