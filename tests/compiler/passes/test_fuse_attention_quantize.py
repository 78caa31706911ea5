"""The pass `fuse_attention_quantize`: where every linear behind attention rounds its input to 8 bits, it comes rounded."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule, Node

from compile_and_serve.compiler import CompileConfig, compile_model
from compile_and_serve.compiler.artifacts.cache_key import plan_fields
from compile_and_serve.compiler.capture.capture import CapturedGraph, capture, example_inputs
from compile_and_serve.compiler.cudagraphs.runner import CudaGraphRunner
from compile_and_serve.compiler.model import Model
from compile_and_serve.compiler.passes import default_passes
from compile_and_serve.compiler.passes.fuse_attention_quantize import ROPE_ATTENTION_QUANTIZE, FuseAttentionQuantize
from compile_and_serve.compiler.passes.fuse_rope_attention import ROPE_ATTENTION
from compile_and_serve.compiler.passes.quantize_linears import QUANTIZED_LINEAR
from compile_and_serve.compiler.pieces.plan import ExecutionPlan, OpStep
from compile_and_serve.compiler.pieces.stitch import stitched_source
from compile_and_serve.compiler.reports import profile
from compile_and_serve.compiler.reports.run_dump import random_inputs
from compile_and_serve.compiler.reports.run_dump import run as run_dumped
from compile_and_serve.compiler.rewrite import available_kernels as kernels_of_devices
from compile_and_serve.compiler.rewrite.graph_pass import PassContext, PassResult, SkipReason
from compile_and_serve.compiler.rewrite.pass_manager import PassRecord, run_passes
from compile_and_serve.compiler.rewrite.verify import PassVerifier
from compile_and_serve.custom_ops.attention.cpu_backend import CpuAttention
from compile_and_serve.custom_ops.attention.flashinfer_backend import FlashInferAttention
from compile_and_serve.custom_ops.attention.torch_backend import TorchAttention
from compile_and_serve.custom_ops.attention.triton_backend import TritonAttention
from compile_and_serve.models.registry import build_model
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.runtime.weights import load_weights, read_config
from tests.compiler.cudagraphs.test_runner import FakeDevice
from tests.compiler.reports.test_dump import load
from tests.support.quantized_checkpoints import compressed_tensors_config, write_quantized
from tests.support.tiny_models import caches, fill, step, tiny_spec
from tests.support.transformers_models import config_of

NAME = "fuse_attention_quantize"
CPU = torch.device("cpu")
LAYERS = 3
WITHOUT = frozenset({"rope_attention", "fused_linear"})
WITH_IT = WITHOUT | {"rope_attention_quantize"}
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_key_value_heads": 4,
    "head_dim": 64,
}  # whole blocks on two ranks


def rewrite(
    spec: ModelSpec, *, kernels: frozenset[str] = WITH_IT, ranks: int = 1, verify: bool = False,
    disabled: frozenset[str] = frozenset(), passes: Any = None, **options: Any,
) -> tuple[CapturedGraph, PassContext, dict[str, PassRecord]]:  # fmt: skip
    shapes = [(8, 2, kv.num_kv_heads, 16, kv.head_dim) for kv in spec.kv_cache_specs]
    captured = capture(spec.module, example_inputs(shapes, torch.bfloat16), quantized=spec.quantized_weights)
    ctx = PassContext(
        device=CPU, dtype=torch.bfloat16, weights=captured.weights, fake_mode=captured.fake_mode, kernels=kernels,
        tensor_parallel_size=ranks, tp_plan=spec.tp_plan, quantized_weights=spec.quantized_weights,
    )  # fmt: skip
    passes = passes or default_passes(
        CompileConfig(tensor_parallel_size=ranks, forced_passes=frozenset({NAME}), **options)
    )
    records = run_passes(captured.gm, passes, ctx, disabled, PassVerifier(spec.buffers) if verify else None)
    return captured, ctx, {record.name: record for record in records}


def tiny(architecture: str = "LlamaForCausalLM", **changes: Any) -> ModelSpec:
    return tiny_spec(architecture, LAYERS, torch.bfloat16, **changes)


def calls(gm: GraphModule, target: Any) -> list[Node]:
    return list(gm.graph.find_nodes(op="call_function", target=target))


def misses(record: PassRecord) -> list[str]:
    assert isinstance(record.result, PassResult)
    return [miss.reason for miss in record.result.near_misses]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("scheme", ["fp8", "int8", "fp8-block"])
@pytest.mark.parametrize("model", ["llama", "qwen3", "transformers"])
def test_every_layer_is_matched(model: str, scheme: Any, ranks: int) -> None:
    if model == "transformers":
        sizes = WIDE | {"num_hidden_layers": LAYERS}
        spec = build_model(config_of("LlamaForCausalLM", **sizes), dtype=torch.bfloat16, model_impl="transformers")
    else:
        spec = tiny({"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[model], **WIDE)
    captured, ctx, records = rewrite(spec, quantization=scheme, ranks=ranks, verify=True)
    assert records[NAME].result == PassResult(matched=LAYERS)
    for record in records.values():
        assert record.verification is None or record.verification.passed, record.name
    verification = records[NAME].verification
    assert verification is not None
    assert verification.relative_error < 1e-12
    assert len(verification.sites) == LAYERS + 1 + LAYERS  # attentions, the result, caches
    assert not calls(captured.gm, ROPE_ATTENTION)

    features = 256 // ranks
    dtype = torch.int8 if scheme == "int8" else torch.float8_e4m3fn
    linears = [node for node in calls(captured.gm, QUANTIZED_LINEAR) if len(node.args) == 13]
    assert len(linears) == LAYERS  # output projections, with the residual that `fuse_linears` gave them
    for number, linear in enumerate(linears):
        x, values, scale = (linear.args[i].meta["example_value"] for i in (0, 11, 12))
        assert "o_proj" in linear.args[1].meta["weight"]
        assert (values.dtype, values.shape) == (dtype, x.shape)
        assert (scale.dtype, scale.shape) == (torch.float32, (x.shape[0], features // 128 if "block" in scheme else 1))
        parts = [linear.args[i] for i in (0, 11, 12)]
        assert all(part.target is operator.getitem for part in parts)
        is_last = number == LAYERS - 1  # there rows are selected first
        if is_last:
            assert len({part.args[1] for part in parts}) == 1
            parts = [part.args[0] for part in parts]
        assert [part.args[1] for part in parts] == [0, 1, 2]
        (attention,) = {part.args[0] for part in parts}
        assert attention.target is ROPE_ATTENTION_QUANTIZE
        name = str(dtype).removeprefix("torch.")
        assert attention.args[10:] == (name, "block" in scheme, None, is_last)

    before = str(captured.gm.graph)
    config = CompileConfig(quantization=scheme, tensor_parallel_size=ranks, forced_passes=frozenset({NAME}))
    for record in run_passes(captured.gm, default_passes(config), ctx):
        assert isinstance(record.result, SkipReason) or record.result.matched == 0, record.name
    assert str(captured.gm.graph) == before


def test_it_runs_where_there_is_a_kernel() -> None:
    captured, ctx, records = rewrite(tiny(), quantization="fp8", kernels=WITHOUT)
    reason = "the attention backend has no kernel that rounds its output for torch.bfloat16 on cpu"
    assert records[NAME].result == SkipReason(sentence=reason)
    assert len(calls(captured.gm, ROPE_ATTENTION)) == LAYERS
    assert FuseAttentionQuantize().guard(ctx) is not None


def test_where_there_is_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs that have float8, of the backends whose decodes are Triton's."""
    monkeypatch.setattr(kernels_of_devices, "triton_unsupported_reason", lambda device: None)
    for reason in (None, "float8 needs a newer one"):
        monkeypatch.setattr(kernels_of_devices, "cuda_unsupported_reason", lambda device, dtype, reason=reason: reason)
        for backend in (TritonAttention(), FlashInferAttention(build=False), TorchAttention(), CpuAttention()):
            found = kernels_of_devices.available_kernels(
                device=torch.device("cuda"), dtype=torch.bfloat16, attention_backend=backend
            )
            ours = reason is None and backend.name in ("triton", "flashinfer")
            assert ("rope_attention_quantize" in found) == ours, backend.name
    found = kernels_of_devices.available_kernels(device=CPU, dtype=torch.bfloat16, attention_backend=TritonAttention())
    assert "rope_attention_quantize" not in found


@pytest.mark.parametrize("scheme", [None, "fp8-weight-only", "int8-weight-only"])
def test_nothing_is_expected_where_nothing_is_rounded(scheme: Any) -> None:
    captured, _, records = rewrite(tiny(), quantization=scheme)
    assert records[NAME].result == PassResult(matched=0)
    assert len(calls(captured.gm, ROPE_ATTENTION)) == LAYERS


def test_linears_that_are_left_unquantized_are_no_sites() -> None:
    exclude = ("lm_head", "model.layers.1.self_attn.o_proj")
    _, _, records = rewrite(tiny(), quantization="fp8", quantization_exclude=exclude)
    assert records[NAME].result == PassResult(matched=LAYERS - 1)


def test_what_is_no_site_says_why() -> None:
    """Another reader, beside the linear or of some features alone; two linears that round differently; a norm taken in."""
    disabled = frozenset({NAME, "fuse_linears"})
    captured, ctx, _ = rewrite(tiny_spec(layers=5, dtype=torch.bfloat16), quantization="fp8", disabled=disabled)
    attentions, graph = calls(captured.gm, ROPE_ATTENTION), captured.gm.graph
    linears = [next(user for user in node.users if user.target is QUANTIZED_LINEAR) for node in attentions[:4]]
    with graph.inserting_after(attentions[0]):
        graph.call_function(torch.neg, (attentions[0],))
    with graph.inserting_after(attentions[1]):
        graph.call_function(operator.getitem, (attentions[1], (slice(None), slice(0, 8))))
    with graph.inserting_after(linears[2]):
        other = graph.node_copy(linears[2])
    other.update_arg(9, "static")
    other.update_arg(10, linears[2].args[2])
    norm_weight = next(node for node in graph.nodes if "norm" in node.meta.get("weight", ""))
    linears[3].update_arg(4, norm_weight)
    record = FuseAttentionQuantize().run(captured.gm, ctx)
    assert record.matched == 1
    reasons = [miss.reason for miss in record.near_misses]
    assert ["read by something else than linears that round it" in reason for reason in reasons] == [
        True,
        True,
        False,
        False,
    ]
    assert reasons[2:] == [
        "linears round attention's output differently",
        "a linear rounds a norm of attention's output, not what attention gives",
    ]
    assert "models/" in record.near_misses[0].source
    assert calls(captured.gm, ROPE_ATTENTION) == attentions[:4]


class WrongScale(FuseAttentionQuantize):
    """Planted: the second layer's attention has another softmax scale."""

    def run(self, gm: GraphModule, ctx: PassContext) -> PassResult:
        result = super().run(gm, ctx)
        calls(gm, ROPE_ATTENTION_QUANTIZE)[1].update_arg(6, 0.3)
        return result


def test_verification_finds_another_attention() -> None:
    config = CompileConfig(quantization="fp8")
    passes = [WrongScale() if one.name == NAME else one for one in default_passes(config)]
    captured, _, records = rewrite(tiny(), passes=passes, verify=True)
    result = records[NAME].result
    assert isinstance(result, SkipReason)
    assert "failed its verification" in result.sentence
    assert "rope_attention_quantize" in result.sentence
    assert len(calls(captured.gm, ROPE_ATTENTION)) == LAYERS


def test_the_artifact_is_another_one() -> None:
    spec, passes = tiny(), default_passes(CompileConfig(quantization="fp8"))
    keys = {
        str(plan_fields(spec, passes, disabled, kernels, CPU, torch.float32))
        for disabled in (frozenset(), frozenset({NAME}))
        for kernels in (WITHOUT, WITH_IT)
    }
    assert len(keys) == 4


def compiled(spec: ModelSpec, cache_dir: Path, kernels: frozenset[str] = WITH_IT, **options: Any) -> Model:
    config = CompileConfig(cache_dir=cache_dir, forced_passes=frozenset({NAME}), **options)
    return compile_model(
        spec, config, device=CPU, dtype=torch.float16, kernels=kernels, attention_backend=TorchAttention()
    )


def generate(model: Model, spec: ModelSpec) -> torch.Tensor:
    """Logits of a prompt and of four tokens after it."""
    kv_caches, tokens = caches(spec, torch.float16), [5, 6, 7, 200, 41]
    rows = [step(model, tokens, 0, kv_caches)]
    rows += [step(model, [int(rows[-1][-1].argmax())], len(tokens) + i, kv_caches) for i in range(4)]
    return torch.cat(rows)


@pytest.mark.parametrize("scheme", ["fp8", "int8", "fp8-block"])
def test_a_compiled_model_says_the_same_with_and_without_it(tmp_path: Path, scheme: Any) -> None:
    """To the bit: in float16, which the reference of quantized linears computes. Compiled, and once more from the store."""
    logits = []
    for kernels in (WITHOUT, WITH_IT, WITH_IT):
        spec = tiny_spec("LlamaForCausalLM", LAYERS, torch.float16, **WIDE)
        model = compiled(spec, tmp_path, kernels, quantization=scheme)
        fill(model)
        logits.append(generate(model, spec))
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    assert model.report["artifact"] == "hit"
    assert next(row["matched"] for row in model.report["passes"] if row["name"] == NAME) == LAYERS
    assert model.report["distinct_pieces"] == 3  # layers share one, the first and the last are others
    plan = model.plan  # type: ignore[attr-defined]
    ops = [one for one in plan.steps if isinstance(one, OpStep)]
    assert {one.op for one in ops} == {"cas::rope_attention_quantize"}
    assert [len(one.outputs) for one in ops] == [3] * LAYERS
    assert ExecutionPlan.from_json(plan.to_json()) == plan
    assert stitched_source(plan).count("op_cas__rope_attention_quantize(") == LAYERS


def test_a_static_scale_of_a_checkpoint(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, initializer_range=0.08, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.float16).save_pretrained(tmp_path / "plain")
    scheme = compressed_tensors_config("float", "tensor", "static", file_format="naive-quantized")
    (tmp_path / "q").mkdir()
    quantized, _ = write_quantized(tmp_path / "plain", tmp_path / "q", scheme)
    logits = []
    for kernels in (WITHOUT, WITH_IT):
        spec = build_model(read_config(quantized), dtype=torch.float16)
        model = compiled(spec, tmp_path / "cache", kernels)
        load_weights(model, spec, quantized, load_format="auto", device=CPU, dtype=torch.float16, seed=0)
        logits.append(generate(model, spec))
    assert torch.equal(*logits)
    assert next(row["matched"] for row in model.report["passes"] if row["name"] == NAME) == LAYERS
    attention = next(one for one in model.plan.steps if isinstance(one, OpStep))  # type: ignore[attr-defined]
    assert attention.arguments[10:12] == ("float8_e4m3fn", False)
    assert "o_proj" in str(attention.arguments[12])
    assert "input_scale" in str(attention.arguments[12])


def test_piecewise_replays_equal_plain_steps(tmp_path: Path) -> None:
    """What the op gives besides is copied into static inputs, too."""
    spec = tiny_spec("LlamaForCausalLM", LAYERS, torch.float16)
    model = compiled(spec, tmp_path, quantization="fp8")
    fill(model)
    runner = CudaGraphRunner(model, mode="piecewise", max_num_seqs=8, backend=TorchAttention(), device=FakeDevice())
    ours, theirs = caches(spec, torch.float16), caches(spec, torch.float16)
    for number in range(6):
        tokens = [(number * 31 + i * 7) % 320 for i in range(8)]
        expected = step(model, tokens, number * 3, theirs)
        assert torch.equal(step(runner, tokens, number * 3, ours), expected)
    assert runner.stats.replays["piecewise"] == 4


def test_dumped_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(profile.STREAM_BYTES, "cpu", 1 << 16)
    monkeypatch.setitem(profile.GEMM_SIZE, "cpu", 16)
    monkeypatch.setattr(profile, "RUNS", 2)
    spec = tiny_spec("LlamaForCausalLM", LAYERS, torch.float16)
    folder, tokens = tmp_path / "dump", 4
    model = compiled(
        spec, tmp_path / "store", quantization="fp8", dump_dir=folder, profile_tokens=(tokens,), verify_passes=True
    )
    rows = {row["name"]: row for row in model.report["profile"]["rows"]}
    assert rows["rope_attention_quantize"]["count"] == LAYERS
    heads, kv_heads, size = 4, 2, 16
    cached = tokens * profile.CONTEXT * 2 * kv_heads * size
    sixteen_bits = cached + tokens * (heads + 2 * kv_heads) * size + 2 * tokens * size + tokens * heads * size
    assert rows["rope_attention_quantize"]["bytes"] == 2 * sixteen_bits + tokens * heads * size + 4 * tokens
    assert rows["rope_attention_quantize"]["flops"] == 4 * profile.CONTEXT * tokens * heads * size
    text = next(folder.glob(f"*_{NAME}.py")).read_text()
    assert f"(float16[tokens, {heads * size}], float8_e4m3fn[tokens, {heads * size}], float32[tokens, 1])" in text
    middle = load(sorted((folder / "90_split").glob("piece_1_*.py"))[0])
    outputs = run_dumped(middle.forward, middle.INPUTS, random_inputs(middle.INPUTS))
    assert all(output.shape[0] == 5 for output in outputs)
