"""Linears in 4-bit floating-point formats and in bitsandbytes' and ModelOpt's, written value by value from the published rules.

NVFP4, MXFP4: e2m1 of the OCP Microscaling Formats 1.0. bitsandbytes: `quantize_blockwise` and `QuantState.as_dict` of its functional.py.
"""

from __future__ import annotations

import json
from typing import Any

import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4 = (0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 6 / 12, 2 / 12, 3 / 12)
BLOCK = 64


def nearest(values: torch.Tensor, table: tuple[float, ...]) -> torch.Tensor:
    """Index of the nearest number of a table."""
    return (values[..., None] - torch.tensor(table)).abs().argmin(-1)


def low_first(codes_OI: torch.Tensor) -> torch.Tensor:
    return (codes_OI[:, 0::2] | codes_OI[:, 1::2] << 4).to(torch.uint8)


def float4_linear(name: str, weight_OI: torch.Tensor, config: dict[str, Any], _: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of one linear, and its dequantized weight in float32."""
    weight = weight_OI.float()
    match config["quant_method"]:
        case "bitsandbytes" if config["load_in_8bit"]:
            tensors, plain = llm_int8(weight)
        case "bitsandbytes":
            tensors, plain = bitsandbytes(weight, config["bnb_4bit_quant_type"], config["bnb_4bit_use_double_quant"])
        case "modelopt" if config["quant_algo"] == "FP8":
            scale = weight.abs().max() / 448
            values = (weight / scale).to(torch.float8_e4m3fn)
            tensors = {"weight": values, "weight_scale": scale, "input_scale": torch.tensor(0.05)}
            plain = values.float() * scale
        case "modelopt":
            tensors, plain = nvfp4(weight, "weight", "weight_scale_2")
        case "quark":
            tensors, plain = mxfp4(weight, "weight")
        case _ if "mxfp4" in config["format"]:
            tensors, plain = mxfp4(weight, "weight_packed")
        case _:
            tensors, plain = nvfp4(weight, "weight_packed", "weight_global_scale")
    return {f"{name}.{leaf}": tensor for leaf, tensor in tensors.items()}, plain


def nvfp4(weight: torch.Tensor, codes_name: str, factor_name: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    groups = weight.unflatten(1, (-1, 16))
    factor = weight.abs().max() / (448 * 6)
    if factor_name == "weight_global_scale":  # the file has the reciprocal
        factor = (1 / factor).reshape(1)
    scale = groups.abs().amax(2) / 6
    scale = (scale * factor if factor_name == "weight_global_scale" else scale / factor).to(torch.float8_e4m3fn)
    real = scale.float() / factor if factor_name == "weight_global_scale" else scale.float() * factor
    codes = nearest(groups / real[..., None], E2M1)
    plain = (torch.tensor(E2M1)[codes] * real[..., None]).flatten(1)
    return {codes_name: low_first(codes.flatten(1)), "weight_scale": scale, factor_name: factor}, plain


def mxfp4(weight: torch.Tensor, codes_name: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    groups = weight.unflatten(1, (-1, 32))
    exponent = torch.floor(torch.log2(groups.abs().amax(2))) - 2
    codes = nearest(groups / torch.exp2(exponent)[..., None], E2M1)
    plain = (torch.tensor(E2M1)[codes] * torch.exp2(exponent)[..., None]).flatten(1)
    return {codes_name: low_first(codes.flatten(1)), "weight_scale": (exponent + 127).to(torch.uint8)}, plain


def bitsandbytes(weight: torch.Tensor, kind: str, double: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    table = NF4 if kind == "nf4" else (*FP4, *(-value for value in FP4))
    blocks = weight.reshape(-1, BLOCK)
    absmax = blocks.abs().amax(1)
    quant_map = torch.tensor(table)
    state: dict[str, Any] = {"quant_type": kind, "blocksize": BLOCK, "dtype": "float16", "shape": list(weight.shape)}
    stored: dict[str, torch.Tensor] = {"absmax": absmax}
    if double:
        # Its own map has 256 values from a tree of exponents; any map must be read from the file.
        nested_map = torch.linspace(-1, 1, 256)
        offset = absmax.mean()
        padded = torch.nn.functional.pad(absmax - offset, (0, -absmax.numel() % 256)).reshape(-1, 256)
        nested_absmax = padded.abs().amax(1)
        levels = nearest(padded / nested_absmax[:, None], tuple(nested_map.tolist()))
        absmax = (nested_map[levels] * nested_absmax[:, None]).flatten()[: absmax.numel()] + offset
        stored = {
            "absmax": levels.flatten()[: absmax.numel()].to(torch.uint8),
            "nested_absmax": nested_absmax,
            "nested_quant_map": nested_map,
        }
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset.item()}
    codes = nearest(blocks / absmax[:, None], table)
    plain = (quant_map[codes] * absmax[:, None]).reshape(weight.shape)
    flat = codes.flatten()
    tensors = {"weight": (flat[0::2] << 4 | flat[1::2]).to(torch.uint8).reshape(-1, 1)}
    tensors |= {f"weight.{leaf}": tensor for leaf, tensor in stored.items()}
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return tensors | {"weight.quant_map": quant_map, f"weight.quant_state.bitsandbytes__{kind}": text}, plain


def llm_int8(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    largest = weight.abs().amax(1)
    values = (weight * (127 / largest)[:, None]).round().to(torch.int8)
    tensors = {"weight": values, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, values.float() * (largest / 127)[:, None]
