"""What a user reads of memory: the table before the cache is allocated, and one sentence where there is not enough."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from compile_and_serve.compiler.cudagraphs.runner import GraphStats, PlainRunner
from compile_and_serve.custom_ops.platform import CpuPlatform, CudaPlatform, MemoryInfo
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.runner.memory import DeviceMemoryError, MemoryPlan, memory_for
from compile_and_serve.runtime.runner.state_memory import KVCacheTooSmallError
from compile_and_serve.serve.cli.main import app
from compile_and_serve.serve.cli.output import USER_ERROR
from tests.support.engines import tiny_config, write_tiny_model

GIB = 1 << 30
CUDA_TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 1.00 GiB is free."


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("memory") / "tiny")


MEMORY = MemoryInfo(free=3 * GIB, total=80 * GIB, reserved=70 * GIB)


@pytest.fixture(autouse=True)
def device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaPlatform, "memory", lambda platform: MEMORY)


class Gpu(CpuPlatform):
    """Says that its memory is its own, of which up to `peak` bytes were in use."""

    shares_host_memory = False
    peak = 0

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.name = "a GPU"

    def memory(self) -> MemoryInfo:
        return MEMORY

    def peak_bytes(self) -> int:
        return self.peak


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(CUDA_TEXT),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported"),
    ],
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
    sentence = (
        r"^Memory ran out while baking: 1152921504606846976 bytes more were wanted, [\d.]+ GiB are free; lower it.$"
    )
    with pytest.raises(DeviceMemoryError, match=sentence), memory_for("baking", torch.device("cpu"), "lower it"):
        torch.empty(1 << 60, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("place", "doing", "flags"),
    [
        (
            "compile_and_serve.runtime.runner.worker.load_weights",
            "loading the weights",
            ["--quantization", "--tensor-parallel-size"],
        ),
        (
            "compile_and_serve.runtime.runner.model_runner.allocate_state",
            "allocating a KV cache of 0.00 GiB",
            ["--gpu-memory-utilization", "--kv-cache-memory", "--max-model-len"],
        ),
        (
            "compile_and_serve.runtime.runner.model_runner.ModelRunner.warm_up",
            "warming up and capturing CUDA graphs",
            ["--gpu-memory-utilization", "--kv-cache-memory", "--max-num-batched-tokens", "--max-num-seqs"],
        ),
    ],
)
def test_start_up_says_what_to_lower(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, place: str, doing: str, flags: list[str]
) -> None:
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

    monkeypatch.setattr("compile_and_serve.runtime.runner.worker.load_weights", fail)
    result = CliRunner().invoke(app, ["generate", str(tiny_llama_dir), "Hi", "--eager", "--device", "cpu"])
    assert result.exit_code == USER_ERROR
    assert "Error: Memory ran out while loading the weights: 2.00 GiB more were wanted" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_plan_adds_up_and_is_readable() -> None:
    plan = MemoryPlan(
        total=80 * GIB, utilization=0.9, others=GIB, weights=15 * GIB, largest_step=2 * GIB, step_tokens=8192, sampling=GIB // 4,
        graphs=GIB // 2,
    )  # fmt: skip
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


def test_what_the_largest_step_takes_is_measured_before_graphs_are_estimated(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Estimating resets the allocator's peak: what is read afterwards is not the largest step's."""
    rank = EngineCore(tiny_config(model_dir, max_num_batched_tokens=64))._executor.worker  # type: ignore[attr-defined]
    gpu = rank.platform = Gpu()
    gpu.peak = 5 * GIB

    class Graphs(PlainRunner):
        def bind(self, *inputs: object) -> None: ...

        def estimate_bytes(self, max_tokens: int, largest_step: int) -> int:
            assert (max_tokens, largest_step) == (64, 3 * GIB)
            gpu.peak = 1
            return GIB

    rank._graphs = Graphs(rank._model)
    rank._backends["kv_caches"].workspace_to_come = GIB
    plan = rank._memory_plan = rank._measure_memory(3 * GIB)
    assert (plan.weights, plan.largest_step, plan.step_tokens, plan.graphs) == (3 * GIB, 3 * GIB, 64, GIB)
    assert (plan.total, plan.others) == (80 * GIB, 7 * GIB)
    with caplog.at_level(logging.INFO, logger="compile_and_serve.runtime"):
        rank._say_memory(4 * GIB, 1000)
    assert "  KV cache            4.00 GiB  1000 tokens" in caplog.text


def test_a_device_without_room_for_a_cache_shows_who_took_it(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    core = EngineCore(tiny_config(model_dir))
    rank = core._executor.worker  # type: ignore[attr-defined]
    rank.platform = Gpu()
    rank._config = replace(rank._config, cache=replace(rank._config.cache, num_blocks=None))
    rank._memory_plan = MemoryPlan(
        total=80 * GIB, utilization=0.5, others=0, weights=39 * GIB, largest_step=2 * GIB, step_tokens=8192, sampling=0, graphs=0
    )  # fmt: skip
    with (
        caplog.at_level(logging.INFO, logger="compile_and_serve.runtime"),
        pytest.raises(KVCacheTooSmallError, match="or raise --gpu-memory-utilization"),
    ):
        rank._num_blocks()
    assert "Memory of a GPU: 80.00 GiB, of which 50% may be used" in caplog.text
    assert "  left               -1.00 GiB" in caplog.text


def test_what_graphs_took_is_said_once_all_are_captured(model_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    rank = EngineCore(tiny_config(model_dir))._executor.worker  # type: ignore[attr-defined]

    class Graphs:
        stats = GraphStats(estimated_bytes=GIB, used_bytes=GIB // 2)
        left = 2

        def capture_next(self) -> bool:
            self.left -= 1
            return self.left >= 0

        def next_piecewise_size(self) -> int | None:
            return None

    rank._graphs = Graphs()
    with caplog.at_level(logging.INFO, logger="compile_and_serve.runtime"):
        assert [rank.idle() for _ in range(4)] == [True, True, False, False]
    assert caplog.text.count("all sizes are captured: estimated 1.00 GiB for all, took 0.50 GiB.") == 1
