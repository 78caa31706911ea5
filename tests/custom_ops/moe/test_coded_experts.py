"""Experts over codes with a scale per group: the layout, the reference and the Triton kernels, against products in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from compile_and_serve.custom_ops.moe import triton_coded_experts, triton_experts
from compile_and_serve.custom_ops.moe.code_format import (
    CodeFormat,
    dequantize_codes,
    pack_expert_codes,
    pack_expert_factors,
    pack_expert_scales,
    triton_codes_unsupported_reason,
)
from compile_and_serve.custom_ops.moe.coded_linear import coded_linears
from compile_and_serve.custom_ops.moe.experts import experts
from compile_and_serve.custom_ops.moe.triton_coded_gemv import GemvTiles, run_coded_gemv
from tests.custom_ops.moe.test_experts import TOLERANCE, by_loops, relative_error, routing

X, K, D, FEATURES = 3, 2, 160, 96  # blocks of 128 (or 64) inputs are not full


class Codes:
    """Random codes of X experts. offsets: "", "zeros", "minima". factors: groups that share one; 0: none."""

    def __init__(self, outputs: int, inputs: int, form: CodeFormat, offsets: str, factors: int) -> None:
        groups = -(-inputs // form.group_size)
        self.form = form
        self.codes = torch.randint(0, 1 << form.bits, (X, outputs, inputs), dtype=torch.uint8)
        std = 0.05 * (torch.rand(X, outputs, groups) + 0.5) * (16 if form.table else 1) / (1 << (form.bits - 4))
        self.scale, self.offset, self.factors = std.half(), None, ()
        if offsets == "zeros":
            self.offset = torch.randint(0, 1 << form.bits, (X, outputs, groups), dtype=torch.uint8)
        if offsets == "minima":
            self.offset = (-(1 << (form.bits - 1)) * std).half()
        if factors:
            sharing = -(-groups // factors)
            self.scale = torch.randint(1, 64, (X, outputs, groups), dtype=torch.uint8)
            self.factors = ((0.002 * (torch.rand(X, outputs, sharing) + 0.5) / (1 << (form.bits - 4))).half(),)
            if offsets == "minima":
                self.offset = torch.randint(1, 64, (X, outputs, groups), dtype=torch.uint8)
                self.factors += ((0.01 * torch.rand(X, outputs, sharing)).half(),)

    def plain(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        matrices = []
        for expert in range(X):
            offset = None if self.offset is None else self.offset[expert]
            factors = tuple(factor[expert] for factor in self.factors)
            matrices.append(dequantize_codes(self.codes[expert], self.scale[expert], offset, self.form, dtype, factors))
        return torch.stack(matrices)

    def packed(self, name: str) -> dict[str, Any]:
        return {
            name: pack_expert_codes(self.codes, self.form.bits),
            f"{name}_scale": pack_expert_scales(self.scale),
            f"{name}_offset": None if self.offset is None else pack_expert_scales(self.offset),
            f"{name}_factor": pack_expert_factors(*self.factors) if self.factors else None,
        }


class Case:
    def __init__(self, form: CodeFormat, offsets: str, factors: int, num_tokens: int, kind: str, dtype: torch.dtype) -> None:
        self.gate_up, self.down = Codes(2 * FEATURES, D, form, offsets, factors), Codes(D, FEATURES, form, offsets, factors)
        self.x = torch.randn(num_tokens, D).to(dtype)
        self.ids, self.weights = routing(kind, num_tokens, X, K), torch.rand(num_tokens, K)
        self.residual = torch.randn(num_tokens, D).to(dtype)

    def expected(self) -> torch.Tensor:
        matrices = [self.gate_up.plain(), self.down.plain()]
        return by_loops([self.x, self.ids, self.weights, *matrices, None, None], "silu", 0.0) + self.residual

    def operands(self) -> triton_experts.Operands:
        name = f"{self.gate_up.form.name}|{self.down.form.name}"
        weights = self.gate_up.packed("gate_up") | self.down.packed("down")
        return triton_experts.Operands(self.x, self.ids, self.weights, residual_TD=self.residual, codes=name, **weights)


# bits, group size, table, offsets, groups that share a factor
FORMS = {
    "awq": (4, 128, "", "zeros", 0),
    "g32": (4, 32, "", "", 0),
    "g64-minima": (4, 64, "", "minima", 0),
    "channel": (4, 256, "", "zeros", 0),
    "q4_k": (4, 32, "", "minima", 8),
    "q5_k": (5, 32, "", "minima", 8),
    "q6_k": (6, 16, "", "", 16),
    "q5_0": (5, 32, "", "", 0),
    "8-bits": (8, 32, "", "", 0),
    "8-bits-g128": (8, 128, "", "zeros", 0),
    "nf4": (4, 64, "nf4", "", 0),
    "nvfp4": (4, 16, "e2m1", "", 1000),
}


QUICK = ("awq", "q4_k", "q6_k", "8-bits", "nvfp4")
EACH = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FORMS]


def case(name: str, num_tokens: int, kind: str, dtype: torch.dtype) -> Case:
    bits, group_size, table, offsets, factors = FORMS[name]
    return Case(CodeFormat(bits, group_size, table), offsets, factors, num_tokens, kind, dtype)


@pytest.mark.slow_cases
@pytest.mark.exhaustive_cases(but=["q4_k", "q6_k", "nvfp4", "minima"])
@pytest.mark.parametrize("form", EACH)
def test_layout_holds_the_weights(form: str) -> None:
    """Exactly, as the dequantizing kernel reads it."""
    one = case(form, 1, "even", torch.float32)
    operands = one.operands()
    for linear, codes in zip(coded_linears(operands, operands.gate_up), (one.gate_up, one.down), strict=True):
        torch.testing.assert_close(triton_coded_experts.dequantize(linear, torch.float32), codes.plain(torch.float32), rtol=3e-7, atol=1e-7)


@pytest.mark.slow_cases
@pytest.mark.exhaustive_cases(but=["q4_k", "q6_k", "nvfp4", "channel", "minima"])
@pytest.mark.parametrize("form", EACH)
@pytest.mark.parametrize(("direct", "rows_first"), [(True, True), (False, False)])
@pytest.mark.parametrize(("num_tokens", "kind"), [(1, "even"), (5, "to_one")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])  # the interpreter has no products of bfloat16
@pytest.mark.pairwise
def test_kernels_equal_the_definition(form: str, direct: bool, num_tokens: int, kind: str, rows_first: bool, dtype: torch.dtype) -> None:
    one = case(form, num_tokens, kind, dtype)
    operands = one.operands()
    tiles = triton_coded_experts.CodeTiles(16, 64, 64, 2, 4, rows_first)
    out = triton_coded_experts.run_coded(tiles, direct, operands, operands.gate_up)
    assert relative_error(out, one.expected()) < TOLERANCE[dtype]


@pytest.mark.slow_cases
@pytest.mark.exhaustive_cases
@pytest.mark.parametrize("form", ["awq", "g32", "q4_k"])
@pytest.mark.parametrize(("num_tokens", "blocks", "dtype"), [(1, 2, torch.float32), (2, 1, torch.float16)])
@pytest.mark.pairwise
def test_gemv_equals_the_definition(form: str, num_tokens: int, blocks: int, dtype: torch.dtype) -> None:
    """In the interpreter, which has no products of a warp: `benchmarks.moe_gpu` checks those."""
    one = case(form, num_tokens, "even", dtype)
    operands = one.operands()
    out = run_coded_gemv(GemvTiles(blocks, blocks), operands, operands.gate_up)
    assert relative_error(out, one.expected()) < TOLERANCE[dtype]


@pytest.mark.parametrize("form", ["awq", "q5_k", "nf4"])
def test_reference_equals_the_definition(form: str) -> None:
    one = case(form, 7, "even", torch.float32)
    plain: dict[str, Any] = {}
    for name, codes in (("gate_up", one.gate_up), ("down", one.down)):
        factor = torch.stack(codes.factors, 1) if codes.factors else None
        plain |= {f"{name}_scale": codes.scale, f"{name}_offset": codes.offset, f"{name}_factor": factor}
    matrices = (one.gate_up.codes, one.down.codes)
    out = experts(one.x, one.ids, one.weights, *matrices, residual_TD=one.residual, codes=one.operands().codes, **plain)
    assert relative_error(out, one.expected()) < 1e-6


@pytest.mark.slow_cases
@pytest.mark.exhaustive_cases(but=["codes"])
@pytest.mark.parametrize("method", ["direct", "codes", "gemv"])
def test_pairs_of_other_ranks_are_skipped(method: str) -> None:
    """Their experts' id is the number of slots."""
    one = case("awq", 3, "even", torch.float32)
    operands = one.operands()
    placement, is_here = torch.zeros(X + 1, 1, dtype=torch.int32), torch.rand(3, K) < 0.5
    spread = replace(operands, placement=placement, ids_TK=torch.where(is_here, one.ids, X).to(torch.int32))
    tiles = triton_coded_experts.CodeTiles(16, 64, 64, 2, 4)
    if method == "gemv":
        out = run_coded_gemv(GemvTiles(2, 2), spread, operands.gate_up)
    else:
        out = triton_coded_experts.run_coded(tiles, method == "direct", spread, operands.gate_up)
    one.weights = one.weights * is_here
    assert relative_error(out, one.expected()) < 1e-6


@pytest.mark.parametrize(("num_tokens", "prefix"), [(1, "direct"), (40, "codes"), (100, "expanded")])
def test_default_method_by_number_of_tokens(num_tokens: int, prefix: str) -> None:
    operands = case("awq", num_tokens, "even", torch.float32).operands()
    assert next(iter(triton_coded_experts.coded_methods(operands))).startswith(prefix)


def test_few_pairs_have_their_own_method_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compile_and_serve.custom_ops.moe.triton_coded_gemv.supports_pdl", lambda device: True)
    for form, dtype, expected in (
        ("awq", torch.bfloat16, True),
        ("q4_k", torch.float16, True),
        ("awq", torch.float32, False),
        ("nf4", torch.bfloat16, False),
    ):
        operands = case(form, 1, "even", dtype).operands()
        names = triton_coded_experts.coded_methods(operands)
        assert any(name.startswith("gemv") for name in names) is expected
        more = replace(operands, ids_TK=operands.ids_TK.repeat(9, 1))
        assert not any(name.startswith("gemv") for name in triton_coded_experts.coded_methods(more))


def test_groups_that_the_kernels_do_not_take() -> None:
    assert all(triton_codes_unsupported_reason(CodeFormat(4, size)) is None for size in (16, 32, 64, 128, 384))
    reason = "the GPU kernels take experts with groups of 16, 32, 64 or a multiple of 128 inputs, not of 96"
    assert triton_codes_unsupported_reason(CodeFormat(4, 96)) == reason
