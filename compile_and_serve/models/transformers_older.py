"""Older classes of the transformers package, which compute attention themselves: their attention is replaced.

Each function below replaces one method, and does what the original does around `softmax(q kᵀ) v`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from compile_and_serve.models.transformers_attention import Mask, Unsupported, attention_forward


def replace_attention(model: nn.Module) -> dict[str, torch.Tensor]:
    """Replace the attention of classes known here. → values of the buffers that it adds, on the CPU, by name"""
    buffers: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        cls = type(module)
        method = _METHODS.get(cls.__name__) or _METHODS.get(f"{cls.__module__}.{cls.__name__}")
        if method is None:
            continue
        attribute, function = method
        setattr(module, attribute, partial(function, module))
        if cls.__name__ == "BloomAttention":
            slopes = alibi_slopes(module.num_heads)
            module.register_buffer("cas_alibi_slopes", torch.empty_like(slopes, device="meta"), persistent=False)
            buffers[f"{name}.cas_alibi_slopes"] = slopes
    return buffers


def alibi_slopes(num_heads: int) -> torch.Tensor:
    """2^(-8i/n) for i = 1 … n, n a power of 2; other numbers of heads take further ones from between (arXiv:2108.12409). → [H]"""
    whole = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * i / whole) for i in range(1, whole + 1)]
    slopes += [2 ** (-4 * i / whole) for i in range(1, 2 * (num_heads - whole) + 1, 2)]
    return torch.tensor(slopes, dtype=torch.float32)


def _no_alibi(*_: Any, **__: Any) -> None:
    """Stands for the tensor of biases: attention takes the slopes."""


def _attend(
    module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, scale: float, **options: Any
) -> torch.Tensor:
    """q, k, v: [1, heads, T, E]. → [1, T, H, E] in v's dtype"""
    return attention_forward(module, q.to(v.dtype), k.to(v.dtype), v, mask, scale, **options)[0]


def _gptj(module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None) -> tuple[torch.Tensor, None]:
    return _attend(module, query, key, value, attention_mask, 1 / float(module.scale_attn)).transpose(1, 2), None


def _gpt_neo(module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None) -> tuple[torch.Tensor, None]:
    window = module.config.window_size if module.attention_type == "local" else None
    return _attend(module, query, key, value, attention_mask, 1.0, own_mask=Mask(window)).transpose(1, 2), None


def _gpt_neox_japanese(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None
) -> tuple[torch.Tensor, None]:
    return _attend(module, query, key, value, attention_mask, 1 / float(module.norm_factor)).transpose(1, 2), None


def _openai_gpt(
    module: Any, q: Any, k: Any, v: Any, attention_mask: Any = None, output_attentions: bool = False
) -> list[torch.Tensor]:
    scale = v.shape[-1] ** -0.5 if module.scale else 1.0
    return [_attend(module, q, k.transpose(2, 3), v, attention_mask, scale, own_mask=Mask()).transpose(1, 2)]


def _xglm(
    module: Any, hidden_states: Any, key_value_states: Any = None, past_key_values: Any = None, attention_mask: Any = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    if key_value_states is not None or options.get("attn_prompt") is not None:
        raise Unsupported(f"{type(module).__name__} attends to other tokens than the sequence's own")
    q, k, v = (
        projection(hidden_states).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    return module.out_proj(_attend(module, q, k, v, attention_mask, module.scaling).flatten(2)), None


def _bloom(
    module: Any, hidden_states: Any, residual: Any, alibi: Any, attention_mask: Any, **_: Any
) -> tuple[torch.Tensor, None]:
    q, k, v = module._reshape(module.query_key_value(hidden_states))
    out = _attend(module, q, k, v, attention_mask, module.inv_norm_factor, alibi_slopes_H=module.cas_alibi_slopes)
    return residual + module.dense(out.flatten(2)), None


def _falcon(
    module: Any, hidden_states: Any, alibi: Any, attention_mask: Any, position_embeddings: Any = None, **_: Any
) -> tuple[torch.Tensor, None]:
    if alibi is not None:
        raise Unsupported("FalconAttention with ALiBi is not known here")
    q, k, v = (heads.transpose(1, 2) for heads in module._split_heads(module.query_key_value(hidden_states)))
    if module.new_decoder_architecture:  # it repeats each key for its queries
        group = module.num_heads // module.num_kv_heads
        k, v = k[:, ::group], v[:, ::group]
    q, k = sys.modules[type(module).__module__].apply_rotary_pos_emb(q, k, *position_embeddings)
    return module.dense(_attend(module, q, k, v, attention_mask, module.inv_norm_factor).flatten(2)), None


_METHODS: dict[str, tuple[str, Callable[..., Any]]] = {  # class of a module → the method and what replaces it
    "GPTJAttention": ("_attn", _gptj),
    "CodeGenAttention": ("_attn", _gptj),
    "GPTNeoSelfAttention": ("_attn", _gpt_neo),
    "GPTNeoXJapaneseAttention": ("_attn", _gpt_neox_japanese),
    "transformers.models.openai.modeling_openai.Attention": ("_attn", _openai_gpt),
    "XGLMAttention": ("forward", _xglm),
    "TrOCRAttention": ("forward", _xglm),
    "MvpAttention": ("forward", _xglm),
    "BloomAttention": ("forward", _bloom),
    "BloomModel": ("build_alibi_tensor", _no_alibi),
    "FalconAttention": ("forward", _falcon),
}
