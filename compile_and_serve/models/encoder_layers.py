"""The modules of BERT-like encoders: each token reads its whole sequence, and each sublayer is followed by its norm.

Shape legend: T tokens of the step, L rows of output, D hidden size, W width of the embeddings, H heads, E head size, V vocabulary,
F distances, R buckets of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from compile_and_serve.custom_ops.attention.encoder_attention import encoder_attention
from compile_and_serve.custom_ops.step import TOKENS, StepInput, TokenBatch
from compile_and_serve.custom_ops.step_data import SECOND_TEXT

FARTHEST = 128  # relative positions that are farther have one bucket
ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "tanh": torch.tanh,
}


def _token_types(batch: TokenBatch) -> np.ndarray | None:
    """0 for tokens of the first text, 1 for those of the second."""
    if not any(SECOND_TEXT in data for data in batch.step_data):
        return np.zeros(len(batch.token_ids), dtype=np.int64)
    return (batch.positions >= batch.data_of_token(SECOND_TEXT, np.iinfo(np.int64).max)).astype(np.int64)


TOKEN_TYPES = StepInput(name="token_types", dtype=torch.int64, dims=(TOKENS,), fill=_token_types)


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderConfig:
    """Sizes and switches of a BERT-like encoder.

    embedding_size: W. first_position: of a sequence's first token in the table of positions. num_token_types: 0: there are none.
    num_buckets: of relative positions (MPNet, T5); 0: there are none.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    embedding_size: int
    num_positions: int
    first_position: int
    num_token_types: int
    eps: float
    activation: str
    num_buckets: int

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


class EncoderEmbeddings(nn.Module):
    """Tokens + positions + token types, normalized."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.words = nn.Embedding(config.vocab_size, config.embedding_size)
        self.positions = nn.Embedding(config.num_positions, config.embedding_size)
        self.types = nn.Embedding(config.num_token_types, config.embedding_size) if config.num_token_types else None
        self.norm = nn.LayerNorm(config.embedding_size, eps=config.eps)
        self.first_position = config.first_position

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, token_types: torch.Tensor | None) -> torch.Tensor:
        x_TW = self.words(input_ids)
        if self.types is not None:
            assert token_types is not None
            x_TW = x_TW + self.types(token_types)
        return self.norm(x_TW + self.positions(positions + self.first_position))


class EncoderLayer(nn.Module):
    """Attention and an MLP, a norm behind each."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.query, self.key, self.value, self.attention_output = (nn.Linear(hidden, hidden) for _ in range(4))
        self.attention_norm = nn.LayerNorm(hidden, eps=config.eps)
        self.intermediate, self.output = nn.Linear(hidden, inner), nn.Linear(inner, hidden)
        self.output_norm = nn.LayerNorm(hidden, eps=config.eps)
        self.head_dim = config.head_dim
        self.activation = ACTIVATIONS[config.activation]

    def forward(self, x_TD: torch.Tensor, columns_F: torch.Tensor | None, distance_bias_HR: torch.Tensor | None) -> torch.Tensor:
        q_THE, k_THE, v_THE = (linear(x_TD).view(x_TD.shape[0], -1, self.head_dim) for linear in (self.query, self.key, self.value))
        mixed_THE = encoder_attention(q_THE, k_THE, v_THE, self.head_dim**-0.5, columns_F=columns_F, distance_bias_HR=distance_bias_HR)
        x_TD = self.attention_norm(x_TD + self.attention_output(mixed_THE.flatten(1)))
        return self.output_norm(x_TD + self.output(self.activation(self.intermediate(x_TD))))


class TextEncoder(nn.Module):
    """An encoder and a head, which sees the rows that are pooled."""

    def __init__(self, config: EncoderConfig, head: nn.Module) -> None:
        super().__init__()
        self.embeddings = EncoderEmbeddings(config)
        is_narrow = config.embedding_size != config.hidden_size
        self.projection = nn.Linear(config.embedding_size, config.hidden_size) if is_narrow else nn.Identity()
        self.distance_buckets: torch.Tensor | None
        if config.num_buckets:
            self.distance_bias = nn.Embedding(config.num_buckets, config.num_heads)
            self.register_buffer("distance_buckets", torch.empty(2 * FARTHEST + 1, dtype=torch.int64), persistent=False)
        else:
            self.distance_buckets = None
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_layers))
        self.head = head

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, logits_indices: torch.Tensor, token_types: torch.Tensor | None = None
    ) -> torch.Tensor:
        """→ [L, outputs of the head]"""
        x_TD = self.projection(self.embeddings(input_ids, positions, token_types))
        distance_bias_HR = None if self.distance_buckets is None else self.distance_bias.weight.t()
        for layer in self.layers:
            x_TD = layer(x_TD, self.distance_buckets, distance_bias_HR)
        return self.head(x_TD[logits_indices])


def distance_buckets(num_buckets: int) -> torch.Tensor:
    """The bucket of each distance j - i from -`FARTHEST` to `FARTHEST`: int64 [F] (arXiv:1910.10683, both ways).

    Half of the buckets are for each direction; half of those are of one distance each, the others grow logarithmically.
    """
    distance = torch.arange(-FARTHEST, FARTHEST + 1)
    half = num_buckets // 2
    exact, size = half // 2, distance.abs()
    grown = exact + (torch.log(size.clamp(min=1).float() / exact) / math.log(FARTHEST / exact) * (half - exact)).long()
    return (distance > 0) * half + torch.where(size < exact, size, grown.clamp(max=half - 1))


class ClassifierHead(nn.Module):
    """activation(dense x) → classes. dense: None: the classes follow from the row itself."""

    def __init__(self, hidden_size: int, num_classes: int, activation: str | None) -> None:
        super().__init__()
        self.dense = nn.Linear(hidden_size, hidden_size) if activation is not None else nn.Identity()
        self.activation = ACTIVATIONS[activation] if activation is not None else nn.Identity()
        self.classes = nn.Linear(hidden_size, num_classes)

    def forward(self, x_LD: torch.Tensor) -> torch.Tensor:
        return self.classes(self.activation(self.dense(x_LD)))


class SparseHead(nn.Module):
    """log(1 + relu(logits)) of the masked-LM head: the weight of each token of the vocabulary (SPLADE, arXiv:2107.05720). → [L, V]"""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.embedding_size)
        self.activation = ACTIVATIONS[config.activation]
        self.norm = nn.LayerNorm(config.embedding_size, eps=config.eps)
        self.decoder = nn.Linear(config.embedding_size, config.vocab_size)

    def forward(self, x_LD: torch.Tensor) -> torch.Tensor:
        return torch.log1p(F.relu(self.decoder(self.norm(self.activation(self.dense(x_LD))))))
