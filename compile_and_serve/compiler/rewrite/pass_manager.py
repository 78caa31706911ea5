"""Runs the passes in order, and records their results and times."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule

from compile_and_serve.compiler.rewrite.graph_pass import GraphPass, NearMiss, PassContext, PassError, PassResult, SkipReason
from compile_and_serve.compiler.rewrite.verify import PassVerifier, Verification

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class PassRecord:
    """One row of the pass report."""

    name: str
    version: int
    seconds: float
    result: PassResult | SkipReason
    verification: Verification | None = None

    def sentence(self) -> str:
        """What the pass did, for the log."""
        if isinstance(self.result, SkipReason):
            return f"{self.name}: skipped, {self.result.sentence}"
        count = len(self.result.left_to_inductor)
        left = f", {count} left to Inductor, which is faster" if count else ""
        return f"{self.name}: {self.result.matched} of {self.result.expected} sites in {self.seconds:.3f} s{left}"


def run_passes(
    gm: GraphModule,
    passes: Sequence[GraphPass],
    ctx: PassContext,
    disabled: frozenset[str] = frozenset(),
    verifier: PassVerifier | None = None,
    after_pass: Callable[[str, GraphModule], None] = lambda name, gm: None,
) -> list[PassRecord]:
    """Rewrite `gm` in place. Near misses are logged with their source line and reason; they do not stop the compilation.

    verifier: checks each pass, and undoes a pass that is wrong. after_pass: called after each pass that ran.
    Raises `PassError` if a pass fails, or if a required pass cannot run.
    """
    records = []
    for graph_pass in passes:
        start = time.perf_counter()
        result, verification = _run_one(gm, graph_pass, ctx, disabled, verifier)
        if isinstance(result, SkipReason) and graph_pass.required and graph_pass.guard(ctx) is None:
            raise PassError(f"Pass {graph_pass.name} cannot be left out here: {result.sentence}.")
        record = PassRecord(
            name=graph_pass.name, version=graph_pass.version, seconds=time.perf_counter() - start, result=result, verification=verification
        )
        log.info("pass %s", record.sentence())
        if isinstance(result, PassResult):
            after_pass(graph_pass.name, gm)
            log_result(graph_pass.name, result.near_misses, result.remarks)
        records.append(record)
    return records


def log_result(name: str, near_misses: Sequence[NearMiss], remarks: Sequence[str]) -> None:
    """Log near misses, one line per reason and source line, because layers repeat each other; then remarks."""
    repeats = Counter((miss.source, miss.reason) for miss in near_misses)
    for miss in near_misses:
        if count := repeats.pop((miss.source, miss.reason), 0):
            more = f" and {count - 1} more" if count > 1 else ""
            log.warning("pass %s did not rewrite %s%s (%s): %s", name, miss.node, more, miss.source, miss.reason)
    for remark in remarks:
        log.info(remark)


def _run_one(
    gm: GraphModule, graph_pass: GraphPass, ctx: PassContext, disabled: frozenset[str], verifier: PassVerifier | None
) -> tuple[PassResult | SkipReason, Verification | None]:
    if graph_pass.name in disabled:
        return SkipReason(sentence="turned off by name"), None
    try:
        if reason := graph_pass.guard(ctx):
            return reason, None
        if verifier is not None:
            return verifier.run(gm, graph_pass, ctx)
        result = graph_pass.run(gm, ctx)
        gm.graph.lint()
    except PassError:
        raise
    except Exception as error:  # the user must learn which pass it was
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        advice = "" if graph_pass.required else f"leave it out with --disable-pass {graph_pass.name}, or "
        raise PassError(f"Pass {graph_pass.name} failed with {what}: {advice}find the line that failed with --verbose.") from error
    return result, None
