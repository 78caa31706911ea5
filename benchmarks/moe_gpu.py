"""Routing and experts on a GPU: correctness against float32 first, then the time of every method. Prints JSON lines.

    python -m benchmarks.moe_gpu [--tokens 1,8,32,256,4096,16384] [--shapes qwen3-30b-a3b,gpt-oss-20b] [--check-only] [--out FILE]
    python -m benchmarks.moe_gpu --weights fp8,fp8-block --activations none,dynamic --shapes qwen3-30b-a3b    # of bfloat16 shapes

With float8 activations, the reference has the same rounded x and h. Shapes in MXFP4 keep their weights.

Tokens go to experts that are drawn evenly. One line for each shape, number of tokens and method: `us` of the whole op as a CUDA graph
replays it, `tb_s` the bytes of the touched experts' weights (each once), of x and of the result over that time, `tflop_s`. Weights of
several layers take turns, so that they come from memory. `route` and `order` are the times of routing and of sorting by expert.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import environment
from compile_and_serve.custom_ops.moe import cuda_experts, triton_expand_experts, triton_experts
from compile_and_serve.custom_ops.moe.route import route
from compile_and_serve.custom_ops.moe.triton_mxfp4_experts import dequantize
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

    layers = []
    for _ in range(LAYERS):
        weights_TK, ids_TK = route(normal(num_tokens, num_experts), top_k)
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
        in_float32 = replace(operands, x_TD=operands.x_TD.float()) if is_float8 else operands
        plain = triton_experts.expanded(triton_expand_experts.dequantize if is_float8 else dequantize, in_float32, operands.gate_up)
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


def measure(
    shape: str, num_tokens: int, emit: Callable[..., None], check_only: bool, weights: str = "model", activations: str = "none"
) -> None:
    num_experts, top_k, hidden, features, _ = SHAPES[shape]
    layers = make_operands(shape, num_tokens, weights=weights, activations=activations)
    touched = [int(layer.ids_TK.unique().numel()) for layer in layers]
    mean = sum(touched) / len(touched)
    pairs = num_tokens * top_k
    bytes_each = 17 / 32 if shape.endswith("mxfp4") else layers[0].gate_up.element_size()
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
    for name in cuda_experts.methods(layers[0]):

        def method(operands: triton_experts.Operands, name: str = name) -> torch.Tensor:
            return cuda_experts.methods(operands)[name](operands.gate_up)

        error = check(name, method, layers[0])
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
    parser.add_argument("--weights", type=comma, default=["model"], help="model (unquantized or MXFP4), fp8, fp8-block")
    parser.add_argument("--activations", type=comma, default=["none"], help="none, dynamic (of float8 weights)")
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--out", type=Path, help="also append the rows to this file")
    args = parser.parse_args()
    device = torch.cuda.get_device_name()
    rows: list[str] = []

    def emit(**row: Any) -> None:
        rows.append(json.dumps({"device": device, **row, **environment()}))
        print(rows[-1], flush=True)

    for shape, num_tokens, weights in itertools.product(args.shapes, args.tokens, args.weights):
        for activations in args.activations if weights != "model" else ["none"]:
            measure(shape, num_tokens, emit, args.check_only, weights, activations)
            torch.cuda.empty_cache()
    if args.out:
        with args.out.open("a") as file:
            file.writelines(row + "\n" for row in rows)


if __name__ == "__main__":
    main()
