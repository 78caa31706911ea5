"""What the scheduler remembers of a step until its result is there."""

from __future__ import annotations

from dataclasses import dataclass, field

from compile_and_serve.runtime.scheduler.request import Request


@dataclass(slots=True)
class Chunk:
    """A part of a prefill in a step. prefill_step: the prefill's first step. num_preemptions: the request's count then; it has
    other blocks if that has changed.
    """

    request: Request
    start: int
    end: int
    samples: bool
    num_preemptions: int
    prefill_step: int


@dataclass(slots=True)
class StepInFlight:
    """Holds requests, not their ids: an id may belong to another request by the time the step is over."""

    step: int
    decodes: list[Request] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)

    def samples_for(self, request: Request) -> bool:
        """Whether the step samples for what the request runs now."""
        return request in self.decodes or any(
            chunk.request is request and chunk.samples and chunk.num_preemptions == request.num_preemptions
            for chunk in self.chunks
        )

    def drop(self, request: Request) -> None:
        """Ignore what the step returns for the request."""
        self.decodes = [decode for decode in self.decodes if decode is not request]
        self.chunks = [chunk for chunk in self.chunks if chunk.request is not request]
