"""Mllama (Llama 3.2 Vision): Llama, between whose layers are gated ones that read an image by cross-attention (arXiv:2407.21783, §7).

A token reads the last image before it, or all images of a run of them that no text parts. Tokens before the first image read none, and
pass these layers unchanged, as in Meta's code; transformers lets them attend to every image. The encoder is transformers', and runs
one image at a time. Beside it, on the encoder's side, are the keys and values of the layers that read it.

Shape legend: T tokens of the step, R rows of an image's patches, S rows whose logits are needed, D hidden size, H query heads, E head
size, L layers that read images, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn

from compile_and_serve.custom_ops.attention.cross_attention import CROSS_SPANS, cross_attention
from compile_and_serve.custom_ops.state.cross import CROSS_CACHES, CrossAttention
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.state.tokens import KVCacheSpec
from compile_and_serve.custom_ops.step import DECODER_INPUTS, TOKENS, StepOutput
from compile_and_serve.models.config import DecoderConfig, UnsupportedConfigError, positive_int
from compile_and_serve.models.decoder_spec import DECODER_TP_PLAN, decoder_spec, on_meta
from compile_and_serve.models.families import register_model
from compile_and_serve.models.families.llama import LlamaDecoderLayer
from compile_and_serve.models.layers import GatedMlp, RotaryEmbedding
from compile_and_serve.models.spec import ModelSpec, full_attention
from compile_and_serve.models.vision.whole_items import PROCESSED_INPUT

MAX_IMAGES = 8  # of a request, of the largest size
_IMAGE_TOKENS = 8  # ids behind the vocabulary, which have embeddings and no logits
_NEVER = -65504.0  # the logit of those: the least number of float16
_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.")  # of the decoder's tensors in checkpoints
_REASON = "transformers' encoder reads the number of an image's tiles on the host"


class CrossAttentionOfHeads(nn.Module):
    """The encoder's side has the projections of keys and values."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        size = config.num_attention_heads * config.head_dim
        self.q_proj, self.o_proj = nn.Linear(config.hidden_size, size, bias=False), nn.Linear(size, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def forward(self, x_TD: torch.Tensor, cross_cache: torch.Tensor, spans_2T: torch.Tensor) -> torch.Tensor:
        q_THE = self.q_norm(self.q_proj(x_TD).view(x_TD.shape[0], -1, self.head_dim))
        first_pages_T, rows_T = spans_2T.unbind(0)
        out_THE = cross_attention(q_THE, cross_cache, rows_T, self.head_dim**-0.5, first_pages_T=first_pages_T)
        return self.o_proj(out_THE.flatten(1))


class CrossAttentionLayer(nn.Module):
    """A token that reads no row passes unchanged."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.cross_attn = CrossAttentionOfHeads(config)
        self.cross_attn_attn_gate = nn.Parameter(torch.zeros(1))
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = GatedMlp(config)
        self.cross_attn_mlp_gate = nn.Parameter(torch.zeros(1))

    def forward(self, x_TD: torch.Tensor, cross_cache: torch.Tensor, spans_2T: torch.Tensor) -> torch.Tensor:
        x_TD = x_TD + self.cross_attn_attn_gate.tanh() * self.cross_attn(self.input_layernorm(x_TD), cross_cache, spans_2T)
        added_TD = self.cross_attn_mlp_gate.tanh() * self.mlp(self.post_attention_layernorm(x_TD))
        return x_TD + torch.where(spans_2T[1][:, None] > 0, added_TD, 0.0)


class MllamaModel(nn.Module):
    def __init__(self, config: DecoderConfig, cross_layers: Sequence[int]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size + _IMAGE_TOKENS, config.hidden_size)
        self.rotary_emb = RotaryEmbedding(config)
        self.layers = nn.ModuleList(
            CrossAttentionLayer(config) if number in cross_layers else LlamaDecoderLayer(config)
            for number in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        kv_caches: list[torch.Tensor],
        logits_indices_S: torch.Tensor,
        cross_caches: list[torch.Tensor],
        spans_2T: torch.Tensor | None,
    ) -> torch.Tensor:
        """→ normed rows [S, D]"""
        x_TD = self.embed_tokens(input_ids_T)
        cos_TE, sin_TE = self.rotary_emb(positions_T, x_TD.dtype)
        caches, caches_of_images = iter(kv_caches), iter(cross_caches)
        for layer in self.layers:
            if not isinstance(layer, CrossAttentionLayer):
                x_TD = layer(x_TD, cos_TE, sin_TE, next(caches))
            elif spans_2T is not None:
                x_TD = layer(x_TD, next(caches_of_images), spans_2T)
        return self.norm(x_TD[logits_indices_S])


class MllamaForConditionalGeneration(nn.Module):
    """forward(input_ids int64 [T], positions int64 [T], a KV cache per layer with self-attention, logits_indices int64 [S], a cross cache
    for each of the others, cross_spans int32 [2, T]) → logits [S, V + 8]. Without `cross_spans`, no token reads an image.
    """

    def __init__(self, config: DecoderConfig, cross_layers: Sequence[int]) -> None:
        super().__init__()
        self.model = MllamaModel(config, cross_layers)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[torch.Tensor],
        logits_indices: torch.Tensor,
        cross_caches: list[torch.Tensor] | None = None,
        cross_spans: torch.Tensor | None = None,
    ) -> torch.Tensor:
        hidden_SD = self.model(input_ids, positions, kv_caches, logits_indices, cross_caches or [], cross_spans)
        logits_SV = self.lm_head(hidden_SD)
        return torch.cat((logits_SV, logits_SV.new_full((logits_SV.shape[0], _IMAGE_TOKENS), _NEVER)), dim=1)


class KeysAndValues(nn.Module):
    """Of one layer. [R, D] → [R, 2 · K · E]"""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        size = config.num_key_value_heads * config.head_dim
        self.k_proj, self.v_proj = (nn.Linear(config.hidden_size, size, bias=False) for _ in range(2))
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def forward(self, x_RD: torch.Tensor) -> torch.Tensor:
        keys = self.k_norm(self.k_proj(x_RD).unflatten(1, (-1, self.k_norm.normalized_shape[0]))).flatten(1)
        return torch.cat((keys, self.v_proj(x_RD)), dim=1)


class MllamaEncoder(nn.Module):
    """forward(pixel_values [all tiles, 3, height, width], num_tiles int64 [images], aspect_ratio_ids int64 [images]) → keys and values of
    the patches of each tile [R, L · 2 · K · E]
    """

    def __init__(self, vision: Any, config: DecoderConfig, num_layers: int) -> None:
        """vision: transformers' config."""
        from transformers.models.mllama.modeling_mllama import MllamaVisionModel

        super().__init__()
        self.vision_model = MllamaVisionModel(vision)
        self.multi_modal_projector = nn.Linear(vision.vision_output_dim, config.hidden_size)
        self.cross = nn.ModuleList(KeysAndValues(config) for _ in range(num_layers))

    def forward(self, pixel_values: torch.Tensor, num_tiles: torch.Tensor, aspect_ratio_ids: torch.Tensor) -> torch.Tensor:
        most = self.vision_model.config.max_num_tiles
        pixels = pixel_values.to(self.multi_modal_projector.weight.dtype)
        rows: list[torch.Tensor] = []
        for tiles, ratio in zip(pixels.split(num_tiles.tolist()), aspect_ratio_ids, strict=True):
            count = len(tiles)
            whole = functional.pad(tiles, (0, 0, 0, 0, 0, 0, 0, most - count))[None, None]  # real tiles attend to the others, too
            is_tile = (torch.arange(most, device=tiles.device) < count).long()[None, None]
            seen = self.vision_model(pixel_values=whole, aspect_ratio_ids=ratio.view(1, 1), aspect_ratio_mask=is_tile).last_hidden_state
            rows.append(self.multi_modal_projector(seen[0, 0, :count].flatten(0, 1)))
        x_RD = torch.cat(rows)
        return torch.cat([layer(x_RD) for layer in self.cross], dim=1)


def build(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    text, vision = config.get("text_config"), config.get("vision_config")
    if not isinstance(text, Mapping) or not isinstance(vision, Mapping):
        raise UnsupportedConfigError("Mllama's config must have a text_config and a vision_config.")
    if text.get("tie_word_embeddings"):
        raise UnsupportedConfigError("tie_word_embeddings is not supported: images' tokens have embeddings and no logits.")
    decoder = DecoderConfig.from_dict(text)
    numbers = sorted(text.get("cross_attention_layers") or (3, 8, 13, 18, 23, 28, 33, 38))
    if not numbers or not 0 <= numbers[0] <= numbers[-1] < decoder.num_hidden_layers:
        raise UnsupportedConfigError(f"cross_attention_layers must be numbers of the {decoder.num_hidden_layers} layers, got {numbers}.")
    layer = KVCacheSpec(num_kv_heads=decoder.num_key_value_heads, head_dim=decoder.head_dim)
    max_rows = MAX_IMAGES * positive_int(vision, "max_num_tiles", 4) * rows_per_tile(vision)
    spec = decoder_spec(
        lambda: MllamaForConditionalGeneration(decoder, numbers),
        decoder,
        config,
        dtype,
        state=(
            full_attention([layer] * (decoder.num_hidden_layers - len(numbers))),
            StateGroup(name=CROSS_CACHES, layers=(layer,) * len(numbers), kind=CrossAttention(max_rows=max_rows, is_required=False)),
        ),
        tp_plan={**DECODER_TP_PLAN, "model.layers.*.cross_attn.q_proj": "colwise", "model.layers.*.cross_attn.o_proj": "rowwise"},
    )
    encoder = _encoder(decoder, config, dtype, numbers)
    stored: dict[str, str | None] = {"language_model.lm_head.weight": "lm_head.weight"}
    for name in (*(name for name, _ in spec.module.named_parameters()), *spec.weight_map):
        if name.startswith("model."):
            stored |= {name.replace("model.", prefix, 1): spec.weight_map.get(name, name) for prefix in _PREFIXES}
    width = len(numbers) * 2 * decoder.num_key_value_heads * decoder.head_dim
    return _with_encoder(spec, encoder, stored, numbers, max_rows=max_rows, width=width)


def rows_per_tile(vision: Mapping[str, Any]) -> int:
    """Patches of a tile, and the class token. vision: the config's part."""
    return (positive_int(vision, "image_size", 448) // positive_int(vision, "patch_size", 14)) ** 2 + 1


def _encoder(decoder: DecoderConfig, config: Mapping[str, Any], dtype: torch.dtype, numbers: Sequence[int]) -> nn.Module:
    from transformers import MllamaVisionConfig

    vision = MllamaVisionConfig(**config["vision_config"])
    vision._attn_implementation = "sdpa"
    return on_meta(lambda: MllamaEncoder(vision, decoder, len(numbers)), dtype)


def _with_encoder(
    spec: ModelSpec, encoder: nn.Module, stored: Mapping[str, str | None], numbers: Sequence[int], *, max_rows: int, width: int
) -> ModelSpec:
    """stored: tensors of checkpoints → parameters of the decoder."""
    theirs: dict[str, str] = {}
    for name, _ in encoder.named_parameters():
        if name.startswith("cross."):
            _, index, rest = name.split(".", 2)
            theirs |= {f"{prefix}layers.{numbers[int(index)]}.cross_attn.{rest}": name for prefix in _PREFIXES}
        else:
            theirs |= {f"{prefix}{name}": name for prefix in ("model.", "")}
    return replace(
        spec,
        vocab_size=spec.vocab_size + _IMAGE_TOKENS,
        inputs=(*DECODER_INPUTS, CROSS_SPANS),
        weight_map={**spec.weight_map, **stored, **dict.fromkeys(theirs)},
        encoder=ModelSpec(
            module=encoder,
            config=spec.config,
            state=(),
            vocab_size=1,
            max_model_len=max_rows,
            inputs=(PROCESSED_INPUT,),
            outputs=(StepOutput(name="rows", dims=(TOKENS, width)),),
            weight_map={**theirs, **dict.fromkeys([*stored, "lm_head.weight"])},
            eager_reason=_REASON,
        ),
    )


register_model("MllamaForConditionalGeneration", build, features=("full attention", "images"))
