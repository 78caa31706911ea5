"""Encoders on a device with graphs, for which fakes on the CPU stand in: what is captured before serving, and what overlaps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compile_and_serve import LLM
from compile_and_serve.compiler.cudagraphs.graph_runners import GraphRunners
from compile_and_serve.compiler.cudagraphs.runner import PlainRunner, StepResult
from compile_and_serve.compiler.cudagraphs.stats import GraphStats
from compile_and_serve.compiler.model import StepModel
from compile_and_serve.custom_ops.platform import register_platform
from compile_and_serve.custom_ops.platforms.cpu import CpuPlatform
from compile_and_serve.custom_ops.step import Step
from compile_and_serve.runtime.engine.client import SyncEngine
from compile_and_serve.runtime.messages import EngineRequest, StepOutputs
from compile_and_serve.runtime.runner import cuda_graphs
from tests.runtime.pooling.test_encoders import PROMPTS, theirs, token_prompts, write_encoder
from tests.support.fake_graphs import FakeDevice
from tests.support.platforms import OwnMemory

OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_num_seqs": 4, "num_threads": 1, "skip_tokenizer_init": True}


class Gpu(OwnMemory):
    replays_graphs = True


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cuda_graphs, "CudaGraphs", lambda device: FakeDevice())
    register_platform("cpu", Gpu)
    yield
    register_platform("cpu", CpuPlatform)


class Octaves(PlainRunner):
    """In the place of `CudaGraphRunner`: notes the sizes that are run, and wants some."""

    sizes = (1,)
    largest_loss = num_waiting = num_piecewise_waiting = 0

    def __init__(self, model: StepModel) -> None:
        super().__init__(model)
        self.stats = GraphStats()
        self.events: list[int | str] = []

    def run(self, step: Step, *, with_sampling: bool = True) -> StepResult:
        self.events.append(step.padded_tokens)
        return super().run(step, with_sampling=with_sampling)

    def bind(self, *steps: object) -> None: ...

    def estimate_parts(self, max_tokens: int, largest_step: int) -> tuple[int, int]:
        return 0, 0

    def capture_next(self) -> bool:
        return False

    def want_octaves(self) -> list[int]:
        self.events.append("octaves")
        return [1024, 256, 64]

    def next_piecewise_size(self) -> int | None:
        return None

    def report(self) -> dict[str, int]:
        return {"piecewise_graphs": 2}


def test_octaves_are_captured_before_serving(gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Octaves] = []

    def graph_runners(config: object, spec: object, plans: list[StepModel], *others: object, logs: bool) -> GraphRunners:
        made.append(Octaves(plans[-1]))
        return GraphRunners(made)  # type: ignore[arg-type]

    monkeypatch.setattr("compile_and_serve.runtime.runner.loaded_model.make_graph_runners", graph_runners)
    folder = write_encoder(tmp_path / "model", "BertModel", num_hidden_layers=1)
    with LLM(str(folder), max_num_batched_tokens=600, enforce_eager=True, **OPTIONS) as llm:
        (runner,) = made
        assert runner.events[runner.events.index("octaves") :] == ["octaves", 256, 64]  # no step is longer than 600
        llm.embed(token_prompts(), use_tqdm=False)


@pytest.mark.slow  # it compiles
def test_texts_replay_graphs_from_the_first_one_on(gpu: None, tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "model", "BertModel", num_hidden_layers=1)
    expected = theirs(folder, "BertModel", PROMPTS)
    with LLM(str(folder), max_num_batched_tokens=600, **OPTIONS) as llm:
        before = llm.core.stats().graph_replays["piecewise"]
        for prompt, rows_TD in zip(token_prompts()[1:], expected[1:], strict=True):  # of 512, 2, 33, 33 and 7 tokens
            mean_D = rows_TD.mean(0)
            (output,) = llm.embed([prompt], use_tqdm=False)
            np.testing.assert_allclose(output.outputs.embedding, mean_D / np.linalg.norm(mean_D), atol=3e-5)
        replayed = llm.core.stats().graph_replays["piecewise"] - before
    assert replayed == 5


def test_the_device_computes_while_requests_are_added(gpu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second full step is launched once two have been added, and no earlier. Results are read while the next step runs."""
    events: list[str] = []
    add_request, step, converted = SyncEngine.add_request, SyncEngine.step, LLM._converted

    def noted_add(engine: SyncEngine, request: EngineRequest) -> None:
        events.append("add")
        add_request(engine, request)

    def noted_step(engine: SyncEngine) -> StepOutputs:
        events.append("step")
        return step(engine)

    def noted_conversion(llm: LLM, *args: Any) -> Any:
        events.append("convert")
        return converted(llm, *args)

    monkeypatch.setattr(SyncEngine, "add_request", noted_add)
    monkeypatch.setattr(SyncEngine, "step", noted_step)
    monkeypatch.setattr(LLM, "_converted", noted_conversion)
    prompts = [{"prompt_token_ids": [5 + i] * 128} for i in range(20)]
    folder = write_encoder(tmp_path / "model", "BertModel", num_hidden_layers=1)
    with LLM(str(folder), max_num_batched_tokens=512, max_model_len=512, enforce_eager=True, **OPTIONS) as llm:
        together = [output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False)]
        assert "".join(event[0] for event in events) == "a" * 8 + ("scccc" + "aaaa") * 3 + "scccc" * 2
        for prompt, embedding in zip(prompts, together, strict=True):
            (alone,) = llm.embed([prompt], use_tqdm=False)
            np.testing.assert_allclose(alone.outputs.embedding, embedding, atol=1e-5)
