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
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, BaseModelOutputWithPastAndCrossAttentions

from compile_and_serve.models.transformers import llama4, relative
from compile_and_serve.models.transformers.attention import Mask, Unsupported, attention_forward


def replace_attention(model: Any) -> dict[str, torch.Tensor]:
    """Replace the attention of classes known here. → values of the buffers that it adds, on the CPU, by name"""
    buffers: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        cls = type(module)
        method = _METHODS.get(cls.__name__) or _METHODS.get(f"{cls.__module__}.{cls.__name__}")
        if method is None or (cls is nn.RMSNorm and module.weight is not None):
            continue
        attribute, function = method
        setattr(module, attribute, partial(function, module))
        slopes = None
        if cls.__name__ == "XmodOutput":
            if (language := model.config.default_language) is None:
                raise Unsupported("its config has no default_language, and requests have none either")
            module.cas_language = language
        if cls.__name__ == "BloomAttention":
            slopes = alibi_slopes(module.num_heads)
        elif cls.__name__ == "MptAttention":
            slopes = mpt_slopes(module.n_heads)
        if (columns := relative.columns_of(module)) is not None:
            module.register_buffer("cas_columns", torch.empty_like(columns, device="meta"), persistent=False)
            buffers[f"{name}.cas_columns"] = columns
        if slopes is not None:
            module.register_buffer("cas_alibi_slopes", torch.empty_like(slopes, device="meta"), persistent=False)
            buffers[f"{name}.cas_alibi_slopes"] = slopes
    return buffers


def alibi_slopes(num_heads: int) -> torch.Tensor:
    """2^(-8i/n) for i = 1 … n, n a power of 2; other numbers of heads take further ones from between (arXiv:2108.12409). → [H]"""
    whole = 2 ** math.floor(math.log2(num_heads))
    slopes = [2 ** (-8 * i / whole) for i in range(1, whole + 1)]
    slopes += [2 ** (-4 * i / whole) for i in range(1, 2 * (num_heads - whole) + 1, 2)]
    return torch.tensor(slopes, dtype=torch.float32)


def mpt_slopes(num_heads: int) -> torch.Tensor:
    """2^(-8i/n) for i = 1 … n, n the next power of 2; if it is not the number of heads, every second one comes first. → [H]"""
    whole = 2 ** math.ceil(math.log2(num_heads))
    slopes = 2.0 ** (-8 / whole * torch.arange(1, whole + 1, dtype=torch.float32))
    return slopes if whole == num_heads else torch.cat([slopes[1::2], slopes[::2]])[:num_heads].clone()


def _attend(module: nn.Module, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, scale: float, **options: Any) -> torch.Tensor:
    """q, k, v: [1, heads, T, E]. → [1, T, H, E] in v's dtype"""
    return attention_forward(module, q.to(v.dtype), k.to(v.dtype), v, mask, scale, **options)[0]


def _gptj(module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None) -> tuple[torch.Tensor, None]:
    return _attend(module, query, key, value, attention_mask, 1 / float(module.scale_attn)).transpose(1, 2), None


def _gpt_neo(module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None) -> tuple[torch.Tensor, None]:
    window = module.config.window_size if module.attention_type == "local" else None
    return _attend(module, query, key, value, attention_mask, 1.0, own_mask=Mask(window)).transpose(1, 2), None


def _gpt_neox_japanese(module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None) -> tuple[torch.Tensor, None]:
    return _attend(module, query, key, value, attention_mask, 1 / float(module.norm_factor)).transpose(1, 2), None


def _openai_gpt(module: Any, q: Any, k: Any, v: Any, attention_mask: Any = None, output_attentions: bool = False) -> list[torch.Tensor]:
    scale = v.shape[-1] ** -0.5 if module.scale else 1.0
    return [_attend(module, q, k.transpose(2, 3), v, attention_mask, scale, own_mask=Mask()).transpose(1, 2)]


def _xglm(
    module: Any, hidden_states: Any, key_value_states: Any = None, _cache: Any = None, attention_mask: Any = None, **options: Any
) -> tuple[torch.Tensor, None]:
    if key_value_states is not None or options.get("attn_prompt") is not None:
        raise Unsupported(f"{type(module).__name__} attends to other tokens than the sequence's own")
    q, k, v = (
        projection(hidden_states).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    return module.out_proj(_attend(module, q, k, v, attention_mask, module.scaling).flatten(2)), None


def _xglm_positions(module: Any, position_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """The original asks whether the step has more tokens than its table has positions, which a capture does not know."""
    return nn.functional.embedding(position_ids + module.offset, module.weights)


def _bloom(module: Any, hidden_states: Any, residual: Any, alibi: Any, attention_mask: Any, **_: Any) -> tuple[torch.Tensor, None]:
    q, k, v = module._reshape(module.query_key_value(hidden_states))
    out = _attend(module, q, k, v, attention_mask, module.inv_norm_factor, alibi_slopes_H=module.cas_alibi_slopes)
    return residual + module.dense(out.flatten(2)), None


def _bloom_model(module: Any, input_ids: Any, **_: Any) -> BaseModelOutputWithPastAndCrossAttentions:
    """The original computes ALiBi for all tokens of a step. Here attention takes the slopes."""
    hidden = module.word_embeddings_layernorm(module.word_embeddings(input_ids))
    mask = create_causal_mask(module.config, hidden, None, None)
    for block in module.h:
        hidden = block(hidden, alibi=None, attention_mask=mask)[0]
    return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=module.ln_f(hidden))


def _falcon(
    module: Any, hidden_states: Any, alibi: Any, attention_mask: Any, position_embeddings: Any = None, **_: Any
) -> tuple[torch.Tensor, None]:
    if alibi is not None:
        raise Unsupported("FalconAttention with ALiBi is not known here")
    # Groups of query heads, each with its key and value head; without groups all heads are one, or each head is one.
    if module.new_decoder_architecture:
        group = module.num_heads // module.num_kv_heads
    else:
        group = module.num_heads if module.multi_query else 1
    heads = module.query_key_value(hidden_states).unflatten(-1, (-1, group + 2, module.head_dim))
    q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in heads.split([group, 1, 1], dim=3))
    q, k = sys.modules[type(module).__module__].apply_rotary_pos_emb(q, k, *position_embeddings)
    return module.dense(_attend(module, q, k, v, attention_mask, module.inv_norm_factor).flatten(2)), None


def _mpt(module: Any, hidden_states: Any, attention_mask: Any = None, **_: Any) -> tuple[torch.Tensor, None]:
    qkv = module.Wqkv(hidden_states)
    if module.clip_qkv:
        qkv = qkv.clamp(-module.clip_qkv, module.clip_qkv)
    q, k, v = (part.unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for part in qkv.chunk(3, dim=2))
    out = _attend(module, q, k, v, attention_mask, module.softmax_scale, alibi_slopes_H=module.cas_alibi_slopes)
    return module.out_proj(out.flatten(2)), None


def _mpt_model(module: Any, input_ids: Any, **_: Any) -> BaseModelOutputWithPastAndCrossAttentions:
    """The original computes ALiBi for its longest sequence, and converts the mask, which there is only in the dry run."""
    hidden = module.wte(input_ids)
    mask = create_causal_mask(module.config, hidden, None, None)
    for block in module.blocks:
        hidden = block(hidden, position_bias=None, attention_mask=mask)[0]
    return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=module.norm_f(hidden))


def _ctrl_model(module: Any, input_ids: Any, position_ids: Any, **_: Any) -> BaseModelOutputWithPast:
    """The original scales by a number of NumPy's, which cannot be captured."""
    hidden = module.w(input_ids) * module.d_model_size**0.5
    mask = create_causal_mask(module.config, hidden, None, None)
    hidden = hidden + module.pos_encoding.to(hidden.dtype)[position_ids]
    for layer in module.h:
        hidden = layer(hidden, attention_mask=mask)
    return BaseModelOutputWithPast(last_hidden_state=module.layernorm(hidden))


def _bert(
    module: Any, hidden_states: Any, attention_mask: Any = None, *_: Any, sinusoidal_pos: Any = None, **options: Any
) -> tuple[torch.Tensor, None]:
    if options.get("encoder_hidden_states") is not None:
        raise Unsupported(f"{type(module).__name__} attends to other tokens than the sequence's own")
    q, k, v = (
        projection(hidden_states).unflatten(-1, (-1, module.attention_head_size)).transpose(1, 2)
        for projection in (module.query, module.key, module.value)
    )
    if sinusoidal_pos is not None:
        rotated = (q, k, v) if module.rotary_value else (q, k)
        q, k, *rest = module.apply_rotary_position_embeddings(sinusoidal_pos, *rotated)
        v = rest[0] if rest else v
    return _attend(module, q, k, v, attention_mask, module.attention_head_size**-0.5).flatten(2), None


def _rms_norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Without a weight. torch's own asks for the number of tokens when its input is strided, which a capture does not have."""
    in_float32 = x.float()
    eps = torch.finfo(x.dtype).eps if module.eps is None else module.eps
    return (in_float32 * torch.rsqrt(in_float32.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def _xmod_adapter(module: Any, lang_ids: Any, hidden_states: Any) -> torch.Tensor:
    """The original selects rows by language. A request has no language, so all of them are in the config's default one."""
    residual = hidden_states
    if module.adapter_layer_norm is not None:
        hidden_states = module.adapter_layer_norm(hidden_states)
    elif module.adapter_reuse_layer_norm:
        hidden_states = module.LayerNorm(hidden_states)
    if module.ln_before_adapter:
        residual = hidden_states
    return module.adapter_modules[module.cas_language](hidden_states) + residual


_METHODS: dict[str, tuple[str, Callable[..., Any]]] = {  # class of a module → the method and what replaces it
    "GPTJAttention": ("_attn", _gptj),
    "CodeGenAttention": ("_attn", _gptj),
    "GPTNeoSelfAttention": ("_attn", _gpt_neo),
    "GPTNeoXJapaneseAttention": ("_attn", _gpt_neox_japanese),
    "transformers.models.openai.modeling_openai.Attention": ("_attn", _openai_gpt),
    "XGLMAttention": ("forward", _xglm),
    "XGLMSinusoidalPositionalEmbedding": ("forward", _xglm_positions),
    "TrOCRAttention": ("forward", _xglm),
    "MvpAttention": ("forward", _xglm),
    "BloomAttention": ("forward", _bloom),
    "BloomModel": ("forward", _bloom_model),
    "FalconAttention": ("forward", _falcon),
    "MptAttention": ("forward", _mpt),
    "MptModel": ("forward", _mpt_model),
    "CTRLModel": ("forward", _ctrl_model),
    "RemBertSelfAttention": ("forward", _bert),
    "MegatronBertSelfAttention": ("forward", _bert),
    "RoFormerSelfAttention": ("forward", _bert),
    "GitSelfAttention": ("forward", _bert),
    "BigBirdSelfAttention": ("forward", _bert),
    "torch.nn.modules.normalization.RMSNorm": ("forward", _rms_norm),
    "XmodOutput": ("lang_adapter", _xmod_adapter),
    **llama4.METHODS,
    **relative.METHODS,
}
