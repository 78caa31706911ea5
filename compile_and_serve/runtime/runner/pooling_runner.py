"""Runs the steps of a model that pools: prompts only, no sampling.

Shape legend: R batch slots, S sequences with rows in the step, L their rows, F sequences whose prompt ends in the step, D features.

A prompt may be computed in chunks. Each step adds its rows to the sum of the request's slot on the device, in float32; the last step
divides. A single row is a sum of one, so that all kinds of pooling are one computation. Rows of one sequence are summed in order and apart
from the others, so the result does not depend on the batch. In the place of the sum, "max" keeps the largest of each feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from compile_and_serve.custom_ops.platforms.protocol import Event
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.pooling.projections import projections_of
from compile_and_serve.runtime.pooling_params import Pooled, RowPooling
from compile_and_serve.runtime.runner.base_batch import BaseBatch, BatchLayout, HeldRequest
from compile_and_serve.runtime.runner.base_runner import BaseRunner
from compile_and_serve.runtime.runner.pending_step import PendingStep
from compile_and_serve.runtime.scheduler.step_messages import ModelRunnerOutput, SchedulerOutput

NOT_FINITE = "The model computed hidden states that are not finite (NaN or infinity) for this request."


@dataclass(frozen=True, kw_only=True, slots=True)
class PooledRows:
    """The next `count` rows of a step's output are this pooling request's. is_last: its prompt ends in the step."""

    request_id: str
    slot: int
    pooling: RowPooling
    count: int
    num_prompt_tokens: int
    is_last: bool


@dataclass(frozen=True, slots=True)
class _Result:
    request_id: str
    chunks: Sequence[torch.Tensor]  # float32 [rows, D] each, on the host once the step is over


class PendingPooling(PendingStep):
    """A launched step of prompts; `result` waits for it."""

    def __init__(self, step: int, results: list[_Result], event: Event | None) -> None:
        self.step = step
        self._results = results
        self._event = event

    def result(self) -> ModelRunnerOutput:
        """Wait for the device; what the step pooled."""
        if self._event is not None:
            self._event.synchronize()
        pooled: dict[str, Pooled] = {}
        errors: dict[str, str] = {}
        for one in self._results:
            rows = np.concatenate([chunk.numpy() for chunk in one.chunks])
            if np.isfinite(rows).all():
                pooled[one.request_id] = Pooled(len(rows), rows.tobytes())
            else:
                errors[one.request_id] = NOT_FINITE
        return ModelRunnerOutput(
            step=self.step,
            sampled_token_ids={},
            logprobs={},
            prompt_logprobs={},
            errors=errors,
            pooled=pooled,
            expert_tokens=list(self.expert_tokens),
            transfers=self.transfers,
            ran=self.ran,
            checksums=list(self.checksums),
            wrong_tables=dict(self.wrong_tables),
        )


class PoolingBatch(BaseBatch):
    """Requests that all pool. pooled_rows: of the step prepared last."""

    pooled_rows: list[PooledRows]

    def _choose_rows(
        self, layout: BatchLayout, rows: list[HeldRequest], computed_S: np.ndarray, ends_S: np.ndarray, starts: np.ndarray
    ) -> list[np.ndarray]:
        """The tokens of each sequence whose rows its pooling needs."""
        indices, self.pooled_rows = [], []
        for row, request in enumerate(rows):
            first, last = int(starts[row]), int(starts[row + 1]) - 1
            pooling = None if request.pooling is None else request.pooling.pooling
            assert pooling is not None, "the engine core fills it in"
            is_last = bool(ends_S[row] >= len(request.token_ids))
            if pooling == "last":
                wanted = range(last, last + 1) if is_last else range(0)
            elif pooling == "cls":
                wanted = range(first, first + 1) if computed_S[row] == 0 else range(0)
            else:
                wanted = range(first, last + 1)
            indices.append(np.arange(wanted.start, wanted.stop, dtype=np.int64))
            self.pooled_rows.append(
                PooledRows(
                    request_id=request.request_id,
                    slot=request.slot,
                    pooling=pooling,
                    count=len(wanted),
                    num_prompt_tokens=request.num_prompt_tokens,
                    is_last=is_last,
                )
            )
        return indices


class PoolingRunner(BaseRunner):
    """Runs the steps of a model that pools."""

    batch_type = PoolingBatch
    batch: PoolingBatch

    def __init__(self, config: EngineConfig, *args: Any, **options: Any) -> None:
        super().__init__(config, *args, **options)
        assert self.spec.pooling is not None
        self._output = self.spec.outputs[0].name
        num_slots = self.batch.num_slots
        self._sums_RD = torch.zeros(num_slots, self.spec.pooling.width, dtype=torch.float32, device=self.device)
        self._has_sum_R = np.zeros(num_slots, dtype=bool)
        self._projections = [one.to(self.device) for one in projections_of(config.model)]
        self._chunks: dict[str, list[torch.Tensor]] = {}  # of the requests that want all rows

    def launch(self, scheduled: SchedulerOutput) -> PendingStep:
        batch = self.batch
        for request_id in scheduled.finished_request_ids:
            batch.remove(request_id)
            self._chunks.pop(request_id, None)
        batch.settle()
        for data in scheduled.new_requests:
            self._has_sum_R[batch.add(data).slot] = False
        for cached in scheduled.cached_requests:
            batch.append_blocks(cached.request_id, cached.new_block_ids)
        layout, buffers, tokens = batch.prepare(scheduled)
        assert tokens is not None, "a step of prompts comes from the host"
        outputs = self._run(layout, buffers, tokens, with_sampling=False).outputs
        results = self._pool(outputs[self._output], batch.pooled_rows)
        return PendingPooling(scheduled.step, results, self.platform.record_event())

    def _pool(self, rows_LD: torch.Tensor, wanted: Sequence[PooledRows]) -> list[_Result]:
        download, upload = self.platform.download, self.platform.upload
        results: list[_Result] = []
        summed = [one for one in wanted if one.count]
        if summed:
            self._add(rows_LD, summed, results)
        finished = [one for one in wanted if one.is_last and one.pooling != "all"]
        if finished:
            slots_F = upload(np.array([one.slot for one in finished], dtype=np.int64))
            counts = [one.num_prompt_tokens if one.pooling == "mean" else 1 for one in finished]
            pooled_FD = download(self._project(self._sums_RD[slots_F] / upload(np.array(counts, dtype=np.float32))[:, None]))
            results += [_Result(one.request_id, (pooled_FD[i : i + 1],)) for i, one in enumerate(finished)]
        return results

    def _project(self, pooled_FD: torch.Tensor) -> torch.Tensor:
        for projection in self._projections:
            pooled_FD = projection(pooled_FD)
        return pooled_FD

    def _add(self, rows_LD: torch.Tensor, summed: Sequence[PooledRows], results: list[_Result]) -> None:
        """Add a step's rows to the sums of their slots. Requests that want all rows get them in `results` at their end."""
        upload = self.platform.upload
        lengths_S = np.array([one.count for one in summed], dtype=np.int64)
        slots_S = np.array([one.slot for one in summed], dtype=np.int64)
        rows_LD = rows_LD[: int(lengths_S.sum())].float()
        first = 0
        for one in summed:
            if one.pooling == "all":
                chunks = self._chunks.setdefault(one.request_id, [])
                chunks.append(self.platform.download(self._project(rows_LD[first : first + one.count])))
                if one.is_last:
                    results.append(_Result(one.request_id, tuple(chunks)))
            first += one.count
        lengths, slots = upload(lengths_S), upload(slots_S)
        # unsafe: the lengths are not checked, which would wait for the device.
        sums_SD = torch.segment_reduce(rows_LD, "sum", lengths=lengths, axis=0, unsafe=True)
        has_sum_S1 = upload(self._has_sum_R[slots_S])[:, None]
        before_SD = self._sums_RD[slots]
        joined_SD = before_SD + sums_SD
        is_max_S = np.array([one.pooling == "max" for one in summed])
        if is_max_S.any():
            largest_SD = torch.segment_reduce(rows_LD, "max", lengths=lengths, axis=0, unsafe=True)
            is_max_S1 = upload(is_max_S)[:, None]
            sums_SD = torch.where(is_max_S1, largest_SD, sums_SD)
            joined_SD = torch.where(is_max_S1, torch.maximum(before_SD, largest_SD), joined_SD)
        self._sums_RD[slots] = torch.where(has_sum_S1, joined_SD, sums_SD)
        self._has_sum_R[slots_S] = True
