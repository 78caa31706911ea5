"""A decoder that reads rows of an encoder where a token is a placeholder, and the spec of both.

Shape legend: T tokens of the step, S rows whose logits are needed, D hidden size, V vocabulary, R rows of the encoder, K features of a row
beside the embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from compile_and_serve.custom_ops.encoder_rows import ENCODER_ROW, read_rows
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.state.rows import ENCODER_ROWS, EncoderRow
from compile_and_serve.custom_ops.step import INPUT_IDS, LOGITS_INDICES, POSITIONS, TOKENS, StepInput, StepOutput
from compile_and_serve.custom_ops.stored_weight import StoredWeight
from compile_and_serve.models.config import DecoderConfig
from compile_and_serve.models.decoder_spec import on_meta
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.models.vision.names import MEDIA_ROWS
from compile_and_serve.models.vision.rope import ThreeRowRope, positions_input, rope_buffers


class VisionLanguageModel(nn.Module):
    """num_features: K. The first embeds the placeholder; feature k + 1 is added to what layer k gives (DeepStack, arXiv:2406.04334)."""

    def __init__(self, config: DecoderConfig, layers: Iterable[nn.Module], num_features: int, rope: type[nn.Module]) -> None:
        """rope: `ThreeRowRope`, or `RotaryEmbedding` for positions int64 [T]."""
        super().__init__()
        self.num_features = num_features
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary_emb = rope(config)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self,
        input_ids_T: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[torch.Tensor],
        logits_indices_S: torch.Tensor,
        rows_R: torch.Tensor,
        encoder_row_T: torch.Tensor | None,
    ) -> torch.Tensor:
        """→ normed rows [S, D]"""
        x_TD = self.embed_tokens(input_ids_T)
        cos_TE, sin_TE = self.rotary_emb(positions, x_TD.dtype)
        features: list[torch.Tensor] = []
        if encoder_row_T is not None:
            embedded_TD, *features = read_rows(rows_R, encoder_row_T).chunk(1 + self.num_features, dim=-1)
            x_TD = torch.where(encoder_row_T[:, None] > 0, embedded_TD, x_TD)
        for number, (layer, kv_cache) in enumerate(zip(self.layers, kv_caches, strict=True)):
            x_TD = layer(x_TD, cos_TE, sin_TE, kv_cache)
            if number < len(features):
                x_TD = x_TD + features[number]  # zeros for text
        return self.norm(x_TD[logits_indices_S])


class VisionLanguageForCausalLM(nn.Module):
    """forward(input_ids int64 [T], positions int64 [3, T], a KV cache per layer, media_rows one [R, D · (1 + K)], logits_indices int64 [S],
    encoder_row int64 [T]) → logits [S, V]. Without `encoder_row`, no token is a placeholder.
    """

    def __init__(
        self, config: DecoderConfig, layers: Iterable[nn.Module], num_features: int = 0, rope: type[nn.Module] = ThreeRowRope
    ) -> None:
        super().__init__()
        self.model = VisionLanguageModel(config, layers, num_features, rope)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: list[torch.Tensor],
        media_rows: list[torch.Tensor],
        logits_indices: torch.Tensor,
        encoder_row: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return self.lm_head(self.model(input_ids, positions, kv_caches, logits_indices, media_rows[0], encoder_row))


def with_encoder(
    text: ModelSpec,
    decoder: DecoderConfig,
    config: Mapping[str, Any],
    dtype: torch.dtype,
    make_encoder: Callable[[], nn.Module],
    *,
    inputs: tuple[StepInput, ...],
    buffers: Mapping[str, torch.Tensor],
    stored: Mapping[str, StoredWeight],
    max_item_tokens: int,
    leading_rows: int = 0,
    num_features: int = 0,
    prefixes: tuple[str, ...] = ("model.visual.", "visual."),
    unused: Iterable[str] = (),
    longer_names: tuple[str, str] | None = None,
    parts_prefix: str = "",
) -> ModelSpec:
    """The spec of a model and of its encoder. text: of the decoder. The others are of the encoder; every rank runs it whole.

    Checkpoints have the decoder's tensors below `model.language_model.` or `model.`, or older ones below `language_model.model.`, and the
    encoder's below one of `prefixes`. unused: tensors of the encoder that this model does not read. longer_names: how names of the encoder
    begin, and how in older checkpoints. parts_prefix: how names of the decoder's experts begin in checkpoints that hold each
    linear of an expert as a tensor.
    """
    encoder = on_meta(make_encoder, dtype)
    of_encoder = [name for name, _ in encoder.named_parameters()]
    of_text = [name for name, _ in text.module.named_parameters(remove_duplicate=False)]
    theirs: dict[str, str | None] = {**{name: name for name in of_encoder}, **dict.fromkeys(unused)}
    if longer_names is not None:
        theirs |= {name.replace(*longer_names, 1): target for name, target in theirs.items() if name.startswith(longer_names[0])}
    theirs = {f"{prefix}{name}": target for name, target in theirs.items() for prefix in prefixes}
    parts = {f"{parts_prefix}{name}": part for name, part in text.parts.items()}
    names = [*of_text, *text.weight_map]
    longer = {name: name.replace("model.", "model.language_model.", 1) for name in names if name.startswith("model.")}
    older = {f"language_model.{name}": text.weight_map.get(name, name) for name in names}
    three_rows = isinstance(text.module.get_submodule("model.rotary_emb"), ThreeRowRope)
    row = EncoderRow(width=decoder.hidden_size * (1 + num_features), dtype=dtype)
    return replace(
        text,
        config=config,
        state=(*text.state, StateGroup(name=MEDIA_ROWS, layers=(row,), kind=ENCODER_ROWS)),
        inputs=(INPUT_IDS, positions_input(text.max_model_len) if three_rows else POSITIONS, LOGITS_INDICES, ENCODER_ROW),
        weight_map={
            **text.weight_map,
            **older,
            **{longer[name]: text.weight_map.get(name, name) for name in longer},
            **dict.fromkeys(theirs),
        },
        parts=parts,
        buffers={f"model.rotary_emb.{name}": value for name, value in rope_buffers(decoder).items()} if three_rows else text.buffers,
        encoder=ModelSpec(
            module=encoder,
            config=config,
            state=(),
            vocab_size=1,
            max_model_len=max_item_tokens,
            leading_rows=leading_rows,
            inputs=inputs,
            outputs=(StepOutput(name="rows", dims=(TOKENS, row.width)),),
            weight_map={**theirs, **dict.fromkeys([*names, *parts, *longer.values(), *older, "lm_head.weight"])},
            buffers=buffers,
            quantized_weights=stored,
        ),
    )
