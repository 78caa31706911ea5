"""Pieces in work: the next one is generated while compilers build what the ones before it need."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, symbolic_trace

from compiler.inductor import PieceCompileError, _kernel_compilers, compile_piece, start_piece

CPU = torch.device("cpu")


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


def test_no_piece_is_waited_for_before_its_result_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.async_compile import AsyncCompile

    waited, wait = [], AsyncCompile.wait

    def counting(self: AsyncCompile, scope: dict[str, object]) -> None:
        waited.append(scope)
        wait(self, scope)

    monkeypatch.setattr(AsyncCompile, "wait", counting)
    factors = (0.5, 3.0)
    begun = [start_piece(piece(factor), CPU, tmp_path / str(factor)) for factor in factors]
    assert not waited
    assert AsyncCompile.wait is counting  # Inductor is as it was
    x = torch.randn(32, 64)
    for count, (factor, in_work) in enumerate(zip(factors, begun, strict=True), start=1):
        compiled = in_work.result()
        assert len(waited) == count
        torch.testing.assert_close(compiled.run([x])[0], torch.tanh(x * factor) + x)
        assert list((tmp_path / str(factor)).rglob("*.so")), "what the piece needs does not lie in its own folder"


def test_a_kernel_that_cannot_be_built_fails_its_piece_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_graph_that_cannot_be_lowered_says_so_at_once(tmp_path: Path) -> None:
    gm = piece(0.25)
    next(iter(gm.graph.find_nodes(op="call_function", target=torch.tanh))).target = torch.linalg.det
    gm.recompile()
    with pytest.raises(PieceCompileError, match="could not compile a piece"):
        compile_piece(gm, CPU, tmp_path)


def test_processes_that_compile_kernels_are_gone_after_the_block() -> None:
    pytest.importorskip("triton")
    from torch._inductor.async_compile import AsyncCompile

    import compiler.inductor as inductor

    for _ in range(2):  # again in the same process
        with _kernel_compilers():
            pool = AsyncCompile.process_pool()
            AsyncCompile.wait_pool_ready()
            assert pool.submit(os.getpid).result(timeout=60) != os.getpid()
        closing = inductor._compilers_closing
        assert closing is not None
        closing.join(timeout=60)
        assert not closing.is_alive()
        assert pool.process.poll() is not None
