"""Warm-up: synthetic steps do everything that is done once, so that no request waits for it.

Before serving, `compile_kernels` compiles the Triton kernels, and `WarmUp.run` measures the linears of decode steps and captures the
first CUDA graphs. `WarmUp.idle` does the rest, one piece at a time, while no step is in flight. It also takes libraries of kernels into
use that were built meanwhile: it chooses among all kernels again, then captures all graphs again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch

from compile_and_serve.compiler.cudagraphs.graph_runners import GraphRunners
from compile_and_serve.custom_ops.collectives.collectives import gather_objects
from compile_and_serve.custom_ops.dummy_step import make_step
from compile_and_serve.custom_ops.jit.background_thread import num_running
from compile_and_serve.custom_ops.jit.cuda import num_building, num_built_libraries, use_built_libraries
from compile_and_serve.custom_ops.jit.sources import PACKAGE
from compile_and_serve.custom_ops.jit.triton_launch import compile_ahead, was_compiled_ahead
from compile_and_serve.custom_ops.step import Step
from compile_and_serve.custom_ops.tuning.token_ranges import token_range, token_ranges
from compile_and_serve.custom_ops.tuning.tuner import tuning_off, unmeasured_token_counts
from compile_and_serve.runtime.runner.base_runner import BaseRunner
from compile_and_serve.runtime.runner.state_memory import GIB

log = logging.getLogger(__name__)

MIN_MIXED_TOKENS = 8  # of `run_mixed_step`
CAPTURED_AT_START = 7  # full CUDA graphs; a step of another size runs in the next larger one
TEXT_TOKENS = 512  # of a text to pool: kernels of shorter ones are chosen before serving


class WarmUp:
    """Warms up one runner: call `run` once, and `idle` until it returns False. All ranks make the same calls of the model.

    logits_dtype: of the model's logits. is_alone: whether there is only one rank.
    """

    def __init__(self, runner: BaseRunner, graphs: GraphRunners | None, logits_dtype: torch.dtype, *, is_alone: bool) -> None:
        self.runner = runner
        self._graphs = graphs
        self._logits_dtype = logits_dtype
        self._is_alone = is_alone
        self._to_measure: list[int] = []  # token counts to run in idle moments, the next one last
        self._ranks_build = True  # some of several ranks may still build libraries of kernels
        self._renews_graphs = False  # once all is measured

    def run(self) -> str:
        """Run every kind of step and capture the first graphs. Returns a sentence on the graphs, or ""."""
        runner, graphs = self.runner, self._graphs
        run_dummy_step(runner, 1, 1)
        run_dummy_step(runner, min(8, runner.max_num_tokens), 1)
        if runner.encoder is not None:
            runner.encoder.run_longest_item()
        # A step of each range of token counts, so that linears measure which kernel is fastest. Ranges of decode steps come before
        # their graphs are captured. The others are run in idle moments, the smallest first, and their graphs are captured later still.
        unmeasured = self._of_any_rank(unmeasured_token_counts(runner.device, runner.max_num_tokens))
        pools = runner.spec.pooling is not None
        most = token_range(runner.batch.num_slots)  # of decodes
        if pools:
            most = max(most, token_range(min(runner.max_model_len, TEXT_TOKENS)))
        for count in unmeasured:
            if count <= most:
                self._measure(count)
        self._to_measure = [count for count in reversed(unmeasured) if count > most]
        if self._to_measure and graphs is not None:
            graphs.capture_pieces_up_to(most)
        runner.compile_output_kernels(self._logits_dtype)
        if graphs is None:
            return ""
        if pools:
            with tuning_off():  # the longer ones are captured again once their kernels are chosen
                for size in graphs.want_octaves():
                    if size <= runner.max_num_tokens:
                        run_dummy_step(runner, size, 1)
        graphs.capture(CAPTURED_AT_START)  # the others in idle moments, or when steps make them due
        report = graphs.report()
        if pools:
            return f"{report['piecewise_graphs']} CUDA graphs of pieces; {graph_memory(graphs)}"
        return f"{report['full_graphs']} CUDA graphs, {report['waiting']} to come; {graph_memory(graphs)}"

    def pending_work(self) -> dict[str, int]:
        """What `idle` has still to do: sizes of CUDA graphs to capture, ranges of token counts to choose kernels for, and what is being
        built in the background or not in use yet.
        """
        return {
            "captures": 0 if self._graphs is None else self._graphs.num_to_capture,
            "choices": len(self._to_measure),
            "builds": num_running() + (num_built_libraries() if self._is_alone or self._ranks_build else 0),
        }

    def idle(self, *, requests_wait: bool = False) -> bool:
        """Capture one more graph or measure one more range of token counts. Returns False if nothing is left to do.

        requests_wait: only capture the full graph that is wanted most; everything else would cost the requests more than it gives them.
        """
        graphs = self._graphs
        if not requests_wait and self._has_new_libraries():
            self._use_libraries()
        # Graphs that are captured before all kernels are chosen are captured again.
        if graphs is not None and (requests_wait or not self._renews_graphs) and graphs.capture_next():
            return True
        if requests_wait:
            return False
        if self._to_measure:
            count = self._to_measure.pop()
            self._measure(count)
            if graphs is not None:
                graphs.capture_pieces_up_to(count if self._to_measure else None)
                if self._renews_graphs and not self._to_measure:
                    self._renews_graphs = False
                    graphs.renew()
            return True
        if graphs is None:
            return False
        while (size := graphs.next_piecewise_size()) is not None:
            if size <= self.runner.max_num_tokens:  # no step is longer
                run_dummy_step(self.runner, size, 1)
                return True
        encoder = self.runner.encoder
        if encoder is not None and graphs.encoder is not None and (size := graphs.encoder.next_piecewise_size()) is not None:
            encoder.run_dummy(size)
            return True
        return False

    def _has_new_libraries(self) -> bool:
        """Whether libraries of kernels were built meanwhile, and none is being built. All ranks answer alike."""
        own = num_building(), num_built_libraries()
        if self._is_alone:
            return own[0] == 0 < own[1]
        if not self._ranks_build:
            return False
        ranks = gather_objects(own)
        self._ranks_build = any(building for building, _ in ranks)
        return not self._ranks_build and any(built for _, built in ranks)

    def _use_libraries(self) -> None:
        """Take built libraries into use, and begin to choose among all kernels again."""
        text = "In use now: %s. Kernels are chosen and CUDA graphs captured again while there are no requests."
        log.info(text, ", ".join(use_built_libraries()) or "what other ranks built")
        self._to_measure = token_ranges(self.runner.max_num_tokens)[::-1]
        self._renews_graphs = True

    def _of_any_rank(self, counts: tuple[int, ...]) -> list[int]:
        """The counts of all ranks. Ranks make the same calls, although one may have measured what another has not."""
        if self._is_alone:
            return list(counts)
        return sorted(set().union(*gather_objects(counts)))

    def _measure(self, num_tokens: int) -> None:
        """Run a step with about as many rows of logits as a step of `num_tokens` may have, so that the output head is measured too. It is
        not a step of decodes alone, which would count as asking for its graph.
        """
        run_dummy_step(self.runner, num_tokens, max(1, min(num_tokens - 1, self.runner.batch.num_slots)))
        encoder = self.runner.encoder
        if encoder is not None and num_tokens <= encoder.max_tokens:
            encoder.run_dummy(num_tokens)


def compile_kernels(
    make_runner: Callable[[], BaseRunner], logits_dtype: torch.dtype, device: torch.device, *, threads: int, known_as: str | None
) -> int:
    """Compile the Triton kernels of the steps before serving, many at once instead of each when it is first launched.

    known_as: identifies the runner's kernels; where they were compiled at an earlier start, nothing is done. None: always compile.
    Returns the number of compiled kernels.
    """
    sources = PACKAGE / "runtime"
    if known_as is not None and was_compiled_ahead(known_as, device, sources):
        return 0
    runner = make_runner()
    tokens, seqs = largest_step_size(runner)
    many = min(tokens, 2 * token_range(seqs))  # more than decodes' kernels are for; libraries' products do run
    if runner.spec.pooling is not None:
        many = tokens  # Inductor chooses a kernel's tiles at its first call: they must suit steps of many texts

    def steps() -> None:
        with tuning_off():
            run_dummy_step(runner, many, seqs)
            if tokens >= MIN_MIXED_TOKENS:
                run_mixed_step(runner, many)
            if runner.encoder is not None:
                runner.encoder.run_largest()
        run_dummy_step(runner, min(8, tokens), 1)
        for count in token_ranges(seqs):
            run_dummy_step(runner, count, count)
        runner.compile_output_kernels(logits_dtype)

    return compile_ahead(steps, device, threads=threads, known_as=known_as, sources=sources)


def largest_step_size(runner: BaseRunner) -> tuple[int, int]:
    """The most tokens of a step, and the most sequences that they may belong to."""
    max_num_seqs = runner.batch.num_slots
    tokens = min(runner.max_num_tokens, max_num_seqs * runner.max_model_len)  # of all sequences at their full length
    return tokens, min(max_num_seqs, tokens)


def run_dummy_step(runner: BaseRunner, num_tokens: int, num_seqs: int) -> None:
    """Run each of the model's plans on `dummy_step(runner, num_tokens, num_seqs)` and sample nothing."""
    assert num_tokens <= runner.max_num_tokens
    _run(runner, dummy_step(runner, num_tokens, num_seqs))


def run_mixed_step(runner: BaseRunner, num_tokens: int) -> None:
    """Run a step as under load: two decodes, the last two tokens of a prompt, one that goes on behind cached tokens, and a new one.

    num_tokens: at most; MIN_MIXED_TOKENS or more.
    """
    cached = min(16, runner.max_model_len // 2)
    half = max(2, min(num_tokens // 2 - 2, runner.max_model_len - cached))
    _run(runner, make_step_of(runner, [(cached, 1), (cached, 1), (cached, 2), (cached, half), (0, half)]))


def dummy_step(runner: BaseRunner, num_tokens: int, num_seqs: int, *, num_rows: int | None = None) -> Step:
    """A step of `num_tokens` over `num_seqs` sequences, or over as many more as keep each within the model's limit. It writes no
    state, and is planned already. num_rows: of output; None: one of each sequence.
    """
    assert num_seqs <= num_tokens
    num_seqs = max(num_seqs, -(-num_tokens // runner.max_model_len))  # a row of the block table has no more columns
    counts = np.full(num_seqs, num_tokens // num_seqs, dtype=np.int64)
    counts[num_seqs - num_tokens % num_seqs :] += 1
    return make_step_of(runner, [(0, int(count)) for count in counts], num_rows)


def graph_memory(graphs: GraphRunners) -> str:
    """What the CUDA graphs take, for the log."""
    stats = graphs.stats
    return f"estimated {stats.estimated_bytes / GIB:.2f} GiB for all, took {stats.used_bytes / GIB:.2f} GiB"


def _run(runner: BaseRunner, step: Step) -> None:
    runner.run_dummy(step)
    runner.platform.synchronize()


def make_step_of(runner: BaseRunner, sequences: Sequence[tuple[int, int]], num_rows: int | None = None) -> Step:
    """A step that writes no state, and is planned already. sequences: (cached tokens, new tokens) of each."""
    return make_step(
        runner.spec.inputs,
        runner.spec.paged_state,
        sequences,
        state=runner.state,
        tokens_per_page=runner.layout.tokens_per_page,
        backends=runner.backends,
        device=runner.device,
        row_indices=None if num_rows is None else np.zeros(num_rows, dtype=np.int64),
        writes_state=False,
        num_columns={name: table.num_columns for name, table in runner.batch.tables.items()},
    )
