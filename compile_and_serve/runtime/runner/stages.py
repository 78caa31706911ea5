"""Stages: the ranks along the pipe axis, of which each runs its part of the model on what the one before computed.

What a stage gives is one message a step, and ends up in the next one's inputs, persistent buffers that graphs may read. The last stage
samples, and sends the tokens to all other stages, which need them before they decode the same sequences. Steps of other sequences do not
wait for them, and no stage waits until another one receives what it has sent.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from compile_and_serve.compiler.model import Outputs
from compile_and_serve.compiler.pieces.plan import ExecutionPlan
from compile_and_serve.compiler.pieces.stages import RECEIVED
from compile_and_serve.custom_ops.collectives.collectives import Transfer, stage_links, start_receive, start_send
from compile_and_serve.custom_ops.mesh import Mesh
from compile_and_serve.custom_ops.platforms.protocol import Platform, TimedEvent
from compile_and_serve.custom_ops.step import Step
from compile_and_serve.models.spec import ModelSpec


def check_stages(spec: ModelSpec, mesh: Mesh) -> None:
    """Raise `ValueError` with one sentence for a model that cannot run in stages."""
    if mesh.pipe == 1:
        return
    unsupported = {
        "A pooling model": spec.pooling is not None,
        "A model that computes whole prompts": spec.whole_prompts,
        "A model with an encoder": spec.encoder is not None,
        "A model without state": not spec.paged_state,
    }
    for what, is_given in unsupported.items():
        if is_given:
            raise ValueError(f"{what} runs in one piece, but pipeline_parallel_size is {mesh.pipe}: set it to 1.")


def spec_of_stage(spec: ModelSpec, sources_of_others: Collection[str], *, is_last: bool) -> ModelSpec:
    """The spec of what a stage runs, whose loader passes over the tensors of others."""
    named = {name: None if parameter in sources_of_others else parameter for name, parameter in spec.weight_map.items()}
    parts = {name: None for name, part in spec.parts.items() if part.parameter in sources_of_others}
    weight_map = dict.fromkeys(sources_of_others) | named | parts
    return replace(spec, weight_map=weight_map, outputs=spec.outputs if is_last else ())


def handed_on(names: Sequence[str]) -> list[str]:
    """Those of the names that go from one stage to the next, in the order in which both transfer them."""
    return sorted((name for name in names if name.startswith(f"{RECEIVED}.")), key=lambda name: int(name.rpartition(".")[2]))


class StageLink:
    """A rank's transfers from and to the other stages of its model. is_last: whether it samples."""

    def __init__(self, platform: Platform, max_steps: int) -> None:
        """max_steps: in flight. So many sends may be under way to a stage before this one waits for the oldest."""
        self._platform = platform
        self._links = stage_links()
        self._last = self._links.num_stages - 1
        self._max_sends = max_steps
        self.is_last = self._links.stage == self._last
        self._names: dict[int, tuple[list[str], list[str]]] = {}  # of each plan: what it receives and what it sends
        self._sends: dict[int, deque[Transfer]] = defaultdict(deque)  # to each stage; they outlive the runner
        self._waits: deque[tuple[TimedEvent, TimedEvent]] = deque()  # before and after each step's receives
        self._waited = 0.0
        self.most_bytes = 0  # of messages at once, in steps as large as those of `note_size`

    def note_size(self, outputs: Outputs, step: Step, plan: ExecutionPlan) -> None:
        """Note what messages take in a step that was run without them."""
        received, sent = self._names_of(plan)
        came = sum(step.inputs[name].nbytes for name in received)
        self.most_bytes = max(self.most_bytes, came + self._max_sends * sum(outputs[name].nbytes for name in sent))

    def receive(self, step: Step, plan: ExecutionPlan) -> None:
        """Receive what the plan reads from the stage before."""
        if not (names := self._names_of(plan)[0]):
            return
        before = self._platform.record_timed_event()
        parts = [step.inputs[name][: step.num_tokens] for name in names]
        packed = torch.empty(sum(one.nbytes for one in parts), dtype=torch.uint8, device=parts[0].device)
        start_receive(packed, self._links.stage - 1, self._links).wait()
        for ours, came in zip(parts, _unpacked(packed, parts), strict=True):
            ours.copy_(came)
        self._waits.append((before, self._platform.record_timed_event()))

    def send(self, outputs: Outputs, step: Step, plan: ExecutionPlan) -> None:
        """Begin to send the next stage what it reads of the step's outputs."""
        if not (names := self._names_of(plan)[1]):
            return
        parts = [outputs[name][: step.num_tokens] for name in names]
        # A copy: the next step overwrites what a graph computed, and does not wait for the next stage.
        packed = torch.empty(sum(one.nbytes for one in parts), dtype=torch.uint8, device=parts[0].device)
        for ours, part in zip(parts, _unpacked(packed, parts), strict=True):
            part.copy_(ours)
        self._start_send(packed, self._links.stage + 1)

    def wait_seconds(self) -> float:
        """For how long the device has waited for the stage before, and for the transfers, since the start."""
        while self._waits and self._waits[0][1].query():
            before, after = self._waits.popleft()
            self._waited += after.seconds_since(before)
        return self._waited

    def send_back(self, tensor: torch.Tensor) -> None:
        """Begin to send all other stages what only the last one knows: the tokens that it sampled, int64 [S], or its drafts."""
        copy = tensor.clone()
        for other in range(self._last):
            self._start_send(copy, other)

    def start_receiving_back(self, tensor: torch.Tensor) -> Transfer:
        """Begin to receive into `tensor` what the last stage sends with `send_back`."""
        return start_receive(tensor, self._last, self._links)

    def _start_send(self, x: torch.Tensor, to: int) -> None:
        sends = self._sends[to]
        sends.append(start_send(x, to, self._links))
        if len(sends) > self._max_sends:
            sends.popleft().wait()  # its memory may be used again from here on

    def _names_of(self, plan: ExecutionPlan) -> tuple[list[str], list[str]]:
        if id(plan) not in self._names:
            self._names[id(plan)] = handed_on(plan.arguments), handed_on(plan.outputs)
        return self._names[id(plan)]


def _unpacked(packed: torch.Tensor, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of bytes as tensors like `parts`. Those of larger elements lie first, so that all are aligned."""
    views: dict[int, torch.Tensor] = {}
    begin = 0
    for index in sorted(range(len(parts)), key=lambda index: -parts[index].itemsize):
        part = parts[index]
        views[index] = packed[begin : begin + part.nbytes].view(part.dtype).view(part.shape)
        begin += part.nbytes
    return [views[index] for index in range(len(parts))]
