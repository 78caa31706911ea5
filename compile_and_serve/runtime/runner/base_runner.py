"""`BaseRunner`: what a step of any model needs. It fills the step's inputs and runs the model, or replays its graphs.

A kind of model adds a subclass: its batch says which rows of output the requests need, its `launch` what is made of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from compile_and_serve.compiler.cudagraphs.graph_runners import GraphRunners
from compile_and_serve.compiler.cudagraphs.runner import StepOf, StepResult
from compile_and_serve.compiler.model import Outputs, StepModel
from compile_and_serve.custom_ops.attention.attention import AttentionBackend
from compile_and_serve.custom_ops.encoder_rows import ENCODER_ROW, row_numbers
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.platforms.protocol import TimedEvent
from compile_and_serve.custom_ops.step import Step, TokenBatch
from compile_and_serve.custom_ops.step_data import StepArray
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.connector.page_memory import PageMemory
from compile_and_serve.runtime.ledger.records import GraphKind, StepRan
from compile_and_serve.runtime.runner.base_batch import BaseBatch, BatchLayout
from compile_and_serve.runtime.runner.media_encoder import RowEncoder
from compile_and_serve.runtime.runner.pending_step import PendingStep
from compile_and_serve.runtime.runner.stages import StageLink
from compile_and_serve.runtime.runner.state_memory import PageLayout, allocate_state, page_parts, page_pieces
from compile_and_serve.runtime.runner.step_buffers import StepBuffers
from compile_and_serve.runtime.runner.step_shapes import common_size, take_shape
from compile_and_serve.runtime.scheduler.step_messages import EncodeItem, SchedulerOutput, StepShape, WorkerStats


class StepRunner(Protocol):
    """Runs steps of a model: `PlainRunner` or `CudaGraphRunner`."""

    @property
    def model(self) -> StepModel: ...

    @property
    def max_padded_size(self) -> int:
        """The largest number of tokens that `padded_size` answers; 0 where it pads nothing."""
        ...

    def padded_size(self, num_tokens: int, num_seqs: int, max_query_len: int) -> int | None:
        """The number of tokens to pad a step to; None: no padding. A decode step is padded with whole sequences of length 0."""
        ...

    def run(self, step: Step, *, with_sampling: bool = True) -> StepResult: ...


class BaseRunner(ABC):
    """Holds the running requests' state beside the model; the scheduler's counterpart on the device's side.

    layout: of the pages. state: tensors by name. padded_tokens: since the start.
    """

    batch_type: type[BaseBatch]
    batch: BaseBatch

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        steps: StepRunner,
        backends: Mapping[str, AttentionBackend],
        device: torch.device,
        dtype: torch.dtype,
        num_pages: int,
        *,
        max_model_len: int | None = None,
        plain_steps: StepRunner | None = None,
        other_steps: Sequence[StepRunner] = (),
        stages: StageLink | None = None,
        encoder: RowEncoder | None = None,
        **batch_options: Any,
    ) -> None:
        """spec: the rank's part. steps: runs any step. backends: by attention group. dtype: of the KV cache. max_model_len: None is the
        config's, or the model's. plain_steps: runs the steps that use no optional input; None: `steps` does. other_steps: of the subclass,
        as `batch_options` are those of its batch. stages: the other stages of the model; None: there are none. encoder: of
        media; None: the model has none.
        """
        self.spec = spec
        self.steps = steps
        self.plain_steps = plain_steps or steps
        self.backends = dict(backends)
        self.stages = stages
        self.encoder = encoder
        self.device = device
        self.platform = platform_of(device)
        self.max_model_len = max_model_len or config.model.max_model_len or spec.max_model_len
        num_slots = config.scheduler.max_num_seqs
        self.max_num_tokens = max(config.scheduler.token_budget, num_slots)
        padded_sizes = [one.max_padded_size for one in (steps, self.plain_steps, *other_steps)]
        if config.mesh.data > 1:  # a step of decodes is padded to the longest one of any group
            padded_sizes.append(self.max_num_tokens)
        self.layout = PageLayout.of(spec.paged_state, config.cache.tokens_per_block, dtype)
        self.state = allocate_state(spec.paged_state, self.layout, num_pages, device=device)
        if encoder is not None:
            encoder.share(self.state)
        self.padded_tokens = 0
        self.batch = self.batch_type(
            spec.inputs,
            spec.paged_state,
            self.layout,
            num_pages,
            num_slots=num_slots,
            max_num_tokens=self.max_num_tokens,
            max_padded_size=max(padded_sizes),
            max_model_len=self.max_model_len,
            device=device,
            **batch_options,
        )
        self._steps_of_layout = steps  # what runs the batch's present layout
        self._last_step: Step | None = None
        self._last_result: tuple[GraphKind, str] = ("plain", "")
        self._padded_before = 0
        self._encoding: tuple[TimedEvent, TimedEvent] | None = None
        self._last_key = (-1, 0, 0, 0)  # of the last step: its layout's version, its numbers of tokens and of rows, `max_query_len`

    @abstractmethod
    def launch(self, scheduled: SchedulerOutput) -> PendingStep:
        """Take in what the scheduler says and start the step."""

    def run_dummy(self, step: Step) -> Outputs:
        """Run a step of no requests on each of the model's plans."""
        for steps in dict.fromkeys((self.steps, self.plain_steps)):
            outputs = steps.run(step).outputs
            if self.stages is not None:
                self.stages.note_size(outputs, step, steps.model.plan)  # type: ignore[attr-defined]
        return outputs

    def compile_output_kernels(self, dtype: torch.dtype) -> None:  # noqa: B027 (torch may do all)
        """Compile the Triton kernels that read the model's outputs. dtype: of the outputs."""

    def bind(self, graphs: GraphRunners, prompt_step: StepOf) -> None:
        """Let graphs be captured over this runner's buffers. prompt_step: see `CudaGraphRunner.bind`."""
        graphs.bind(None, prompt_step)

    def page_memory(self) -> PageMemory:
        """Where the content of the pages lies."""
        groups = self.spec.state
        return PageMemory(parts=page_parts(groups, self.layout, self.state), pieces=page_pieces(groups, self.layout))

    def differences(self, pairs: Sequence[tuple[int, int, int]]) -> list[float]:
        """How far apart the contents of (group, page, other page) are, for the norm of the first: the most of the group's tensors that hold
        floating-point numbers. Waits for the device.
        """
        found = []
        for number, one, other in pairs:
            tensors = [self.state[name] for name in self.layout.groups[self.spec.state[number].name].tensors]
            contents = [(tensor[one].float(), tensor[other].float()) for tensor in tensors if tensor.is_floating_point()]
            apart = [(first - second).norm() / first.norm().clamp_min(1e-6) for first, second in contents]
            found.append(float(torch.stack(apart).max()) if apart else 0.0)
        return found

    def stats(self) -> WorkerStats:
        """Counters since the start."""
        return WorkerStats(padded_tokens=self.padded_tokens, prompt_steps=self._prompt_steps())

    def _prompt_steps(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for backend in self.backends.values():  # groups count the same steps
            found = max(found, dict(backend.prompt_steps), key=lambda steps: sum(steps.values()))
        return found

    def take_encoding(self) -> tuple[TimedEvent, TimedEvent] | None:
        """Before and after the media that the step that was launched last encoded; None: it encoded none."""
        encoding, self._encoding = self._encoding, None
        return encoding

    def take_ran(self) -> StepRan:
        """How the step that was launched last ran, but for its encoder."""
        padded, self._padded_before = self.padded_tokens - self._padded_before, self.padded_tokens
        kind, miss = self._last_result
        if miss == "not_captured" and self._steps_of_layout is self.steps is not self.plain_steps:
            miss = "optional_input"  # the plan that takes optional inputs has graphs of its own
        return StepRan(kind, miss, padded)

    def _encode(self, items: Sequence[EncodeItem]) -> None:
        """Compute those rows that are not there yet, and let the requests' tokens read their items' rows from now on."""
        assert self.encoder is not None
        new = [one for one in items if one.arrays]
        if new:
            before = self.platform.record_timed_event()
            self.encoder.encode(new)
            self._encoding = before, self.platform.record_timed_event()
        for one in items if self.encoder.has_region else ():
            rows = StepArray.of(row_numbers(one.page_ids, one.length), start=one.position)
            self.batch.add_array(one.request_id, ENCODER_ROW.name, rows)

    def _run(
        self, layout: BatchLayout, buffers: StepBuffers, tokens: TokenBatch, *, with_sampling: bool = True, shape: StepShape | None = None
    ) -> StepResult:
        """Run a step that `batch.prepare` laid out. with_sampling: see `CudaGraphRunner.run`. shape: of `SchedulerOutput`."""
        batch = self.batch
        num_tokens, num_seqs = layout.num_tokens, len(layout.slots_S)
        if layout.uses_optional is None:  # the same for all steps of these sequences
            layout.uses_optional = buffers.uses_optional(tokens)
            self._steps_of_layout = self._steps_for(layout)
        steps = self._steps_of_layout
        q, max_query_len = layout.query_len, layout.max_query_len
        seqs, rows = num_seqs, layout.num_logits
        if shape is None:
            # Prompts of a single token make no step of decodes.
            size = steps.padded_size(num_tokens, num_seqs, max_query_len if layout.is_decode_only else max(2, max_query_len)) or num_tokens
        else:
            size, rows = common_size(steps, shape), shape.rows
            max_query_len = max_query_len if shape.is_decode else max(2, max_query_len)  # or it might have a graph where others have none
        if shape is not None and not shape.is_decode:
            buffers.pad_slot_mapping(num_tokens, size)
        elif layout.is_decode_only and layout.num_logits == num_tokens and size <= batch.num_slots * q and size % q == 0:
            seqs, rows = size // q, size
            if seqs > num_seqs:
                buffers.pad_sequences(num_seqs, seqs, q, batch.num_slots)
        elif size > num_tokens:
            buffers.pad_slot_mapping(num_tokens, size)
        self.padded_tokens += size - num_tokens
        buffers.fill(tokens, size, rows, uses_optional=layout.uses_optional)
        buffers.upload()
        for table in batch.tables.values():
            table.commit()
        key = (layout.version, size, rows, max_query_len)
        if self._last_step is not None and self._last_key == key:
            step = self._last_step  # the same sequences in the same memory: only their lengths are new
            buffers.update(step, layout.max_seq_len)
        else:
            step = self._step_in(
                buffers,
                size,
                seqs,
                rows,
                num_tokens=num_tokens,
                num_seqs=num_seqs,
                max_query_len=max_query_len,
                max_seq_len=layout.max_seq_len,
                uses_optional=layout.uses_optional,
            )
            self._last_step, self._last_key = step, key
        if shape is not None:
            take_shape(step, shape)
        self._fill_from_device(step, layout, buffers)
        for name, backend in self.backends.items():
            backend.plan(step.metadata[name])
        return self._compute(step, with_sampling=with_sampling)

    def _compute(self, step: Step, *, with_sampling: bool = True) -> StepResult:
        """Run a step on what the stage before sends, and send the next stage what comes out."""
        stages, steps = self.stages, self._steps_of_layout
        if stages is not None:
            plan = steps.model.plan  # type: ignore[attr-defined]
            stages.receive(step, plan)
        result = steps.run(step, with_sampling=with_sampling)
        self._last_result = result.kind, result.miss
        if stages is not None:
            stages.send(result.outputs, step, plan)
        return result

    def _steps_for(self, layout: BatchLayout) -> StepRunner:
        return self.steps if layout.uses_optional else self.plain_steps

    def _fill_from_device(self, step: Step, layout: BatchLayout, buffers: StepBuffers) -> None:  # noqa: B027 (the host may know all)
        """Write what only the device knows into the step's inputs."""

    def _step_in(self, buffers: StepBuffers, size: int, seqs: int, rows: int, **facts: Any) -> Step:
        return buffers.step(size, seqs, rows, state=self.state, tables=self.batch.tables, backends=self.backends, **facts)
