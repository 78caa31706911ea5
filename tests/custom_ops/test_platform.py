"""The platform seam: devices answer through `platform_of`, and no other code asks for a device's type."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from compile_and_serve.compiler import available_kernels
from compile_and_serve.custom_ops.attention.flashinfer_modules import flashinfer_unavailable_reason
from compile_and_serve.custom_ops.linear.elementwise import elementwise_unsupported_reason
from compile_and_serve.custom_ops.platform import platform_of, register_platform
from compile_and_serve.custom_ops.platforms.cpu import CpuPlatform
from compile_and_serve.custom_ops.platforms.cuda import CudaPlatform
from compile_and_serve.custom_ops.platforms.protocol import MemoryInfo
from compile_and_serve.custom_ops.staged_arrays import StagedArrays
from compile_and_serve.custom_ops.triton_common import num_sms
from compile_and_serve.custom_ops.tuning.tuner import device_name
from compile_and_serve.runtime.runner.device import resolve_dtype
from compile_and_serve.runtime.runner.memory import DeviceMemoryError, memory_for

PACKAGE = Path(__file__).parents[2] / "compile_and_serve"
ALLOWED = {
    "custom_ops/platform.py",
    "custom_ops/platforms/cuda.py",
    "compiler/cudagraphs/graph_capture.py",  # CUDA's `GraphDevice`, which is made only where the platform replays graphs
}
CPU = torch.device("cpu")


def device_questions(source: str) -> list[tuple[int, str]]:
    """Line and text of every comparison of a device's type, lookup by it, `is_cuda`, `is_cpu`, and use of `torch.cuda`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            sides = (node.left, *node.comparators)
            words = {side.value for side in sides if isinstance(side, ast.Constant)}
            asks = any(map(_is_type, sides)) and (not words or bool(words & {"cpu", "cuda", "meta"}))
        elif isinstance(node, ast.Subscript):
            asks = _is_type(node.slice)
        elif isinstance(node, ast.Attribute):
            asks = node.attr in ("is_cuda", "is_cpu") or ast.unparse(node) == "torch.cuda"
        elif isinstance(node, ast.Import):
            asks = any(alias.name.startswith("torch.cuda") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            asks = any(name.startswith("torch.cuda") for name in names)
        else:
            continue
        if asks:
            found.append((node.lineno, ast.unparse(node)))
    return sorted(found)


def _is_type(node: ast.expr) -> bool:
    """`x.type`, or a variable that holds it."""
    if isinstance(node, ast.Attribute):
        return node.attr in ("type", "device_type")
    return isinstance(node, ast.Name) and node.id == "device_type"


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("x.device.type == 'cuda'", 1),
        ("'cpu' != device.type", 1),
        ("device_type in ('cpu', 'cuda')", 1),
        ("SIZES[device.type]", 1),
        ("x.is_cuda and y.is_cpu", 2),
        ("torch.cuda.synchronize()", 1),
        ("def f(event: torch.cuda.Event | None): ...", 1),
        ("import torch.cuda", 1),
        ("body.thinking.type == 'enabled'", 0),
        ("from torch import cuda", 1),
        ("from torch.cuda import Event", 1),
        ("print(device.type, torch.version.cuda, type(x) == y, x.types == y)", 0),
    ],
)
def test_questions_are_found(source: str, count: int) -> None:
    assert len(device_questions(source)) == count


def test_only_platforms_ask_for_the_type_of_a_device() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{line}: {text}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if str(path.relative_to(PACKAGE)) not in ALLOWED
        for line, text in device_questions(path.read_text())
    ]
    assert not found, "\n".join(found)


class Accelerator(CpuPlatform):
    """A third platform, with memory of its own and no kernels of ours."""

    shares_host_memory = False
    runs_cpp_kernels = False
    num_multiprocessors = 8

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.name = "an accelerator"

    def computes_in(self, dtype: torch.dtype) -> bool:
        return dtype == torch.bfloat16

    def memory(self) -> MemoryInfo:
        return MemoryInfo(free=1 << 30, total=8 << 30, reserved=5 << 30)


@pytest.fixture
def accelerator() -> Iterator[torch.device]:
    register_platform("meta", Accelerator)
    yield torch.device("meta")
    register_platform("meta", None)


def test_a_platform_that_is_registered_is_asked(accelerator: torch.device) -> None:
    assert platform_of(accelerator) is platform_of(accelerator)
    assert device_name(accelerator) == "an accelerator"
    assert num_sms(accelerator) == 8
    assert "CPU only" in (elementwise_unsupported_reason(device=accelerator, dtype=torch.float32) or "")
    assert "CUDA devices only" in (flashinfer_unavailable_reason(accelerator) or "")
    assert available_kernels(device=accelerator, dtype=torch.float32, attention_backends=[]) == {"rope_attention"}
    assert resolve_dtype("auto", accelerator) == torch.bfloat16
    arrays = StagedArrays({"ids": (np.int64, 3)}, accelerator)
    assert arrays.rotate()["ids"] is not arrays.rotate()["ids"]  # one is filled while the other is on its way
    assert arrays.device["ids"].device == accelerator
    sentence = "META ran out of memory while cooking: 1.00 GiB of 8.00 GiB are free, 5.00 GiB are held here and 2.00 GiB by other"
    with pytest.raises(DeviceMemoryError, match=sentence), memory_for("cooking", accelerator, "lower the heat"):
        raise MemoryError


def test_a_device_without_a_platform_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"^There is no platform for meta devices: known are cpu, cuda\.$"):
        platform_of(torch.device("meta"))


@pytest.mark.parametrize(("capability", "computes"), [((7, 5), []), ((8, 0), ["bfloat16"]), ((8, 9), ["bfloat16", "float8_e4m3fn"])])
def test_what_a_cuda_device_computes_in(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], computes: list[str]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    cuda = CudaPlatform(torch.device("cuda"))
    assert [name for name in ("bfloat16", "float8_e4m3fn") if cuda.computes_in(getattr(torch, name))] == computes
    assert cuda.computes_in(torch.float32)


def test_the_cpu_shares_memory_and_waits_for_nothing() -> None:
    cpu = platform_of(CPU)
    array = np.arange(4)
    uploaded = cpu.upload(array)
    assert uploaded.data_ptr() == array.ctypes.data
    assert cpu.download(uploaded) is uploaded
    assert cpu.record_event() is None
    with pytest.raises(ValueError, match="no graphs"):
        cpu.capture(lambda: None)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_memory_of_the_cpu() -> None:
    cpu = platform_of(CPU)
    memory = cpu.memory()
    assert 1 << 20 < memory.free <= memory.total < 1 << 50
    cpu.reset_peak()
    before = cpu.used_bytes()
    block = np.ones(256 << 20, dtype=np.uint8)
    assert cpu.used_bytes() >= before + (200 << 20)
    del block
    assert cpu.peak_bytes() >= before + (200 << 20)
    cpu.reset_peak()
    assert cpu.peak_bytes() < before + (200 << 20)


@pytest.mark.gpu
def test_events_graphs_and_memory_of_a_gpu() -> None:
    cuda = platform_of(torch.device("cuda", torch.cuda.current_device()))
    x = cuda.upload(np.zeros(1 << 20, dtype=np.float32), through_pinned=True)
    start = cuda.record_timed_event()
    graph = cuda.capture(lambda: x.add_(1))
    graph.replay()
    end = cuda.record_timed_event()
    end.synchronize()
    assert end.query()
    assert end.seconds_since(start) > 0
    host = cuda.download(x)
    event = cuda.record_event()
    assert event is not None
    event.synchronize()
    assert host.is_pinned()
    assert host.eq(2).all()  # the warm-up, and the replay
    assert cuda.current_stream() == torch.cuda.current_stream().cuda_stream
    assert not cuda.is_capturing()
    assert cuda.host_zeros(3, torch.int64).is_pinned()
    pinned = cuda.host_zeros(4, torch.int64)
    torch.add(torch.arange(3, device=cuda.device), 1 << 40, out=cuda.device_view(pinned)[:3])
    torch.cuda.synchronize()
    assert pinned.tolist() == [1 << 40, (1 << 40) + 1, (1 << 40) + 2, 0]
    cuda.reset_peak()
    before = cuda.used_bytes()
    more = torch.zeros(1 << 20, device=cuda.device)
    assert cuda.used_bytes() >= before + more.nbytes
    del more
    cuda.release_cached()
    assert cuda.used_bytes() == before < cuda.peak_bytes()
    assert 0 < cuda.memory().free < cuda.memory().total
