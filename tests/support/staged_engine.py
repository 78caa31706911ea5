"""Engines of several stages in tests. Their ranks are processes of their own, which load this module as a plug-in where a test asks for it:
with pieces that run as they are, because compiling them is not the subject, or with stand-ins for CUDA graphs.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from compile_and_serve.compiler import pipeline
from compile_and_serve.compiler.cudagraphs.graph_runners import GraphRunners
from compile_and_serve.compiler.cudagraphs.runner import CudaGraphRunner
from compile_and_serve.compiler.inductor import CompiledPiece
from compile_and_serve.custom_ops.step import LOGITS
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.runtime.runner import loaded_model
from compile_and_serve.runtime.sampling.decode_step import begin_step, end_step
from tests.support.fake_graphs import FakeDevice, FakeGraph
from tests.test_plugins import install

PLAIN_PIECES = "STAGES_TEST_PLAIN_PIECES"  # of the environment: pieces are not compiled
REPLAYS = "STAGES_TEST_REPLAYS"  # of the environment: steps run as fake graphs, and a rank that replays one leaves a file in this folder


class NotedGraph(FakeGraph):
    def replay(self) -> None:
        super().replay()
        (Path(os.environ[REPLAYS]) / str(os.getpid())).touch()


class NotingDevice(FakeDevice):
    def capture(self, fn: Any, *, keep_outputs: bool = False) -> Any:
        graph, outputs, seconds = super().capture(fn, keep_outputs=keep_outputs)
        return NotedGraph(graph.fn, outputs), outputs, seconds


def fake_graph_runners(config: Any, spec: ModelSpec, plans: list[Any], *others: Any, logs: bool) -> GraphRunners:
    """As `make_graph_runners` on a GPU."""
    samples = any(one.name == LOGITS for one in spec.outputs)
    options: dict[str, Any] = {"mode": "full", "max_num_seqs": 4, "backends": [], "device": NotingDevice(), "sizes": (1, 2, 4)}
    return GraphRunners([CudaGraphRunner(plans[0], **options, decode_head=begin_step, decode_tail=end_step if samples else None)])


def plain_piece(gm: Any, device: Any, folder: Path) -> CompiledPiece:
    """A piece that is not compiled."""

    def run(inputs: list[Any]) -> Any:
        outputs = gm(*inputs)
        inputs.clear()
        return outputs

    return CompiledPiece(run=run, source="")


def use_plain_pieces(patch: pytest.MonkeyPatch) -> None:
    """In this process, and with `plugged_in` in those of ranks. Artifacts then hold no pieces: give each engine use_cache=False."""
    patch.setenv(PLAIN_PIECES, "1")
    patch.setattr(pipeline, "start_piece", plain_piece)


def plugged_in(site: Path, patch: pytest.MonkeyPatch) -> None:
    """Let ranks load this module. site: a new folder."""
    install(site, "staged-engine", {"compile_and_serve.models": {"staged-engine": __name__}})
    patch.syspath_prepend(str(site))


if PLAIN_PIECES in os.environ:
    pipeline.start_piece = plain_piece
if REPLAYS in os.environ:
    loaded_model.make_graph_runners = fake_graph_runners
