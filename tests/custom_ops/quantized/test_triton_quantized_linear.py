"""The Triton kernels of linears over 8-bit weights, in Triton's interpreter, against torch in float64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("where there is a GPU the kernels run on it (tests/gpu)", allow_module_level=True)

from compile_and_serve.custom_ops.linear.triton_elementwise import rms_norm
from compile_and_serve.custom_ops.quantization import block_scales, dequantize_weight, quantize_weight, row_scales
from compile_and_serve.custom_ops.quantized import cuda_linear as quantized_linear_cuda
from compile_and_serve.custom_ops.quantized import scaled_gemm
from compile_and_serve.custom_ops.quantized import triton_matmul as triton_quantized_matmul
from compile_and_serve.custom_ops.quantized.cuda_linear import GEMV, SCALED_SILU_MUL, TILE, QuantizedLinear, quantized_linear
from compile_and_serve.custom_ops.quantized.cutlass_gemm import BLOCKS
from compile_and_serve.custom_ops.quantized.deep_gemm import DEEP
from compile_and_serve.custom_ops.quantized.scaled_gemm import EXPANDED, TORCH, gemm_names
from compile_and_serve.custom_ops.triton_quantize import quantize_rows
from tests.support.numbers import relative_error

LIMITS = {torch.float32: 2e-6, torch.float16: 1e-3}
KINDS = [("none", row_scales), ("dynamic", row_scales), ("static", row_scales), ("none", block_scales), ("dynamic", block_scales)]


def arguments(num_tokens, out, inner, silu_mul, extras, activations, scales, weight_dtype, dtype) -> dict[str, object]:
    rows = out // 2 if silu_mul else out
    weight = torch.randn(out, inner) * inner**-0.5
    scale = scales(weight, weight_dtype)
    return {
        "x_TI": torch.randn(num_tokens, inner + 8).to(dtype)[:, :inner],
        "weight_OI": quantize_weight(weight, scale, weight_dtype),
        "scale": scale,
        "out_features": out,
        "norm_weight_I": torch.randn(inner).to(dtype) if extras else None,
        "eps": 1e-5,
        "bias_O": torch.randn(out).to(dtype) if extras else None,
        "silu_mul": silu_mul,
        "residual_TO": torch.randn(num_tokens, rows + 4).to(dtype)[:, :rows] if extras else None,
        "activations": activations,
        "input_scale": torch.tensor([0.03]) if activations == "static" else None,
    }


def reference(a) -> torch.Tensor:
    """In float64 over what the rounding kernel gives (it has tests of its own)."""
    x, weight, norm, per_group = a["x_TI"], a["weight_OI"], a["norm_weight_I"], a["scale"].dim() == 2
    if a["activations"] != "none":
        options = {"norm_weight_I": norm, "eps": a["eps"], "per_group": per_group, "input_scale": a["input_scale"]}
        x, x_scale = quantize_rows(x, weight.dtype, **options)
        x = x.double() * (x_scale.double().repeat_interleave(128, 1)[:, : x.shape[1]] if per_group else x_scale)
    elif norm is not None:
        x = rms_norm(x, norm, a["eps"])
    bias = a["bias_O"]
    weight = dequantize_weight(weight, a["scale"], torch.float64)
    y = F.linear(x.double(), weight, None if bias is None else bias.double())
    if a["silu_mul"]:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate) * up
    return y if a["residual_TO"] is None else y + a["residual_TO"].double()


@pytest.mark.pairwise
@pytest.mark.parametrize("weight_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("activations", "scales"), KINDS)
@pytest.mark.parametrize(("num_tokens", "out", "inner", "silu_mul", "extras"), [
    (0, 24, 48, False, False), (1, 10, 96, False, False), (1, 30, 2080, True, True), (1, 12, 4104, False, True), (1, 6, 33, False, True),
    (3, 300, 200, True, True), (17, 20, 300, False, True), (70, 24, 40, True, True),
])  # fmt: skip
def test_like_float64(num_tokens, out, inner, silu_mul, extras, scales, activations, weight_dtype, monkeypatch):
    torch.manual_seed(num_tokens + out)
    dtype = torch.float16 if silu_mul else torch.float32
    monkeypatch.setattr(quantized_linear_cuda, "gemm_names", lambda *_, **__: ())
    a = arguments(num_tokens, out, inner, silu_mul, extras, activations, scales, weight_dtype, dtype)
    result = quantized_linear(**a)
    assert result.shape == (num_tokens, out // 2 if silu_mul else out)
    assert result.dtype == dtype
    if num_tokens:
        assert relative_error(result, reference(a)) < LIMITS[dtype]


@pytest.mark.pairwise
@pytest.mark.parametrize("weight_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("activations", ["none", "dynamic", "static"])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("inner", [96, 4104])
def test_one_token_is_quantized_as_by_the_kernel_for_many(inner: int, norm: bool, activations: str, weight_dtype) -> None:
    """To the bit: what the kernel makes of x by itself is what the kernels before it would hand to it."""
    torch.manual_seed(inner)
    a = arguments(1, 20, inner, False, True, activations, row_scales, weight_dtype, torch.float16)
    if not norm:
        a["norm_weight_I"] = None
    x, scale = a["x_TI"], a["scale"]
    rounding = {"norm_weight_I": a["norm_weight_I"], "eps": a["eps"], "input_scale": a["input_scale"]}
    if activations != "none":
        x, x_scale = quantize_rows(x, weight_dtype, **rounding)  # type: ignore[arg-type]
        x, scale = x.half(), scale * x_scale[0]  # type: ignore[operator]
    elif norm:
        x = rms_norm(x, a["norm_weight_I"], a["eps"])  # type: ignore[arg-type]
    plain = {"x_TI": x, "scale": scale, "norm_weight_I": None, "activations": "none", "input_scale": None}
    assert torch.equal(linear_of(a).run(GEMV), linear_of(a | plain).run(GEMV))


@pytest.mark.parametrize("kernel", [GEMV, TILE])
@pytest.mark.parametrize("activations", ["none", "dynamic", "static"])
@pytest.mark.parametrize("norm", [False, True])
def test_what_is_not_a_number_stays_so(norm: bool, activations: str, kernel: str) -> None:
    a = arguments(1, 20, 4104, False, True, activations, row_scales, torch.float8_e4m3fn, torch.float16)
    a["x_TI"][0, 4100] = float("nan")  # type: ignore[index]
    assert linear_of(a if norm else a | {"norm_weight_I": None}).run(kernel).isnan().all()


@pytest.mark.parametrize("per_block", [False, True])
@pytest.mark.parametrize("silu_mul", [False, True])
def test_splits(silu_mul: bool, per_block: bool) -> None:
    torch.manual_seed(0)
    scales = block_scales if per_block else row_scales
    a = arguments(20, 40, 700, silu_mul, True, "none", scales, torch.int8, torch.float32)
    operands = (a["x_TI"], None, a["weight_OI"], a["scale"], a["bias_O"], silu_mul, a["residual_TO"], torch.float32)
    first, second = (
        triton_quantized_matmul.matmul(*operands, config=(16, 128, 3, 2, 4))  # type: ignore[arg-type]
        for _ in range(2)
    )
    assert torch.equal(first, second)
    assert relative_error(first, reference(a | {"norm_weight_I": None})) < LIMITS[torch.float32]


def linear_of(a: dict[str, object]) -> QuantizedLinear:
    return QuantizedLinear(**{name: value for name, value in a.items() if name != "out_features"})  # type: ignore[arg-type]


@pytest.mark.slow_cases
@pytest.mark.parametrize("activations", ["none", "dynamic"])
@pytest.mark.parametrize("weight_dtype", [torch.int8, torch.float8_e4m3fn])
def test_every_kernel_computes_the_same(weight_dtype: torch.dtype, activations: str) -> None:
    """torch's scaled GEMMs run on the CPU as well, though not all of their scalings."""
    torch.manual_seed(0)
    a = arguments(80, 64, 96, True, True, activations, row_scales, weight_dtype, torch.float32)
    linear = linear_of(a)
    assert set(linear.kernels()) == {TILE, TORCH if activations == "dynamic" else EXPANDED}
    for kernel in linear.kernels():
        assert relative_error(linear.run(kernel), reference(a)) < 1e-5


@pytest.mark.slow_cases
@pytest.mark.parametrize(("num_tokens", "scales"), [(1, row_scales), (80, row_scales), (5, block_scales)])
def test_a_quantized_x_is_not_quantized_again(num_tokens: int, scales, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, by every kernel, and as a choice of its own: less is left to do."""
    torch.manual_seed(num_tokens)
    a = arguments(num_tokens, 64, 96, True, True, "dynamic", scales, torch.float8_e4m3fn, torch.float32)
    linear = linear_of(a)
    expected = {kernel: linear.run(kernel) for kernel in linear.kernels()}
    quantized = linear_of(a | {"quantized": linear.operand()})
    monkeypatch.setattr(quantized_linear_cuda, "quantize_rows", None)
    assert quantized.kernels() == linear.kernels()
    for kernel, y in expected.items():
        assert torch.equal(quantized.run(kernel), y), kernel
    assert quantized.problem().name == f"{linear.problem().name} quantized_input"
    monkeypatch.setattr(quantized_linear_cuda, "fastest_kernel", lambda *_, **__: next(iter(expected)))
    assert torch.equal(
        quantized_linear(**a, quantized_TI=quantized.quantized[0], quantized_scale=quantized.quantized[1]),  # type: ignore[index]
        next(iter(expected.values())),
    )


def test_kernels_by_the_number_of_tokens() -> None:
    """The first is what is taken where nothing was measured."""

    def kernels(num_tokens: int, activations: str = "dynamic", scales=row_scales) -> tuple[str, ...]:
        return linear_of(arguments(num_tokens, 64, 96, False, True, activations, scales, torch.float8_e4m3fn, torch.float16)).kernels()

    assert kernels(1) == kernels(1, "none") == (GEMV, TILE)
    assert kernels(1, scales=block_scales) == (TILE,)
    assert kernels(16) == (TILE, TORCH)
    assert kernels(17) == kernels(256) == (TORCH, TILE)
    assert kernels(257) == (TORCH,)
    assert kernels(64, "none") == (TILE,)
    assert kernels(256, "none") == (TILE, EXPANDED)
    assert kernels(257, "none") == (EXPANDED,)


def test_deep_gemms_products_join_once_they_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of weights with scales per block. Until then others run, and the choice is made again."""
    built = {"cutlass": False, "deep_gemm": False}
    for module in (scaled_gemm, quantized_linear_cuda):
        monkeypatch.setattr(module, "load_gemms", lambda device: object() if built["cutlass"] else None)
        monkeypatch.setattr(module, "load_deep_gemms", lambda device: object() if built["deep_gemm"] else None)
    monkeypatch.setattr(quantized_linear_cuda, "platform_of", lambda device: SimpleNamespace(runs_cuda_kernels=True))

    def linear(num_tokens: int, scales=block_scales, dtype: torch.dtype = torch.bfloat16) -> QuantizedLinear:
        return linear_of(arguments(num_tokens, 64, 96, False, False, "dynamic", scales, torch.float8_e4m3fn, dtype))

    names = [linear(300).problem().name]
    assert linear(300).kernels() == (TILE,)
    built["deep_gemm"] = True
    assert linear(300).kernels() == DEEP
    names.append(linear(300).problem().name)
    built["cutlass"] = True
    assert linear(300).kernels() == (*BLOCKS[::-1], *DEEP)
    assert linear(65).kernels() == (*BLOCKS[::-1], *DEEP, TILE)
    assert linear(64).kernels() == (*BLOCKS[::-1], TILE)  # the last of a range of the tuner
    names.append(linear(300).problem().name)
    assert names == [names[0], f"{names[0]} deep_gemm", f"{names[0]} cutlass deep_gemm"]
    assert not set(DEEP) & {*linear(300, row_scales).kernels(), *linear(300, dtype=torch.float16).kernels()}
    for other in (linear(300, row_scales), linear(300, dtype=torch.float16)):
        assert "deep_gemm" not in other.problem().name


def test_libraries_are_not_asked_for_where_none_of_their_products_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for one begins to build it."""
    asked: list[str] = []
    for module in (scaled_gemm, quantized_linear_cuda):
        for name in ("load_gemms", "load_deep_gemms"):
            monkeypatch.setattr(module, name, lambda device, name=name: asked.append(name))
    monkeypatch.setattr(quantized_linear_cuda, "load_silu_mul_gemms", lambda device: asked.append("load_silu_mul_gemms"))
    monkeypatch.setattr(quantized_linear_cuda, "platform_of", lambda device: SimpleNamespace(runs_cuda_kernels=True))

    def ask(activations: str, scales, weight_dtype: torch.dtype, dtype: torch.dtype) -> set[str]:
        asked.clear()
        linear = linear_of(arguments(300, 64, 96, True, False, activations, scales, weight_dtype, dtype))
        linear.kernels()
        linear.problem()
        return set(asked)

    fp8 = torch.float8_e4m3fn
    assert ask("dynamic", row_scales, fp8, torch.bfloat16) == {"load_gemms", "load_silu_mul_gemms"}
    assert ask("dynamic", block_scales, fp8, torch.bfloat16) == {"load_gemms", "load_deep_gemms"}
    assert not ask("dynamic", block_scales, fp8, torch.float16)
    assert not ask("none", row_scales, fp8, torch.bfloat16)
    assert not ask("dynamic", row_scales, torch.int8, torch.bfloat16)


def test_a_product_with_silu_mul_joins_where_it_computes_the_whole_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    is_built = False
    monkeypatch.setattr(quantized_linear_cuda, "load_silu_mul_gemms", lambda device: object() if is_built else None)
    for module in (scaled_gemm, quantized_linear_cuda):
        monkeypatch.setattr(module, "load_gemms", lambda device: None)
    monkeypatch.setattr(quantized_linear_cuda, "platform_of", lambda device: SimpleNamespace(runs_cuda_kernels=True))

    def linear(**changes: object) -> QuantizedLinear:
        a = arguments(300, 64, 96, True, False, "dynamic", row_scales, torch.float8_e4m3fn, torch.bfloat16)
        return linear_of(a | changes)

    before = linear().problem().name
    assert SCALED_SILU_MUL not in linear().kernels()
    is_built = True
    assert SCALED_SILU_MUL in linear().kernels()
    assert linear().problem().name == f"{before} cutlass_silu_mul"
    one = torch.ones(300, 64, dtype=torch.bfloat16)
    weight = linear().weight_OI
    for changes in (
        {"bias_O": one[0]},
        {"residual_TO": one[:, :32]},
        {"silu_mul": False},
        {"x_TI": linear().x_TI.half()},
        {"activations": "none"},
        {"weight_OI": weight[:56], "scale": linear().scale[:56]},  # 28 pairs of gates and up-projections
        {"scale": torch.ones(1, 1)},
    ):
        assert SCALED_SILU_MUL not in linear(**changes).kernels(), changes


@pytest.mark.parametrize("silu_mul", [False, True])
@pytest.mark.parametrize("quantized_input", [False, True])
def test_deep_gemms_products_in_a_linear(quantized_input: bool, silu_mul: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Norm, quantization, bias, SiLU-mul and residual around the product. x is quantized in the layout that the product reads."""
    strides = []

    def product(library, config, x, weight, x_scale, scale) -> torch.Tensor:
        strides.append(x_scale.stride())
        x = x.double() * x_scale.double().repeat_interleave(128, 1)[:, : x.shape[1]]
        return (x @ dequantize_weight(weight, scale, torch.float64).T).float()

    monkeypatch.setattr(scaled_gemm, "load_deep_gemms", lambda device: object())
    monkeypatch.setattr(scaled_gemm, "run_deep_gemm", product)
    torch.manual_seed(0)
    a = arguments(37, 64, 300, silu_mul, True, "dynamic", block_scales, torch.float8_e4m3fn, torch.float32)
    if quantized_input:
        a["quantized"] = linear_of(a).operand()
    assert relative_error(linear_of(a).run(DEEP[0]), reference(a)) < 1e-5
    assert strides == [(3, 1) if quantized_input else (1, 40)]


def test_what_no_library_gemm_takes() -> None:
    for num_tokens, out, inner, scales in (
        (80, 24, 96, row_scales),
        (80, 64, 40, row_scales),
        (80, 64, 96, block_scales),
        (16, 64, 96, row_scales),
    ):
        a = arguments(num_tokens, out, inner, False, False, "dynamic", scales, torch.int8, torch.float16)
        assert gemm_names(num_tokens, a["weight_OI"], a["scale"], torch.float16, is_quantized=True) == ()  # type: ignore[arg-type]


def test_a_problem_is_all_that_the_fastest_kernel_depends_on() -> None:
    def key(num_tokens: int, extras: bool = True, silu_mul: bool = True, activations: str = "dynamic") -> str:
        return linear_of(arguments(num_tokens, 64, 96, silu_mul, extras, activations, row_scales, torch.int8, torch.float16)).problem().key

    assert key(3) == key(4) == "int8 64x96 by_row float16 dynamic norm_weight bias residual silu_mul T<=16"
    assert len({key(3), key(17), key(3, False), key(3, True, False), key(3, True, True, "none")}) == 5


@pytest.mark.slow_cases
@pytest.mark.parametrize("kernel", [TILE, TORCH])
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("quantized_input", [False, True])
def test_silu_mul_of_a_long_prompt_in_chunks(
    quantized_input: bool, has_residual: bool, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit what the whole prompt gives at once."""
    monkeypatch.setattr(QuantizedLinear, "fastest", lambda *_: kernel)
    a = arguments(50, 64, 96, True, True, "dynamic", row_scales, torch.int8, torch.float16)
    if not has_residual:
        a["residual_TO"] = None
    if quantized_input:
        a["quantized_TI"], a["quantized_scale"] = linear_of(a).operand()
    at_once = quantized_linear(**a)  # type: ignore[arg-type]
    assert relative_error(at_once, reference(a)) < 1e-2
    monkeypatch.setattr(quantized_linear_cuda, "CHUNK_TOKENS", 20)
    assert torch.equal(quantized_linear(**a), at_once)  # type: ignore[arg-type]
