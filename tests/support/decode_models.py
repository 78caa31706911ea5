"""Models and steps of decodes for tests of CUDA graphs, over the stand-ins of `fake_graphs`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from compile_and_serve.compiler import CompileConfig, compile_model
from compile_and_serve.compiler.cudagraphs.runner import CudaGraphRunner
from compile_and_serve.compiler.model import CompiledModel
from compile_and_serve.custom_ops.attention.torch_backend import TorchAttention
from compile_and_serve.custom_ops.state.metadata import AttentionMetadata
from compile_and_serve.custom_ops.state.tokens import KV_CACHES
from compile_and_serve.custom_ops.step import Step
from compile_and_serve.models.spec import ModelSpec
from tests.support.fake_graphs import FakeDevice
from tests.support.tiny_models import fill, tiny_spec


class Backend(TorchAttention):
    name = "fake"
    decode_capturable = True


class Model:
    """logits[s, 0] = 2 · input id, logits[s, 1] = length of the sequence."""

    def __init__(self) -> None:
        self.sizes_run: list[int] = []

    def __call__(self, step: Step) -> dict[str, torch.Tensor]:
        input_ids, lengths_S = step.inputs["input_ids"], step.metadata[KV_CACHES].seq_lens
        self.sizes_run.append(len(input_ids))
        lengths = torch.zeros_like(input_ids)
        lengths[: len(lengths_S)] = lengths_S
        return {"logits": torch.stack([2 * input_ids, lengths], 1).float()[step.inputs["logits_indices"]]}


@dataclass
class Buffers:
    """What a runner owns: the arrays that every step of decodes is written into."""

    backend: Backend

    def __post_init__(self) -> None:
        self.input_ids = torch.zeros(64, dtype=torch.int64)
        self.indices = torch.arange(64)
        self.starts = torch.arange(65, dtype=torch.int32)
        self.seq_lens = torch.zeros(64, dtype=torch.int32)
        self.table = torch.zeros(64, 4, dtype=torch.int32)
        self.slots = torch.full((64,), -1)
        self.caches = [torch.zeros(4, 2, 1, 16, 8)]

    def inputs(self, size: int) -> Step:
        metadata = AttentionMetadata(
            backend=self.backend,  # type: ignore[arg-type]
            query_start_loc=self.starts[: size + 1],
            seq_lens=self.seq_lens[:size],
            block_table=self.table[:size],
            slot_mapping=self.slots[:size],
            num_seqs=size,
            num_tokens=size,
            max_query_len=1,
            max_seq_len=50,
        )
        ids = self.input_ids[:size]
        return Step(
            inputs={"input_ids": ids, "positions": ids, "logits_indices": self.indices[:size]},
            state={"kv_caches.0": self.caches[0]},
            metadata={KV_CACHES: metadata},
            num_tokens=size,
            num_seqs=size,
            padded_tokens=size,
            padded_seqs=size,
            num_rows=size,
            max_query_len=1,
        )


def run(runner: CudaGraphRunner, inputs: Step) -> torch.Tensor:
    return runner.run(inputs).outputs["logits"]


def make(
    backend: Backend | None = None, device: FakeDevice | None = None, **options: object
) -> tuple[CudaGraphRunner, Model, Buffers, FakeDevice]:
    model, buffers, device = Model(), Buffers(backend or Backend()), device or FakeDevice()
    runner = CudaGraphRunner(
        model,
        mode="full",
        max_num_seqs=40,
        backends=[buffers.backend],
        device=device,
        **options,  # type: ignore[arg-type]
    )
    runner.bind(buffers.inputs)
    return runner, model, buffers, device


def compiled(cache_dir: Path) -> tuple[ModelSpec, CompiledModel]:
    """A tiny model in pieces, with weights."""
    spec, kernels = tiny_spec(), frozenset({"rope_attention", "fused_linear"})
    config = CompileConfig(cache_dir=cache_dir)
    model = compile_model(spec, config, device=torch.device("cpu"), dtype=torch.float32, kernels=kernels)
    assert isinstance(model, CompiledModel)
    fill(model)
    return spec, model
