"""Pending pieces: a piece is generated while the kernels of earlier pieces are built."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule, symbolic_trace

from compile_and_serve.compiler.compat import fake_mode_with_symbols, rows_at_once
from compile_and_serve.compiler.fusion import has_encoder_norms
from compile_and_serve.compiler.inductor import PieceCompileError, end_kernel_compilers, start_inductor, start_piece
from compile_and_serve.custom_ops.platform import register_platform
from compile_and_serve.custom_ops.platforms.cpu import CpuPlatform
from tests.support.hopper import run_script
from tests.support.processes import is_running, wait_until

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("instruction_set")


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.tanh(x * self.factor) + x,)


def piece(factor: float) -> GraphModule:
    gm = symbolic_trace(Scaled(factor))
    for node in gm.graph.find_nodes(op="placeholder"):
        node.meta["example_value"] = torch.empty(32, 64)
    return gm


@pytest.mark.slow
def test_a_piece_is_waited_for_only_by_its_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.async_compile import AsyncCompile

    waited, wait = [], AsyncCompile.wait

    def counting(self: AsyncCompile, scope: dict[str, object]) -> None:
        waited.append(scope)
        wait(self, scope)

    monkeypatch.setattr(AsyncCompile, "wait", counting)
    factors = (0.5, 3.0)
    begun = [start_piece(piece(factor), CPU, tmp_path / str(factor)) for factor in factors]
    assert not waited
    assert AsyncCompile.wait is counting  # Inductor is restored
    x = torch.randn(32, 64)
    for count, (factor, pending) in enumerate(zip(factors, begun, strict=True), start=1):
        compiled = pending.result()
        assert len(waited) == count
        torch.testing.assert_close(compiled.run([x])[0], torch.tanh(x * factor) + x)
        assert list((tmp_path / str(factor)).rglob("*.so")), "the piece's kernels are not in its folder"


def test_compiling_adds_no_environment_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may start a program at the same time, which then fails with "Bad address"."""
    monkeypatch.delenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", raising=False)
    with start_inductor(CPU, tmp_path / "probes") as wait:
        wait()
        before = set(os.environ)
        compiled = start_piece(piece(0.75), CPU, tmp_path / "piece").result()
        assert set(os.environ) == before
    x = torch.randn(32, 64)
    torch.testing.assert_close(compiled.run([x])[0], torch.tanh(x * 0.75) + x)


@pytest.mark.slow
@pytest.mark.usefixtures("two_compile_threads")  # with one, kernels are built while the piece is generated
def test_a_kernel_that_cannot_be_built_fails_only_its_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.async_compile import AsyncCompile

    build, sources = AsyncCompile.cpp_pybinding, []

    def first_is_wrong(self: AsyncCompile, argtypes: list[str], source_code: str) -> object:
        sources.append(source_code)
        return build(self, argtypes, source_code + ("\n#error no such kernel\n" if len(sources) == 1 else ""))

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", first_is_wrong)
    wrong, right = (start_piece(piece(factor), CPU, tmp_path / str(factor)) for factor in (7.0, 8.0))
    with pytest.raises(PieceCompileError, match="could not compile a piece"):
        wrong.result()
    x = torch.randn(32, 64)
    torch.testing.assert_close(right.result().run([x])[0], torch.tanh(x * 8.0) + x)


def test_a_graph_that_cannot_be_lowered_is_an_error_at_once(tmp_path: Path) -> None:
    gm = piece(0.25)
    next(iter(gm.graph.find_nodes(op="call_function", target=torch.tanh))).target = torch.linalg.det
    gm.recompile()
    with pytest.raises(PieceCompileError, match="could not compile a piece"):
        start_piece(gm, CPU, tmp_path)


@pytest.fixture
def no_ptxas_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_PTXAS_PATH", "")  # so that it is restored after the test
    monkeypatch.delenv("TRITON_PTXAS_PATH")


@pytest.fixture
def triton_kernels() -> Iterator[None]:
    """The CPU counts as a device whose kernels are Triton's, so that processes compile them."""

    class Gpu(CpuPlatform):
        runs_triton_kernels = True

    register_platform("cpu", Gpu)
    yield
    register_platform("cpu", CpuPlatform)


class Normalized(nn.Module):
    def forward(self, tokens: int, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor]:
        return (F.layer_norm(x + y, (64,), weight, bias),)


class RowsNormalized(nn.Module):
    def forward(self, tokens: int, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.rms_norm(torch.neg(x), weight.shape, weight, 1e-6),)


@pytest.mark.parametrize(("shape", "counts"), [((4, 1280), True), ((4, 128), False), ((1280,), False)])
def test_norms_of_an_encoders_rows_are_known(shape: tuple[int, ...], counts: bool) -> None:
    mode, symbols = fake_mode_with_symbols(["tokens"], {"tokens": 1 << 16})
    gm = symbolic_trace(RowsNormalized())
    for node in gm.graph.find_nodes(op="call_function", target=torch.neg):
        with mode:
            node.meta["example_value"] = torch.empty((symbols["tokens"], *shape), device="meta")
    assert has_encoder_norms(gm) is counts


@pytest.mark.parametrize(("size", "hint", "is_whole"), [(1280, "INNER", True), (4096, "INNER", False), (1280, "OUTER", False)])
def test_rows_of_norms_are_reduced_at_once(size: int, hint: str, is_whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import sympy
    from torch._inductor.choices import InductorChoices
    from torch._inductor.runtime.hints import ReductionHint

    monkeypatch.setattr(InductorChoices, "should_use_persistent_reduction", staticmethod(lambda features, cooperative: False))
    features = SimpleNamespace(reduction_numel=sympy.Integer(size), get_reduction_hint=lambda: ReductionHint[hint])
    with rows_at_once():
        assert InductorChoices.should_use_persistent_reduction(features, False) is is_whole
        assert not InductorChoices.should_use_persistent_reduction(features, True)
    assert not InductorChoices.should_use_persistent_reduction(features, False)


@pytest.mark.usefixtures("triton_kernels")
def test_where_kernels_are_tritons_reads_of_symbolic_length_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor fuses a reduction only where that saves bytes."""
    pytest.importorskip("triton")
    from torch._inductor.choices import InductorChoices
    from torch._inductor.graph import GraphLowering

    saved, can_fuse, size_of = set[int](), InductorChoices.can_fuse, GraphLowering.get_dep_size_hint

    def noting(scheduler: Any, one: Any, other: Any, score: int) -> bool:
        saved.add(score)
        return can_fuse(scheduler, one, other, score)

    monkeypatch.setattr(InductorChoices, "can_fuse", staticmethod(noting))
    mode, symbols = fake_mode_with_symbols(["tokens"], {"tokens": 1 << 16})
    tokens = symbols["tokens"]
    gm = symbolic_trace(Normalized())
    with mode:
        values = [tokens, *(torch.empty(size, device="meta") for size in ((tokens, 64), (tokens, 64), (64,), (64,)))]
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), values, strict=True):
        node.meta["example_value"] = value
    compiled = start_piece(gm, CPU, tmp_path).result()
    assert max(saved) >= 4 * 64 * 1000  # a read of x or y by two kernels
    assert GraphLowering.get_dep_size_hint is size_of
    for count in (1, 7):
        x, y, weight, bias = (torch.randn(size) for size in ((count, 64), (count, 64), (64,), (64,)))
        torch.testing.assert_close(compiled.run([count, x, y, weight, bias])[0], F.layer_norm(x + y, (64,), weight, bias))


class Patches(nn.Module):
    def forward(self, tokens: int, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor]:
        return (F.linear(torch.tanh(x), weight),)


def test_a_linear_of_several_rows_a_token_is_compiled(tmp_path: Path) -> None:
    """torch 2.11 cannot trace it as it is."""
    mode, symbols = fake_mode_with_symbols(["tokens"], {"tokens": 1 << 16})
    gm = symbolic_trace(Patches())
    with mode:
        values = [symbols["tokens"], torch.empty((symbols["tokens"], 4, 16), device="meta"), torch.empty(8, 16, device="meta")]
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), values, strict=True):
        node.meta["example_value"] = value
    compiled = start_piece(gm, CPU, tmp_path).result()
    for count in (1, 7):
        x, weight = torch.randn(count, 4, 16), torch.randn(8, 16)
        torch.testing.assert_close(compiled.run([count, x, weight])[0], F.linear(torch.tanh(x), weight))


@pytest.fixture
def two_compile_threads() -> Iterator[None]:
    """With one core, no processes would be started."""
    from torch._inductor import config

    with config.patch(compile_threads=2):
        yield


@pytest.mark.slow
@pytest.mark.exhaustive_cases(but=["ready"])
@pytest.mark.usefixtures("no_ptxas_named", "two_compile_threads", "triton_kernels")
@pytest.mark.parametrize("is_ready", [pytest.param(True, id="ready"), pytest.param(False, id="starting", marks=pytest.mark.slow)])
def test_compile_processes_end_with_the_block(is_ready: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from torch._inductor.async_compile import AsyncCompile

    monkeypatch.setattr("compile_and_serve.compiler.inductor.POOL_START_SECONDS", 60.0)
    with suppress(KeyError), start_inductor(CPU, tmp_path) as wait:
        pool = AsyncCompile.process_pool()
        if is_ready:
            wait()
            assert AsyncCompile.use_process_pool()
            assert pool.submit(os.getpid).result(timeout=60) != os.getpid()
        raise KeyError("the block fails")
    wait_until(lambda: pool.process.poll() is not None, 120)  # it imports torch first
    assert not AsyncCompile.process_pool.cache_info().currsize  # the next compilation starts a new pool


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.usefixtures("no_ptxas_named", "two_compile_threads", "triton_kernels")
def test_compile_processes_use_the_bytecode_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from torch._inductor.async_compile import AsyncCompile

    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    with start_inductor(CPU, tmp_path):
        assert "PYTHONPYCACHEPREFIX" not in os.environ
        pool = AsyncCompile.process_pool().process
        environment = Path(f"/proc/{pool.pid}/environ").read_text().split("\0")
        end_kernel_compilers()
        wait_until(lambda: not is_running(pool.pid))
    assert f"PYTHONPYCACHEPREFIX={tmp_path}" in environment


@pytest.mark.slow
@pytest.mark.usefixtures("no_ptxas_named", "two_compile_threads", "triton_kernels")
def test_compile_processes_can_be_killed(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    from torch._inductor.async_compile import AsyncCompile

    with start_inductor(CPU, tmp_path):
        AsyncCompile.wait_pool_ready()
        worker = AsyncCompile.process_pool().submit(os.getpid).result(timeout=60)
        assert is_running(worker)
        end_kernel_compilers()
        wait_until(lambda: not is_running(worker))
    end_kernel_compilers()  # does nothing


@pytest.mark.slow
def test_a_pool_that_did_not_start_is_logged_once_and_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch._inductor.async_compile import AsyncCompile

    failed: Future[str] = Future()
    failed.set_exception(RuntimeError("no more processes"))
    monkeypatch.setattr(AsyncCompile, "_ready_future", failed)
    x = torch.randn(32, 64)
    for factor in (5.0, 6.0):
        compiled = start_piece(piece(factor), CPU, tmp_path / str(factor)).result()
        torch.testing.assert_close(compiled.run([x])[0], torch.tanh(x * factor) + x)
    assert [record.message for record in caplog.records if "no more processes" in record.message] == [
        "Inductor's compile processes could not be started; kernels are compiled one after another: RuntimeError: no more processes"
    ]


KERNEL = """
import json, shutil, sys, os
from pathlib import Path
import triton, triton.language as tl
import torch
from compile_and_serve.compiler.inductor import load_pieces
from tests.support.hopper import compiled

here = Path(sys.argv[1])
hits = []
triton.knobs.compilation.listener = lambda src, metadata, metadata_group, times, cache_hit: hits.append(cache_hit)
from compile_and_serve.custom_ops.sampling.decode_inputs import _begin_kernel

def compile_in(folder):
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    types = {"num_rows": "i32", "table_stride": "i32", "seq_lens_ptr": "*i32", "block_table_ptr": "*i32"}
    compiled(_begin_kernel, {"BLOCK_SIZE": 16, "ROWS": 128}, lambda name: types.get(name, "*i64"), 4)

compile_in(here / "made")
compile_in(here / "made")
shutil.copytree(here / "made", here / "copied")
shutil.rmtree(here / "made")
load_pieces({"none": "call = None"}, torch.device("cpu"), here / "copied")
compile_in(here / "copied")
print(json.dumps(hits))
"""


@pytest.mark.slow
def test_copied_kernels_are_not_rebuilt_when_the_original_folder_is_gone(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    script = KERNEL.replace("sys.argv[1]", repr(str(tmp_path)))
    assert run_script(script, tmp_path / "outside") == [False, True, True]
