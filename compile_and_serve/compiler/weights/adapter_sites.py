"""What LoRA adapters can change in a plan: its linears, embeddings and experts."""

from __future__ import annotations

from collections.abc import Sequence

from compile_and_serve.compiler.weights.adapter_slots import LinearSite, linear_sites
from compile_and_serve.compiler.weights.embedding_slots import EmbeddingSite, embedding_sites
from compile_and_serve.compiler.weights.expert_slots import ExpertSite, expert_sites
from compile_and_serve.compiler.weights.transforms import WeightTransform

AdapterSite = LinearSite | EmbeddingSite | ExpertSite


def adapter_sites(transforms: Sequence[WeightTransform]) -> tuple[AdapterSite, ...]:
    """The sites of a plan, in the plan's order for each kind."""
    return (*linear_sites(transforms), *embedding_sites(transforms), *expert_sites(transforms))
