"""A model unlike any of ours, declared and registered from outside: it compiles, is verified and captured, and serves.

It has a group of tokens with a window and an op of its own, a recurrent group with one slot a sequence, an input of [3, tokens] that the
host fills at each step, and a second output.

Shape legend: T tokens of the step, S sequences, D hidden size, P tokens per page.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from compile_and_serve.compiler.config import CompileConfig
from compile_and_serve.compiler.cudagraphs.graph_runners import GraphRunners
from compile_and_serve.compiler.cudagraphs.runner import CudaGraphRunner
from compile_and_serve.compiler.pipeline import compile_model
from compile_and_serve.custom_ops.library import OpKind, define
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.state.kind import LayerState, StateTensor
from compile_and_serve.custom_ops.state.recurrent import Recurrent, RecurrentLayer, gather_slot, scatter_slot
from compile_and_serve.custom_ops.state.tokens import TokenWindow
from compile_and_serve.custom_ops.step import INPUT_IDS, LOGITS, LOGITS_INDICES, ROWS, TOKENS, StepInput, StepOutput, current_metadata
from compile_and_serve.models.families import register_model
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.sampling.decode_step import begin_step, end_step
from tests.support.engines import mixed_requests, prompt_of, request, run_requests, tiny_config, tokens_of
from tests.support.fake_graphs import FakeDevice
from tests.support.tiny_models import fill, plain_logits

VOCAB, D, WINDOW, LAYERS = 320, 24, 9, 3
DECAY = 0.7


@dataclass(frozen=True, kw_only=True)
class WindowLayer(LayerState):
    """Values of D features a token."""

    size: int

    def tensors(self, tokens_per_page: int, cache_dtype: torch.dtype) -> tuple[StateTensor, ...]:
        return (StateTensor(shape=(tokens_per_page, self.size)),)


def _window_mean(x_TD: torch.Tensor, cache_NPD: torch.Tensor, window: int, group: str) -> torch.Tensor:
    """The mean of the last `window` tokens of each token's sequence, itself included."""
    metadata, size = current_metadata(group), cache_NPD.shape[1]
    written = metadata.slot_mapping[: len(x_TD)] >= 0
    slots = metadata.slot_mapping[: len(x_TD)][written]
    cache_NPD[slots // size, slots % size] = x_TD[written].to(cache_NPD.dtype)
    out_TD = torch.zeros_like(x_TD)
    starts = metadata.query_start_loc.tolist()
    for s, length in enumerate(metadata.seq_lens.tolist()):
        for token in range(starts[s], starts[s + 1] if length else starts[s]):
            end = length - (starts[s + 1] - token) + 1
            places = torch.arange(max(0, end - window), end)
            pages = metadata.block_table[s, places // size].long()
            out_TD[token] = cache_NPD[pages, places % size].to(x_TD.dtype).mean(0)
    return out_TD


def _decaying_mean(
    x_TD: torch.Tensor,
    sums: torch.Tensor,
    sum_columns: torch.Tensor,
    weights: torch.Tensor,
    weight_columns: torch.Tensor,
    decay: float,
    group: str,
) -> torch.Tensor:
    """y_t / w_t with y_t = decay · y_{t-1} + x_t and w_t = decay · w_{t-1} + 1 along each sequence."""
    metadata = current_metadata(group)
    out_TD = torch.zeros_like(x_TD)
    y_SD = gather_slot(sums, sum_columns, metadata.read_pages, 1)[:, 0]
    weights_S1 = gather_slot(weights, weight_columns, metadata.read_pages, 1)[:, 0]
    begins_S1 = (metadata.num_computed <= 0)[:, None]
    y_SD, weights_S1 = y_SD.masked_fill(begins_S1, 0), weights_S1.masked_fill(begins_S1, 0)
    starts = metadata.query_start_loc.tolist()
    for s, length in enumerate(metadata.seq_lens.tolist()):
        for token in range(starts[s], starts[s + 1] if length else starts[s]):
            y_SD[s], weights_S1[s] = decay * y_SD[s] + x_TD[token], decay * weights_S1[s] + 1
            out_TD[token] = y_SD[s] / weights_S1[s]
    scatter_slot(y_SD[:, None], sums, sum_columns, metadata.write_pages)
    scatter_slot(weights_S1[:, None], weights, weight_columns, metadata.write_pages)
    return out_TD


WINDOW_MEAN = define(
    "test_window_mean(Tensor x, Tensor(a!) cache, int window, str group) -> Tensor",
    kind=OpKind.SPLIT_POINT,
    version=1,
    fake=lambda x, cache, window, group: torch.empty_like(x),
    CompositeExplicitAutograd=_window_mean,
)
DECAYING_MEAN = define(
    "test_decaying_mean(Tensor x, Tensor(a!) sums, Tensor sum_columns, Tensor(b!) weights, Tensor weight_columns, float decay, str group) "
    "-> Tensor",
    kind=OpKind.SPLIT_POINT,
    version=1,
    fake=lambda x, *_: torch.empty_like(x),
    CompositeExplicitAutograd=_decaying_mean,
)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(D, eps=1e-5)
        self.near, self.far, self.out = (nn.Linear(D, D, bias=False) for _ in range(3))

    def forward(self, x_TD: torch.Tensor, cache: torch.Tensor, memory: tuple[tuple[torch.Tensor, torch.Tensor], ...]) -> torch.Tensor:
        y_TD = self.norm(x_TD)
        near_TD = WINDOW_MEAN(self.near(y_TD), cache, WINDOW, "window_caches")
        far_TD = DECAYING_MEAN(self.far(y_TD), *memory[0], *memory[1], DECAY, "memories")
        return x_TD + self.out(torch.tanh(near_TD + 0.3 * far_TD))


class Outside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, D)
        self.places = nn.Linear(3, D, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(D, VOCAB, bias=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        places: torch.Tensor,
        window_caches: list[torch.Tensor],
        memories: list[tuple[tuple[torch.Tensor, torch.Tensor], ...]],
        logits_indices: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x_TD = self.embedding(input_ids)
        x_TD = x_TD + self.places(places.transpose(0, 1).to(x_TD.dtype) * 0.1)
        for layer, cache, memory in zip(self.layers, window_caches, memories, strict=True):
            x_TD = layer(x_TD, cache, memory)
        rows_LD = x_TD[logits_indices]
        return self.head(rows_LD), rows_LD


MEMORY = RecurrentLayer(parts=(StateTensor(shape=(1, D)), StateTensor(shape=(1, 1))))
PLACES = StepInput(
    name="places",
    dtype=torch.int64,
    dims=(3, TOKENS),
    fill=lambda batch: np.stack([batch.positions % 7, batch.positions % 3, batch.sequence_of_token * 0 + 1]),
)


def build(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    with torch.device("meta"):
        module = Outside().to(dtype)
    module.requires_grad_(False).eval()
    return ModelSpec(
        module=module,
        config=config,
        state=(
            StateGroup(name="window_caches", layers=(WindowLayer(size=D),) * LAYERS, kind=TokenWindow(size=WINDOW)),
            StateGroup(name="memories", layers=(MEMORY,) * LAYERS, kind=Recurrent()),
        ),
        vocab_size=VOCAB,
        max_model_len=256,
        inputs=(INPUT_IDS, PLACES, LOGITS_INDICES),
        outputs=(StepOutput(name=LOGITS), StepOutput(name="hidden", dims=(ROWS, D))),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's folder."""
    register_model("OutsideForTests", build)
    made = tmp_path_factory.mktemp("outside")
    (made / "config.json").write_text(json.dumps({"architectures": ["OutsideForTests"], "vocab_size": VOCAB, "eos_token_id": 2}))
    return made


def test_it_compiles_and_every_pass_is_verified() -> None:
    spec = build({}, torch.float32)
    config = CompileConfig(use_cache=False, verify_passes=True)
    model = compile_model(spec, config, device=torch.device("cpu"), dtype=torch.float32)
    fill(model)
    assert model.report["distinct_pieces"] == 3  # before the first layer's ops, between layers, after the last
    assert model.report["pieces"] == LAYERS + 1
    for row in model.report["passes"]:
        assert "failed" not in str(row.get("skipped", "")), row


@pytest.mark.exhaustive
def test_it_serves_the_tokens_of_the_plain_module(folder: Path, tmp_path: Path) -> None:
    core = EngineCore(tiny_config(folder, enforce_eager=False, cache_dir=tmp_path, max_num_batched_tokens=16))
    requests = [request(f"r{i}", prompt_of(i, 3 + 11 * i), max_tokens=30) for i in range(4)]
    served = tokens_of(run_requests(core, requests))
    assert core.info.compile_report["distinct_pieces"] == 3
    core.shutdown()
    eager = EngineCore(tiny_config(folder))
    spec = eager.executor.worker.loaded.model.spec  # type: ignore[attr-defined]
    for one in requests:
        sequence = list(one.prompt_token_ids)
        for _ in range(30):
            logits, _ = plain_logits(spec, sequence, torch.float32)
            sequence.append(int(logits[-1].argmax()))
        assert served[one.request_id] == sequence[len(one.prompt_token_ids) :], one.request_id
    eager.shutdown()


def test_preemptions_change_no_token(folder: Path) -> None:
    """Greedy or drawn, with penalties, logprobs, stop ids."""
    outputs = []
    for num_kv_blocks in (None, 12):
        core = EngineCore(tiny_config(folder, max_num_batched_tokens=24, max_model_len=100, num_kv_blocks=num_kv_blocks))
        outputs.append(run_requests(core, mixed_requests()))
        stats = core.stats()
        assert stats.num_free_blocks == stats.num_total_blocks
        assert (stats.num_preemptions > 0) == (num_kv_blocks is not None)
        core.shutdown()
    assert tokens_of(outputs[0]) == tokens_of(outputs[1])


def test_decode_steps_are_captured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    made: list[CudaGraphRunner] = []

    def graph_runners(config: Any, spec: Any, plans: list[Any], *others: Any, logs: bool) -> GraphRunners:
        made.append(
            CudaGraphRunner(
                plans[0],
                mode="full",
                max_num_seqs=8,
                backends=[],
                device=FakeDevice(),
                sizes=(1, 2, 4, 8),
                decode_head=begin_step,
                decode_tail=end_step,
            )
        )
        return GraphRunners(made)

    requests = [request(f"r{i}", prompt_of(i, 5 + 3 * i), max_tokens=24) for i in range(3)]
    plain = EngineCore(tiny_config(folder))
    expected = tokens_of(run_requests(plain, requests))
    plain.shutdown()
    monkeypatch.setattr("compile_and_serve.runtime.runner.loaded_model.make_graph_runners", graph_runners)
    core = EngineCore(tiny_config(folder, max_num_seqs=8))
    made[0].capture()
    assert tokens_of(run_requests(core, requests)) == expected
    assert made[0].stats.replays["full"] > 3
    core.shutdown()
