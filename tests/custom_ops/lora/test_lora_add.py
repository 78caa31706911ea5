"""`cas::lora_add` and `cas::lora_linear`: references, C++ kernels and Triton kernels against float64; kernels compile for a Hopper GPU."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import compile_and_serve.custom_ops.lora.triton_lora as kernels
from compile_and_serve.custom_ops.jit.cpu_kernels import load_cpu_kernels
from compile_and_serve.custom_ops.linear.fused_linear import pack_linear_weight
from compile_and_serve.custom_ops.linear.triton_linear import small_batch
from compile_and_serve.custom_ops.linear.triton_linear_configs import MAX_SMALL_TOKENS, SmallBatchConfig
from compile_and_serve.custom_ops.lora.limits import COLUMNS, TILE
from compile_and_serve.custom_ops.lora.lora_add import lora_add, lora_groups, unblocked
from compile_and_serve.custom_ops.lora.lora_linear import lora_linear
from tests.support.hopper import LARGEST_SHARED, run_script
from tests.support.numbers import relative_error

LIMITS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SLOTS = 3
# tokens, input features, ends of the parts of the outputs, rank, adapters of the tokens
BATCHES = [
    (1, 48, [40], 8, "one"),
    (5, 64, [64, 80, 96], 16, "many"),
    (7, 2100, [7, 33], 20, "runs"),
    (33, 200, [130], 5, "none"),
    (33, 200, [130], 5, "many"),
    (37, 300, [16, 32, 40, 48], 32, "runs"),
]


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    load_cpu_kernels()  # where they cannot be built the references are tested


def reference_op(name: str) -> Callable[..., torch.Tensor]:
    return lambda *args: getattr(torch.ops.cas, f"{name}_reference").default(*args)


def exact(y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, index: torch.Tensor, ends: list[int]) -> torch.Tensor:
    out, rank = y.double(), b.shape[2]
    for token, i in enumerate(index.tolist()):
        for part, (begin, end) in enumerate(pairwise((0, *ends))) if i else ():
            h = a[i - 1, part * rank : (part + 1) * rank].double() @ x[token].double()
            out[token, begin:end] += h @ unblocked(b[i - 1])[:, begin:end].double()
    return out


def make_adapters(num_in: int, ends: list[int], rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    a = (torch.randn(SLOTS, len(ends) * rank, num_in) / num_in**0.5).to(dtype)
    b_RO = F.pad(torch.randn(SLOTS, rank, ends[-1]) / rank**0.5, (0, -ends[-1] % COLUMNS))
    return a, b_RO.unflatten(2, (-1, COLUMNS)).transpose(1, 2).contiguous().to(dtype)


def make_index(tokens: int, mix: str) -> torch.Tensor:
    return {
        "none": torch.zeros(tokens),
        "one": torch.full((tokens,), 2),
        "runs": torch.arange(tokens) * (SLOTS + 1) // tokens,
        "many": torch.randint(0, SLOTS + 1, (tokens,)),
    }[mix].to(torch.int32)


@pytest.mark.parametrize(
    ("run", "dtype", "max_sorted"),
    [
        *((run, dtype, kernels.MAX_SORTED) for run in (lora_add, reference_op("lora_add")) for dtype in LIMITS),
        # The interpreter has no products of bfloat16.
        (kernels.lora_add, torch.float32, 0),
        (kernels.lora_add, torch.float32, kernels.MAX_SORTED),
    ],
)
@pytest.mark.parametrize("tokens, num_in, ends, rank, mix", BATCHES)
def test_lora_add(
    run: Callable[..., torch.Tensor],
    dtype: torch.dtype,
    tokens: int,
    num_in: int,
    ends: list[int],
    rank: int,
    mix: str,
    max_sorted: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "MAX_SORTED", max_sorted)
    y = torch.randn(tokens, ends[-1] + 7).to(dtype)[:, : ends[-1]]
    x = torch.randn(tokens, num_in + 8).to(dtype)[:, :num_in]
    a, b = make_adapters(num_in, ends, rank, dtype)
    index = make_index(tokens, mix)
    before = y.clone()
    out = run(y, x, a, b, index, ends)
    assert torch.equal(y, before)
    assert (out.dtype, out.shape, out.is_contiguous()) == (dtype, y.shape, True)
    assert relative_error(out, exact(y, x, a, b, index, ends)) < LIMITS[dtype]
    none = index == 0
    assert torch.equal(out[none], y[none])  # exactly: a token without an adapter does not see the others'


@pytest.mark.parametrize(
    ("run", "dtype"),
    [(lora_linear, torch.float32), (lora_linear, torch.bfloat16), (kernels.lora_linear, torch.float32)],
    ids=["op-float32", "op-bfloat16", "triton-float32"],
)
@pytest.mark.parametrize(
    "tokens, mix, norm, silu_mul, residual, bias, num_in, ends, rank",
    [
        (1, "one", 1, 0, 0, 1, 64, [96], 16),
        (1, "one", 0, 1, 1, 1, 147, [24, 48], 8),
        (1, "one", 0, 0, 1, 0, 128, [16, 17, 50], 4),
        (1, "none", 1, 1, 0, 0, 147, [24, 48], 8),
        (5, "many", 0, 0, 0, 0, 128, [16, 17, 50], 4),
        (5, "many", 1, 1, 0, 0, 64, [96], 16),
        (37, "many", 0, 0, 1, 0, 147, [24, 48], 8),
        (37, "many", 1, 0, 0, 1, 128, [16, 17, 50], 4),
    ],
)
def test_lora_linear(
    run: Callable[..., torch.Tensor], dtype: torch.dtype, tokens: int, mix: str, norm: int, silu_mul: int, residual: int,
    bias: int, num_in: int, ends: list[int], rank: int,
) -> None:  # fmt: skip
    width = ends[-1] // 2 if silu_mul else ends[-1]
    x = torch.randn(tokens, num_in + 8).to(dtype)[:, :num_in]
    weight = (torch.randn(ends[-1], num_in) / num_in**0.5).to(dtype)
    optional: dict[str, Any] = {
        "norm": torch.rand(num_in).to(dtype) + 0.5 if norm else None,
        "bias": torch.randn(ends[-1]).to(dtype) if bias else None,
        "residual": torch.randn(tokens, width).to(dtype) if residual else None,
    }
    a, b = make_adapters(num_in, ends, rank, dtype)
    index = make_index(tokens, mix)
    packed = pack_linear_weight(weight) if run is lora_linear else weight
    out = run(
        x, packed, ends[-1], optional["norm"], 1e-5, optional["bias"], bool(silu_mul), optional["residual"], False, a, b, index, ends, None
    )
    n = x.double()
    if norm:
        n = F.rms_norm(n, (num_in,), optional["norm"].double(), 1e-5)
    y = exact(F.linear(n, weight.double()), n, a, b, index, ends)
    if bias:
        y = y + optional["bias"].double()
    if silu_mul:
        y = F.silu(y[:, :width]) * y[:, width:]
    if residual:
        y = y + optional["residual"].double()
    assert (out.dtype, out.shape, out.is_contiguous()) == (dtype, y.shape, True)
    assert relative_error(out, y) < LIMITS[dtype]


@pytest.mark.parametrize("mix", ["none", "one", "many", "runs"])
@pytest.mark.parametrize(
    "tokens, silu_mul, bias, residual, num_in, ends, rank, splits",
    [
        (2, 0, 1, 0, 64, [96], 16, 1),
        (5, 0, 0, 1, 300, [64, 128, 150], 20, 2),
        (37, 1, 0, 1, 147, [128], 8, 1),
        (64, 1, 1, 0, 600, [128, 256], 5, 2),
        (3, 0, 0, 0, 64, [70], 200, 1),
    ],
)
def test_small_batch_with_adapters(
    tokens: int, silu_mul: int, bias: int, residual: int, num_in: int, ends: list[int], rank: int, splits: int, mix: str
) -> None:
    width = ends[-1] // 2 if silu_mul else ends[-1]
    x = torch.randn(tokens, num_in)
    weight = torch.randn(ends[-1], num_in) / num_in**0.5
    biases, residuals = torch.randn(ends[-1]) if bias else None, torch.randn(tokens, width) if residual else None
    a, b = make_adapters(num_in, ends, rank, torch.float32)
    index = make_index(tokens, mix)
    groups = kernels.lora_groups(index)
    h = kernels._shrink(x, a, index, groups)
    out = small_batch(
        x,
        weight,
        ends[-1],
        None,
        1e-5,
        biases,
        bool(silu_mul),
        residuals,
        config=SmallBatchConfig(64, 128, splits, 1, 4),
        adapters=(h, b, index, groups, kernels.padded_ends(ends)),
    )
    y = exact(F.linear(x.double(), weight.double()), x.double(), a, b, index, ends)
    y = y if biases is None else y + biases.double()
    y = F.silu(y[:, :width]) * y[:, width:] if silu_mul else y
    y = y if residuals is None else y + residuals.double()
    assert relative_error(out, y) < LIMITS[torch.float32]


@pytest.mark.parametrize("tokens", [1, 5, 64, 130])
def test_groups_are_tiles_of_one_adapter(tokens: int) -> None:
    for mix in ("none", "one", "runs", "many"):
        index = make_index(tokens, mix)
        groups = kernels.lora_groups(index)
        columns = 4 if tokens <= MAX_SMALL_TOKENS else 3
        assert torch.equal(groups[:, :columns], lora_groups(index)[:, :columns])
        assert sorted(groups[:, 0].tolist()) == list(range(tokens))
        assert torch.equal(groups[:, 1], index[groups[:, 0].long()])
        covered = [row for row, count in enumerate(groups[:, 2].tolist()) for row in range(row, row + count)]
        assert covered == list(range(tokens))
        for row, count in enumerate(groups[:, 2].tolist()):
            assert count <= TILE
            assert len(set(groups[row : row + count, 1].tolist())) <= 1


def test_groups_are_visible_to_kernels_that_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ordinary kernel comes between the one that writes them and those that start before the kernel before them has ended."""
    launched = []
    monkeypatch.setattr(kernels, "launch", lambda kernel, grid, *args, **options: launched.append((kernel, options)))
    kernels.lora_groups(make_index(64, "many"))
    assert [kernel for kernel, _ in launched] == [kernels._groups_kernel, kernels._flush_kernel]
    assert not any("launch_pdl" in options for _, options in launched)


def test_the_fake_refuses_adapters_that_do_not_fit() -> None:
    with FakeTensorMode():
        y, x, index = torch.empty(2, 8), torch.empty(2, 6), torch.zeros(2, dtype=torch.int32)
        assert lora_add(y, x, torch.empty(3, 4, 6), torch.empty(3, 1, 4, 16), index, [8]).shape == (2, 8)
        assert lora_add(y, x, torch.empty(3, 8, 6), torch.empty(3, 1, 4, 16), index, [2, 8]).shape == (2, 8)
        with pytest.raises(ValueError, match="do not fit"):
            lora_add(y, x, torch.empty(3, 4, 6), torch.empty(3, 2, 4, 16), index, [8])
        with pytest.raises(ValueError, match="1 to 4 parts"):
            lora_add(y, x, torch.empty(3, 20, 6), torch.empty(3, 1, 4, 16), index, [1, 2, 3, 4, 8])


SCRIPT = """
import json
from compile_and_serve.custom_ops.linear.triton_linear import _gemv_kernel, _small_batch_kernel
from compile_and_serve.custom_ops.lora import triton_lora as kernels
from tests.support.hopper import compiled
types = {"partial_ptr": "*fp32", "counter_ptr": "*i32", "index_ptr": "*i32", "groups_ptr": "*i32", "eps": "fp32"}
def made(kernel, constants, warps=4):
    done = compiled(kernel, constants, lambda n: types.get(n, "*bf16" if n.endswith("_ptr") else "i32"), num_warps=warps)
    return done.metadata.shared
shared = {"groups": made(kernels._groups_kernel, {"BLOCK": 64, "TILE": 16}), "flush": made(kernels._flush_kernel, {})}
types["h_ptr"] = "*fp32"  # of kernels for one token
for norm in (True, False):
    constants = {"HAS_NORM": norm, "BLOCK_I": 1 << 14, "PDL": True} | ({} if norm else {"norm_ptr": None})
    shared[f"shrink one {norm}"] = made(kernels._shrink_one_kernel, constants, 8)
for silu, rows, warps in ((False, 8, 8), (True, 4, 4)):
    shared[f"gemv {silu}"] = made(_gemv_kernel, {
        "HAS_NORM": True, "HAS_BIAS": False, "HAS_RESIDUAL": False, "SILU_MUL": silu, "GELU": False, "BLOCK_O": rows,
        "BLOCK_I": 256 * warps, "LANES": 8, "THREADS": 32 * warps, "PDL": True, "HAS_ADAPTERS": True, "BLOCK_R": 16,
        "bias_ptr": None, "residual_ptr": None,
    }, warps)
del types["h_ptr"]
for is_sorted in (True, False):
    block_t = 16 if is_sorted else 32
    shared_constants = {"SORTED": is_sorted, "BLOCK_T": block_t, "PDL": True} | ({} if is_sorted else {"groups_ptr": None})
    unsplit = {"SPLITS": 1, "partial_ptr": None, "counter_ptr": None}
    blocks = {"BLOCK_R": 64, "BLOCK_I": 256} if is_sorted else {"BLOCK_R": 64, "BLOCK_I": 128}
    shared[f"shrink {is_sorted}"] = made(kernels._shrink_kernel, shared_constants | blocks | ({"SPLITS": 8} if is_sorted else unsplit))
    for silu in (True, False):
        shared[f"expand {is_sorted} {silu}"] = made(kernels._expand_kernel, shared_constants | {
            "SILU_MUL": silu, "GELU": False, "HAS_RESIDUAL": not silu, "BLOCK_R": 32, "BLOCK_O": 128
        } | ({"residual_ptr": None} if silu else {}))
for silu, rank in ((False, 16), (True, 16), (True, 256)):
    shared[f"small batch {silu} {rank}"] = made(_small_batch_kernel, {
        "HAS_NORM": False, "HAS_BIAS": False, "HAS_RESIDUAL": not silu, "SILU_MUL": silu, "GELU": False, "BLOCK_T": 64, "BLOCK_O": 64,
        "BLOCK_I": 128, "SPLITS": 1 if silu else 4, "STAGES": 4, "PDL": True, "HAS_ADAPTERS": True, "BLOCK_R": rank,
        "BLOCK_K": max(128, rank), "norm_ptr": None, "bias_ptr": None,
    } | ({"residual_ptr": None, "partial_ptr": None, "counter_ptr": None} if silu else {}))
print(json.dumps(shared))
"""


@pytest.mark.exhaustive
def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    shared = run_script(SCRIPT, tmp_path)
    assert len(shared) == 15
    assert max(shared.values()) <= LARGEST_SHARED
