"""The weights that hold the LoRA adapters of an embedding, with a slot for each adapter (`adapter_slots.py`).

    embedding(ids, W) + B A[:, ids]

The rows of Aᵀ are looked up as the embedding's are. Then they go through `cas::lora_add` with identities in A's place, which needs no
kernel of its own.

Shape legend: S slots, R the largest rank, V tokens of the vocabulary (a rank's share where it is sharded), D features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compile_and_serve.compiler.weights.adapter_slots import fill_columns, is_sharded
from compile_and_serve.compiler.weights.transforms import WeightTransform, evaluate
from compile_and_serve.custom_ops.mesh import Coordinates
from compile_and_serve.custom_ops.weight_functions import Expression, weight_function

ROWS, BLOCKS, IDENTITY = ".embedding_lora_a", ".embedding_lora_b", ".embedding_lora_identity"


@weight_function("adapter_rows")
def _zero_rows(num_slots: int, num_rows: int, rank: int, vocab_size: int, shards: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(num_slots, num_rows, rank, dtype=dtype)


@weight_function("adapter_identities")
def _identities(num_slots: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.eye(rank, dtype=dtype).repeat(num_slots, 1, 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingSlots:
    """Names and expressions of an embedding's three weights: Aᵀ [S, V, R], B [S, ceil(D / 16), R, 16], identities [S, R, R]."""

    rows: tuple[str, Expression]
    blocks: tuple[str, Expression]
    identities: tuple[str, Expression]


def embedding_slots(
    module: str, num_slots: int, rank: int, shape: Sequence[int], vocab_size: int, base: Expression, dtype: torch.dtype
) -> EmbeddingSlots:
    """shape: of the embedding's weight here, [V, D]; base: its expression; vocab_size: tokens of all ranks together."""
    size = base[-1] if is_sharded(base, "shard_rows") else 0
    return EmbeddingSlots(
        rows=(module + ROWS, ("adapter_rows", num_slots, shape[0], rank, vocab_size, size, dtype)),
        blocks=(module + BLOCKS, ("adapter_blocks", num_slots, rank, shape[1], dtype)),
        identities=(module + IDENTITY, ("adapter_identities", num_slots, rank, dtype)),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingSite:
    """An embedding that adapters can change. in_features: tokens of the vocabulary. shards: ranks that share them; 0: not sharded."""

    module: str
    in_features: int
    out_features: int
    a: str
    b: str
    shards: int

    def fill(self, slot_a: torch.Tensor, slot_b: torch.Tensor, a_RV: torch.Tensor, b_DR: torch.Tensor, coordinates: Coordinates) -> None:
        """Copy a rank's share of an adapter's A [R, V] and B [D, R] into a slot of the two weights."""
        a_VR = a_RV.T
        if self.shards:
            a_VR = evaluate(("shard_rows", "a", self.shards, self.shards), {"a": a_VR}, coordinates)
        slot_a[:, : a_VR.shape[1]].copy_(a_VR)
        fill_columns(slot_b, b_DR, 0)


def embedding_sites(transforms: Sequence[WeightTransform]) -> list[EmbeddingSite]:
    """The embeddings of a plan that adapters can change."""
    of = {one.target: one.expression for one in transforms if not one.sources}
    sites = []
    for target, rows in of.items():
        if not target.endswith(ROWS):
            continue
        module = target.removesuffix(ROWS)
        blocks = of[module + BLOCKS]
        assert isinstance(rows, tuple)
        assert isinstance(blocks, tuple)
        sites.append(EmbeddingSite(module=module, in_features=rows[4], out_features=blocks[3], a=target, b=module + BLOCKS, shards=rows[5]))
    return sites
