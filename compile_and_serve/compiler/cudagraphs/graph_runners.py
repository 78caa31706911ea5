"""The CUDA graphs of a model that has two plans: one runner for each plan, over one graph device.

A model that takes optional inputs has a plan with and a plan without them. Steps that use no optional input run the plain plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compile_and_serve.compiler.cudagraphs.graph_capture import Graph
from compile_and_serve.compiler.cudagraphs.runner import CudaGraphRunner, StepOf
from compile_and_serve.compiler.cudagraphs.stats import GraphStats
from compile_and_serve.compiler.cudagraphs.work_graphs import WorkGraphs, WorkOf

DRAFTED_AT_START = 3  # full graphs of steps with drafts that are captured before serving


class GraphRunners:
    """The CUDA graphs of all of a model's plans.

    runners: one for each plan, with one stats object; the first runs the plan that any step may use. drafted: runs the plain plan's steps
    in which all sequences have the same number of draft tokens; None if there are no such steps. drafter: of the model that drafts; None
    if there is none, or if it cannot be captured. encoder: piecewise, of the model beside that encodes media; None if there is none, or if
    it has no graphs. has_draft_model: whether there is one.
    """

    def __init__(
        self,
        runners: Sequence[CudaGraphRunner],
        drafted: CudaGraphRunner | None = None,
        drafter: WorkGraphs | None = None,
        encoder: CudaGraphRunner | None = None,
        *,
        has_draft_model: bool = False,
    ) -> None:
        self.runners = tuple(runners)
        self.drafted = drafted
        self.drafter = drafter
        self.encoder = encoder
        self.has_draft_model = has_draft_model
        self._in_pieces = self.runners if encoder is None else (*self.runners, encoder)
        self._all = (*self.runners, *(one for one in (drafted, drafter) if one is not None))
        self.stats: GraphStats = self.runners[0].stats
        self.sizes = self.runners[0].sizes

    @property
    def drafts_run_ahead(self) -> bool:
        """Whether everything in a step with drafts can be captured. A drafter without a model needs no graph."""
        return self.drafted is not None and (self.drafter is not None or not self.has_draft_model)

    def bind(
        self,
        decode_step: StepOf | None,
        prompt_step: StepOf | None = None,
        drafted_step: StepOf | None = None,
        drafter_work: WorkOf | None = None,
        encoder_step: StepOf | None = None,
    ) -> None:
        """`CudaGraphRunner.bind` of each. drafted_step: as `decode_step`, with draft tokens. drafter_work: see `WorkGraphs.bind`.
        encoder_step: a made-up step of the encoder, for estimates.
        """
        for runner in self.runners:
            runner.bind(decode_step, prompt_step)
        if self.drafted is not None:
            self.drafted.bind(drafted_step)
        if self.drafter is not None:
            self.drafter.bind(drafter_work)
        if self.encoder is not None:
            self.encoder.bind(None, encoder_step)

    def capture(self, count: int) -> None:
        """Capture up to `count` full graphs of each plan, the largest of all first, so that all fit into their memory."""
        for index in range(count):
            for runner in self._all if index < DRAFTED_AT_START else self.runners:
                runner.capture_next()

    def capture_next(self) -> bool:
        """Capture the graph that is wanted most; False when there is nothing left to capture."""
        # While all requests have adapters, the plan without adapters loses no steps, and vice versa.
        return any(runner.capture_next() for runner in sorted(self._all, key=lambda one: -one.largest_loss))

    def renew(self) -> None:
        """`CudaGraphRunner.renew` of all."""
        for one in (*self._all, *(() if self.encoder is None else (self.encoder,))):
            one.renew()

    def capture_pieces_up_to(self, max_tokens: int | None) -> None:
        """`CudaGraphRunner.capture_pieces_up_to` of each."""
        for runner in self._in_pieces:
            runner.capture_pieces_up_to(max_tokens)

    def next_piecewise_size(self) -> int | None:
        """The piecewise size to capture next, first of the plain plan. The next step of that size captures it."""
        sizes = (runner.next_piecewise_size() for runner in reversed(self.runners))
        return next((size for size in sizes if size is not None), None)

    def want_octaves(self) -> list[int]:
        """The sizes of `CudaGraphRunner.want_octaves` of every plan, largest first."""
        return sorted({size for runner in self.runners for size in runner.want_octaves()}, reverse=True)

    def estimate_bytes(self, max_tokens: int, largest_step: int, encoder_tokens: int = 0) -> int:
        """`CudaGraphRunner.estimate_bytes` of all: what a step frees is shared, graphs keep the rest for themselves.

        encoder_tokens: of the encoder's longest step, which takes no more than `largest_step`.
        """
        estimates = [runner.estimate_parts(max_tokens, largest_step) for runner in self._all]
        if self.encoder is not None:
            estimates.append(self.encoder.estimate_parts(encoder_tokens, largest_step))
        self.stats.estimated_bytes = max(peak for peak, _ in estimates) + sum(kept for _, kept in estimates)
        return self.stats.estimated_bytes

    def captured_graph(self, num_seqs: int) -> Graph | None:
        """`CudaGraphRunner.captured_graph` of the plan that steps without optional inputs run."""
        return self.runners[-1].captured_graph(num_seqs)

    @property
    def num_to_capture(self) -> int:
        """Captures still to come: full graphs, and sizes of piecewise graphs."""
        piecewise = sum(runner.num_piecewise_waiting for runner in self._in_pieces)
        return piecewise + sum(runner.num_waiting for runner in self._all)

    def report(self) -> dict[str, Any]:
        """`CudaGraphRunner.report`, with the waiting graphs of all."""
        return self.runners[0].report() | {"waiting": sum(runner.num_waiting for runner in self._all)}
