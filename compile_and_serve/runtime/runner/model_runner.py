"""`ModelRunner`: prepares a step's inputs, runs the model on them, samples.

Shape legend: T tokens of the step (with padding), S sequences, L rows of logits, V vocabulary, R batch slots.

`launch` never waits for the device: a decode takes its input token from the device, where the step before left it.
`PendingStep.result` waits. At most one step may be launched before the result of the one before it is taken. On the
CPU `launch` computes at once. A step that runs ahead of one with drafts waits for its tokens where no graphs can do without them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from compile_and_serve.compiler.cudagraphs.graph_runners import GraphRunners
from compile_and_serve.compiler.cudagraphs.runner import CudaGraphRunner, StepOf, StepResult
from compile_and_serve.compiler.cudagraphs.work_graphs import Work, WorkGraphs
from compile_and_serve.compiler.model import Outputs
from compile_and_serve.custom_ops.attention.attention import AttentionBackend
from compile_and_serve.custom_ops.step import LOGITS, Step, TokenBatch
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.connector.page_memory import PageMemory
from compile_and_serve.runtime.drafting.compiled_drafter import CompiledDrafter
from compile_and_serve.runtime.drafting.device_drafts import DeviceDrafts, DraftSetup, TargetStep
from compile_and_serve.runtime.drafting.method import method_of
from compile_and_serve.runtime.runner.alignment import AlignmentWeights
from compile_and_serve.runtime.runner.base_batch import BatchLayout, HeldRequest
from compile_and_serve.runtime.runner.base_runner import BaseRunner, StepRunner
from compile_and_serve.runtime.runner.compile_models import allocate_side_state
from compile_and_serve.runtime.runner.device import num_cores
from compile_and_serve.runtime.runner.drafted_sequences import DraftedSequences
from compile_and_serve.runtime.runner.input_batch import InputBatch
from compile_and_serve.runtime.runner.pending_step import PendingStep, PromptResult
from compile_and_serve.runtime.runner.read_back import ReadBack
from compile_and_serve.runtime.runner.step_buffers import StepBuffers
from compile_and_serve.runtime.sampling.decode_step import DecodeStep, advances_on_device, begin_step, end_step
from compile_and_serve.runtime.sampling.logprobs import RowLogprobs, row_logprobs
from compile_and_serve.runtime.sampling.ops import SAMPLING_FIELDS
from compile_and_serve.runtime.sampling.sampler import Sampler, SamplingPlan
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.runtime.scheduler.step_messages import SchedulerOutput, WorkerStats
from compile_and_serve.runtime.structured.compiler import GrammarCompiler
from compile_and_serve.runtime.structured.masks import GrammarSequence, MaskedRows, TokenMasks
from compile_and_serve.runtime.text.load_tokenizer import load_model_tokenizer

logger = logging.getLogger(__name__)

NOT_TAKEN_IN = "The engine failed on this request's sampling options; its log has the details."


class ModelRunner(BaseRunner):
    """Runs the steps of a model that generates.

    captures_due: steps after which the capture of a graph was due, since the start. steps_on_device: those whose inputs the device made of
    the step before's, since the start.
    """

    batch_type = InputBatch
    batch: InputBatch

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
        drafted_steps: CudaGraphRunner | None = None,
        drafter: CompiledDrafter | None = None,
        drafter_graphs: WorkGraphs | None = None,
        **options: Any,
    ) -> None:
        """drafted_steps: runs the steps whose sequences all have the same number of drafts; None: they are not padded to it. drafter: makes
        these. drafter_graphs: where it is captured. options: and the others, of `BaseRunner`.
        """
        self._config = config
        self._drafted_steps = drafted_steps
        self._drafted_graph_steps: list[DecodeStep] = []  # graphs read and write tensors that only these steps hold
        self._drafted_len = 1 + (0 if config.speculative is None else config.speculative.num_speculative_tokens)
        # Decodes of one step that have a graph with drafts.
        self._max_drafted_seqs = 0 if drafted_steps is None else drafted_steps.max_padded_size // self._drafted_len
        super().__init__(
            config,
            spec,
            steps,
            backends,
            device,
            dtype,
            num_pages,
            other_steps=() if drafted_steps is None else (drafted_steps,),
            max_drafts=self._drafted_len - 1,
            max_drafted_rows=0 if config.speculative is None else config.max_drafted_rows,
            max_padded_drafts=self._max_drafted_seqs,
            resumes=config.mesh.pipe == 1,  # with stages, a token of the slot's last sequence may still be on its way
            **options,
        )
        self.captures_due = self.steps_on_device = 0
        self.drafter: DeviceDrafts | None = None
        speculative, platform, num_slots = config.speculative, self.platform, self.batch.num_slots
        method = None if speculative is None else method_of(speculative)
        if speculative is not None and method is not None and method.drafts_on_device(is_asynchronous=platform.is_asynchronous):
            setup = DraftSetup(
                config=speculative,
                batch=self.batch,
                device=device,
                max_len=self.max_model_len,
                num_pages=num_pages,
                compiled=drafter,
                allocate_state=lambda compiled: allocate_side_state(compiled, self.layout.tokens_per_page, num_pages, device),
                graphs=drafter_graphs,
            )
            self.drafter = self._new_drafter(setup)
        self._acceptance_rate = None if config.speculative is None else config.speculative.synthetic_acceptance_rate

        self.sampler = Sampler(vocab_size=spec.vocab_size, num_slots=num_slots, device=device, logprobs_mode=config.model.logprobs_mode)
        self.drafted = DraftedSequences(
            self.batch, self.sampler, spec.inputs, self.drafter, drafted_steps, self._drafted_len, self._acceptance_rate, device
        )
        self._alignment = AlignmentWeights.of(spec, self.state, self.batch.tables)
        self._advances_on_device = advances_on_device(spec.inputs)
        self.grammars = GrammarCompiler(lambda: load_model_tokenizer(config.model), spec.vocab_size)
        self._sequences: dict[int, GrammarSequence] = {}  # of structured output, by slot
        self._masks: TokenMasks | None = None
        self._structured_step: PendingStep | None = None  # the last one with structured output
        self._plan: SamplingPlan | None = None
        self._plan_version = -1
        self._sampled_inputs = [one.name for one in spec.inputs if one.advance == "sampled"]
        self._mask_seconds: dict[str, float] = {}  # of this step
        self._errors: dict[str, str] = {}  # of the requests that this step could not take in
        self._is_alone = config.mesh.size == 1
        self._padded_as: tuple[int, bool, bool] | None = None  # of the last step's shape
        self._shares_memory = platform.shares_host_memory
        self._read_back = None if self._shares_memory else ReadBack(platform, self.batch.max_sampled)

    def launch(self, scheduled: SchedulerOutput) -> PendingStep:
        batch, sampler, shape = self.batch, self.sampler, scheduled.shape
        self._update_requests(scheduled)
        padded_as = None if shape is None else (shape.tokens, shape.is_decode, shape.is_apart)
        if padded_as != self._padded_as:
            self._padded_as = padded_as
            batch.forget_advanced()  # the step may be padded to another size
        if self.stages is not None and self.drafter is not None and scheduled.drafts:
            self.stages.send_back(self.drafter.drafts)
        plan = self._plan
        if plan is None or plan.valid_steps <= 0:
            batch.forget_advanced()  # what it is sampled with is new
        layout, buffers, tokens = batch.prepare(scheduled, is_ahead=self.drafted.runs_ahead)
        structured = self._structured_rows(layout) if self._sequences else []
        if layout.has_drafts:
            self.drafted.laid_out(scheduled.step, layout, buffers)
        is_valid = plan is not None and self._plan_version == layout.version and plan.valid_steps > 0
        if plan is None or not is_valid or (layout.has_drafts and plan.logits is not None):  # which reads the drafts
            plan = self._plan = self._sampling_plan(layout)
            self._plan_version = layout.version
        if tokens is None:
            result = self._run_again(layout)
        else:
            for name, values in sampler.inputs(plan).items():
                buffers.host[name][: len(values)] = values
            is_apart = bool(structured) or (shape is not None and shape.is_apart)
            result = self._run(layout, buffers, tokens, with_sampling=not is_apart, shape=shape)
        logits_LV = result.outputs[LOGITS]
        num_sampled = sum(layout.sampled_counts) if layout.sampled_counts else len(layout.sampled_ids)
        if num_sampled == 0:
            prompts = self._prompt_results(layout, result.outputs)
            pending = self._pending(scheduled.step, layout, None, None, None, prompts)
            self._follow(scheduled, layout, result, None)
            return pending
        logits_SV = logits_LV if logits_LV.shape[0] == num_sampled else logits_LV[:num_sampled]
        drawn = None
        if result.sampled is not None:
            drawn = result.sampled[0][:num_sampled], result.sampled[1][:num_sampled]
            if self._advances_on_device and not layout.has_drafts:
                batch.will_advance_on_device()
        assert drawn is not None or not self.drafted.runs_ahead, "a step that runs ahead ran without its graph"
        self.captures_due += result.is_capture_due
        exclude = self._fill_masks(layout, structured, is_timed=scheduled.times_masks) if structured else None
        sampled = sampler.sample(logits_SV, plan, buffers.device, drawn, exclude)
        if drawn is not None and sampled.tokens_S is drawn[0]:
            pass  # they are the last tokens already
        elif layout.has_drafts:
            pass  # the host says which once the step is over
        elif self._shares_memory:
            batch.host_last_tokens[layout.sampled_slots] = sampled.tokens_S.numpy()
        else:
            batch.last_tokens.index_copy_(0, buffers.device["sampled_slots"][:num_sampled], sampled.tokens_S)
        if self.stages is not None and not layout.has_drafts:  # of those the host tells all stages
            self.stages.send_back(sampled.tokens_S)
        prompts = self._prompt_results(layout, result.outputs) if layout.prompt_rows else []
        pending = self._pending(scheduled.step, layout, sampled.tokens_S, sampled.best_S, sampled.logprobs, prompts)
        if layout.has_drafts:
            self.drafted.launched(pending, sampled_in_graph=drawn is not None and sampled.tokens_S is drawn[0])
        self._follow(scheduled, layout, result, sampled.tokens_S)  # the step's result does not wait for it
        if structured:
            pending.mask_seconds, self._mask_seconds = self._mask_seconds, {}
            pending.follow_with([(index, rows.sequence) for index, rows in structured])
            self._structured_step = pending
        return pending

    def run_step(self, step: Step, *, with_sampling: bool) -> None:
        """Run a step of no requests in the place of one of theirs."""
        self._steps_of_layout = self.plain_steps
        self._last_step, self._padded_as = None, None
        self.batch.forget_advanced()
        self.padded_tokens += step.padded_tokens
        result = self._compute(step, with_sampling=with_sampling)
        self.captures_due += result.is_capture_due

    def _new_drafter(self, setup: DraftSetup) -> DeviceDrafts:
        method = method_of(setup.config).device
        assert method is not None
        return method()(setup)

    def _follow(self, scheduled: SchedulerOutput, layout: BatchLayout, result: StepResult, tokens_S: torch.Tensor | None) -> None:
        if self.drafter is not None:
            assert self._last_step is not None
            target = TargetStep(self._last_step, layout, result.outputs, tokens_S)
            self.drafter.follow(target, keeps_state_only=scheduled.is_drafting_off)

    def drafted_step(self, size: int) -> DecodeStep:
        """As `decode_step`, where each sequence has the most draft tokens."""
        step = self.decode_step(size, self._drafted_len)
        for name in self.backends:
            step.metadata[name].add_rows(self._drafted_len)
        self._drafted_graph_steps.append(step)
        return step

    def decode_step(self, size: int, query_len: int = 1) -> DecodeStep:
        """A step of `size` decodes in the persistent buffers, which are filled with padding sequences: what a graph is captured on.
        query_len: tokens of each.
        """
        batch, buffers = self.batch, self.batch.decode_buffers
        batch.forget_advanced()
        batch.lay_padding()
        buffers.rotate()
        buffers.needs(-1)
        q = query_len
        buffers.pad_sequences(0, size, q, batch.num_slots)
        empty = np.empty(0, dtype=np.int64)
        none = TokenBatch(token_ids=empty, positions=empty, query_start_loc=np.zeros(1, dtype=np.int32), row_indices=empty)
        buffers.fill(none, size * q, size * q)
        buffers.upload()
        step = self._step_in(
            buffers,
            size * q,
            size,
            size * q,
            num_tokens=size * q,
            num_seqs=size,
            max_query_len=q,
            max_seq_len=self.max_model_len,
            uses_optional=True,
        )
        device = buffers.device
        return DecodeStep(
            inputs=step.inputs,
            state=step.state,
            metadata=step.metadata,
            num_tokens=size * q,
            num_seqs=size,
            padded_tokens=size * q,
            padded_seqs=size,
            num_rows=size * q,
            max_query_len=q,
            declared=self.spec.inputs,
            sampling=tuple(device[name][: size * q] for name in SAMPLING_FIELDS),
            slots=device["slots"][:size],
            last_tokens=batch.last_tokens,
            has_run=device["has_run"][:size],
            seq_lens=device["seq_lens"][:size],
            block_sizes=batch.tokens_per_page,
            num_new_tokens=batch.num_new_tokens,
            drafts=None if self.drafter is None else self.drafter.drafts,
            verdicts=device["verdicts"][: size * q],
        )

    def run_dummy(self, step: Step) -> Outputs:
        outputs = super().run_dummy(step)
        if self.drafter is not None:
            self.drafter.follow(TargetStep(step, None, outputs, None))
        return outputs

    def compile_output_kernels(self, dtype: torch.dtype) -> None:
        if not self.platform.runs_triton_kernels:
            return
        padding = self.decode_step(1)
        begin_step(padding)
        end_step({LOGITS: torch.zeros(1, self.sampler.vocab_size, dtype=dtype, device=self.device)}, padding)
        self.sampler.compile_kernels(dtype)

    def bind(self, graphs: GraphRunners, prompt_step: StepOf) -> None:
        encoder_step = None if self.encoder is None else self.encoder.dummy_step
        graphs.bind(self.decode_step, prompt_step, self.drafted_step, self.drafter_work, encoder_step)

    def page_memory(self) -> PageMemory:
        memory = super().page_memory()
        added = {} if self.drafter is None else self.drafter.page_parts()
        if not added:
            return memory
        names = [group.name for group in self.spec.state]
        return PageMemory(
            parts=[[*own, *added.get(name, [])] for name, own in zip(names, memory.parts, strict=True)],
            pieces=[None if name in added else own for name, own in zip(names, memory.pieces, strict=True)],
        )

    def stats(self) -> WorkerStats:
        return WorkerStats(
            padded_tokens=self.padded_tokens,
            captures_due=self.captures_due,
            steps_on_device=self.steps_on_device,
            stage_wait_seconds=0.0 if self.stages is None else self.stages.wait_seconds(),
            prompt_steps=self._prompt_steps(),
        )

    def drafter_work(self, size: int) -> Iterator[Work]:
        """What the drafter does for `size` decodes: what graphs are captured of."""
        assert self.drafter is not None
        return self.drafter.work(size, self.decode_step, self.drafted_step if size <= self._max_drafted_seqs else None)

    def _update_requests(self, scheduled: SchedulerOutput) -> None:
        batch, sampler = self.batch, self.sampler
        for request_id in scheduled.finished_request_ids:
            gone = batch.remove(request_id)
            if gone is not None:
                sampler.remove(gone.slot)
                self._sequences.pop(gone.slot, None)
                self.drafted.forget(gone.slot)
        batch.settle()
        for data in scheduled.new_requests:
            request = batch.add(data)
            if self.drafter is not None:
                self.drafter.add(request.slot, request.token_ids, request.params, data.num_prompt_tokens)
            tokens, num_prompt = request.token_ids, data.num_prompt_tokens
            params, structured = request.params, request.params.structured_outputs
            try:
                if structured is not None:
                    self._add_sequence(request, data.stop_token_ids, tokens[num_prompt:])
                    if not structured.is_free:
                        params = msgspec.structs.replace(params, min_tokens=0)  # which the masks see to
                sampler.add(request.slot, params, data.stop_token_ids, tokens[:num_prompt], tokens[num_prompt:])
            except Exception:
                if not self._is_alone:  # the other ranks may have taken it in, and would go on with other tokens
                    raise
                logger.exception("Request %s could not be taken in.", data.request_id)
                self._errors[data.request_id] = NOT_TAKEN_IN
                # Until it is gone:
                sampler.add(request.slot, SamplingParams(temperature=0.0), [], tokens[:0], tokens[:0])
        for cached in scheduled.cached_requests:
            batch.append_blocks(cached.request_id, cached.new_block_ids)
        if scheduled.encodes:
            self._encode(scheduled.encodes)
        self.drafted.take_in(scheduled, self._sequences)

    def _add_sequence(self, request: HeldRequest, stop_ids: Sequence[int], output: np.ndarray) -> None:
        structured = request.params.structured_outputs
        assert structured is not None
        assert structured.compiled is not None
        grammar = self.grammars.compile(structured.compiled).result()  # compiled before the request was scheduled
        sequence = GrammarSequence(
            grammar,
            structured.begins_after,
            request.params.min_tokens,
            stop_ids,
            thinking_token_budget=structured.thinking_token_budget,
            thinking_starts=structured.thinking_starts,
            is_free=structured.is_free,
            may_end_before=structured.may_end_before,
        )
        sequence.advance(output.tolist())
        self._sequences[request.slot] = sequence

    def _structured_rows(self, layout: BatchLayout) -> list[tuple[int, MaskedRows]]:
        """The rows of the sequences with structured output, each with its sequence's number among those that sample."""
        found, first = [], 0
        for index, slot in enumerate(layout.sampled_slots.tolist()):
            sequence = self._sequences.get(slot)
            drafts = layout.sampled_drafts[index].tolist() if layout.sampled_counts else []
            if sequence is not None:
                known = [token for token in drafts if token >= 0]  # the others are padding
                found.append((index, MaskedRows(first_row=first, sequence=sequence, drafts=known)))
            first += 1 + len(drafts)
        return found

    def _fill_masks(
        self, layout: BatchLayout, structured: list[tuple[int, MaskedRows]], *, is_timed: bool
    ) -> Callable[[torch.Tensor], None] | None:
        """Compute the masks on the host, while the device runs the model; what applies them. Waits for the tokens of the step before."""
        if self._structured_step is not None:
            self._structured_step.advance_grammars()
            self._structured_step = None
        masks = self._masks
        if masks is None:
            num_rows = self.batch.max_sampled
            masks = self._masks = TokenMasks(num_rows, self.grammars.num_words, self.device, num_cores())
        count = masks.fill([rows for _, rows in structured], is_timed=is_timed)
        for index, rows in structured:
            if rows.first_row in masks.seconds:
                self._mask_seconds[layout.sampled_ids[index]] = masks.seconds[rows.first_row]
            if rows.sequence.error is not None:
                self._errors[layout.sampled_ids[index]] = rows.sequence.error
        return (lambda logits_SV: masks.apply(logits_SV, count)) if count else None

    def _steps_for(self, layout: BatchLayout) -> StepRunner:
        is_drafted = layout.is_decode_only and layout.has_drafts and not layout.uses_optional
        return (self._drafted_steps if is_drafted else None) or super()._steps_for(layout)

    def _fill_from_device(self, step: Step, layout: BatchLayout, buffers: StepBuffers) -> None:
        if not self._shares_memory and layout.num_decodes and not layout.has_drafts:
            slots = buffers.device["slots"][: layout.num_decodes]
            for name in self._sampled_inputs:
                torch.index_select(self.batch.last_tokens, 0, slots, out=step.inputs[name][: layout.num_decodes])
        if self.drafted.are_on_device and layout.has_drafts and not self.drafted.runs_ahead:
            assert self.drafter is not None
            self.drafter.put_drafts(step, layout)
        self.steps_on_device += self.drafted.runs_ahead

    def _run_again(self, layout: BatchLayout) -> StepResult:
        """The step before once more, on the inputs that the device makes from what it left."""
        step = self._last_step
        assert step is not None
        for metadata in (step.metadata[name] for name in self.batch.tables):
            metadata.max_seq_len = layout.max_seq_len
            metadata.seq_lens_cpu = None  # only the device knows them, and nobody else asks
        self.padded_tokens += step.padded_tokens - layout.num_tokens
        self.steps_on_device += 1
        for table in self.batch.tables.values():
            table.commit()
        result = self._compute(step)
        assert result.sampled is not None, "a step that had a graph ran without it"
        return result

    def _sampling_plan(self, layout: BatchLayout) -> SamplingPlan:
        slots = layout.sampled_slots.tolist()
        if not layout.sampled_counts:
            return self.sampler.plan(slots)
        counts = layout.sampled_counts
        rows = [(slot, i) for slot, count in zip(slots, counts, strict=True) for i in range(count)]
        drafts = layout.sampled_drafts
        before = np.full((len(rows), max(map(len, drafts))), -1, dtype=np.int64)
        first = 0
        for draft, count in zip(drafts, counts, strict=True):
            for i in range(1, count):
                before[first + i, :i] = draft[:i]
            first += count
        return self.sampler.plan([slot for slot, _ in rows], [offset for _, offset in rows], before)

    def _prompt_results(self, layout: BatchLayout, outputs: Outputs) -> list[PromptResult]:
        results = []
        for rows in layout.prompt_rows:
            targets = torch.from_numpy(rows.targets).to(self.device, non_blocking=True)
            place = slice(rows.begin, rows.begin + len(rows.targets))
            logprobs = row_logprobs(outputs[LOGITS][place], targets, rows.count).to_host()
            attention = None if self._alignment is None else self._alignment.of_prompt(rows.request, outputs, place)
            results.append(PromptResult(rows=rows, logprobs=logprobs, attention=attention))
        return results

    def _pending(
        self,
        step: int,
        layout: BatchLayout,
        tokens_S: torch.Tensor | None,
        best_S: torch.Tensor | None,
        logprobs: RowLogprobs | None,
        prompts: list[PromptResult],
    ) -> PendingStep:
        if logprobs is not None:
            logprobs = logprobs.to_host()
        if tokens_S is None or best_S is None:
            tokens, best = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
        elif self._read_back is None:
            tokens, best = tokens_S.numpy(), best_S.numpy()
        else:
            tokens, best = self._read_back.take(tokens_S, best_S)
        drafts = None
        if self.drafted.are_on_device and layout.has_drafts:
            assert self.drafter is not None
            drafts = self.drafter.download().numpy()
        event = self.platform.record_event()
        errors, self._errors = self._errors, {}
        return PendingStep(step, layout, tokens, best, self._plan, logprobs, prompts, event, errors, self._acceptance_rate, drafts)
