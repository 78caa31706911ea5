"""Prepares a step's inputs, runs the model on them, samples.

Shape legend: T tokens of the step (with padding), S sequences, L rows of logits, V vocabulary, N cache blocks, P
tokens a block, K key/value heads, E head size.

`launch` never waits for the device: a decode's input token is taken from the device, where the step before left it.
`PendingStep.result` waits. At most one step may be launched before the result of the one before it is taken. On the
CPU `launch` computes at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from compile_and_serve.compiler.cudagraphs.runner import DecodeRows, StepInputs
from compile_and_serve.custom_ops.attention.attention import AttentionBackend, AttentionMetadata, attention_metadata
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.runner.decode_step import begin_step, end_step
from compile_and_serve.runtime.runner.input_batch import BatchLayout, InputBatch
from compile_and_serve.runtime.runner.kv_cache import allocate_kv_cache
from compile_and_serve.runtime.runner.pending_step import PendingStep, PromptResult
from compile_and_serve.runtime.runner.staged_arrays import StagedArrays
from compile_and_serve.runtime.sampling.logprobs import RowLogprobs, row_logprobs
from compile_and_serve.runtime.sampling.ops import SAMPLING_FIELDS
from compile_and_serve.runtime.sampling.sampler import Sampler, SamplingPlan
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.runtime.scheduler.step_messages import SchedulerOutput

logger = logging.getLogger(__name__)

NOT_TAKEN_IN = "The engine failed on this request's sampling options; its log has the details."


class RunnableModel(Protocol):
    """A compiled model as the runner sees it.

    It may have `tail`: what `decode_step.end_step` made of the logits of the call just made, or None; and `is_missed`: whether that
    call had no graph but may have one later. And it may have
    `padded_size(num_tokens, num_seqs, max_query_len) -> int | None`: the number of tokens to pad the step
    to (None: no padding), never more than its `max_padded_size`. Padding tokens have slot -1; a step of decodes is
    padded with whole sequences of length 0 and with rows of logits at index 0.
    """

    def __call__(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
        logits_indices: torch.Tensor,
    ) -> torch.Tensor:
        """int64 [T], int64 [T], one [N, 2, K, P, E] a layer, int64 [L] → logits [L, V]."""
        ...


class ModelRunner:
    """Holds the running requests' state beside the model; the scheduler's counterpart on the device's side."""

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        compiled: RunnableModel,
        backend: AttentionBackend,
        device: torch.device,
        dtype: torch.dtype,
        num_blocks: int,
        *,
        max_model_len: int | None = None,
    ) -> None:
        """dtype: of the KV cache. max_model_len: None is the config's, or the model's."""
        scheduler = config.scheduler
        block_size = config.cache.block_size
        self.compiled = compiled
        self.backend = backend
        self.device = device
        self.max_model_len = max_model_len or config.model.max_model_len or spec.max_model_len
        self.max_num_tokens = max(scheduler.token_budget, scheduler.max_num_seqs)
        self.kv_caches = allocate_kv_cache(spec.kv_cache_specs, num_blocks, block_size, dtype=dtype, device=device)
        self.padded_tokens = 0  # since the start
        self.decode_misses = 0  # steps of decodes for which the model had no graph, since the start
        self.steps_on_device = 0  # whose inputs the device made of the step before's, since the start
        self._padded_size: Callable[[int, int, int], int | None] | None = getattr(compiled, "padded_size", None)
        self.batch = InputBatch(
            num_slots=scheduler.max_num_seqs,
            max_num_tokens=self.max_num_tokens,
            max_padded_size=getattr(compiled, "max_padded_size", 0),
            max_model_len=self.max_model_len,
            block_size=block_size,
            device=device,
        )
        self.sampler = Sampler(vocab_size=spec.vocab_size, num_slots=scheduler.max_num_seqs, device=device)
        self._plan: SamplingPlan | None = None
        self._plan_version = -1
        self._last_inputs: StepInputs | None = None
        self._errors: dict[str, str] = {}  # of the requests that this step could not take in
        self._is_alone = config.num_ranks == 1
        self._is_cpu = device.type == "cpu"
        if not self._is_cpu:
            # Two steps may be in flight, and the result of a third may still be read.
            self._pinned = [
                (
                    torch.zeros(scheduler.max_num_seqs, dtype=torch.int64, pin_memory=True),
                    torch.zeros(scheduler.max_num_seqs, dtype=torch.float32, pin_memory=True),
                )
                for _ in range(3)
            ]
            self._num_launched = 0

    def launch(self, scheduled: SchedulerOutput) -> PendingStep:
        """Take in what the scheduler says and start the step."""
        batch, sampler = self.batch, self.sampler
        self._take_in(scheduled)
        plan = self._plan
        if plan is None or plan.valid_steps <= 0:
            batch.forget_advanced()  # what it is sampled with is new
        layout, arrays = batch.prepare(scheduled)
        if plan is None or self._plan_version != layout.version or plan.valid_steps <= 0:
            plan = self._plan = sampler.plan(layout.sampled_slots.tolist())
            self._plan_version = layout.version
        if layout.is_on_device:
            logits_LV = self._run_again(layout)
        else:
            for name, values in sampler.inputs(plan).items():
                arrays.host[name][: len(values)] = values
            logits_LV = self._run(layout, arrays)
        num_sampled = len(layout.sampled_ids)
        if num_sampled == 0:
            return self._pending(scheduled.step, layout, None, None, None, self._prompt_results(layout, logits_LV))
        logits_SV = logits_LV if logits_LV.shape[0] == num_sampled else logits_LV[:num_sampled]
        drawn = getattr(self.compiled, "tail", None)
        if drawn is not None:
            drawn = drawn[0][:num_sampled], drawn[1][:num_sampled]
            batch.will_advance_on_device()
        elif getattr(self.compiled, "is_missed", False):
            self.decode_misses += 1
        sampled = sampler.sample(logits_SV, plan, arrays.device, drawn)
        if drawn is not None and sampled.tokens_S is drawn[0]:
            pass  # they are the last tokens already
        elif self._is_cpu:
            batch.last_tokens.numpy()[layout.sampled_slots] = sampled.tokens_S.numpy()
        else:
            batch.last_tokens.index_copy_(0, arrays.device["sampled_slots"][:num_sampled], sampled.tokens_S)
        prompts = self._prompt_results(layout, logits_LV) if layout.prompt_rows else []
        return self._pending(scheduled.step, layout, sampled.tokens_S, sampled.best_S, sampled.logprobs, prompts)

    def decode_inputs(self, size: int) -> StepInputs:
        """The persistent arrays of a step of `size` decodes, filled with padding sequences: what a graph is captured
        on.
        """
        arrays, tables = self.batch.decode_arrays, self.batch.tables
        self.batch.forget_advanced()
        host = arrays.rotate()
        arrays.needs(-1)
        _pad_rows(host, 0, size)
        arrays.upload()
        device = arrays.device
        metadata = AttentionMetadata(
            backend=self.backend,
            query_start_loc=device["query_start_loc"][: size + 1],
            seq_lens=device["seq_lens"][:size],
            block_table=tables.batch_table(size),
            slot_mapping=device["slot_mapping"][:size],
            num_seqs=size,
            num_tokens=size,
            max_query_len=1,
            max_seq_len=self.max_model_len,
            query_start_loc_cpu=host["query_start_loc"][: size + 1],
            seq_lens_cpu=host["seq_lens"][:size],
        )
        return StepInputs(
            input_ids=device["input_ids"][:size],
            positions=device["positions"][:size],
            kv_caches=self.kv_caches,
            logits_indices=device["logits_indices"][:size],
            metadata=metadata,
            rows=DecodeRows(
                sampling=tuple(device[name][:size] for name in SAMPLING_FIELDS),
                slots=device["slots"][:size],
                last_tokens=self.batch.last_tokens,
                has_run=device["has_run"][:size],
            ),
        )

    def warm_up(self, num_tokens: int, num_seqs: int) -> None:
        """Run the model on `made_up_step(num_tokens, num_seqs)` and sample nothing."""
        step = self.made_up_step(num_tokens, num_seqs)
        with attention_metadata(step.metadata):
            self.compiled(step.input_ids, step.positions, self.kv_caches, step.logits_indices)
        if not self._is_cpu:
            torch.cuda.synchronize(self.device)

    def made_up_step(self, num_tokens: int, num_seqs: int) -> StepInputs:
        """A step of `num_tokens` over `num_seqs` sequences, or as many more as no sequence is longer than the model allows, that writes
        no cache; planned already.
        """
        assert num_seqs <= num_tokens <= self.max_num_tokens
        num_seqs = max(num_seqs, -(-num_tokens // self.max_model_len))  # a row of the block table has no more columns
        counts = np.full(num_seqs, num_tokens // num_seqs, dtype=np.int64)
        counts[num_seqs - num_tokens % num_seqs :] += 1
        device = self.device
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        metadata = AttentionMetadata(
            backend=self.backend,
            query_start_loc=torch.from_numpy(starts).to(device),
            seq_lens=torch.from_numpy(counts.astype(np.int32)).to(device),
            block_table=torch.zeros(num_seqs, self.batch.tables.num_columns, dtype=torch.int32, device=device),
            slot_mapping=torch.full((num_tokens,), -1, dtype=torch.int64, device=device),
            num_seqs=num_seqs,
            num_tokens=num_tokens,
            max_query_len=int(counts.max()),
            max_seq_len=int(counts.max()),
            query_start_loc_cpu=starts,
            seq_lens_cpu=counts.astype(np.int32),
        )
        zeros_T = torch.zeros(num_tokens, dtype=torch.int64, device=device)
        indices_S = torch.from_numpy(starts[1:].astype(np.int64) - 1).to(device)
        self.backend.plan(metadata)
        return StepInputs(
            input_ids=zeros_T, positions=zeros_T, kv_caches=self.kv_caches, logits_indices=indices_S, metadata=metadata
        )

    def warm_up_sampler(self, dtype: torch.dtype) -> None:
        """Build the GPU's kernels around the model, sampling first of all, before a request waits for them (on the CPU there are none).
        dtype: of the logits.
        """
        if self._is_cpu:
            return
        padding = self.decode_inputs(1)
        begin_step(padding)
        end_step(torch.zeros(1, self.sampler.vocab_size, dtype=dtype, device=self.device), padding)
        for logits_dtype in {dtype, torch.float32}:
            logits_SV = torch.zeros(1, self.sampler.vocab_size, dtype=logits_dtype, device=self.device)
            for params in (SamplingParams(temperature=0.0), SamplingParams(top_k=2, top_p=0.5, seed=0)):
                token = np.zeros(1, dtype=np.int64)
                self.sampler.add(0, params, [], token, token)
                plan = self.sampler.plan([0])
                inputs = {n: torch.from_numpy(v).to(self.device) for n, v in self.sampler.inputs(plan).items()}
                self.sampler.sample(logits_SV, plan, inputs)
                self.sampler.remove(0)

    def _take_in(self, scheduled: SchedulerOutput) -> None:
        batch, sampler = self.batch, self.sampler
        for request_id in scheduled.finished_request_ids:
            gone = batch.remove(request_id)
            if gone is not None:
                sampler.remove(gone.slot)
        for data in scheduled.new_requests:
            request = batch.add(data)
            tokens, num_prompt = request.token_ids, data.num_prompt_tokens
            try:
                sampler.add(request.slot, request.params, data.stop_token_ids, tokens[:num_prompt], tokens[num_prompt:])
            except Exception:
                if not self._is_alone:  # the other ranks may have taken it in, and would go on with other tokens
                    raise
                logger.exception("Request %s could not be taken in.", data.request_id)
                self._errors[data.request_id] = NOT_TAKEN_IN
                # Until it is gone:
                sampler.add(request.slot, SamplingParams(temperature=0.0), [], tokens[:0], tokens[:0])
        for cached in scheduled.cached_requests:
            batch.append_blocks(cached.request_id, cached.new_block_ids[0])

    def _run(self, layout: BatchLayout, arrays: StagedArrays) -> torch.Tensor:
        batch, device = self.batch, arrays.device
        num_tokens, num_seqs, num_logits = layout.num_tokens, len(layout.slots_S), layout.num_logits
        size = None
        if self._padded_size is not None:
            size = self._padded_size(num_tokens, num_seqs, layout.max_query_len)
        rows = num_seqs
        if size is not None and size > num_tokens:
            self.padded_tokens += size - num_tokens
            rows, num_logits = _pad(layout, arrays.host, size)
        size = size or num_tokens
        num_decodes = layout.num_decodes
        input_ids_T = device["input_ids"][:size]
        if self._is_cpu:
            if num_decodes:
                last = batch.last_tokens.numpy()
                last.take(layout.slots_S[:num_decodes], out=arrays.host["input_ids"][:num_decodes], mode="clip")
        else:
            arrays.upload()
            if num_decodes:
                slots = device["slots"][:num_decodes]
                torch.index_select(batch.last_tokens, 0, slots, out=device["input_ids"][:num_decodes])
        batch.tables.commit()
        metadata = AttentionMetadata(
            backend=self.backend,
            query_start_loc=device["query_start_loc"][: rows + 1],
            seq_lens=device["seq_lens"][:rows],
            block_table=batch.tables.batch_table(rows),
            slot_mapping=device["slot_mapping"][:size],
            num_seqs=num_seqs,
            num_tokens=num_tokens,
            max_query_len=layout.max_query_len,
            max_seq_len=layout.max_seq_len,
            query_start_loc_cpu=arrays.host["query_start_loc"][: rows + 1],
            seq_lens_cpu=arrays.host["seq_lens"][:rows],
        )
        self.backend.plan(metadata)
        self._last_inputs = StepInputs(
            input_ids=input_ids_T,
            positions=device["positions"][:size],
            kv_caches=self.kv_caches,
            logits_indices=device["logits_indices"][:num_logits],
            metadata=metadata,
        )
        return self._call(self._last_inputs)

    def _run_again(self, layout: BatchLayout) -> torch.Tensor:
        """The step before once more, on the inputs that the device makes of what it left."""
        inputs = self._last_inputs
        assert inputs is not None
        inputs.metadata.max_seq_len = layout.max_seq_len
        inputs.metadata.seq_lens_cpu = None  # the device knows, nobody else asks
        self.padded_tokens += len(inputs.input_ids) - layout.num_tokens
        self.steps_on_device += 1
        self.batch.tables.commit()
        logits_LV = self._call(inputs)
        assert getattr(self.compiled, "tail", None) is not None, "a step that had a graph ran without it"
        return logits_LV

    def _call(self, inputs: StepInputs) -> torch.Tensor:
        with attention_metadata(inputs.metadata):
            return self.compiled(inputs.input_ids, inputs.positions, inputs.kv_caches, inputs.logits_indices)

    def _prompt_results(self, layout: BatchLayout, logits_LV: torch.Tensor) -> list[PromptResult]:
        results = []
        for rows in layout.prompt_rows:
            targets = torch.from_numpy(rows.targets).to(self.device, non_blocking=True)
            logits = logits_LV[rows.begin : rows.begin + len(rows.targets)]
            results.append(PromptResult(rows=rows, logprobs=row_logprobs(logits, targets, rows.count).to_host()))
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
        event = None
        if tokens_S is None or best_S is None:
            tokens, best = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
        elif self._is_cpu:
            tokens, best = tokens_S.numpy(), best_S.numpy()
        else:
            pinned_tokens, pinned_best = self._pinned[self._num_launched % len(self._pinned)]
            pinned_tokens[: len(tokens_S)].copy_(tokens_S, non_blocking=True)
            pinned_best[: len(tokens_S)].copy_(best_S, non_blocking=True)
            tokens, best = pinned_tokens.numpy()[: len(tokens_S)], pinned_best.numpy()[: len(tokens_S)]
        if not self._is_cpu:
            self._num_launched += 1
            event = torch.cuda.Event()
            event.record()
        errors, self._errors = self._errors, {}
        return PendingStep(step, layout.sampled_ids, tokens, best, self._plan, logprobs, prompts, event, errors)


def _pad(layout: BatchLayout, host: dict[str, np.ndarray], size: int) -> tuple[int, int]:
    """Fill the host arrays up to `size` tokens; the number of rows of the metadata and of logits."""
    num_tokens, num_seqs = layout.num_tokens, len(layout.slots_S)
    if layout.is_decode_only and size <= len(host["slots"]):
        _pad_rows(host, num_seqs, size)
        return size, size
    _pad_tokens(host, num_tokens, size)
    return num_seqs, layout.num_logits


def _pad_tokens(host: dict[str, np.ndarray], begin: int, size: int) -> None:
    host["input_ids"][begin:size] = 0
    host["positions"][begin:size] = 0
    host["slot_mapping"][begin:size] = -1


def _pad_rows(host: dict[str, np.ndarray], begin: int, size: int) -> None:
    """Sequences of one padding token and length 0."""
    _pad_tokens(host, begin, size)
    host["query_start_loc"][begin + 1 : size + 1] = np.arange(begin + 1, size + 1)
    host["seq_lens"][begin:size] = 0
    host["logits_indices"][begin:size] = 0
    host["temperatures"][begin:size] = 0.0
