"""Routing and experts on a GPU: correctness against float32 first, then the time of every method. Prints JSON lines.

    python -m benchmarks.moe_gpu [--tokens 1,8,32,256,4096,16384] [--shapes qwen3-30b-a3b,gpt-oss-20b] [--check-only] [--out FILE]
    python -m benchmarks.moe_gpu --weights fp8,fp8-block --activations none,dynamic --shapes qwen3-30b-a3b    # of bfloat16 shapes

    python -m benchmarks.moe_gpu --weights awq,q4_k,gptq-g32 --shapes qwen3-30b-a3b                            # codes of 4 bits
    python -m benchmarks.moe_gpu --weights awq --sweep --tokens 1,2,8,64,256 --shapes qwen3-30b-a3b            # every tile of codes

With float8 activations, the reference has the same rounded x and h. Shapes in MXFP4 keep their weights. `--sweep` times tiles of codes
that are no candidates, too; what it finds best is written by hand into `triton_coded_experts.py` and `triton_coded_gemv.py`.

Tokens go to experts that are drawn evenly. One line for each shape, number of tokens and method: `us` of the whole op as a CUDA graph
replays it, `tb_s` the bytes of the touched experts' weights (each once), of x and of the result over that time, `tflop_s`. Weights of
several layers take turns, so that they come from memory. `route` and `order` are the times of routing and of sorting by expert.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import environment
from compile_and_serve.custom_ops.moe import cuda_experts, triton_expand_experts, triton_experts
from compile_and_serve.custom_ops.moe.code_format import CodeFormat, pack_expert_codes, pack_expert_factors, pack_expert_scales
from compile_and_serve.custom_ops.moe.route import route
from compile_and_serve.custom_ops.moe.triton_coded_experts import CodeTiles, expanded_codes, run_coded
from compile_and_serve.custom_ops.moe.triton_coded_gemv import GemvTiles, gemv_tiles, run_coded_gemv
from compile_and_serve.custom_ops.moe.triton_order import order_by_expert
from compile_and_serve.custom_ops.quantization import BLOCK, block_scales, quantize_activations, quantize_weight, row_scales
from compile_and_serve.custom_ops.quantized.mxfp4 import pack_mxfp4_codes, pack_mxfp4_scales
from compile_and_serve.custom_ops.tuning.timer import call_seconds

# experts, experts of a token, hidden size, intermediate size of an expert, activation
SHAPES = {
    "qwen3-30b-a3b": (128, 8, 2048, 768, "silu"),
    "deepseek-v2-lite": (64, 6, 2048, 1408, "silu"),
    "gpt-oss-20b": (32, 4, 2880, 2880, "clamped_swiglu"),
    "gpt-oss-20b-mxfp4": (32, 4, 2880, 2880, "clamped_swiglu"),
}
# Weights of codes: format, dtype of offsets, groups that share factors (0: none).
CODES = {
    "awq": (CodeFormat(4, 128), torch.uint8, 0),
    "gptq-g32": (CodeFormat(4, 32), torch.uint8, 0),
    "q4_k": (CodeFormat(4, 32), torch.uint8, 8),
    "q4_0": (CodeFormat(4, 32), None, 0),
    "q6_k": (CodeFormat(6, 16), None, 16),
    "q8_0": (CodeFormat(8, 32), None, 0),
    "nf4": (CodeFormat(4, 64, "nf4"), None, 0),
}
LIMIT = 7.0
LAYERS = 3  # whose weights take turns
TOLERANCE = 1e-2  # relative, of bfloat16 results
# With float8 activations: where sums differ in their last bits, a value of h beside the middle of two float8 values is rounded differently.
FLOAT8_TOLERANCE = 1.5e-2


def make_operands(
    shape: str, num_tokens: int, seed: int = 0, weights: str = "model", activations: str = "none"
) -> list[triton_experts.Operands]:
    """Operands of `LAYERS` layers with the same x."""
    num_experts, top_k, hidden, features, activation = SHAPES[shape]
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*size: int, std: float = 1.0) -> torch.Tensor:
        return torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_(0, std, generator=generator)

    x_TD = normal(num_tokens, hidden)
    biased, is_mxfp4 = activation == "clamped_swiglu", shape.endswith("mxfp4")

    def matrices(outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weights and, in MXFP4, their scales."""
        if not is_mxfp4:
            plain = normal(num_experts, outputs, inputs, std=inputs**-0.5)
            if weights == "model":
                return plain, None
            scale = (row_scales if weights == "fp8" else block_scales)(plain, torch.float8_e4m3fn)
            return quantize_weight(plain, scale, torch.float8_e4m3fn), scale
        blocks = (num_experts, outputs, inputs // 32)
        codes = torch.randint(0, 256, (*blocks, 16), dtype=torch.uint8, device="cuda", generator=generator)
        scales = torch.randint(118, 122, blocks, dtype=torch.uint8, device="cuda", generator=generator)
        return pack_mxfp4_codes(codes), pack_mxfp4_scales(scales)

    def codes(name: str, outputs: int, inputs: int) -> dict[str, torch.Tensor]:
        form, _, _ = CODES[weights]
        size, groups = (num_experts, outputs, inputs), (num_experts, outputs, inputs // form.group_size)
        drawn = torch.randint(0, 1 << form.bits, size, dtype=torch.uint8, device="cuda", generator=generator)
        std = inputs**-0.5 / (0.5 if form.table else 0.3 * (1 << form.bits))
        made = {name: pack_expert_codes(drawn, form.bits)}
        scale = (std * torch.rand(groups, device="cuda", generator=generator).add(0.5)).half()
        _, offset_dtype, sharing = CODES[weights]
        if sharing:
            factors = [torch.full((num_experts, outputs, groups[2] // sharing), std / 32, device="cuda", dtype=torch.float16)]
            scale = torch.randint(16, 48, groups, dtype=torch.uint8, device="cuda", generator=generator)
            made[f"{name}_factor"] = pack_expert_factors(*factors * (1 if offset_dtype is None else 2))
        if offset_dtype is not None:
            low, high = (120, 360) if sharing else (6, 11)
            offset = torch.randint(low, high, groups, device="cuda", generator=generator).clamp(max=255).to(offset_dtype)
            made[f"{name}_offset"] = pack_expert_scales(offset)
        return made | {f"{name}_scale": pack_expert_scales(scale)}

    layers = []
    for _ in range(LAYERS):
        weights_TK, ids_TK = route(normal(num_tokens, num_experts), top_k)
        if weights in CODES:
            form = CODES[weights][0].name
            coded = codes("gate_up", 2 * features, hidden) | codes("down", hidden, features)
            layers.append(
                triton_experts.Operands(
                    x_TD,
                    ids_TK,
                    weights_TK,
                    activation=activation,
                    limit=LIMIT,
                    codes=f"{form}|{form}",
                    **coded,  # type: ignore[arg-type]
                ).normalized()
            )
            continue
        (gate_up, gate_up_scale), (down, down_scale) = matrices(2 * features, hidden), matrices(hidden, features)
        layers.append(
            triton_experts.Operands(
                x_TD,
                ids_TK,
                weights_TK,
                gate_up,
                down,
                normal(num_experts, 2 * features) if biased else None,
                normal(num_experts, hidden) if biased else None,
                activation,
                LIMIT,
                gate_up_scale=gate_up_scale,
                down_scale=down_scale,
                activations=activations,
            )
        )
    return layers


def reference(operands: triton_experts.Operands, tokens: torch.Tensor) -> torch.Tensor:
    """The rows `tokens` of the result in float32."""
    is_float8 = operands.gate_up.dtype == torch.float8_e4m3fn
    if operands.gate_up_scale is not None:
        in_float32 = replace(operands, x_TD=operands.x_TD.float())
        if is_float8:
            plain = triton_experts.expanded(triton_expand_experts.dequantize, in_float32, operands.gate_up)
        else:
            plain = expanded_codes(in_float32, operands.gate_up)
        operands = replace(operands, gate_up=plain.gate_up, down=plain.down)
    out = []

    def rounded(x_I: torch.Tensor) -> torch.Tensor:
        """x as the products take it."""
        if not operands.rounds_activations:
            return x_I
        per_block = operands.scales == 2
        values, scale = quantize_activations(x_I.bfloat16()[None], torch.float8_e4m3fn, per_group=per_block)
        return (values.float() * (scale.repeat_interleave(BLOCK, 1)[:, : len(x_I)] if per_block else scale))[0]

    for token in tokens.tolist():
        x = operands.x_TD[token].float()
        total = torch.zeros_like(x)
        for expert, weight in zip(operands.ids_TK[token].tolist(), operands.weights_TK[token], strict=True):
            y = operands.gate_up[expert].float() @ rounded(x)
            if operands.gate_up_bias is not None:
                y += operands.gate_up_bias[expert].float()
            gate, up = y.chunk(2)
            if operands.clamped:
                gate, up = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
                h = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            else:
                h = torch.nn.functional.silu(gate) * up
            y = operands.down[expert].float() @ rounded(h)
            if operands.down_bias is not None:
                y += operands.down_bias[expert].float()
            total += weight * y
        out.append(total)
    return torch.stack(out)


def all_to_one(operands: triton_experts.Operands) -> triton_experts.Operands:
    """The operands with all tokens sent to the same experts."""
    return replace(operands, ids_TK=operands.ids_TK[:1].expand_as(operands.ids_TK).contiguous())


def check(name: str, method: Callable[..., torch.Tensor], operands: triton_experts.Operands) -> float:
    """Relative error of up to 16 tokens, which must be within `TOLERANCE`."""
    num_tokens = operands.x_TD.shape[0]
    tokens = torch.randint(num_tokens, (min(16, num_tokens),))
    expected = reference(operands, tokens)
    found = method(operands)[tokens.cuda()].float()
    error = ((found - expected).norm() / expected.norm()).item()
    assert error < (FLOAT8_TOLERANCE if operands.rounds_activations else TOLERANCE), f"{name}: relative error {error}"
    return error


def seconds(calls: list[Callable[[], object]]) -> float:
    """Device seconds of one call; the calls take turns."""
    rounds = call_seconds([lambda number: calls[number % len(calls)]()], torch.device("cuda"), num_calls=12, num_rounds=5)
    return min(rounds[0])


Method = Callable[[triton_experts.Operands], torch.Tensor]


def _methods(operands: triton_experts.Operands, sweep: bool) -> dict[str, Method]:
    """The candidates by name. sweep: further tiles of codes."""

    def candidate(name: str) -> Method:
        return lambda operands: cuda_experts.methods(operands)[name](operands.gate_up)

    def coded(tiles: CodeTiles, direct: bool) -> Method:
        return lambda operands: run_coded(tiles, direct, operands, operands.gate_up)

    def gemv(tiles: GemvTiles) -> Method:
        return lambda operands: run_coded_gemv(tiles, operands, operands.gate_up)

    found = {name: candidate(name) for name in cuda_experts.methods(operands)}
    if not sweep or operands.gate_up.dtype != torch.int16:
        return found
    each = operands.num_pairs / operands.gate_up.shape[0]
    if operands.num_pairs <= 64:
        if gemv_tiles(operands):
            pairs = itertools.product((2, 4, 8, 16), (1, 2, 4, 8))
            found |= {one.name: gemv(one) for one in (GemvTiles(*pair) for pair in pairs)}
        rows = ((16, 32), (32, 32), (32, 64), (64, 64), (64, 128))
        sizes = itertools.product(rows, (2, 4, 6), (2, 4), (False, True))
        direct = [CodeTiles(16, *size, stages, warps, first) for size, stages, warps, first in sizes]
        found |= {f"direct {one.name}": coded(one, True) for one in direct}
    largest = 16 if each <= 8 else 32 if each <= 24 else 64 if each <= 64 else 128
    pairs_of_block = [size for size in (16, 32, 64, 128) if largest // 2 <= size <= largest]
    rows = ((32, 64), (64, 64), (64, 128), (128, 128), (128, 256))
    grouped = itertools.product(pairs_of_block, rows, (2, 3, 4, 5), (4, 8), (False, True))
    tiles = [CodeTiles(p, *size, stages, warps, first) for p, size, stages, warps, first in grouped if warps == 4 or size[0] == 128]
    return found | {f"codes {one.name}": coded(one, False) for one in tiles}


def measure(
    shape: str,
    num_tokens: int,
    emit: Callable[..., None],
    check_only: bool,
    weights: str = "model",
    activations: str = "none",
    sweep: bool = False,
) -> None:
    num_experts, top_k, hidden, features, _ = SHAPES[shape]
    layers = make_operands(shape, num_tokens, weights=weights, activations=activations)
    touched = [int(layer.ids_TK.unique().numel()) for layer in layers]
    mean = sum(touched) / len(touched)
    pairs = num_tokens * top_k
    kept = [getattr(layers[0], f"{name}{part}") for name in ("gate_up", "down") for part in ("", "_scale", "_offset", "_factor")]
    bytes_each = sum(one.nbytes for one in kept if one is not None) / (num_experts * 3 * hidden * features)
    num_bytes = mean * 3 * hidden * features * bytes_each + 2 * num_tokens * hidden * 2
    flop = pairs * 3 * hidden * features * 2
    common: dict[str, Any] = {
        "shape": shape,
        "weights": weights,
        "activations": activations,
        "tokens": num_tokens,
        "distinct_experts": round(mean, 1),
    }
    if not check_only and activations == "none":
        logits = torch.randn(num_tokens, num_experts, dtype=torch.bfloat16, device="cuda")
        emit(**common, method="route", us=round(seconds([lambda: route(logits, top_k)]) * 1e6, 2))
        for block in (16, 128):
            us = seconds([lambda block=block: order_by_expert(layers[0].ids_TK, num_experts, block)]) * 1e6  # type: ignore[misc]
            emit(**common, method=f"order {block}", us=round(us, 2))
    candidates = _methods(layers[0], sweep)
    if sweep:  # Triton compiles them side by side
        with ThreadPoolExecutor(12) as pool:
            for done in [pool.submit(run, layers[0]) for run in candidates.values()]:
                done.exception()
    for name, run in candidates.items():

        def method(operands: triton_experts.Operands, run: Method = run) -> torch.Tensor:
            return run(operands)

        try:
            error = check(name, method, layers[0])
        except Exception as reason:  # tiles that do not fit
            if not sweep:
                raise
            emit(**common, method=name, failed=f"{type(reason).__name__}: {str(reason).splitlines()[0]:.100}")
            continue
        if not sweep:
            check(f"{name}, all to one", method, all_to_one(layers[0]))
        row = common | {"method": name, "relative_error": round(error, 5)}
        if not check_only:
            took = seconds([lambda layer=layer, method=method: method(layer) for layer in layers])  # type: ignore[misc]
            row |= {"us": round(took * 1e6, 2), "tb_s": round(num_bytes / took / 1e12, 3), "tflop_s": round(flop / took / 1e12, 1)}
        emit(**row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = [1, 8, 32, 256, 4096, 16384]
    parser.add_argument("--tokens", type=lambda text: [int(part) for part in text.split(",")], default=numbers)

    def comma(text: str) -> list[str]:
        return text.split(",")

    parser.add_argument("--shapes", type=comma, default=list(SHAPES))
    parser.add_argument(
        "--weights", type=comma, default=["model"], help=f"model (unquantized or MXFP4), fp8, fp8-block, {', '.join(CODES)}"
    )
    parser.add_argument("--activations", type=comma, default=["none"], help="none, dynamic (of float8 weights)")
    parser.add_argument("--sweep", action="store_true", help="of weights in codes: more tiles than the tuner tries")
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--out", type=Path, help="also append the rows to this file")
    args = parser.parse_args()
    device = torch.cuda.get_device_name()
    rows: list[str] = []

    def emit(**row: Any) -> None:
        rows.append(json.dumps({"device": device, **row, **environment()}))
        print(rows[-1], flush=True)

    for shape, num_tokens, weights in itertools.product(args.shapes, args.tokens, args.weights):
        for activations in args.activations if weights in ("fp8", "fp8-block") else ["none"]:
            measure(shape, num_tokens, emit, args.check_only, weights, activations, args.sweep)
            torch.cuda.empty_cache()
    if args.out:
        with args.out.open("a") as file:
            file.writelines(row + "\n" for row in rows)


if __name__ == "__main__":
    main()
