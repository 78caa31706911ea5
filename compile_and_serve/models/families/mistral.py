"""Mistral and Qwen2: Llama's block, in which some or all layers attend to a sliding window. Qwen2 has biases of queries, keys and values.

Shape legend: T tokens of the step, S rows whose logits are needed, D hidden size, E head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from compile_and_serve.custom_ops.step import KV_CACHES, WINDOW_CACHES
from compile_and_serve.models.config import WindowedConfig
from compile_and_serve.models.families.llama import LlamaAttention, LlamaDecoderLayer
from compile_and_serve.models.families.moe import Qwen2Attention
from compile_and_serve.models.layers import RotaryEmbedding

MakeLayer = Callable[[str], nn.Module]

_NO_BIAS = {"attention_bias": False, "mlp_bias": False}  # as options: these families ignore them


def mistral_config(config: Mapping[str, Any]) -> WindowedConfig:
    """Read a config.json of Mistral: every layer has the window. Raises `ModelConfigError`."""
    return WindowedConfig.read({**config, **_NO_BIAS}, has_window=lambda layer: True)


def qwen2_config(config: Mapping[str, Any]) -> WindowedConfig:
    """Read a config.json of Qwen2: layers from max_window_layers on have the window, if it is used. Raises `ModelConfigError`."""
    first = int(config.get("max_window_layers", 28))
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window") else None
    known = {**config, **_NO_BIAS, "sliding_window": window}
    return WindowedConfig.read(known, has_window=lambda layer: layer >= first)


class WindowedModel(nn.Module):
    def __init__(self, config: WindowedConfig, make_layer: MakeLayer) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary_emb = RotaryEmbedding(config)
        self.has_window = [window is not None for window in config.windows]
        self.layers = nn.ModuleList(make_layer(WINDOW_CACHES if has_window else KV_CACHES) for has_window in self.has_window)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        kv_caches: Sequence[torch.Tensor],
        window_caches: Sequence[torch.Tensor],
        logits_indices_S: torch.Tensor,
    ) -> torch.Tensor:
        x_TD = self.embed_tokens(input_ids_T)
        cos_TE, sin_TE = self.rotary_emb(positions_T, x_TD.dtype)
        full, windowed = iter(kv_caches), iter(window_caches)
        for layer, has_window in zip(self.layers, self.has_window, strict=True):
            x_TD = layer(x_TD, cos_TE, sin_TE, next(windowed if has_window else full))
        return self.norm(x_TD[logits_indices_S])


class WindowedForCausalLM(nn.Module):
    """forward(input_ids int64 [T], positions int64 [T], logits_indices int64 [S], KV caches of both kinds of layers) → logits [S, V].

    make_layer: makes a layer with the `forward` of `LlamaDecoderLayer` for a state group; None: Llama's.
    """

    def __init__(self, config: WindowedConfig, make_layer: MakeLayer | None = None) -> None:
        super().__init__()
        self.model = WindowedModel(config, make_layer or (lambda group: LlamaDecoderLayer(config, LlamaAttention(config, group))))
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        logits_indices: torch.Tensor,
        kv_caches: Sequence[torch.Tensor] = (),
        window_caches: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        return self.lm_head(self.model(input_ids, positions, kv_caches, window_caches, logits_indices))


class Qwen2ForCausalLM(WindowedForCausalLM):
    """As `WindowedForCausalLM`."""

    def __init__(self, config: WindowedConfig) -> None:
        super().__init__(config, lambda group: LlamaDecoderLayer(config, Qwen2Attention(config, group)))
