"""What a user reads of memory: the table before the cache is allocated, and one sentence where there is not enough."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from typer.testing import CliRunner

from compile_and_serve.compiler.cudagraphs.runner import PlainRunner
from compile_and_serve.compiler.cudagraphs.stats import GraphStats
from compile_and_serve.compiler.model import StepModel
from compile_and_serve.custom_ops.attention.torch_backend import TorchAttention
from compile_and_serve.custom_ops.platform import platform_of, register_platform
from compile_and_serve.custom_ops.platforms.cpu import CpuPlatform
from compile_and_serve.custom_ops.platforms.cuda import CudaPlatform
from compile_and_serve.custom_ops.platforms.protocol import MemoryInfo
from compile_and_serve.runtime.distributed.in_process_executor import InProcessExecutor
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.runner import cuda_graphs
from compile_and_serve.runtime.runner.memory import DeviceMemoryError, MemoryPlan, memory_for
from compile_and_serve.runtime.runner.state_memory import KVCacheTooSmallError
from compile_and_serve.runtime.runner.warm_up import CAPTURED_AT_START
from compile_and_serve.serve.cli.main import app
from compile_and_serve.serve.cli.output import USER_ERROR
from tests.support.engines import tiny_config, write_tiny_model

GIB = 1 << 30
CPU = torch.device("cpu")
CUDA_TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.00 GiB is free."


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("memory") / "tiny")


MEMORY = MemoryInfo(free=3 * GIB, total=80 * GIB, reserved=70 * GIB)


@pytest.fixture(autouse=True)
def device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaPlatform, "memory", lambda platform: MEMORY)


class Gpu(CpuPlatform):
    """Says that its memory is its own: `used` bytes are in use, and up to `peak` were."""

    shares_host_memory = False

    def __init__(self) -> None:
        super().__init__(CPU)
        self.name = "a GPU"
        self.used = self.peak = 0

    def memory(self) -> MemoryInfo:
        return MEMORY

    def used_bytes(self) -> int:
        return self.used

    def peak_bytes(self) -> int:
        return self.peak


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError(CUDA_TEXT), RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported")]
)
def test_out_of_memory_becomes_a_sentence(error: RuntimeError) -> None:
    with pytest.raises(DeviceMemoryError) as raised, memory_for("cooking", torch.device("cuda"), "lower --heat"):
        raise error
    wanted = "2.00 GiB more were wanted, " if "Tried" in str(error) else ""
    assert str(raised.value) == (
        f"CUDA ran out of memory while cooking: {wanted}3.00 GiB of 80.00 GiB are free, 70.00 GiB are held here and 7.00 GiB by "
        "other processes and the driver; lower --heat."
    )
    assert raised.value.__cause__ is error


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="^shapes do not fit$"), memory_for("cooking", torch.device("cpu"), ""):
        raise RuntimeError("shapes do not fit")


def test_the_cpu_has_no_endless_memory_either() -> None:
    sentence = r"^Memory ran out while baking: 1152921504606846976 bytes more were wanted, [\d.]+ GiB are free; lower it.$"
    with pytest.raises(DeviceMemoryError, match=sentence), memory_for("baking", torch.device("cpu"), "lower it"):
        torch.empty(1 << 60, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("place", "doing", "flags"),
    [
        ("compile_and_serve.runtime.runner.loaded_model.load_weights", "loading the weights", ["--quantization", "--tensor-parallel-size"]),
        (
            "compile_and_serve.runtime.runner.base_runner.allocate_state",
            "allocating a KV cache of 0.00 GiB",
            ["--gpu-memory-utilization", "--kv-cache-memory", "--max-model-len"],
        ),
        (
            "compile_and_serve.runtime.runner.warm_up.run_dummy_step",
            "warming up and capturing CUDA graphs",
            ["--gpu-memory-utilization", "--kv-cache-memory", "--max-num-batched-tokens", "--max-num-seqs"],
        ),
    ],
)
def test_start_up_says_what_to_lower(model_dir: Path, monkeypatch: pytest.MonkeyPatch, place: str, doing: str, flags: list[str]) -> None:
    def fail(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError(CUDA_TEXT)

    monkeypatch.setattr(place, fail)
    with pytest.raises(DeviceMemoryError, match=f"while {doing}: 2.00 GiB more") as raised:
        EngineCore(tiny_config(model_dir))
    assert all(flag in str(raised.value) for flag in flags)
    assert "\n" not in str(raised.value)


def test_a_command_ends_as_with_any_mistake_at_start_up(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise torch.OutOfMemoryError(CUDA_TEXT)

    monkeypatch.setattr("compile_and_serve.runtime.runner.loaded_model.load_weights", fail)
    result = CliRunner().invoke(app, ["generate", str(tiny_llama_dir), "Hi", "--eager", "--device", "cpu"])
    assert result.exit_code == USER_ERROR
    assert "Error: Memory ran out while loading the weights: 2.00 GiB more were wanted" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_plan_adds_up_and_is_readable() -> None:
    plan = MemoryPlan(
        total=80 * GIB,
        utilization=0.9,
        others=GIB,
        weights=15 * GIB,
        largest_step=2 * GIB,
        step_tokens=8192,
        sampling=GIB // 4,
        graphs=GIB // 2,
    )
    assert plan.free_for_cache == 72 * GIB - 18 * GIB - 3 * GIB // 4
    assert plan.table("a GPU", 50 * GIB, 409600).splitlines() == [
        "Memory of a GPU: 80.00 GiB, of which 90% may be used",
        "  other processes     1.00 GiB  and the driver",
        "  weights            15.00 GiB",
        "  largest step        2.00 GiB  8192 tokens",
        "  sampling            0.25 GiB",
        "  CUDA graphs         0.50 GiB  estimated",
        "  KV cache           50.00 GiB  409600 tokens",
        "  left                3.25 GiB",
    ]


class Graphs(PlainRunner):
    """In the place of `CudaGraphRunner`. Its estimate takes a GiB and resets the allocator's peak; then two graphs are captured."""

    sizes = (1,)
    largest_loss = num_waiting = 0

    def __init__(self, model: StepModel, *, stats: GraphStats, **options: object) -> None:
        super().__init__(model)
        self.stats = stats
        self.num_left = CAPTURED_AT_START + 2

    def bind(self, *steps: object) -> None: ...

    def estimate_parts(self, max_tokens: int, largest_step: int) -> tuple[int, int]:
        cast(Gpu, platform_of(CPU)).peak = 1
        self.stats.estimated_bytes = GIB
        return GIB, 0

    def capture_next(self) -> bool:
        self.num_left -= 1
        self.stats.used_bytes = GIB // 2
        return self.num_left >= 0

    def capture_pieces_up_to(self, max_tokens: int | None) -> None: ...

    def next_piecewise_size(self) -> int | None:
        return None

    def report(self) -> dict[str, Any]:
        return {"full_graphs": 0}


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    """The CPU's platform has memory of its own."""
    gpu = Gpu()
    register_platform("cpu", lambda device: gpu)
    yield gpu
    register_platform("cpu", CpuPlatform)


def test_the_largest_step_is_measured_with_the_workspace_that_later_steps_take(
    model_dir: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.used, gpu.peak = 3 * GIB, 5 * GIB
    config = tiny_config(model_dir, max_num_batched_tokens=64)
    monkeypatch.setattr(TorchAttention, "pending_workspace_bytes", GIB)
    with caplog.at_level(logging.INFO, logger="compile_and_serve.runtime"):
        plan = EngineCore(replace(config, attention_backend="torch")).info.compile_report
    assert [plan[f"memory.{name}"] for name in ("weights", "largest_step", "step_tokens")] == [3 * GIB, 3 * GIB, 64]
    assert [plan[f"memory.{name}"] for name in ("total", "others", "graphs")] == [80 * GIB, 7 * GIB, 0]
    assert "  largest step        3.00 GiB  64 tokens" in caplog.text
    assert "  KV cache            0.00 GiB  8192 tokens" in caplog.text


def test_graphs_are_estimated_after_the_largest_step_and_reported_once_all_are_captured(
    model_dir: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Estimating resets the allocator's peak: what is read afterwards is not the largest step's."""
    gpu.used, gpu.peak, gpu.replays_graphs = 3 * GIB, 5 * GIB, True
    monkeypatch.setattr(cuda_graphs, "CudaGraphRunner", Graphs)
    monkeypatch.setattr(cuda_graphs, "CudaGraphs", lambda device: None)
    config = tiny_config(model_dir, max_num_batched_tokens=64, enforce_eager=False)
    executor = InProcessExecutor(config, lambda *stage: None)
    plan = executor.info.compile_report
    assert [plan[f"memory.{name}"] for name in ("largest_step", "graphs")] == [2 * GIB, GIB]
    with caplog.at_level(logging.INFO, logger="compile_and_serve.runtime"):
        assert [executor.idle() for _ in range(4)] == [True, True, False, False]
    assert caplog.text.count("all sizes are captured: estimated 1.00 GiB for all, took 0.50 GiB.") == 1


def test_a_device_without_room_for_a_cache_shows_who_took_it(model_dir: Path, gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    gpu.used, gpu.peak = 32 * GIB, 34 * GIB
    config = tiny_config(model_dir, num_kv_blocks=None, gpu_memory_utilization=0.5)
    with (
        caplog.at_level(logging.INFO, logger="compile_and_serve.runtime"),
        pytest.raises(KVCacheTooSmallError, match="or raise --gpu-memory-utilization"),
    ):
        EngineCore(config)
    assert "Memory of a GPU: 80.00 GiB, of which 50% may be used" in caplog.text
    assert "  left               -1.00 GiB" in caplog.text
