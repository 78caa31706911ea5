"""Messages between the coordinator and the API processes (sent over ZMQ, encoded by msgspec as msgpack).

A message with a `call_id` that is not 0 is answered with the same `call_id`.
"""

from __future__ import annotations

import msgspec

from compile_and_serve.runtime.lora.request import LoRARequest
from compile_and_serve.runtime.messages import EngineRequest, StepOutputs, UtilityOptions

Sample = tuple[str, dict[str, str], float]  # name, labels, value
MetricFamily = tuple[str, str, str, list[Sample]]  # name, text, type, samples


class ApiReady(msgspec.Struct, tag="ready"):
    """The process listens."""

    process: int


class ApiFailed(msgspec.Struct, tag="failed"):
    """The process could not start. reason: one sentence."""

    process: int
    reason: str


class Submit(msgspec.Struct, tag="submit"):
    """Send a request to the engine. With a call_id, `Reply` says whether there is room for it."""

    process: int
    call_id: int
    request: EngineRequest


class Abort(msgspec.Struct, tag="abort"):
    """End requests."""

    process: int
    request_ids: list[str]


class Call(msgspec.Struct, tag="call"):
    """Call a method of the engine, or "metrics" of the coordinator. Answered by `Reply`."""

    process: int
    call_id: int
    method: str
    adapter: LoRARequest | None = None
    options: UtilityOptions = {}


class Done(msgspec.Struct, tag="done"):
    """The answer to `SetSleeping`, `SetAdapter` and `ReadMetrics`. metrics: of the process."""

    process: int
    call_id: int
    metrics: list[MetricFamily] = []


ToCoordinator = ApiReady | ApiFailed | Submit | Abort | Call | Done


class Steps(msgspec.Struct, tag="steps"):
    """A process's part of a step's outputs. num_in_flight: sequences of all processes."""

    step: StepOutputs
    num_in_flight: int


class Reply(msgspec.Struct, tag="reply", omit_defaults=True):
    """The answer to `Submit` and `Call`.

    At most one is set: error, a user's mistake; full, the queue has no room; dead, why the engine is gone.
    """

    call_id: int
    value: dict[str, int | float | str | bool | None] = {}
    metrics: list[MetricFamily] = []
    error: str | None = None
    full: str | None = None
    retry_after: int | None = None
    dead: str | None = None


class SetSleeping(msgspec.Struct, tag="sleeping"):
    """Refuse requests, or accept them again. Answered once no request is on its way to the coordinator."""

    call_id: int
    is_sleeping: bool


class SetAdapter(msgspec.Struct, tag="adapter"):
    """An adapter was loaded or unloaded."""

    call_id: int
    adapter: LoRARequest
    is_loaded: bool


class ReadMetrics(msgspec.Struct, tag="metrics"):
    """Send the process's metrics."""

    call_id: int


class Heartbeat(msgspec.Struct, tag="heartbeat"):
    """Sent every second. problem: why the engine is not healthy; None if it is."""

    problem: str | None
    num_in_flight: int


class EngineGone(msgspec.Struct, tag="gone"):
    """No more outputs. reason: why the engine died; None if it was shut down."""

    reason: str | None


class StopServing(msgspec.Struct, tag="stop"):
    """Let running requests finish, then end. hurry: cancel the requests instead."""

    hurry: bool = False


FromCoordinator = Steps | Reply | SetSleeping | SetAdapter | ReadMetrics | Heartbeat | EngineGone | StopServing
