"""Tiny checkpoints with packed codes (AWQ, GPTQ, compressed-tensors), written value by value from the formats' published rules.

AWQ: AutoAWQ's WQLinear_GEMM. GPTQ: AutoGPTQ's QuantLinear.pack. compressed-tensors: pack_to_int32. Each writes one value at a time into its
place, unlike the decoders under test.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from tests.support.quantized_checkpoints import write_pair

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def put_stream(words: np.ndarray, values: np.ndarray, bits: int) -> None:
    """Write values [N] as a little-endian bit stream into uint32 words."""
    for index, value in enumerate(values.tolist()):
        for bit in range(bits):
            at = index * bits + bit
            words[at // 32] |= np.uint32(((value >> bit) & 1) << (at % 32))


def stream_rows(values: np.ndarray, bits: int) -> np.ndarray:
    """[R, N] → int32 [R, ceil(N · bits / 32)], one stream per row."""
    words = np.zeros((values.shape[0], -(-values.shape[1] * bits // 32)), dtype=np.uint32)
    for row in range(values.shape[0]):
        put_stream(words[row], values[row], bits)
    return words.view(np.int32)


def awq_words(values: np.ndarray) -> np.ndarray:
    """[R, O] → int32 [R, O / 8]"""
    words = np.zeros((values.shape[0], values.shape[1] // 8), dtype=np.uint32)
    for at in range(values.shape[1] // 8):
        for nibble, output in enumerate(AWQ_ORDER):
            words[:, at] |= values[:, at * 8 + output].astype(np.uint32) << np.uint32(4 * nibble)
    return words.view(np.int32)


def round_to_groups(
    weight_OI: torch.Tensor, bits: int, group_size: int, symmetric: bool, groups_I: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Round to nearest. → codes [O, I], scales float16 [O, G], zero points [O, G], the dequantized weight in float32"""
    num_groups = int(groups_I.max()) + 1
    largest = (1 << bits) - 1
    scale = torch.empty(weight_OI.shape[0], num_groups, dtype=torch.float16)
    zero = torch.full_like(scale, 1 << (bits - 1), dtype=torch.int64)
    for group in range(num_groups):
        part = weight_OI[:, groups_I == group].float()
        if symmetric:
            scale[:, group] = (part.abs().amax(1) / (largest // 2)).half()
        else:
            low, high = part.amin(1).clamp_max(0), part.amax(1).clamp_min(0)
            scale[:, group] = ((high - low) / largest).half()
            zero[:, group] = (-low / scale[:, group].float()).round().clamp(0, largest).long()
    scale_OI, zero_OI = scale.float()[:, groups_I], zero[:, groups_I]
    codes = (weight_OI.float() / scale_OI + zero_OI).round().clamp(0, largest).long()
    return codes, scale, zero, (codes - zero_OI).float() * scale_OI


def packed_linear(
    name: str, weight_OI: torch.Tensor, config: dict[str, Any], order_seed: int
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The tensors of one linear, and its dequantized weight. order_seed: of the order of inputs with act-order."""
    method = config["quant_method"]
    weights = config["config_groups"]["group_0"]["weights"] if method == "compressed-tensors" else config
    bits = weights.get("bits") or weights.get("num_bits")
    in_features = weight_OI.shape[1]
    group_size = weights.get("group_size") or -1
    group_size = in_features if group_size == -1 else group_size
    symmetric = weights.get("symmetric", config.get("sym", not config.get("zero_point", False)))
    groups_I = torch.arange(in_features) // group_size
    if weights.get("desc_act") or weights.get("actorder") == "group":
        groups_I = groups_I[torch.randperm(in_features, generator=torch.Generator().manual_seed(order_seed))]
    codes, scale, zero, plain = round_to_groups(weight_OI, bits, group_size, symmetric, groups_I)
    codes_OI, zero_OG = codes.numpy(), zero.numpy()
    if method == "awq" or config.get("packing_format", "").endswith("awq"):
        tensors = {"qweight": awq_words(codes_OI.T), "qzeros": awq_words(zero_OG.T), "scales": scale.T}
    elif method == "compressed-tensors":
        tensors = {"weight_packed": stream_rows(codes_OI, bits), "weight_scale": scale, "weight_shape": np.array(weight_OI.shape)}
        if not symmetric:
            tensors["weight_zero_point"] = stream_rows(zero_OG.T, bits).T
        if weights.get("actorder") == "group":
            tensors["weight_g_idx"] = groups_I.int()
    else:
        stored = zero_OG if config.get("checkpoint_format") == "gptq_v2" else (zero_OG - 1) % (1 << bits)
        tensors = {
            "qweight": stream_rows(codes_OI, bits).T,
            "qzeros": stream_rows(stored.T, bits),
            "scales": scale.T,
            "g_idx": groups_I.int(),
        }
    return {f"{name}.{leaf}": torch.as_tensor(np.ascontiguousarray(value)) for leaf, value in tensors.items()}, plain


def write_grouped(
    plain: Path,
    folder: Path,
    config: dict[str, Any],
    skipped: tuple[str, ...] = (),
    pack: Callable[..., tuple[dict[str, torch.Tensor], torch.Tensor]] = packed_linear,
) -> tuple[Path, Path]:
    """`plain`'s linears but the head and the skipped, quantized as `config` says. → the quantized checkpoint, its dequantized weights"""
    quantized: dict[str, torch.Tensor] = {}
    dequantized: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not module.endswith(("_proj", ".w1", ".w2", ".w3")) or module in skipped:
            quantized[name] = dequantized[name] = tensor
            continue
        # Linears over one input have one order of inputs, as GPTQ's calibration gives them.
        layer = module.split(".")[2]
        seed = (
            int(layer) * 4 + ("o_proj" in module) + 2 * ("mlp" in module or "moe" in module) + ("down" in module or module.endswith(".w2"))
        )
        tensors, dequantized[name] = pack(module, tensor, config, seed)
        quantized |= tensors
    settings = {"dtype": None, "torch_dtype": "float16", "quantization_config": config}
    return write_pair(plain, folder, quantized, dequantized, settings)
