"""Times every kernel of linears over quantized weights on a GPU, at a model's shapes. Prints JSON lines.

usage: python -m benchmarks.ops_gpu_quantized [--models llama-8b] [--tokens 1,16,64] [--sites qkv,down] [--quantization fp8] [--sweep]
       python -m benchmarks.ops_gpu_quantized --quantization int4 --tokens 1,4,16,64,256,4096 [--sweep]
int4: random 4-bit codes with float16 scales and zero points for groups of 128 inputs, as in AWQ.
CUTLASS' kernels, and with fp8-block DeepGEMM's, are built first if needed (a minute). Weights come from memory, as in a step over many
layers.
"""

from __future__ import annotations

import argparse
import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from typing import Any

import torch

import compile_and_serve.custom_ops.quantized.group_linear  # noqa: F401 (defines the op)
from benchmarks.gpu_timing import emit, relative_error, time_ms
from benchmarks.ops_gpu import DTYPE, Shape
from compile_and_serve.custom_ops.jit.cpp import BuildError
from compile_and_serve.custom_ops.quantization import Activations, block_scales, quantize_weight, row_scales
from compile_and_serve.custom_ops.quantized.cuda_group_linear import EXPANDED, TILE, GroupLinear
from compile_and_serve.custom_ops.quantized.cuda_linear import QuantizedLinear
from compile_and_serve.custom_ops.quantized.cutlass_gemm import gemm_library
from compile_and_serve.custom_ops.quantized.deep_gemm import deep_gemm_library
from compile_and_serve.custom_ops.quantized.group_layout import pack_codes_triton, pack_scales_triton
from compile_and_serve.custom_ops.quantized.triton_gemv import gemv
from compile_and_serve.custom_ops.quantized.triton_group_matmul import group_matmul
from compile_and_serve.custom_ops.quantized.triton_matmul import matmul
from compile_and_serve.custom_ops.tuning.fastest_kernel import fastest_kernel

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 16384)
SCHEMES: dict[str, tuple[torch.dtype, bool, Activations]] = {  # dtype of the weights, whether scales are per block, activations
    "fp8": (torch.float8_e4m3fn, False, "dynamic"),
    "fp8-block": (torch.float8_e4m3fn, True, "dynamic"),
    "fp8-weight-only": (torch.float8_e4m3fn, False, "none"),
    "int8": (torch.int8, False, "dynamic"),
    "int8-weight-only": (torch.int8, False, "none"),
}
MEMORY_BYTES_PER_SECOND = 4.8e12  # of an H200, as NVIDIA gives it
FEW_TOKENS = 256  # up to here the weight's bytes decide, and the copies of it that are timed exceed L2 together


def linear_of(shape: Shape, site: str, num_tokens: int, scheme: str) -> QuantizedLinear:
    """One linear of a layer with what it takes in, over random values."""
    rows, columns = shape.sizes()[site]
    how = shape.sites()[site]
    dtype, per_block, activations = SCHEMES[scheme]
    weight = torch.randn(rows, columns, device="cuda") * columns**-0.5
    scale = (block_scales if per_block else row_scales)(weight, dtype)
    stored = rows // 2 if how.get("silu_mul") else rows
    return QuantizedLinear(
        x_TI=torch.randn(num_tokens, columns, device="cuda").to(DTYPE),
        weight_OI=quantize_weight(weight, scale, dtype),
        scale=scale,
        norm_weight_I=torch.empty(columns, device="cuda").uniform_(0.5, 1.5).to(DTYPE) if how.get("norm") else None,
        eps=shape.eps,
        silu_mul=how.get("silu_mul", False),
        residual_TO=torch.randn(num_tokens, stored, device="cuda").to(DTYPE) if how.get("residual") else None,
        activations=activations,
    )


def group_linear_of(shape: Shape, site: str, num_tokens: int) -> GroupLinear:
    """One linear of a layer over 4-bit codes in groups of 128, with what it takes in, over random values."""
    rows, columns = shape.sizes()[site]
    how = shape.sites()[site]
    stored, groups = rows // 2 if how.get("silu_mul") else rows, columns // 128
    codes = torch.randint(0, 16, (rows, columns), device="cuda", dtype=torch.uint8)
    scale = (torch.rand(rows, groups, device="cuda") + 0.5) * 0.2 * columns**-0.5
    return GroupLinear(
        x_TI=torch.randn(num_tokens, columns, device="cuda").to(DTYPE),
        packed=pack_codes_triton(codes, 4),
        scale=pack_scales_triton(scale.half()),
        offset=pack_scales_triton(torch.randint(0, 16, (rows, groups), device="cuda", dtype=torch.uint8)),
        out_features=rows,
        bits=4,
        group_size=128,
        norm_weight_I=torch.empty(columns, device="cuda").uniform_(0.5, 1.5).to(DTYPE) if how.get("norm") else None,
        eps=shape.eps,
        silu_mul=how.get("silu_mul", False),
        residual_TO=torch.randn(num_tokens, stored, device="cuda").to(DTYPE) if how.get("residual") else None,
    )


def group_bytes(linear: GroupLinear) -> int:
    """Bytes of the weight with its scales and zero points."""
    assert linear.offset is not None
    return sum(tensor.numel() * tensor.element_size() for tensor in (linear.packed, linear.scale, linear.offset))


def measure_groups(shape: Shape, site: str, num_tokens: int) -> float | None:
    """Check against torch in float32 and time every kernel of a group-quantized linear; → microseconds of the fastest."""
    linear = group_linear_of(shape, site, num_tokens)
    wide = replace(
        linear,
        x_TI=linear.x_TI.float(),
        norm_weight_I=None if linear.norm_weight_I is None else linear.norm_weight_I.float(),
        residual_TO=None if linear.residual_TO is None else linear.residual_TO.float(),
    )
    expected = torch.ops.cas.group_linear_reference(*(getattr(wide, field.name) for field in fields(wide)))
    copies = copies_of(linear.packed, num_tokens, group_bytes(linear))
    row: dict[str, Any] = {"model": shape.name, "scheme": "int4", "site": site, "tokens": num_tokens}
    us: dict[str, float] = {}
    kernels = dict.fromkeys((*linear.kernels(), TILE, *((EXPANDED,) if num_tokens > 16 else ())))
    for kernel in kernels:

        def all_copies(kernel: str = kernel) -> None:
            for packed in copies:
                linear.run(kernel, packed)

        try:
            error = relative_error(linear.run(kernel), expected)
            us[kernel] = round(time_ms(all_copies, 15.0) * 1e3 / len(copies), 2)
            emit(
                work="group_linear",
                **row,
                kernel=kernel,
                us=us[kernel],
                tb_s=round(group_bytes(linear) / us[kernel] / 1e6, 3),
                error=float(f"{error:.2e}"),
                ok=error < 1e-2,
            )
        except Exception as error:
            emit(work="group_linear", **row, kernel=kernel, failed=repr(error)[:300])
    return min(us.values(), default=None)


def sweep_groups(shape: Shape, site: str, num_tokens: int) -> None:
    """Times every configuration of the tile kernel."""
    linear = group_linear_of(shape, site, num_tokens)
    copies = copies_of(linear.packed, num_tokens, group_bytes(linear))
    x_TI = torch.randn_like(linear.x_TI)
    configs: list[Any] = [None]
    configs += [(*c, c[0] // 16) for c in itertools.product((64, 128), (1, 2, 4, 8, 16), (3, 4, 6, 8))]

    def run(config: Any, packed: torch.Tensor) -> None:
        group_matmul(
            x_TI, packed, linear.scale, linear.offset, linear.out_features, 4, 128, None, linear.silu_mul, linear.residual_TO, config
        )

    def compiles(config: Any) -> bool:
        try:
            run(config, copies[0])
            torch.cuda.synchronize()
        except Exception as error:  # too much shared memory, say
            emit(work="sweep_failed", site=site, tokens=num_tokens, config=config, error=repr(error)[:200])
            return False
        return True

    with ThreadPoolExecutor(16) as pool:
        fitting = [c for c, fits in zip(configs, pool.map(compiles, configs), strict=True) if fits]
    results = []
    for config in fitting:

        def all_copies(config: Any = config) -> None:
            for packed in copies:
                run(config, packed)

        results.append((round(time_ms(all_copies, 10.0) * 1e3 / len(copies), 2), config))
    emit(
        work="group_sweep",
        model=shape.name,
        site=site,
        tokens=num_tokens,
        mb=round(group_bytes(linear) / 1e6, 2),
        as_chosen=results[0][0],
        best=sorted(results, key=lambda r: r[0])[:8],
    )


def copies_of(weight: torch.Tensor, num_tokens: int, num_bytes: int | None = None) -> list[torch.Tensor]:
    if num_tokens > FEW_TOKENS:
        return [weight]
    l2_bytes = torch.cuda.get_device_properties(weight.device).L2_cache_size
    return [weight, *(weight.clone() for _ in range(-(-2 * l2_bytes // (num_bytes or weight.numel()))))]


def floor_us(linear: QuantizedLinear) -> float:
    """What reading the weight and the activations and writing the result take at the memory's speed."""
    stored = linear.weight_OI.shape[0] // (2 if linear.silu_mul else 1)
    values = linear.x_TI.numel() + linear.x_TI.shape[0] * stored * (1 if linear.residual_TO is None else 2)
    num_bytes = linear.weight_OI.numel() + values * linear.x_TI.element_size()
    return num_bytes / MEMORY_BYTES_PER_SECOND * 1e6


def measure(shape: Shape, site: str, num_tokens: int, scheme: str) -> float | None:
    """Time and check every kernel; → microseconds of the fastest."""
    linear = linear_of(shape, site, num_tokens, scheme)
    arguments = (
        linear.x_TI, linear.weight_OI, linear.scale, linear.weight_OI.shape[0], linear.norm_weight_I, linear.eps, None,
        linear.silu_mul, linear.residual_TO, linear.activations,
    )  # fmt: skip
    expected = torch.ops.cas.quantized_linear_reference(*arguments) if num_tokens <= FEW_TOKENS else None
    copies = copies_of(linear.weight_OI, num_tokens)
    row: dict[str, Any] = {"model": shape.name, "scheme": scheme, "site": site, "tokens": num_tokens}
    row["floor_us"] = round(floor_us(linear), 2)
    us: dict[str, float] = {}
    for kernel in linear.kernels():

        def all_copies(kernel: str = kernel) -> None:
            for weight in copies:
                linear.run(kernel, weight)

        try:
            us[kernel] = round(time_ms(all_copies, 15.0) * 1e3 / len(copies), 2)
            check = {}
            if expected is not None:
                error = relative_error(linear.run(kernel), expected)
                check = {"error": float(f"{error:.2e}"), "ok": error < 1e-2}
            emit(work="quantized_linear", **row, kernel=kernel, us=us[kernel], **check)
        except Exception as error:  # a product that does not take these sizes
            emit(work="quantized_linear", **row, kernel=kernel, failed=repr(error)[:200])
    runs = {kernel: lambda weight, kernel=kernel: linear.run(kernel, weight) for kernel in linear.kernels()}
    started = time.perf_counter()
    chosen = fastest_kernel(linear.problem(), runs, linear.weight_OI)
    emit(
        work="quantized_linear_choice",
        **row,
        chosen=chosen,
        us=us.get(chosen),
        fastest=min(us, key=us.__getitem__, default=None),
        choosing_ms=round((time.perf_counter() - started) * 1e3, 1),
    )
    return min(us.values(), default=None)


def sweep(shape: Shape, site: str, num_tokens: int, scheme: str) -> None:
    """Times every configuration of the kernel for one token or of the tiled kernel, including the quantization of x."""
    linear = linear_of(shape, site, num_tokens, scheme)
    copies = copies_of(linear.weight_OI, num_tokens)
    is_gemv = num_tokens == 1 and linear.scale.dim() == 1
    configs: list[Any] = [None]
    if is_gemv:
        configs += itertools.product((2, 4, 8, 16), (4, 8), (1, 2, 3, 4), (0, 8, 16, 32))
    else:
        configs += itertools.product((64, 128), (128, 256, 512), (1, 2, 4, 8), (3, 4, 5), (4, 8))

    def run(config: Any, weight: torch.Tensor) -> None:
        if is_gemv:
            gemv(linear.x_TI, weight, linear.scale, linear.norm_weight_I, linear.eps, None, linear.silu_mul, linear.residual_TO,
                 linear.activations, None, config)  # fmt: skip
        else:
            matmul(*linear.operand(), weight, linear.scale, None, linear.silu_mul, linear.residual_TO, DTYPE, config)

    def compiles(config: Any) -> bool:
        try:
            run(config, copies[0])
            torch.cuda.synchronize()
        except Exception as error:  # of Triton: too much shared memory, say
            emit(work="sweep_failed", site=site, tokens=num_tokens, config=config, error=repr(error)[:200])
            return False
        return True

    with ThreadPoolExecutor(16) as pool:
        fitting = [c for c, fits in zip(configs, pool.map(compiles, configs), strict=True) if fits]
    results = []
    for config in fitting:

        def all_copies(config: Any = config) -> None:
            for weight in copies:
                run(config, weight)

        ms = time_ms(all_copies, 10.0)
        results.append((round(ms * 1e3 / len(copies), 2), config))
    emit(work="quantized_sweep", model=shape.name, scheme=scheme, site=site, tokens=num_tokens, floor_us=round(floor_us(linear), 2),
         as_chosen=results[0][0], best=sorted(results, key=lambda r: r[0])[:8])  # fmt: skip


def build_products(*, per_block: bool) -> None:
    """Build the products of 8-bit weights that are missing. A row says why DeepGEMM's cannot be built."""
    gemm_library().build()
    if per_block:
        try:
            deep_gemm_library(torch.cuda.get_device_properties("cuda").multi_processor_count).build()
        except BuildError as error:
            emit(work="build", skipped=str(error))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="llama-8b")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--sites", default="qkv,o,gate_up,down")
    parser.add_argument("--quantization", default="fp8", choices=(*SCHEMES, "int4"))
    parser.add_argument("--sweep", action="store_true", help="every configuration of the Triton kernels instead; takes minutes")
    args = parser.parse_args()
    started = time.perf_counter()
    if args.quantization != "int4":
        build_products(per_block=SCHEMES[args.quantization][1])
        emit(work="build", seconds=round(time.perf_counter() - started, 1))
    for name in args.models.split(","):
        shape = Shape(name)
        for num_tokens in map(int, args.tokens.split(",")):
            if args.sweep:
                for site in args.sites.split(","):
                    if args.quantization == "int4":
                        sweep_groups(shape, site, num_tokens)
                    else:
                        sweep(shape, site, num_tokens, args.quantization)
                continue
            us = [
                measure_groups(shape, site, num_tokens)
                if args.quantization == "int4"
                else measure(shape, site, num_tokens, args.quantization)
                for site in args.sites.split(",")
            ]
            layers_ms = sum(filter(None, us)) * shape.layers / 1e3
            emit(work="quantized_linears_of_all_layers", model=name, scheme=args.quantization, tokens=num_tokens, ms=round(layers_ms, 3))
            torch.cuda.empty_cache()
    emit(work="total", seconds=round(time.perf_counter() - started, 1))


if __name__ == "__main__":
    main()
