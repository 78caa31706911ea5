"""A DFlash block drafter of random weights, and what it drafts by its formula (arXiv:2602.06036), written down densely.

Shape legend: C tokens of the context, B of the block, D hidden size, H heads, E head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

D, H, KV_HEADS, E, LAYERS, MASK = 64, 4, 2, 16, 2, 5
CONFIG: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "vocab_size": 320, "hidden_size": D, "intermediate_size": 96,
    "num_hidden_layers": LAYERS, "num_attention_heads": H, "num_key_value_heads": KV_HEADS, "head_dim": E, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256, "rope_theta": 10000.0, "hidden_act": "silu", "block_size": 8, "num_target_layers": 3,
    "layer_types": ["full_attention"] * LAYERS, "use_sliding_window": False,
    "dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": MASK},
}  # fmt: skip


def shapes() -> dict[str, tuple[int, ...]]:
    """Of the tensors under their published names."""
    found: dict[str, tuple[int, ...]] = {"fc.weight": (D, 2 * D), "hidden_norm.weight": (D,), "norm.weight": (D,)}
    for i in range(LAYERS):
        layer, attention = f"layers.{i}", f"layers.{i}.self_attn"
        found |= {
            f"{attention}.q_proj.weight": (H * E, D),
            f"{attention}.k_proj.weight": (KV_HEADS * E, D),
            f"{attention}.v_proj.weight": (KV_HEADS * E, D),
            f"{attention}.o_proj.weight": (D, H * E),
            f"{attention}.q_norm.weight": (E,),
            f"{attention}.k_norm.weight": (E,),
            f"{layer}.input_layernorm.weight": (D,),
            f"{layer}.post_attention_layernorm.weight": (D,),
            f"{layer}.mlp.gate_proj.weight": (96, D),
            f"{layer}.mlp.up_proj.weight": (96, D),
            f"{layer}.mlp.down_proj.weight": (D, 96),
        }
    return found


def drafts(
    tensors: Mapping[str, torch.Tensor], embedding: torch.Tensor, head: torch.Tensor, hidden_CF: torch.Tensor, last: int, count: int
) -> list[int]:
    """The drafts behind the token `last`. embedding, head: the target's. hidden_CF: the target's hidden states of the tokens before."""
    context_CD = norm(F.linear(hidden_CF, tensors["fc.weight"]), tensors["hidden_norm.weight"])
    x_BD = embedding[torch.tensor([last] + [MASK] * count)]
    positions = torch.arange(len(context_CD) + len(x_BD))
    for i in range(LAYERS):
        t = {name.removeprefix(f"layers.{i}."): one for name, one in tensors.items() if name.startswith(f"layers.{i}.")}
        normed_BD = norm(x_BD, t["input_layernorm.weight"])
        both = torch.cat((context_CD, normed_BD))
        q = norm(F.linear(normed_BD, t["self_attn.q_proj.weight"]).view(-1, H, E), t["self_attn.q_norm.weight"])
        k = norm(F.linear(both, t["self_attn.k_proj.weight"]).view(-1, KV_HEADS, E), t["self_attn.k_norm.weight"])
        v = F.linear(both, t["self_attn.v_proj.weight"]).view(-1, KV_HEADS, E)
        q, k = rotated(q, positions[-len(x_BD) :]), rotated(k, positions).repeat_interleave(H // KV_HEADS, dim=1)
        scores = torch.einsum("bhe,che->hbc", q, k) * E**-0.5  # nothing is hidden
        attended = torch.einsum("hbc,che->bhe", scores.softmax(-1), v.repeat_interleave(H // KV_HEADS, dim=1))
        x_BD = x_BD + F.linear(attended.flatten(1), t["self_attn.o_proj.weight"])
        normed_BD = norm(x_BD, t["post_attention_layernorm.weight"])
        gated = F.silu(F.linear(normed_BD, t["mlp.gate_proj.weight"])) * F.linear(normed_BD, t["mlp.up_proj.weight"])
        x_BD = x_BD + F.linear(gated, t["mlp.down_proj.weight"])
    return F.linear(norm(x_BD, tensors["norm.weight"]), head)[1:].argmax(-1).tolist()


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (len(weight),), weight, 1e-5)


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """x: [tokens, heads, E]"""
    angles = positions[:, None] * 10000.0 ** (-torch.arange(0, E, 2) / E)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
