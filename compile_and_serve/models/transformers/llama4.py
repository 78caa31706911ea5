"""Llama 4's text model in the transformers package: the parts that count tokens, use complex numbers or run every expert are replaced.

Layers with RoPE attend to chunks; layers without scale their queries by the position. A token goes through its best experts, whose inputs
(not results) are multiplied by sigmoid(score), and through a shared expert.

Shape legend: T tokens of the step, H heads, E head size, D hidden size, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from compile_and_serve.custom_ops.moe.experts import experts
from compile_and_serve.custom_ops.stored_weight import ArrangedWeight, StoredTensor, StoredWeight
from compile_and_serve.models.transformers.attention import attention_forward


def _angles(module: Any, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The class has one complex number for each pair of neighbours. → cos, sin, float32 [1, T, 1, E], each angle twice"""
    angles = position_ids[..., None].float() * module.inv_freq.float()
    cos, sin = ((values * module.attention_scaling).repeat_interleave(2, dim=-1)[:, :, None] for values in (angles.cos(), angles.sin()))
    return cos, sin


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate pairs of neighbours, in float32. [1, T, H, E] → the same in x's dtype"""
    in_float32 = x.float()
    turned = torch.stack((-in_float32[..., 1::2], in_float32[..., ::2]), dim=-1).flatten(-2)
    return (in_float32 * cos + turned * sin).to(x.dtype)


def _attention(
    module: Any, hidden_states: torch.Tensor, position_embeddings: Any, attention_mask: Any = None, **_: Any
) -> tuple[torch.Tensor, None]:
    q, k, v = (
        projection(hidden_states).unflatten(-1, (-1, module.head_dim)) for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    if module.use_rope:
        q, k = _rotated(q, *position_embeddings), _rotated(k, *position_embeddings)
    if hasattr(module, "qk_norm"):
        q, k = module.qk_norm(q), module.qk_norm(k)
    if module.attn_temperature_tuning and not module.use_rope:
        positions = module.cas_running.positions.float()
        scales = torch.log1p(torch.floor((positions + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
        q = (q * scales[None, :, None, None]).to(q.dtype)
    q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
    out = attention_forward(module, q, k, v, attention_mask, module.scaling)[0]
    return module.o_proj(out.flatten(2)), None


def _experts(module: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """→ [T, D], router logits [T, X]. The experts' parameters are as in `arranged_experts`."""
    x_TD = hidden_states.reshape(-1, module.hidden_dim)
    logits = F.linear(x_TD, module.router.weight)
    values_TK, ids_TK = torch.topk(logits, module.top_k, dim=1)
    scores_TK = torch.sigmoid(values_TK.float()).to(x_TD.dtype)
    gate_up, down = module.experts.gate_up_proj, module.experts.down_proj
    out_TD = module.shared_expert(x_TD)
    for number in range(module.top_k):  # released models have 1
        one = slice(number, number + 1)
        scores_T1 = scores_TK[:, one]
        out_TD = out_TD + experts(x_TD * scores_T1, ids_TK[:, one], torch.ones_like(scores_T1), gate_up, down)
    return out_TD, logits


def arranged_experts(model: nn.Module, dtype: torch.dtype) -> dict[str, StoredWeight]:
    """Give experts parameters in our op's layout: [X, 2F, D] and [X, D, F]. → by name, the checkpoint's: [X, D, 2F] and [X, F, D]"""
    stored: dict[str, StoredWeight] = {}
    for path, module in model.named_modules():
        if type(module).__name__ not in OUR_EXPERTS:
            continue
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            name = f"{path}.{leaf}"
            tensor = StoredTensor(name=name, shape=tuple(parameter.shape), dtype=dtype)
            stored[name] = ArrangedWeight(value=("swap_inputs_and_outputs", name), tensors=(tensor,))
            setattr(module, leaf, nn.Parameter(parameter.transpose(1, 2).contiguous(), requires_grad=False))
    return stored


METHODS: dict[str, tuple[str, Callable[..., Any]]] = {  # as `older` has them
    "Llama4TextRotaryEmbedding": ("forward", _angles),
    "Llama4TextAttention": ("forward", _attention),
    "Llama4TextMoe": ("forward", _experts),
}
OUR_EXPERTS = ("Llama4TextExperts",)  # modules that one of these methods replaces
