"""The pass `fuse_allreduce_quantize`: the all-reduce quantizes the norm if all linears that read it quantize it to float8."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

from compile_and_serve.compiler import CompileConfig, compile_model
from compile_and_serve.compiler.passes import default_passes
from compile_and_serve.compiler.passes.fuse_allreduce_quantize import FuseAllreduceQuantize, may_quantize
from compile_and_serve.compiler.rewrite.graph_pass import PassResult, SkipReason, op_arguments
from compile_and_serve.custom_ops.collectives.allreduce_norm import (
    ALLREDUCE_ADD_RMS_NORM,
    ALLREDUCE_ADD_RMS_NORM_QUANTIZE,
    allreduce_add_rms_norm,
    allreduce_add_rms_norm_quantize,
)
from compile_and_serve.custom_ops.quantization import quantize_activations
from compile_and_serve.custom_ops.quantized.quantized_linear import QUANTIZED_LINEAR
from compile_and_serve.custom_ops.stored_weight import QuantizedWeight, scaled_weight
from tests.compiler.passes.test_tensor_parallel import LAYERS
from tests.compiler.passes.test_tensor_parallel_ranks import PROMPT
from tests.support.ranks import run_ranks
from tests.support.rewriting import KERNELS, check_unchanged, check_verified, rewrite
from tests.support.tiny_models import caches, fill, step, tiny_spec

NAME = "fuse_allreduce_quantize"
ALLREDUCE = KERNELS | {"allreduce_add_rms_norm"}
WITH_IT = ALLREDUCE | {"allreduce_add_rms_norm_quantize"}
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_key_value_heads": 4, "head_dim": 64}  # blocks of 128 on each rank
SITES = 2 * LAYERS - 1  # all but the last, whose norm the output head reads unquantized


def run(quantization: Any = "fp8", kernels: frozenset[str] = WITH_IT, ranks: int = 2, **options: Any) -> Any:
    model = WIDE if quantization == "fp8-block" else {}
    spec = tiny_spec("LlamaForCausalLM", LAYERS, torch.bfloat16, **model)
    return rewrite(spec, CompileConfig(tensor_parallel_size=ranks, quantization=quantization), kernels=kernels, **options)


def calls(gm: GraphModule, target: Any) -> list[Node]:
    return list(gm.graph.find_nodes(op="call_function", target=target))


def test_who_may_have_sites_is_known_before_the_model_is_compiled() -> None:
    def stored(dtype: torch.dtype, activations: Any, *, per_block: bool = False) -> dict[str, QuantizedWeight]:
        return {"w": scaled_weight("w", (8, 8), dtype, scale="s", scale_of="block" if per_block else "tensor", activations=activations)}

    float8, plain = torch.float8_e4m3fn, CompileConfig()
    assert may_quantize(CompileConfig(quantization="fp8"), {})
    assert may_quantize(plain, stored(float8, "dynamic"))
    assert not may_quantize(CompileConfig(quantization="fp8", disabled_passes=frozenset({NAME})), {})
    others = {}, stored(torch.int8, "dynamic"), stored(float8, "static"), stored(float8, "dynamic", per_block=True)
    assert not any(may_quantize(plain, weights) for weights in others)


def test_the_fake_takes_any_group() -> None:
    x, weight = torch.empty(3, 16, device="meta"), torch.empty(16, device="meta")
    shapes = [t.shape for t in allreduce_add_rms_norm_quantize(x, x, weight, 1e-5, "experts")]
    assert shapes == [(3, 16), (3, 16), (3, 16), (3, 1)]


def test_every_norm_that_linears_quantize_is_quantized_once() -> None:
    captured, ctx, records = run(kernels=WITH_IT)
    assert records["quantize_linears"].result == PassResult(matched=4 * LAYERS)
    assert records[NAME].result == PassResult(matched=SITES)
    check_verified(records, NAME)
    fused = calls(captured.gm, ALLREDUCE_ADD_RMS_NORM_QUANTIZE)
    assert (len(fused), len(calls(captured.gm, ALLREDUCE_ADD_RMS_NORM))) == (SITES, 1)
    readers = [node for node in calls(captured.gm, QUANTIZED_LINEAR) if op_arguments(node)["quantized"] is not None]
    assert len(readers) == SITES  # all QKV but the first, all gate/up; after fuse_linears, too
    for reader in readers:
        parts = [reader.args[0], *reader.args[-2:]]
        assert all(part.target is operator.getitem for part in parts)
        assert [part.args[1] for part in parts] == [1, 2, 3]
        assert {part.args[0] for part in parts} <= set(fused)
        x, values, scale = (part.meta["example_value"] for part in parts)
        assert (values.dtype, values.shape) == (torch.float8_e4m3fn, x.shape)
        assert (scale.dtype, scale.shape) == (torch.float32, (x.shape[0], 1))
    check_unchanged(captured, ctx, default_passes(CompileConfig(tensor_parallel_size=2, quantization="fp8")))


def test_it_runs_where_there_are_ranks_and_a_kernel() -> None:
    _, ctx, records = run(ranks=1, verify=False)
    assert NAME not in records
    assert FuseAllreduceQuantize().guard(ctx) == SkipReason(sentence="the model runs on one rank")
    captured, _, records = run(kernels=ALLREDUCE, verify=False)
    assert records[NAME].result == SkipReason(sentence="there is no kernel for it for torch.bfloat16 on cpu")
    assert not calls(captured.gm, ALLREDUCE_ADD_RMS_NORM_QUANTIZE)


@pytest.mark.parametrize("quantization", [None, "fp8-weight-only", "int8-weight-only"])
def test_nothing_is_expected_without_quantized_activations(quantization: Any) -> None:
    _, _, records = run(quantization, verify=False)
    assert records[NAME].result == PassResult(matched=0)


@pytest.mark.parametrize(
    ("quantization", "reason"),
    [("int8", "a linear quantizes the norm to int8, not to float8_e4m3fn"), ("fp8-block", "with a scale per 128 features")],
)
def test_other_quantizations_are_near_misses(quantization: Any, reason: str) -> None:
    captured, _, records = run(quantization, verify=False)
    result = records[NAME].result
    assert (result.matched, len(result.near_misses)) == (0, SITES)
    assert all(reason in miss.reason for miss in result.near_misses)
    assert "models/" in result.near_misses[0].source
    assert not calls(captured.gm, ALLREDUCE_ADD_RMS_NORM_QUANTIZE)


def test_other_readers_and_static_scales_are_near_misses() -> None:
    captured, ctx, _ = run(kernels=ALLREDUCE, disabled=frozenset({"fuse_linears"}), verify=False)
    ctx.kernels = WITH_IT
    norms = [next(part for part in fused.users if part.args[1] == 1) for fused in calls(captured.gm, ALLREDUCE_ADD_RMS_NORM)]
    with captured.gm.graph.inserting_after(norms[0]):
        captured.gm.graph.call_function(torch.neg, (norms[0],))
    next(iter(norms[1].users)).update_arg(9, "static")
    result = FuseAllreduceQuantize().run(captured.gm, ctx)
    assert (result.matched, len(result.near_misses)) == (1, 2)
    assert [norm.args[0].target is ALLREDUCE_ADD_RMS_NORM_QUANTIZE for norm in norms] == [False, False, True, False]
    assert "not only linears that quantize the norm read it" in result.near_misses[0].reason
    assert "a scale from its checkpoint" in result.near_misses[1].reason


def operands(rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(99)
    residual, weight = torch.randn(5, 24, generator=generator), torch.randn(24, generator=generator)
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(rank))
    return x.to(dtype), residual.to(dtype), weight.to(dtype)


def fuse(rank: int) -> list[tuple[torch.Tensor, ...]]:
    """The op with and without quantization; float8 as bytes, which can be sent."""
    outs: list[tuple[torch.Tensor, ...]] = []
    for dtype in (torch.float32, torch.bfloat16):
        total, normed, values, scale = allreduce_add_rms_norm_quantize(*operands(rank, dtype), 1e-5)
        assert values.dtype == torch.float8_e4m3fn
        outs += [allreduce_add_rms_norm(*operands(rank, dtype), 1e-5), (total, normed, values.view(torch.uint8), scale)]
    return outs


def test_the_ops_are_the_sum_the_norm_and_then_the_quantization(tmp_path: Path) -> None:
    """Bit-identical on every rank."""
    by_rank = run_ranks(2, fuse, folder=tmp_path)
    for (total, normed), (dtype, tolerance) in zip(by_rank[0][::2], ((torch.float32, 1e-6), (torch.bfloat16, 2**-7)), strict=True):
        parts = [operands(rank, dtype) for rank in range(2)]
        exact = sum(x.double() for x, _, _ in parts) + parts[0][1].double()
        exact_norm = exact / (exact.square().mean(1, keepdim=True) + 1e-5).sqrt() * parts[0][2].double()
        torch.testing.assert_close(total.double(), exact, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(normed.double(), exact_norm, rtol=2 * tolerance, atol=2 * tolerance)
    for outs in by_rank:
        for (total, normed), ours in zip(outs[::2], outs[1::2], strict=True):
            values, scale = quantize_activations(normed, torch.float8_e4m3fn)
            expected = (total, normed, values.view(torch.uint8), scale)
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, expected, strict=True))
            assert scale.shape == (5, 1)
            # But for float8's three bits of mantissa, and its smallest step, it is the norm.
            error = (ours[2].view(torch.float8_e4m3fn).double() * ours[3] - normed.double()).abs()
            assert (error <= 2**-4 * normed.double().abs() + 2**-10 * scale).all()
    for ours, theirs in zip(*by_rank, strict=True):
        assert all(torch.equal(mine, other) for mine, other in zip(ours, theirs, strict=True))


def generate(rank: int, cache_dir: str) -> list[tuple[torch.Tensor, list[int], int]]:
    """Logits and greedy tokens of a float16 model (which the reference of quantized linears computes), and the sites of the pass."""
    results = []
    for kernels in (ALLREDUCE, WITH_IT):
        spec = tiny_spec("LlamaForCausalLM", LAYERS, torch.float16)
        config = CompileConfig(cache_dir=Path(cache_dir), tensor_parallel_size=2, quantization="fp8")
        model = compile_model(spec, config, device=torch.device("cpu"), dtype=torch.float16, kernels=kernels)
        fill(model, rank=rank)
        kv_caches = caches(spec, torch.float16, tensor_parallel_size=2)
        rows, tokens = [step(model, PROMPT, 0, kv_caches)], []
        for start in range(len(PROMPT), len(PROMPT) + 4):
            tokens.append(int(rows[-1][-1].argmax()))
            rows.append(step(model, tokens[-1:], start, kv_caches))
        sites = next(row.get("matched", 0) for row in model.report["passes"] if row["name"] == NAME)
        results.append((torch.cat(rows), tokens, sites))
    return results


@pytest.mark.exhaustive
def test_ranks_agree_with_and_without_it(tmp_path: Path) -> None:
    by_rank = run_ranks(2, generate, str(tmp_path / "artifacts"), folder=tmp_path)
    for (logits, tokens, without), (ours, our_tokens, sites) in by_rank:
        assert (without, sites) == (0, SITES)
        assert torch.equal(ours, logits)
        assert our_tokens == tokens
        assert torch.equal(ours, by_rank[0][1][0])
