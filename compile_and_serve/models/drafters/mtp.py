"""The layers for multi-token prediction that checkpoints of DeepSeek-V3 and GLM-4-MoE have after their last layer (arXiv:2412.19437,
section 2.2). Each is a model of its own.

Shape legend: T tokens, S rows whose logits are needed, D hidden size, E size of cos and sin, V vocabulary.

At position i the first one reads the hidden state of token i and the embedding of token i + 1, and predicts token i + 2, as an EAGLE head
does. Where there is one, it drafts further tokens from its own output. `runtime/runner/layers_behind.py` says what further layers read.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import nn

from compile_and_serve.custom_ops.step import ROWS, TOKENS
from compile_and_serve.models.config import DecoderConfig, ModelConfigError, positive_int
from compile_and_serve.models.drafters.drafter_spec import EMBEDDING, HEAD, DrafterSpec, checked_target
from compile_and_serve.models.drafters.hidden_states import num_layers_of, reads_hidden_states, with_hidden_states
from compile_and_serve.models.families.deepseek_moe import DeepseekMoe, DeepseekMoeLayer, DeepseekMoeModelConfig
from compile_and_serve.models.layers import RotaryEmbedding
from compile_and_serve.models.quantization.stored_weights import with_stored_weights
from compile_and_serve.models.registry import ARCHITECTURES, deepseek_moe_spec
from compile_and_serve.models.spec import ModelSpec


class SharedHead(nn.Module):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, x_SD: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x_SD))


class MtpLayer(DeepseekMoeLayer):
    """A layer of the family, with experts, and what comes before and after it."""

    def __init__(self, config: DeepseekMoeModelConfig) -> None:
        decoder = config.decoder
        super().__init__(decoder, config.make_attention(), DeepseekMoe(decoder, config.moe))
        self.embed_tokens = nn.Embedding(decoder.vocab_size, decoder.hidden_size)
        self.enorm = nn.RMSNorm(decoder.hidden_size, eps=decoder.rms_norm_eps)
        self.hnorm = nn.RMSNorm(decoder.hidden_size, eps=decoder.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * decoder.hidden_size, decoder.hidden_size, bias=False)
        self.shared_head = SharedHead(decoder)

    def joined(self, input_ids_T: torch.Tensor, hidden_TD: torch.Tensor) -> torch.Tensor:
        """The layer's input. [T, D]"""
        return self.eh_proj(torch.cat((self.enorm(self.embed_tokens(input_ids_T)), self.hnorm(hidden_TD)), dim=-1))


class MtpModel(nn.Module):
    """The layer under the name that it has in the checkpoint."""

    def __init__(self, config: DeepseekMoeModelConfig, number: int) -> None:
        super().__init__()
        self.rotary_emb = RotaryEmbedding(config.decoder)
        self.layers = nn.ModuleDict({str(number): MtpLayer(config)})


class MtpForCausalLM(nn.Module):
    """forward(input_ids int64 [T], positions int64 [T], hidden_states [T, D], kv_caches, logits_indices int64 [S]) → logits [S, V] and
    hidden states [S, D].

    number: of the layer in the checkpoint. is_only: there is no other one, which would read the hidden states of all tokens, [T, D].
    """

    def __init__(self, config: DeepseekMoeModelConfig, number: int, *, is_only: bool) -> None:
        super().__init__()
        self.model = MtpModel(config, number)
        self.is_only = is_only

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        kv_caches: list[torch.Tensor],
        logits_indices: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        (layer,) = self.model.layers.values()
        assert isinstance(layer, MtpLayer)
        x_TD = layer.joined(input_ids, hidden_states)
        cos_TE, sin_TE = self.model.rotary_emb(positions, x_TD.dtype)
        hidden_TD = layer(x_TD, cos_TE, sin_TE, kv_caches[0])
        hidden_SD = hidden_TD[logits_indices]
        return layer.shared_head(hidden_SD), hidden_SD if self.is_only else hidden_TD


def mtp(target: ModelSpec, *, dtype: torch.dtype, num_tokens: int) -> DrafterSpec:
    """The target's own layers for multi-token prediction, as many as `num_tokens` drafts need. Raises `ModelConfigError` if it has none."""
    config = target.config
    architecture = (config.get("architectures") or ["?"])[0]
    family = ARCHITECTURES.get(architecture)
    if family is None or family.deepseek_moe is None or not config.get("num_nextn_predict_layers"):
        families = [name for name, one in ARCHITECTURES.items() if one.deepseek_moe is not None]
        raise ModelConfigError(
            f"{architecture} brings no layer for multi-token prediction that is known here: it must be one of {', '.join(families)} with "
            "num_nextn_predict_layers in its config."
        )
    assert family.experts is not None
    parsed = family.deepseek_moe(config)
    target = with_hidden_states(checked_target(target), (num_layers_of(target),))
    first, size = parsed.decoder.num_hidden_layers, parsed.decoder.hidden_size
    numbers = range(first, first + min(num_tokens, positive_int(config, "num_nextn_predict_layers")))
    layers = []
    for number in numbers:
        is_only, prefix = len(numbers) == 1, f"model.layers.{number}."
        make = partial(MtpForCausalLM, number=number, is_only=is_only)
        # The number is part of the config, because it is part of the weights' names, which an artifact holds.
        own = {**config, "mtp_layer_number": number}
        spec = with_stored_weights(deepseek_moe_spec(make, parsed, family.experts, own, dtype, number))
        layers.append(
            DrafterSpec(
                kind="hidden",
                spec=reads_hidden_states(spec, size, dtype, gives=ROWS if is_only else TOKENS),
                target=target,
                hidden_size=size,
                borrowed_weights={f"{prefix}embed_tokens.weight": (EMBEDDING,), f"{prefix}shared_head.head.weight": (HEAD, EMBEDDING)},
                prefix=prefix,
            )
        )
    return replace(layers[0], layers_behind=tuple(layers[1:]))
