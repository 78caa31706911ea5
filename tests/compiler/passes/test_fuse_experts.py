"""Experts in the graph: their fusions and shards compute the same, verified in float64."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from compile_and_serve.compiler import CompileConfig
from compile_and_serve.compiler.passes.quantize_experts import KERNEL, PACKED_KERNEL
from compile_and_serve.compiler.rewrite.graph_pass import PassError, PassResult, SkipReason, op_arguments, tensor_of
from compile_and_serve.custom_ops.moe.packed_experts import is_packed, packed_inputs
from compile_and_serve.models.registry import build_model
from tests.models.test_registry import EXPERTS
from tests.support.moe_models import FAMILIES
from tests.support.quantized_checkpoints import compressed_tensors_config
from tests.support.rewriting import KERNELS, check_verified, result_of, rewrite
from tests.support.tiny_models import tiny_spec
from tests.support.transformers_models import config_of

LAYERS = 1
GPT_OSS = {"architecture": "GptOssForCausalLM", "num_hidden_layers": LAYERS, "num_local_experts": 4, "num_experts_per_tok": 2}
_LARGE = EXPERTS["Qwen3MoeForCausalLM"] | {"moe_intermediate_size": 256}


@pytest.mark.slow_cases
@pytest.mark.parametrize(("architecture", "size"), [("MixtralForCausalLM", 1), ("Qwen2MoeForCausalLM", 2), ("Qwen3MoeForCausalLM", 2)])
def test_passes_are_verified(architecture: str, size: int) -> None:
    spec = tiny_spec(architecture, LAYERS, torch.bfloat16, **EXPERTS[architecture])
    captured, _, records = rewrite(spec, CompileConfig(tensor_parallel_size=size))
    shared = architecture.startswith("Qwen2")
    assert records["fuse_experts"].result == PassResult(matched=LAYERS)
    assert records["select_rows_early"].result == PassResult(matched=1)
    if size > 1:
        # attention, experts, and the shared expert's three linears; embedding and head
        assert records["tensor_parallel"].result == PassResult(matched=LAYERS * (5 + 3 * shared) + 2)
    check_verified(records)
    nodes = captured.gm.graph.find_nodes(op="call_function", target=torch.ops.cas.experts.default)
    assert len(nodes) == LAYERS
    for node in nodes:
        assert node.args[3].meta["example_value"].dim() == 4  # packed
        assert node.args[10] is not None  # the norm's weight
        assert (node.args[9] is not None) == (size == 1)  # with ranks, the sum over them comes first


def test_features_that_ranks_cannot_share() -> None:
    spec = tiny_spec("Qwen3MoeForCausalLM", 1, torch.bfloat16, **EXPERTS["Qwen3MoeForCausalLM"] | {"moe_intermediate_size": 27})
    with pytest.raises(PassError, match="it has 27 features in each expert, which 2 does not divide"):
        rewrite(spec, CompileConfig(tensor_parallel_size=2), verify=False)


@pytest.mark.parametrize("size", [1, 4])
def test_experts_in_mxfp4_keep_their_codes(size: int) -> None:
    config = config_of(**GPT_OSS, intermediate_size=128, quantization_config={"quant_method": "mxfp4"})
    spec = build_model(config, dtype=torch.bfloat16)
    captured, _, records = rewrite(spec, CompileConfig(tensor_parallel_size=size), kernels=KERNELS | {KERNEL})
    assert records["quantize_experts"].result == PassResult(matched=LAYERS)
    check_verified(records)
    for node in captured.gm.graph.find_nodes(op="call_function", target=torch.ops.cas.experts.default):
        gate_up, down, gate_up_scale, down_scale = (tensor_of(node.args[at]) for at in (3, 4, 12, 13))
        assert (tuple(gate_up.shape), gate_up.dtype) == ((4, 256 // size, 2, 16), torch.uint8)
        assert tuple(down.shape) == (4, 64, 4 // size, 16)
        assert (gate_up_scale.shape, down_scale.shape) == (gate_up.shape[:3], down.shape[:3])


def test_blocks_of_mxfp4_that_ranks_would_divide_are_dequantized() -> None:
    config = config_of(**GPT_OSS, intermediate_size=96, quantization_config={"quant_method": "mxfp4"})
    _, _, records = rewrite(
        build_model(config, dtype=torch.bfloat16), CompileConfig(tensor_parallel_size=2), kernels=KERNELS | {KERNEL}, verify=False
    )
    result = result_of(records, "quantize_experts")
    assert result.matched == 0
    assert {miss.reason for miss in result.near_misses} == {"scales are per block of 32, and a part of the weight has 48 columns"}


@pytest.mark.slow_cases
@pytest.mark.parametrize("quantization", ["fp8", "fp8-block", "fp8-weight-only", "int8", "int8-weight-only", "int4"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.pairwise
def test_experts_are_quantized_with_the_linears(quantization: Any, size: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    spec = tiny_spec("Qwen3MoeForCausalLM", LAYERS, torch.bfloat16, **_LARGE)
    config = CompileConfig(tensor_parallel_size=size, quantization=quantization)
    captured, _, records = rewrite(spec, config, kernels=KERNELS | {KERNEL})
    remark = "Activations of experts stay in torch.bfloat16: there is no kernel of experts with int8 activations."
    remarks = (remark,) if quantization == "int8" else ()
    assert records["quantize_experts"].result == PassResult(matched=LAYERS, remarks=remarks)
    assert all(one in caplog.messages for one in remarks)
    check_verified(records, "quantize_experts")
    shape = {"fp8-block": (4, 512 // size // 128, 1), "int4": (4, 512 // size, 64 // 32)}.get(quantization, (4, 512 // size))
    dtype = {"int8": torch.int8, "int8-weight-only": torch.int8, "int4": torch.uint8}.get(quantization, torch.float8_e4m3fn)
    for node in captured.gm.graph.find_nodes(op="call_function", target=torch.ops.cas.experts.default):
        assert tensor_of(op_arguments(node)["gate_up"]).dtype == dtype
        assert op_arguments(node)["activations"] == ("dynamic" if quantization in ("fp8", "fp8-block") else "none")
        assert tuple(tensor_of(op_arguments(node)["gate_up_scale"]).shape) == shape


@pytest.mark.parametrize("quantization", ["fp8", "fp8-block"])
def test_experts_that_a_checkpoint_holds_in_another_order_are_quantized(quantization: Any) -> None:
    """gpt-oss: transposed, and gate and up rows alternate."""
    config = config_of(**GPT_OSS, intermediate_size=256)
    spec = build_model(config, dtype=torch.bfloat16)
    _, _, records = rewrite(spec, CompileConfig(quantization=quantization), kernels=KERNELS | {KERNEL})
    assert records["quantize_experts"].result == PassResult(matched=LAYERS)
    check_verified(records, "quantize_experts")


@pytest.mark.slow_cases
@pytest.mark.parametrize(
    ("strategy", "activations", "rows"),
    [("channel", "token", 512), ("tensor", "static", 512), ("block", "group", 4), ("channel", None, 512)],
)
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.pairwise
def test_8bit_experts_of_compressed_tensors_keep_their_values(
    strategy: str, activations: str | None, rows: int, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    spec = build_model(
        config_of(
            "Qwen3MoeForCausalLM",
            **_LARGE | {"num_hidden_layers": LAYERS},
            quantization_config=compressed_tensors_config("float", strategy, activations),
        ),
        dtype=torch.bfloat16,
    )
    captured, _, records = rewrite(spec, CompileConfig(tensor_parallel_size=size), kernels=KERNELS | {KERNEL})
    remark = "Activations of experts get one scale per token: the checkpoint's static scales are not used."
    remarks = (remark,) if activations == "static" else ()
    assert records["quantize_experts"].result == PassResult(matched=LAYERS, remarks=remarks)
    assert all(one in caplog.messages for one in remarks)
    check_verified(records, "quantize_experts")
    for node in captured.gm.graph.find_nodes(op="call_function", target=torch.ops.cas.experts.default):
        assert tensor_of(op_arguments(node)["gate_up"]).dtype == torch.float8_e4m3fn
        assert tensor_of(op_arguments(node)["gate_up_scale"]).shape[1] == rows // size
        assert op_arguments(node)["activations"] == ("none" if activations is None else "dynamic")


def test_experts_can_be_excluded_and_stay_where_no_kernel_runs() -> None:
    spec = tiny_spec("Qwen3MoeForCausalLM", LAYERS, torch.bfloat16, **_LARGE)
    config = CompileConfig(quantization="fp8", quantization_exclude=("*.experts",))
    _, _, records = rewrite(spec, config, kernels=KERNELS | {KERNEL}, verify=False)
    assert records["quantize_experts"].result == PassResult(matched=0)
    _, _, records = rewrite(spec, CompileConfig(quantization="fp8"), verify=False)
    reason = "no kernel of quantized experts runs here: they are computed in torch.bfloat16"
    assert records["quantize_experts"].result == SkipReason(sentence=reason)


@pytest.mark.parametrize(("quantization", "size"), [("fp8", 2), ("mxfp4", 1)])
def test_quantized_experts_are_packed_for_the_cpu(quantization: Any, size: int) -> None:
    if quantization == "mxfp4":
        config = config_of(**GPT_OSS, intermediate_size=128, quantization_config={"quant_method": "mxfp4"})
        spec, options = build_model(config, dtype=torch.bfloat16), CompileConfig(tensor_parallel_size=size)
    else:
        spec = tiny_spec("Qwen3MoeForCausalLM", LAYERS, torch.bfloat16, **_LARGE)
        options = CompileConfig(tensor_parallel_size=size, quantization=quantization)
    captured, _, records = rewrite(spec, options, kernels=KERNELS | {PACKED_KERNEL})
    assert records["quantize_experts"].result == PassResult(matched=LAYERS)
    check_verified(records)
    for node in captured.gm.graph.find_nodes(op="call_function", target=torch.ops.cas.experts.default):
        assert is_packed(tensor_of(op_arguments(node)["gate_up"]), tensor_of(op_arguments(node)["gate_up_scale"]))
        assert op_arguments(node)["activations"] == ("dynamic" if quantization == "fp8" else "none")


def test_blocks_of_scales_stay_where_no_cpu_kernel_takes_them(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    spec = tiny_spec("Qwen3MoeForCausalLM", LAYERS, torch.bfloat16, **_LARGE)
    config = CompileConfig(quantization="fp8-block")
    _, _, records = rewrite(spec, config, kernels=KERNELS | {PACKED_KERNEL}, verify=False)
    result = result_of(records, "quantize_experts")
    assert {miss.reason for miss in result.near_misses} == {"the CPU kernels take a scale per output, not per block"}
    assert records["fuse_experts"].result == PassResult(matched=LAYERS)  # packed unquantized
    assert (
        "Activations of experts stay in torch.bfloat16, because the weights are not quantized: the CPU kernels take a scale per output, "
        "not per block." in caplog.messages
    )


@pytest.mark.slow
def test_experts_that_a_checkpoint_holds_transposed_are_sharded_and_quantized() -> None:
    config = FAMILIES["Llama4ForCausalLM"]
    spec = build_model(config_of("Llama4ForCausalLM", **config), dtype=torch.bfloat16)
    options = CompileConfig(tensor_parallel_size=2, quantization="int8")
    captured, _, records = rewrite(spec, options, kernels=KERNELS | {PACKED_KERNEL})
    check_verified(records)
    nodes = captured.gm.graph.find_nodes(op="call_function", target=torch.ops.cas.experts.default)
    assert records["quantize_experts"].result.matched == len(nodes)
    assert {packed_inputs(tensor_of(node.args[4])) for node in nodes} == {config["intermediate_size"] // 2}
