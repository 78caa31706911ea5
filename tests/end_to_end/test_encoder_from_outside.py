"""An encoder without any state, declared and registered from outside: each token reads its whole sequence. Prompts are not cut, there is no
cache, and requests are admitted by their tokens alone.

Shape legend: T tokens of the step, B tokens of a sequence, D hidden size, H heads, E head size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from compile_and_serve import LLM
from compile_and_serve.compiler.config import CompileConfig
from compile_and_serve.compiler.cudagraphs.graph_runners import GraphRunners
from compile_and_serve.compiler.cudagraphs.runner import CudaGraphRunner
from compile_and_serve.compiler.pipeline import compile_model
from compile_and_serve.custom_ops.step import HIDDEN_STATES, ROWS, StepOutput
from compile_and_serve.models.families import FAMILIES, register_model
from compile_and_serve.models.spec import ModelSpec, PoolingSpec
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.messages import EngineRequest
from compile_and_serve.runtime.pooling_params import PoolingParams
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.runtime.scheduler.step_messages import SchedulerOutput
from tests.support.engines import prompt_of, run_requests, tiny_config
from tests.support.fake_graphs import FakeDevice
from tests.support.tiny_models import fill
from tests.support.within_sequences import WITHIN_SEQUENCES

ARCHITECTURE = "EncodesForTestsModel"
VOCAB, D, E, LAYERS, MAX_LEN = 320, 32, 16, 2, 64


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        q_THE, k_THE, v_THE = (linear(x_TD).view(x_TD.shape[0], -1, E) for linear in (self.q, self.k, self.v))
        return self.norm(x_TD + self.o(WITHIN_SEQUENCES(q_THE, k_THE, v_THE, E**-0.5).flatten(1)))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, D), nn.Embedding(MAX_LEN, D)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
        x_TD = self.words(input_ids) + self.places(positions)
        for layer in self.layers:
            x_TD = layer(x_TD)
        return x_TD[logits_indices]


def build(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    with torch.device("meta"):
        module = Encoder().to(dtype).requires_grad_(False).eval()
    return ModelSpec(
        module=module,
        config=config,
        state=(),
        vocab_size=VOCAB,
        max_model_len=MAX_LEN,
        outputs=(StepOutput(name=HIDDEN_STATES, dims=(ROWS, D)),),
        pooling=PoolingSpec(kind="embed", width=D),
        whole_prompts=True,
    )


def weights() -> Encoder:
    torch.manual_seed(3)
    return Encoder().eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The model's folder."""
    register_model(ARCHITECTURE, build)
    made = tmp_path_factory.mktemp("encoder")
    (made / "config.json").write_text(json.dumps({"architectures": [ARCHITECTURE]}))
    save_file(weights().state_dict(), made / "model.safetensors")
    yield made
    del FAMILIES[ARCHITECTURE]


LENGTHS = [1, 64, 9, 33, 64, 2, 50, 17, 64, 40, 5, 63]
PROMPTS = [prompt_of(index, length) for index, length in enumerate(LENGTHS)]


def expected(prompt: list[int]) -> np.ndarray:
    """float32 [D]: the mean of the hidden states, in plain torch."""
    model = weights()
    with torch.no_grad():
        x_BD = model.words(torch.tensor(prompt)) + model.places(torch.arange(len(prompt)))
        for layer in model.layers:
            assert isinstance(layer, Layer)
            q_HBE, k_HBE, v_HBE = (linear(x_BD).view(len(prompt), -1, E).transpose(0, 1) for linear in (layer.q, layer.k, layer.v))
            mixed_HBE = torch.softmax(q_HBE @ k_HBE.transpose(1, 2) * E**-0.5, dim=-1) @ v_HBE
            x_BD = layer.norm(x_BD + layer.o(mixed_HBE.transpose(0, 1).flatten(1)))
    return x_BD.mean(0).numpy()


def pooling(request_id: str, prompt: list[int]) -> EngineRequest:
    params = SamplingParams(max_tokens=0)
    return EngineRequest(
        request_id=request_id, prompt_token_ids=prompt, sampling_params=params, pooling=PoolingParams(pooling="mean", use_activation=False)
    )


def pooled(core: EngineCore, requests: list[EngineRequest]) -> list[np.ndarray]:
    outputs = run_requests(core, requests)
    rows = []
    for one in requests:
        result = outputs[one.request_id][-1].pooled
        assert result is not None
        rows.append(np.frombuffer(result.data, dtype=np.float32))
    return rows


@pytest.mark.exhaustive
def test_it_compiles_and_every_pass_is_verified() -> None:
    config = CompileConfig(use_cache=False, verify_passes=True)
    model = compile_model(build({}, torch.float32), config, device=torch.device("cpu"), dtype=torch.float32)
    fill(model)
    assert model.report["distinct_pieces"] == 3  # before the first attention, between two, behind the last
    for row in model.report["passes"]:
        assert "failed" not in str(row.get("skipped", "")), row


@pytest.mark.slow
@pytest.mark.parametrize("eager", [True, False])
def test_prompts_are_computed_whole_without_a_cache(folder: Path, tmp_path: Path, eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    core = EngineCore(
        tiny_config(folder, load_format="auto", enforce_eager=eager, cache_dir=tmp_path, max_num_batched_tokens=100, max_num_seqs=5)
    )
    assert core.info.num_kv_blocks == 0
    assert not core.info.prefix_caching
    steps: list[SchedulerOutput] = []
    launch = core.executor.launch

    def launch_recorded(scheduled: SchedulerOutput) -> Any:
        steps.append(scheduled)
        return launch(scheduled)

    monkeypatch.setattr(core.executor, "launch", launch_recorded)
    requests = [pooling(f"r{i}", prompt) for i, prompt in enumerate(PROMPTS)]
    for prompt, row in zip(PROMPTS, pooled(core, requests), strict=True):
        np.testing.assert_allclose(row, expected(prompt), atol=2e-5)
    lengths = {one.request_id: len(one.prompt_token_ids) for one in requests}
    counts = [step.num_scheduled_tokens for step in steps]
    assert all(count == lengths[name] for step in counts for name, count in step.items())
    assert [name for step in counts for name in step] == list(lengths)  # in order, nobody overtakes
    assert max(sum(step.values()) for step in counts) <= 100
    # As many as fit, by tokens and by sequences.
    for step, following in pairwise(counts):
        assert len(step) == 5 or sum(step.values()) + next(iter(following.values())) > 100
    stats = core.stats()
    assert (stats.kv_cache_usage, stats.num_total_blocks) == (0.0, 0)
    core.shutdown()


def test_as_many_sequences_run_as_may(folder: Path) -> None:
    core = EngineCore(tiny_config(folder, load_format="auto", max_num_seqs=5))
    for i in range(12):
        core.add_request(pooling(f"r{i}", PROMPTS[2]))
    sizes = []
    while core.has_work():
        sizes.append(len(core.step().outputs))
    assert sizes == [5, 5, 2]
    core.shutdown()


def test_the_token_budget_has_room_for_the_longest_prompt(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens is 63, but the model reads prompts of up to 64 tokens in one step"):
        EngineCore(tiny_config(folder, load_format="auto", max_num_batched_tokens=63))
    core = EngineCore(tiny_config(folder, load_format="auto", max_num_batched_tokens=20, max_model_len=20))
    with pytest.raises(ValueError, match="The prompt has 33 tokens"):
        core.add_request(pooling("long", PROMPTS[3]))
    core.shutdown()
    monkeypatch.setattr("compile_and_serve.runtime.config.CPU_TOKEN_BUDGET", 16)
    core = EngineCore(tiny_config(folder, load_format="auto"))
    assert core.config.scheduler.token_budget == 64
    np.testing.assert_allclose(pooled(core, [pooling("longest", PROMPTS[1])])[0], expected(PROMPTS[1]), atol=2e-5)
    core.shutdown()


def test_prompts_that_cannot_be_cut_have_no_prompt_logprobs(folder: Path) -> None:
    core = EngineCore(tiny_config(folder, load_format="auto"))
    one = pooling("a", PROMPTS[2])
    one.sampling_params = SamplingParams(max_tokens=0, prompt_logprobs=1)
    with pytest.raises(ValueError, match="prompt_logprobs are computed in parts of a prompt, which this model cannot cut"):
        core.add_request(one)
    core.shutdown()


@pytest.mark.slow
def test_pieces_are_captured(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are padded to the sizes of the graphs."""
    made: list[CudaGraphRunner] = []

    def graph_runners(config: Any, spec: Any, plans: list[Any], *others: Any, logs: bool) -> GraphRunners:
        made.append(CudaGraphRunner(plans[0], mode="piecewise", max_num_seqs=8, backends=[], device=FakeDevice(), sizes=(16, 64, 128)))
        return GraphRunners(made)

    monkeypatch.setattr("compile_and_serve.runtime.runner.loaded_model.make_graph_runners", graph_runners)
    core = EngineCore(tiny_config(folder, load_format="auto", enforce_eager=False, cache_dir=tmp_path, max_num_batched_tokens=128))
    for _ in range(4):
        for prompt, row in zip(PROMPTS, pooled(core, [pooling(f"r{i}", prompt) for i, prompt in enumerate(PROMPTS)]), strict=True):
            np.testing.assert_allclose(row, expected(prompt), atol=2e-5)
    assert made[0].stats.replays["piecewise"] > 4
    core.shutdown()


def test_it_is_used_offline(folder: Path) -> None:
    with LLM(str(folder), dtype="float32", enforce_eager=True, skip_tokenizer_init=True, device="cpu", pooling_type="mean") as llm:
        outputs = llm.embed([{"prompt_token_ids": prompt} for prompt in PROMPTS], use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        row = expected(prompt)
        np.testing.assert_allclose(output.outputs.embedding, row / np.linalg.norm(row), atol=2e-5)
