"""`RequestRecord`: what one HTTP request took, from its first byte to its last, filled where the server and the engine take the times."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from compile_and_serve.runtime.ledger.records import RequestLedger, StepTotals
from compile_and_serve.runtime.messages import FinishReason
from compile_and_serve.runtime.text.output_processor import CompletionDelta

Stage = str  # "media", "media.download", "tokenize", "grammar_check" … : of the API process, before the engine gets the request


class StepSource(Protocol):
    """Whence a record has the engine's totals. now: when the last step arrived (time.monotonic). output_seconds: host time for the
    outputs of one sequence, over all steps.
    """

    now: float
    step_totals: StepTotals
    output_seconds: float


@dataclass(slots=True)
class SequenceRecord:
    """One sequence. submitted, first_token, ended: time.monotonic(), 0.0: not yet. first_token: that this engine computed. engine: None: it
    has none yet. before_first: what `engine` was then. pauses: (name, begin, end) of what a preemption took since then.
    at_first, at_end: of the engine's steps.
    """

    prompt_tokens: int
    submitted: float
    engine_id: str = ""
    first_token: float = 0.0
    ended: float = 0.0
    new_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    finish_reason: FinishReason | None = None
    error: str | None = None
    engine: RequestLedger | None = None
    before_first: RequestLedger | None = None
    pauses: list[tuple[str, float, float]] = field(default_factory=list)
    at_first: StepTotals = field(default_factory=StepTotals)
    at_end: StepTotals = field(default_factory=StepTotals)
    output_seconds: float = 0.0

    def take(self, delta: CompletionDelta, source: StepSource) -> None:
        """Note what a step brought. Nothing is computed for a token but sums of integers."""
        self.new_tokens += len(delta.token_ids)
        if delta.num_draft_tokens:
            self.draft_tokens += delta.num_draft_tokens
            self.accepted_tokens += delta.num_accepted_drafts
        if delta.ledger is not None:
            self._take_ledger(delta.ledger, source)
        self.at_end = source.step_totals  # of its own replica
        if delta.finish_reason is not None:
            self.end(delta.finish_reason, source)
            self.error = delta.error

    def end(self, reason: FinishReason, source: StepSource) -> None:
        """The sequence has ended."""
        self.finish_reason, self.ended = reason, time.monotonic()
        self.output_seconds += source.output_seconds if self.first_token else 0.0

    @property
    def decode_steps(self) -> StepTotals:
        """What the engine's steps did since its first token."""
        return self.at_end.since(self.at_first) if self.first_token else StepTotals()

    def _take_ledger(self, ledger: RequestLedger, source: StepSource) -> None:
        """With the first token, and with the first after a preemption."""
        before, self.engine = self.engine, ledger
        if before is None:
            self.before_first = ledger
            self.first_token, self.at_first = source.now, source.step_totals
            self.output_seconds = -source.output_seconds
            return
        went_on = source.now - (ledger.recomputed - before.recomputed)
        self.pauses.append(("preempted", went_on - (ledger.preempted - before.preempted), went_on))
        self.pauses.append(("recomputed", went_on, source.now))


@dataclass(slots=True)
class RequestRecord:
    """One HTTP request. began: time.monotonic(); wall: time.time(). stages: (name, begin, end) on the clock of `began`, in the order in
    which they ended. sending: seconds in which the answer was written and the client took it. with_prefix: the client may know what the
    prefix cache had of others.
    """

    request_id: str
    path: str
    began: float = field(default_factory=time.monotonic)
    wall: float = field(default_factory=time.time)
    tenant: str | None = None
    stages: list[tuple[Stage, float, float]] = field(default_factory=list)
    sequences: list[SequenceRecord] = field(default_factory=list)
    sending: float = 0.0
    ended: float = 0.0
    status: int = 0

    def add_stage(self, name: Stage, begin: float, end: float) -> None:
        """Note a stage. May be called from any thread."""
        self.stages.append((name, begin, end))

    @property
    def is_answered(self) -> bool:
        """Whether all its sequences have ended."""
        return bool(self.sequences) and all(one.ended for one in self.sequences)


# Of the request whose handler runs; None: its server keeps none, or it is not a request to the API.
current_record: ContextVar[RequestRecord | None] = ContextVar("current_record", default=None)


@contextmanager
def stage(name: Stage) -> Iterator[None]:
    """Note how long the block takes, for the request whose handler runs."""
    record = current_record.get()
    if record is None:
        yield
        return
    begin = time.monotonic()
    try:
        yield
    finally:
        record.add_stage(name, begin, time.monotonic())
