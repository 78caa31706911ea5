"""Adds up what the engine's steps do. Each step is counted once, however many requests it has."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from compile_and_serve.runtime.ledger.records import LastStep, StepTotals
from compile_and_serve.runtime.messages import EngineStats
from compile_and_serve.runtime.scheduler.block_pool import BlockPool
from compile_and_serve.runtime.scheduler.step_messages import ModelRunnerOutput, SchedulerOutput


class StepLedger:
    """weight_bytes: of a rank's weights, all of which a step is taken to read. page_bytes: of a block of the KV cache on a rank."""

    def __init__(self, *, weight_bytes: int, page_bytes: int) -> None:
        self.totals = StepTotals()
        self.last: LastStep | None = None
        self._weight_bytes, self._page_bytes = weight_bytes, page_bytes
        self._last_end = 0.0

    def add(self, scheduled: SchedulerOutput, result: ModelRunnerOutput, seconds: float, pools: Sequence[BlockPool]) -> None:
        """Count a step whose result is there. seconds: that it took. pools: of the KV cache of each data group."""
        num_seqs = len(scheduled.num_scheduled_tokens)
        if not num_seqs:
            return
        totals, ran, now = self.totals, result.ran, time.time()
        kind, num_tokens = ran.kind, scheduled.total_num_scheduled_tokens
        totals.steps[kind] = totals.steps.get(kind, 0) + 1
        totals.seconds[kind] = totals.seconds.get(kind, 0.0) + seconds
        num_decodes = scheduled.num_decodes
        if num_decodes < num_seqs:
            totals.prompt_steps += 1
            totals.prompt_seconds += seconds
        totals.tokens += num_tokens
        totals.padded_tokens += ran.padded
        num_groups, num_held = len(pools), sum(pool.num_blocks - pool.num_free for pool in pools)
        num_bytes = self._weight_bytes + num_held / num_groups * self._page_bytes  # of a rank
        totals.bytes += num_bytes
        totals.row_bytes += num_bytes * num_groups / num_seqs
        for miss in (ran.miss and "graph." + ran.miss, scheduled.missed_drafts and "draft." + scheduled.missed_drafts):
            if miss:
                totals.misses[miss] = totals.misses.get(miss, 0) + 1
        began = now - seconds
        idle = max(0.0, began - self._last_end) if self._last_end else 0.0
        self._last_end = now
        held, num_prompts = num_held / max(1, sum(pool.num_blocks for pool in pools)), num_seqs - num_decodes
        self.last = LastStep(scheduled.step, began, seconds, kind, num_decodes, num_prompts, num_tokens, ran.padded, idle, held)

    def add_to(self, stats: EngineStats, misses: Mapping[str, int]) -> None:
        """Report the totals, and the step that was added last. misses: of requests."""
        stats.steps, stats.last_step = self.totals.copy(), self.last
        stats.misses = {**misses, **self.totals.misses}
