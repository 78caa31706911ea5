"""The splitter and the fingerprint: few distinct pieces at any depth, which do not contain the identity of a layer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from compile_and_serve.compiler.passes import default_passes
from compile_and_serve.compiler.pieces.fingerprint import fingerprint, normalized_text
from compile_and_serve.compiler.pieces.plan import ExecutionPlan, make_plan
from compile_and_serve.compiler.pieces.splitter import Piece, SplitError, is_contiguous, split
from compile_and_serve.compiler.rewrite.pass_manager import run_passes
from compile_and_serve.custom_ops.attention.attention import attention
from compile_and_serve.models.registry import build_model
from compile_and_serve.runtime.weights import read_config
from tests.support.recurrent_models import FAMILIES
from tests.support.rewriting import KERNELS, pass_context, rewrite
from tests.support.tiny_models import capture_decoder, capture_spec, tiny_spec
from tests.support.transformers_models import config_of


def stages_of(layers: int, architecture: str = "LlamaForCausalLM", kernels: frozenset[str] = KERNELS):
    captured, _, _ = rewrite(tiny_spec(architecture, layers), dtype=torch.float32, kernels=kernels, verify=False)
    return captured, split(captured.gm)


@pytest.mark.slow_cases
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("kernels", [KERNELS, frozenset()], ids=["fused", "plain"])
def test_distinct_pieces_do_not_grow_with_depth(architecture: str, kernels: frozenset[str]) -> None:
    distinct = {}
    for layers in (2, 5):
        _, stages = stages_of(layers, architecture, kernels)
        pieces = [stage for stage in stages if isinstance(stage, Piece)]
        assert len(pieces) == layers + 1
        distinct[layers] = {fingerprint(piece.gm) for piece in pieces}
    assert distinct[2] == distinct[5]
    assert len(distinct[2]) <= 4


class _TwoAttentions(nn.Module):
    """Attends twice with the queries of the first piece, and reads a strided part of a tensor that this piece makes."""

    def forward(self, input_ids, positions, kv_caches, logits_indices):
        table = torch.arange(16.0, device=positions.device)[:, None, None] + positions[None, None]
        parts_TLE = table.transpose(0, 2).expand(-1, 2, -1)
        parts_TLE = parts_TLE * torch.ones(1, 2, 16, device=positions.device)
        q_HTE, part_TE = parts_TLE.transpose(0, 1) * 2, parts_TLE[:, 1]
        for kv_cache in kv_caches:
            q_THE = q_HTE.transpose(0, 1)
            out = attention(q_THE, q_THE, q_THE, kv_cache, 0.25)
        return (out[:, 0] + part_TE)[logits_indices]


def test_values_between_pieces_are_contiguous_with_tokens_first() -> None:
    captured = capture_decoder(_TwoAttentions(), torch.float32, heads=[(2, 16)] * 2)
    run_passes(captured.gm, default_passes(), pass_context(captured, torch.float32))
    pieces = [stage for stage in split(captured.gm) if isinstance(stage, Piece)]
    crossing = [node for piece in pieces[1:] for node in piece.inputs if node.op == "call_function"]
    values = [node.meta["example_value"] for node in crossing if isinstance(node.meta["example_value"], torch.Tensor)]
    assert len(values) >= 2
    for value in values:
        assert is_contiguous(value)
        assert not isinstance(value.shape[0], int)


def test_parts_of_a_layers_product_cross_as_the_product() -> None:
    """The gate of a recurrent layer, and what its decays are computed from, lie beside what the convolution reads: none is copied."""
    sizes = {**FAMILIES["Qwen3_5ForCausalLM"], "num_hidden_layers": 3, "layer_types": ["linear_attention"] * 3}
    captured, _, _ = rewrite(build_model(config_of("Qwen3_5ForCausalLM", **sizes), dtype=torch.float32), verify=False)
    pieces = [stage.gm for stage in split(captured.gm) if isinstance(stage, Piece)]
    assert not any(node.target is torch.clone for piece in pieces for node in piece.graph.nodes)
    assert len({fingerprint(piece) for piece in pieces}) == 4  # before, inside, between and behind the layers


@pytest.mark.exhaustive
def test_smollm2_has_as_many_distinct_pieces_at_30_layers_as_at_2(smollm2_gguf: Path) -> None:
    config = read_config(smollm2_gguf)
    assert config["num_hidden_layers"] == 30
    distinct = {}
    for layers in (30, 2):
        spec = build_model({**config, "num_hidden_layers": layers}, dtype=torch.bfloat16)
        captured, _, _ = rewrite(spec, verify=False)
        distinct[layers] = {fingerprint(stage.gm) for stage in split(captured.gm) if isinstance(stage, Piece)}
    assert distinct[30] == distinct[2]
    assert len(distinct[30]) <= 4


def test_no_layer_identity_in_a_piece() -> None:
    _, stages = stages_of(3)
    for stage in stages:
        if isinstance(stage, Piece):
            assert not re.search(r"layer|modules|weight", normalized_text(stage.gm))


@pytest.mark.slow
def test_fingerprint_sees_a_changed_constant() -> None:
    def pieces(eps: float) -> set[str]:
        spec = tiny_spec(rms_norm_eps=eps)
        captured = capture_spec(spec, torch.float32)
        return {fingerprint(s.gm) for s in split(captured.gm) if isinstance(s, Piece)}

    assert pieces(1e-5) == pieces(1e-5)
    assert not pieces(1e-5) & pieces(1e-6)


def test_a_plan_can_be_stored_as_json() -> None:
    captured, stages = stages_of(2)
    plan, _ = make_plan(captured.gm, stages, captured.weights, ["logits"])
    assert ExecutionPlan.from_json(plan.to_json()) == plan


class UndeclaredOp(nn.Module):
    def forward(self, input_ids, positions, kv_caches, logits_indices):
        x = torch.ops.undeclared.double(positions[:, None].float())
        return attention(x[:, None], x[:, None], x[:, None], kv_caches[0], 1.0)[logits_indices]


def test_undeclared_op_is_an_error_with_name_and_line() -> None:
    library = torch.library.Library("undeclared", "DEF")
    library.define("double(Tensor x) -> Tensor")
    library.impl("double", lambda x: x * 2, "CompositeExplicitAutograd")
    torch.library.register_fake("undeclared::double", lambda x: torch.empty_like(x), lib=library)
    captured = capture_decoder(UndeclaredOp(), torch.float32, [(1, 1)])
    with pytest.raises(SplitError, match=r"undeclared::double at .*test_pieces\.py:\d+.*neither declared capturable nor a split"):
        split(captured.gm)
