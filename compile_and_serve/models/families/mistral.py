"""Mistral and Mixtral: Llama's block, in which all layers attend to a sliding window, or which has a mixture of experts.

Shape legend: T tokens of the step, S rows whose logits are needed, D hidden size, E head size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from compile_and_serve.custom_ops.state.tokens import KV_CACHES, WINDOW_CACHES
from compile_and_serve.models.config import ModelConfigError, WindowedConfig
from compile_and_serve.models.config_fields import DECODER_FIELDS, EXPERT_FIELDS, WINDOW_FIELDS
from compile_and_serve.models.decoder_spec import decoder_spec
from compile_and_serve.models.families import register_model
from compile_and_serve.models.families.llama import LlamaAttention, LlamaDecoderLayer, LlamaForCausalLM
from compile_and_serve.models.families.moe import ExpertNames, moe_spec
from compile_and_serve.models.spec import ModelSpec

MakeLayer = Callable[[str], nn.Module]

# What a config.json leaves out.
_DEFAULTS = {"sliding_window": 4096, "max_position_embeddings": 131072}
_MIXTRAL_DEFAULTS = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "max_position_embeddings": 131072}
NO_BIAS = {"attention_bias": False, "mlp_bias": False}  # as options: these families ignore them


class WindowedForCausalLM(LlamaForCausalLM):
    """forward(input_ids int64 [T], positions int64 [T], logits_indices int64 [S], KV caches of both kinds of layers) → logits [S, V].

    make_layer: makes a layer with the `forward` of `LlamaDecoderLayer` for a state group; None: Llama's.
    """

    def __init__(self, config: WindowedConfig, make_layer: MakeLayer | None = None) -> None:
        make_layer = make_layer or (lambda group: LlamaDecoderLayer(config, LlamaAttention(config, group)))
        groups = [KV_CACHES if window is None else WINDOW_CACHES for window in config.windows]
        super().__init__(config, map(make_layer, groups))
        self.groups = groups

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        logits_indices: torch.Tensor,
        kv_caches: Sequence[torch.Tensor] = (),
        window_caches: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        by_group = {KV_CACHES: iter(kv_caches), WINDOW_CACHES: iter(window_caches)}
        return super().forward(input_ids, positions, [next(by_group[group]) for group in self.groups], logits_indices)


def build(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    """Mistral: every layer has the window."""
    decoder = WindowedConfig.read({**_DEFAULTS, **config, **NO_BIAS}, has_window=lambda layer: True)
    return decoder_spec(lambda: WindowedForCausalLM(decoder), decoder, config, dtype)


def build_mixtral(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    if config.get("sliding_window") is not None:
        raise ModelConfigError("sliding_window is not supported for Mixtral: set it to null in the model's config.")
    names = ExpertNames(gate="w1", up="w3", down="w2", block="block_sparse_moe")
    return moe_spec({**_MIXTRAL_DEFAULTS, **config}, dtype, LlamaAttention, always_renormalize=True, names=names)


register_model("MistralForCausalLM", build, features=("full attention", "sliding windows"), fields={**DECODER_FIELDS, **WINDOW_FIELDS})
_MIXTRAL_FIELDS = {**DECODER_FIELDS, **EXPERT_FIELDS, "sliding_window": "integer"}
register_model("MixtralForCausalLM", build_mixtral, features=("full attention", "experts"), fields=_MIXTRAL_FIELDS)
