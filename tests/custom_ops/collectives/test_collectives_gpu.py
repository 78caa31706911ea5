"""Collectives over NCCL and over symmetric memory, as calls and as a CUDA graph that is replayed, against float64."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compile_and_serve.custom_ops.collectives.allreduce_choice import (
    AllreduceChoice,
    choose_allreduce,
    fused_allreduce,
    use_symmetric_memory,
)
from compile_and_serve.custom_ops.collectives.allreduce_norm import allreduce_add_rms_norm, allreduce_add_rms_norm_quantize
from compile_and_serve.custom_ops.collectives.collectives import all_gather, all_reduce, rank_group
from compile_and_serve.custom_ops.collectives.symmetric_memory import SymmetricMemory, layout_for, map_symmetric_memory
from compile_and_serve.custom_ops.collectives.tokens import gather_tokens, map_token_memory, scatter_tokens
from compile_and_serve.custom_ops.mesh import Mesh
from compile_and_serve.custom_ops.quantization import quantize_activations
from compile_and_serve.custom_ops.triton_common import num_sms
from compile_and_serve.custom_ops.tuning.tuner import Tuner, device_name
from tests.support.numbers import relative_error
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu]

ROWS, FEATURES, REPLAYS = (1, 3, 128, 130, 515, 2200), 4096, 5
EVERYTHING = 1 << 20
CHOICES = {
    "pushed": AllreduceChoice(pushed_rows=EVERYTHING, one_shot_rows=EVERYTHING),
    "one shot": AllreduceChoice(one_shot_rows=EVERYTHING, two_shot_rows=EVERYTHING),
    "two shots": AllreduceChoice(one_shot_rows=0, two_shot_rows=EVERYTHING),
    "two shots by stores": AllreduceChoice(two_shot_stores_rows=EVERYTHING),
    "by turns": AllreduceChoice(pushed_rows=1, one_shot_rows=3, two_shot_rows=128, two_shot_stores_rows=1000),
}


def operands(rank: int, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shared = torch.Generator().manual_seed(rows)
    residual, weight = torch.randn(rows, FEATURES, generator=shared), torch.randn(FEATURES, generator=shared)
    x = torch.randn(rows, FEATURES, generator=torch.Generator().manual_seed(1000 * rows + rank))
    return x.bfloat16(), residual.bfloat16(), weight.bfloat16()


def run_rank(rank: int, size: int, kernel: str) -> list[dict[str, torch.Tensor]]:
    device = torch.device("cuda", torch.cuda.current_device())
    results = []
    if kernel in CHOICES:
        group = rank_group()
        layout = layout_for(size, FEATURES, torch.bfloat16, ROWS[-1], num_sms(device))
        memory = map_symmetric_memory(rank, layout, group.process_group, device)
        assert isinstance(memory, SymmetricMemory), memory
        use_symmetric_memory(memory, CHOICES[kernel])
    for rows in ROWS:
        x, residual, weight = (tensor.to(device) for tensor in operands(rank, rows))

        def work(x: torch.Tensor = x, residual: torch.Tensor = residual, weight: torch.Tensor = weight) -> dict[str, torch.Tensor]:
            total, normed = allreduce_add_rms_norm(x, residual, weight, 1e-5)
            total_again, normed_again, values, scale = allreduce_add_rms_norm_quantize(x, residual, weight, 1e-5)
            return {
                "sum": all_reduce(x),
                "all": all_gather(x, size, size * FEATURES - 3),
                "total": total,
                "normed": normed,
                "total again": total_again,
                "normed again": normed_again,
                "values": values.view(torch.uint8),  # which can be sent
                "scale": scale,
            }

        for _ in range(3):
            called = {name: tensor.cpu() for name, tensor in work().items()}
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog looks at events of other collectives meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            replayed = work()
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
        for name, tensor in replayed.items():
            assert torch.equal(tensor.cpu(), called[name]), f"{name} of {rows} rows differs in a graph"
        check_launches_one_by_one(x, residual, weight, called["total"])
        results.append(called)
    assert rank_group().size == size
    return results


def check_launches_one_by_one(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, expected: torch.Tensor) -> None:
    """Values change from launch to launch: one that reads what an earlier one left behind is seen."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        totals = [allreduce_add_rms_norm(x.neg_(), residual, weight, 1e-5)[0] for _ in range(6)]
    for _ in range(REPLAYS):
        graph.replay()
        torch.cuda.synchronize()
        for even, odd in zip(totals[::2], totals[1::2], strict=True):
            assert torch.equal(odd.cpu(), expected)
            assert torch.equal(even, totals[0])
            torch.testing.assert_close((even.double() + odd.double()) / 2, residual.double(), rtol=2**-6, atol=2**-3)


FOUR = pytest.mark.multigpu(4)


@pytest.mark.parametrize(
    ("size", "kernel", "sees_all"),
    [
        *((2, kernel, True) for kernel in ["nccl", *CHOICES]),
        (2, "nccl", False),
        (2, "by turns", False),
        *(pytest.param(4, kernel, False, marks=FOUR) for kernel in CHOICES),
    ],
)
def test_collectives_equal_their_definition(size: int, kernel: str, sees_all: bool, tmp_path: Path) -> None:
    """sees_all False: each rank sees its own device alone, as in the engine."""
    by_rank = run_ranks(size, run_rank, size, kernel, folder=tmp_path, device="cuda", sees_all=sees_all)
    for i, rows in enumerate(ROWS):
        parts = [operands(rank, rows) for rank in range(size)]
        total = torch.stack([x.double() for x, _, _ in parts]).sum(0)
        with_residual = total + parts[0][1].double()
        normed = with_residual / (with_residual.square().mean(1, keepdim=True) + 1e-5).sqrt() * parts[0][2].double()
        expected = {"sum": total, "total": with_residual, "normed": normed}
        for results in by_rank:
            for name, value in expected.items():
                error = relative_error(results[i][name], value)
                assert error < 2**-7, f"{name} of {rows} rows is off by {error:.1e}"
                # A sum that NCCL rounds before the residual cancels it: its last bit times the norm's weight.
                torch.testing.assert_close(results[i][name].double(), value, rtol=2**-6, atol=2**-3)
                assert torch.equal(results[i][name], by_rank[0][i][name]), f"{name} differs between ranks"
            assert torch.equal(results[i]["total again"], results[i]["total"])
            # Another kernel may add a row's squares in another order: the last bit of the norm.
            torch.testing.assert_close(results[i]["normed again"], results[i]["normed"], rtol=2**-7, atol=2**-7)
            values, scale = quantize_activations(results[i]["normed again"], torch.float8_e4m3fn)  # to the bit
            assert torch.equal(results[i]["values"], values.view(torch.uint8))
            assert torch.equal(results[i]["scale"], scale)
            assert torch.equal(results[i]["all"], torch.cat([x for x, _, _ in parts], 1)[:, : size * FEATURES - 3])


def choose(rank: int, store: Path) -> tuple[list[str], AllreduceChoice | None]:
    """Measured, and then as kept."""
    device = torch.device("cuda", rank)
    said = [
        choose_allreduce(num_features=1024, dtype=torch.bfloat16, max_rows=300, device=device, tuner=Tuner(device_name(device), [store]))
        for _ in range(2)
    ]
    fused = fused_allreduce()
    return said, fused.choice if fused else None


def test_ranks_measure_together_and_keep_one_choice(tmp_path: Path) -> None:
    by_rank = run_ranks(2, choose, tmp_path / "tuning", folder=tmp_path, device="cuda")
    (measured, kept), choice = by_rank[0]
    assert by_rank[1] == by_rank[0]
    assert isinstance(choice, AllreduceChoice)
    assert choice.sentence() == measured
    assert kept == f"{measured}, as measured at an earlier start"


def tokens_of_rank(rank: int, rows: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1000 * rows + rank)
    own, weights = torch.randn(rows, FEATURES, generator=draw), torch.randn(rows, 16, generator=draw)
    return own.bfloat16(), weights, torch.randn(size * rows, FEATURES, generator=draw).bfloat16()


def exchange_tokens(rank: int, size: int, is_mapped: bool) -> list[tuple[torch.Tensor, ...]]:
    device = torch.device("cuda", torch.cuda.current_device())
    if is_mapped:
        said = map_token_memory(num_features=FEATURES, dtype=torch.bfloat16, max_tokens=ROWS[-2], device=device)
        assert said.startswith("over symmetric memory up to"), said
    found = []
    for rows in ROWS:
        own, weights, results = (x.to(device) for x in tokens_of_rank(rank, rows, size))

        def work(own: torch.Tensor = own, weights: torch.Tensor = weights, results: torch.Tensor = results) -> tuple[torch.Tensor, ...]:
            return gather_tokens(own, size), gather_tokens(weights, size), scatter_tokens(results, size)

        called = [x.cpu() for x in work()]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            replayed = [part for factor in (-1.0, 1.0, 2.0, 1.0) for part in work(own * factor, weights * factor, results * factor)]
        for _ in range(REPLAYS):
            graph.replay()
            torch.cuda.synchronize()
            for at, factor in enumerate((-1.0, 1.0, 2.0, 1.0)):
                for part, first in zip(replayed[3 * at : 3 * at + 3], called, strict=True):
                    assert torch.equal(part.cpu(), first * factor), f"{rows} rows times {factor} differ in a graph"
        found.append(tuple(called))
    return found


@pytest.mark.parametrize(("size", "is_mapped"), [(2, True), (2, False), pytest.param(4, True, marks=FOUR)])
def test_tokens_come_to_all_ranks_and_sums_go_back(size: int, is_mapped: bool, tmp_path: Path) -> None:
    mesh = Mesh(data=size, expert_parallel=True)
    by_rank = run_ranks(size, exchange_tokens, size, is_mapped, folder=tmp_path, device="cuda", sees_all=False, mesh=mesh)
    for at, rows in enumerate(ROWS):
        parts = [tokens_of_rank(rank, rows, size) for rank in range(size)]
        for rank in range(size):
            own, weights, added = by_rank[rank][at]
            assert torch.equal(own, torch.cat([one for one, _, _ in parts]))
            assert torch.equal(weights, torch.cat([one for _, one, _ in parts]))
            total = torch.stack([one[rank * rows : (rank + 1) * rows].double() for _, _, one in parts]).sum(0)
            assert relative_error(added, total) < 2**-8
