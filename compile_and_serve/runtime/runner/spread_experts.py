"""Experts that are spread over the ranks of a stage, as the runner sees them."""

from __future__ import annotations

from compile_and_serve.compiler.model import CompiledModel, Model
from compile_and_serve.compiler.passes.expert_parallel import PLACEMENT
from compile_and_serve.custom_ops.mesh import EXPERT, Mesh


def check_experts(model: Model, mesh: Mesh) -> None:
    """Raise `ValueError` if experts are to be spread over ranks, and the model has none."""
    if mesh.of_axis(EXPERT) == 1 or not isinstance(model, CompiledModel):
        return
    if not any(one.target.endswith(PLACEMENT) for one in model.whole_transforms or model.plan.transforms):
        raise ValueError("enable_expert_parallel is set, but the model has no experts: leave it out.")
