"""Gemma 2 and Gemma 3 (text): norms before and after attention and MLP, and layers that alternate between windows and full attention.

Shape legend: T tokens of the step, S rows whose logits are needed, D hidden size, H query heads, K key/value heads,
E head size, V vocabulary. Views use -1 for head counts, so that sharded projections need no change here.

Gemma 2 caps attention scores and logits. Gemma 3 normalizes queries and keys instead, and rotates the layers with a window by angles of
their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from compile_and_serve.custom_ops.attention.attention import attention
from compile_and_serve.custom_ops.state.kind import ScoreFeature
from compile_and_serve.custom_ops.state.tokens import KV_CACHES, WINDOW_CACHES
from compile_and_serve.models.config import UnsupportedConfigError, WindowedConfig
from compile_and_serve.models.config_fields import DECODER_FIELDS, WINDOW_FIELDS
from compile_and_serve.models.decoder_spec import decoder_spec
from compile_and_serve.models.families import register_model
from compile_and_serve.models.layers import RotaryEmbedding, apply_rope
from compile_and_serve.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmaConfig:
    """What a Gemma has beyond a decoder. The caps are 0 where there are none. query_scale: of attention's scores."""

    decoder: WindowedConfig
    query_scale: float
    has_qk_norm: bool
    attention_cap: float = 0.0
    logits_cap: float = 0.0

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> GemmaConfig:
        """Read a config.json. Raises `ModelConfigError` for a missing or invalid value."""
        is_gemma3 = config["architectures"][0] == "Gemma3ForCausalLM"
        activation = config.get("hidden_activation") or config.get("hidden_act") or "gelu_pytorch_tanh"
        if activation != "gelu_pytorch_tanh":
            raise UnsupportedConfigError(f"hidden_activation must be 'gelu_pytorch_tanh', got {activation!r}.")
        if config.get("use_bidirectional_attention"):
            raise UnsupportedConfigError("use_bidirectional_attention is not supported: the model must be causal.")
        pattern = int(config.get("sliding_window_pattern") or (6 if is_gemma3 else 2))
        theta = {"rope_theta": 1e6, "rope_local_base_freq": 1e4} if is_gemma3 else {}
        known: dict[str, Any] = {"tie_word_embeddings": True, "sliding_window": 4096, **theta, **config}
        known["hidden_act"] = "silu"  # the activation is checked above
        decoder = WindowedConfig.read(known, has_window=lambda layer: bool((layer + 1) % pattern), default_head_dim=256)
        query_scale = float(config.get("query_pre_attn_scalar") or 256) ** -0.5
        caps = (None, None) if is_gemma3 else (50.0, 30.0)
        attention_cap, logits_cap = (
            float(config.get(name, default) or 0.0)
            for name, default in zip(("attn_logit_softcapping", "final_logit_softcapping"), caps, strict=True)
        )
        return cls(decoder=decoder, query_scale=query_scale, has_qk_norm=is_gemma3, attention_cap=attention_cap, logits_cap=logits_cap)


class GemmaNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · (1 + weight), in float32 with one rounding."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * (1.0 + self.weight.float())).to(x.dtype)


class GemmaAttention(nn.Module):
    def __init__(self, config: GemmaConfig, group: str) -> None:
        super().__init__()
        decoder = config.decoder
        self.head_dim, self.scale, self.cap, self.group = (decoder.head_dim, config.query_scale, config.attention_cap, group)
        q_size, kv_size = decoder.num_attention_heads * self.head_dim, decoder.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(decoder.hidden_size, q_size, bias=decoder.attention_bias)
        self.k_proj = nn.Linear(decoder.hidden_size, kv_size, bias=decoder.attention_bias)
        self.v_proj = nn.Linear(decoder.hidden_size, kv_size, bias=decoder.attention_bias)
        self.o_proj = nn.Linear(q_size, decoder.hidden_size, bias=decoder.attention_bias)
        self.q_norm = GemmaNorm(self.head_dim, decoder.rms_norm_eps) if config.has_qk_norm else nn.Identity()
        self.k_norm = GemmaNorm(self.head_dim, decoder.rms_norm_eps) if config.has_qk_norm else nn.Identity()

    def forward(self, x_TD: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
        q_THE = self.q_norm(self.q_proj(x_TD).view(x_TD.shape[0], -1, self.head_dim))
        k_TKE = self.k_norm(self.k_proj(x_TD).view(x_TD.shape[0], -1, self.head_dim))
        v_TKE = self.v_proj(x_TD).view(x_TD.shape[0], -1, self.head_dim)
        q_THE, k_TKE = apply_rope(q_THE, cos_TE, sin_TE), apply_rope(k_TKE, cos_TE, sin_TE)
        out_THE = attention(q_THE, k_TKE, v_TKE, kv_cache, self.scale, self.group, self.cap)
        return self.o_proj(out_THE.flatten(1))


class GemmaMlp(nn.Module):
    """down(gelu(gate(x)) · up(x)) with the tanh form of GELU. [T, D] → [T, D]"""

    def __init__(self, config: WindowedConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x_TD), approximate="tanh") * self.up_proj(x_TD))


class GemmaDecoderLayer(nn.Module):
    def __init__(self, config: GemmaConfig, group: str) -> None:
        super().__init__()
        hidden, eps = config.decoder.hidden_size, config.decoder.rms_norm_eps
        self.input_layernorm = GemmaNorm(hidden, eps)
        self.self_attn = GemmaAttention(config, group)
        self.post_attention_layernorm = GemmaNorm(hidden, eps)
        self.pre_feedforward_layernorm = GemmaNorm(hidden, eps)
        self.mlp = GemmaMlp(config.decoder)
        self.post_feedforward_layernorm = GemmaNorm(hidden, eps)

    def forward(self, x_TD: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
        attended_TD = self.self_attn(self.input_layernorm(x_TD), cos_TE, sin_TE, kv_cache)
        x_TD = x_TD + self.post_attention_layernorm(attended_TD)
        return x_TD + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x_TD)))


class GemmaModel(nn.Module):
    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        decoder = config.decoder
        self.embed_tokens = nn.Embedding(decoder.vocab_size, decoder.hidden_size)
        # The reference rounds the factor to the activations' dtype.
        size = torch.tensor(decoder.hidden_size**0.5, dtype=torch.float64, device="cpu")
        self.embedding_scale = {dtype: size.to(dtype).item() for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)}
        self.rotary_emb = RotaryEmbedding(decoder)
        self.window_rotary_emb = RotaryEmbedding(decoder, decoder.window_rope)
        self.has_window = [window is not None for window in decoder.windows]
        self.layers = nn.ModuleList(GemmaDecoderLayer(config, WINDOW_CACHES if has_window else KV_CACHES) for has_window in self.has_window)
        self.norm = GemmaNorm(decoder.hidden_size, decoder.rms_norm_eps)

    def forward(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
        window_caches: Sequence[torch.Tensor],
        logits_indices_S: torch.Tensor,
    ) -> torch.Tensor:
        x_TD = self.embed_tokens(input_ids_T)
        x_TD = x_TD * self.embedding_scale[x_TD.dtype]
        angles, window_angles = (self.rotary_emb(positions_T, x_TD.dtype), self.window_rotary_emb(positions_T, x_TD.dtype))
        caches, window_layers = iter(kv_caches), iter(window_caches)
        for layer, has_window in zip(self.layers, self.has_window, strict=True):
            cos_TE, sin_TE = window_angles if has_window else angles
            x_TD = layer(x_TD, cos_TE, sin_TE, next(window_layers if has_window else caches))
        return self.norm(x_TD[logits_indices_S])


class GemmaForCausalLM(nn.Module):
    """forward(input_ids int64 [T], positions int64 [T], logits_indices int64 [S], KV caches of both kinds of layers) → logits [S, V]."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.model = GemmaModel(config)
        self.lm_head = nn.Linear(config.decoder.hidden_size, config.decoder.vocab_size, bias=False)
        if config.decoder.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self.cap = config.logits_cap

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        logits_indices: torch.Tensor,
        kv_caches: Sequence[torch.Tensor] = (),
        window_caches: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        logits = self.lm_head(self.model(input_ids, positions, kv_caches, window_caches, logits_indices))
        return torch.tanh(logits / self.cap) * self.cap if self.cap else logits


def build(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    gemma = GemmaConfig.from_dict(config)
    scores = frozenset[ScoreFeature](["soft_cap"] if gemma.attention_cap else [])
    return decoder_spec(lambda: GemmaForCausalLM(gemma), gemma.decoder, config, dtype, scores=scores)


_FIELDS = {
    **DECODER_FIELDS,
    **WINDOW_FIELDS,
    "hidden_activation": "text",
    "use_bidirectional_attention": "flag",
    "sliding_window_pattern": "integer",
    "query_pre_attn_scalar": "number",
    "attn_logit_softcapping": "number",
    "final_logit_softcapping": "number",
}
for _architecture in ("Gemma2ForCausalLM", "Gemma3ForCausalLM"):
    register_model(_architecture, build, features=("full attention", "sliding windows"), fields=_FIELDS)
