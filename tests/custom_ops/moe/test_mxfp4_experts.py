"""Experts in MXFP4: the layouts, the reference and the Triton kernels, against products with the dequantized weights in float64."""

from __future__ import annotations

import pytest
import torch

from compile_and_serve.custom_ops.moe import triton_coded_experts, triton_experts
from compile_and_serve.custom_ops.moe.coded_linear import CodedLinear
from compile_and_serve.custom_ops.moe.experts import experts
from compile_and_serve.custom_ops.moe.triton_mxfp4_decode import BFLOAT16_PTX, FACTOR_PTX
from compile_and_serve.custom_ops.quantized.mxfp4 import dequantize_mxfp4, pack_mxfp4_codes, pack_mxfp4_scales
from tests.custom_ops.moe.test_experts import TOLERANCE, by_loops, relative_error, routing

X, K, D, FEATURES = 5, 2, 160, 96  # a block of 128 inputs is not full


def bits(outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random codes and scales of X experts, as a checkpoint holds them."""
    codes = torch.randint(0, 256, (X, outputs, inputs // 32, 16), dtype=torch.uint8)
    return codes, torch.randint(121, 126, (X, outputs, inputs // 32), dtype=torch.uint8)


class Case:
    def __init__(self, num_tokens: int, kind: str, dtype: torch.dtype) -> None:
        self.gate_up, self.down = bits(2 * FEATURES, D), bits(D, FEATURES)
        self.x = torch.randn(num_tokens, D).to(dtype)
        self.ids, self.weights = routing(kind, num_tokens, X, K), torch.rand(num_tokens, K)
        self.biases = torch.randn(X, 2 * FEATURES).to(dtype), torch.randn(X, D).to(dtype)

    def expected(self) -> torch.Tensor:
        matrices = (dequantize_mxfp4(*pair, torch.float64) for pair in (self.gate_up, self.down))
        return by_loops([self.x, self.ids, self.weights, *matrices, *self.biases], "clamped_swiglu", 1.5)

    def operands(self) -> triton_experts.Operands:
        return triton_experts.Operands(
            self.x,
            self.ids,
            self.weights,
            pack_mxfp4_codes(self.gate_up[0]),
            pack_mxfp4_codes(self.down[0]),
            *self.biases,
            "clamped_swiglu",
            1.5,
            gate_up_scale=pack_mxfp4_scales(self.gate_up[1]),
            down_scale=pack_mxfp4_scales(self.down[1]),
        )


@pytest.mark.parametrize("num_tokens", [1, 9])
@pytest.mark.parametrize("kind", ["even", "to_one"])
def test_reference_equals_the_definition(num_tokens: int, kind: str) -> None:
    case = Case(num_tokens, kind, torch.float32)
    out = experts(
        case.x,
        case.ids,
        case.weights,
        case.gate_up[0],
        case.down[0],
        *case.biases,
        activation="clamped_swiglu",
        limit=1.5,
        gate_up_scale=case.gate_up[1],
        down_scale=case.down[1],
    )
    assert relative_error(out, case.expected()) < 1e-6


@pytest.mark.slow_cases
@pytest.mark.exhaustive_cases(but=["expanded", "5-grouped"])
@pytest.mark.parametrize("method", ["direct", "grouped", "expanded"])
@pytest.mark.parametrize("num_tokens", [1, 5])
@pytest.mark.parametrize("kind", ["even", "to_one"])
@pytest.mark.parametrize("rows_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.pairwise
def test_kernels_equal_the_definition(
    method: str, num_tokens: int, kind: str, rows_first: bool, dtype: torch.dtype
) -> None:  # the interpreter has no products of bfloat16
    case = Case(num_tokens, kind, dtype)
    operands = case.operands()
    if method == "expanded":
        plain = triton_coded_experts.expanded_codes(operands, operands.gate_up)
        assert torch.equal(plain.gate_up, dequantize_mxfp4(*case.gate_up, dtype))
        assert torch.equal(plain.down, dequantize_mxfp4(*case.down, dtype))
        out = triton_experts.run_grouped(triton_experts.Tiles(16, 16, 32, 32, 2, 4), plain, plain.gate_up)
    else:
        tiles = triton_coded_experts.CodeTiles(16, 32, 64, 2, 4, rows_first)
        out = triton_coded_experts.run_coded(tiles, method == "direct", operands, operands.gate_up)
    assert relative_error(out, case.expected()) < TOLERANCE[dtype]


@pytest.mark.exhaustive
def test_hundreds_of_tokens() -> None:
    case = Case(300, "even", torch.float32)
    operands = case.operands()
    out = triton_coded_experts.run_coded(triton_coded_experts.CodeTiles(64, 64, 128, 2, 4, True), False, operands, operands.gate_up)
    plain = triton_coded_experts.expanded_codes(operands, operands.gate_up)
    expected = experts(case.x, case.ids, case.weights, plain.gate_up, plain.down, *case.biases, activation="clamped_swiglu", limit=1.5)
    assert relative_error(out, expected.double()) < 1e-6


@pytest.mark.parametrize(("num_tokens", "prefix"), [(1, "direct"), (40, "codes"), (200, "expanded")])
def test_default_method_by_number_of_tokens(num_tokens: int, prefix: str) -> None:
    operands = Case(num_tokens, "even", torch.float32).operands()
    assert next(iter(triton_coded_experts.coded_methods(operands))).startswith(prefix)


def test_few_pairs_in_bfloat16_have_their_own_method_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compile_and_serve.custom_ops.moe.triton_coded_gemv.supports_pdl", lambda device: True)
    for num_tokens, dtype, expected in ((8, torch.bfloat16, True), (9, torch.bfloat16, False), (1, torch.float16, False)):
        names = triton_coded_experts.coded_methods(Case(num_tokens, "even", dtype).operands())
        assert {name.startswith("gemv") for name in names} == {expected}


def test_every_code_and_scale() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(1, 16, 1, 16)
    for scale in (0, 60, 120, 128):
        scales = torch.full((1, 16, 1), scale, dtype=torch.uint8)
        words, packed = pack_mxfp4_codes(codes), pack_mxfp4_scales(scales)
        linear = CodedLinear(words, packed, None, None, None, None, 32)
        out = triton_coded_experts.dequantize(linear, torch.float32)
        expected = dequantize_mxfp4(codes, scales, torch.float32)
        assert torch.equal(out, expected) or scale == 0
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-37)


def run_ptx(ptx: str, words: int, factors: int) -> int:
    """What the decode instructions make of two words ($1) and two factors ($2): two bfloat16 numbers."""
    found = {"$1": words, "$2": factors, "0": 0}

    def value(name: str) -> int:
        return found[name] if name in found else int(name, 0)

    def bfloat16(bits: int) -> torch.Tensor:
        return torch.tensor([bits & 0xFFFF, bits >> 16]).to(torch.uint16).view(torch.bfloat16)

    for line in ptx.strip("{}").split(";"):
        name, *operands = line.replace(",", " ").split() or [".reg"]
        if name == ".reg":
            continue
        to, a, b, *rest = operands
        if name == "and.b32":
            found[to] = value(a) & value(b)
        elif name == "shl.b32":
            found[to] = value(a) << value(b) & 0xFFFFFFFF
        elif name == "shf.r.wrap.b32":
            found[to] = (value(b) << 32 | value(a)) >> value(rest[0]) & 0xFFFFFFFF
        elif name == "mul.lo.u32":
            found[to] = value(a) * value(b) & 0xFFFFFFFF
        elif name == "prmt.b32":
            both = value(b) << 32 | value(a)
            found[to] = sum((both >> 8 * (value(rest[0]) >> 4 * i & 7) & 0xFF) << 8 * i for i in range(4))
        else:
            assert name == "mul.rn.bf16x2", name
            low, high = (bfloat16(value(a)) * bfloat16(value(b))).view(torch.uint16).tolist()
            found[to] = high << 16 | low
    return found["$0"]


def test_decode_instructions() -> None:
    """The PTX, which the interpreter cannot run, gives the value of every pair of codes."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, 4, 4, 16)  # each byte is a pair of neighbours; a row is a block
    scales = torch.tensor([100, 121, 127, 128], dtype=torch.uint8).expand(1, 4, 4).contiguous()
    expected = dequantize_mxfp4(codes, scales, torch.bfloat16).view(4, 4, 16, 2)
    pairs, packed = pack_mxfp4_codes(codes).view(torch.int32).view(4, 16), pack_mxfp4_scales(scales).view(4)
    for row in range(4):
        for part in range(4):
            factors = run_ptx(FACTOR_PTX.value[part], int(packed[row]) & 0xFFFFFFFF, 0)
            for pair in range(16):
                found = run_ptx(BFLOAT16_PTX.value[part], int(pairs[row, pair]) & 0xFFFFFFFF, factors)
                values = torch.tensor([found & 0xFFFF, found >> 16]).to(torch.uint16).view(torch.bfloat16)
                assert torch.equal(values, expected[row, part, pair]), (row, part, pair)


def test_scales_that_the_kernel_cannot_apply_are_one_sentence() -> None:
    with pytest.raises(ValueError, match="scale of the checkpoint is 129, but the kernel takes at most 128"):
        pack_mxfp4_scales(torch.full((1, 2, 3), 129, dtype=torch.uint8))
