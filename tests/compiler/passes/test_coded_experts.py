"""Experts that a checkpoint holds in codes: kept in every format, on ranks too, in the layouts of both devices."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compile_and_serve.compiler import CompileConfig
from compile_and_serve.compiler.capture.capture import CapturedGraph
from compile_and_serve.compiler.passes.quantize_experts import KERNEL
from compile_and_serve.compiler.rewrite.graph_pass import PassResult, op_arguments, weight_of
from compile_and_serve.custom_ops.mesh import ORIGIN, Coordinates
from compile_and_serve.custom_ops.moe.code_format import CodeFormat
from compile_and_serve.models.registry import build_model
from compile_and_serve.models.spec import ModelSpec
from tests.models.test_registry import EXPERTS
from tests.runtime.weights.test_grouped_experts import FORMATS
from tests.support.rewriting import KERNELS, check_verified, result_of, rewrite
from tests.support.transformers_models import config_of

QUICK = ("awq", "gptq-3-bits", "w8a16-channel", "nvfp4", "fp4-double")
CODED = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FORMATS if name not in ("llm-int8", "gptq-act-order")
]


def spec_of(name: str, **changes: Any) -> ModelSpec:
    sizes = EXPERTS["Qwen3MoeForCausalLM"] | {"num_hidden_layers": 1, "hidden_size": 128, "moe_intermediate_size": 256} | changes
    return build_model(config_of("Qwen3MoeForCausalLM", **sizes, quantization_config=FORMATS[name]), dtype=torch.float32)


def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights get the layouts of the Triton kernels."""
    platform = SimpleNamespace(runs_triton_kernels=True, runs_cuda_kernels=True)
    monkeypatch.setattr("compile_and_serve.compiler.passes.quantize_experts.platform_of", lambda device: platform)


def coded_weights(captured: CapturedGraph) -> list[tuple[str, dict[str, str], CodeFormat | None]]:
    """Of each linear of experts: the parameter, the weights by argument ("", "_scale", …), and the format (None: MXFP4)."""
    found = []
    for node in captured.gm.graph.find_nodes(op="call_function", target=torch.ops.cas.experts.default):
        args = op_arguments(node)
        for linear, form in zip(("gate_up", "down"), (args["codes"] or "|").split("|"), strict=True):
            names = {part: weight_of(args[f"{linear}{part}"]) for part in ("", "_scale", "_offset", "_factor")}
            kept = {part: name for part, name in names.items() if name is not None}
            found.append((kept[""].rsplit(".", 2)[0], kept, CodeFormat.of(form) if form else None))
    return found


@pytest.mark.slow_cases
@pytest.mark.exhaustive_cases
@pytest.mark.parametrize("name", CODED)
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_gpu_layout_holds_the_weights(name: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the kernels decode it, in Triton's interpreter, against the format's own dequantization."""
    coded_linear = pytest.importorskip("compile_and_serve.custom_ops.moe.coded_linear")
    from compile_and_serve.custom_ops.moe.triton_coded_experts import dequantize

    on_a_gpu(monkeypatch)
    spec = spec_of(name)
    captured, _, records = rewrite(spec, CompileConfig(tensor_parallel_size=size), torch.float32, kernels=KERNELS | {KERNEL}, verify=False)
    assert result_of(records, "quantize_experts") == PassResult(matched=1, remarks=result_of(records, "quantize_experts").remarks)
    generator = torch.Generator().manual_seed(0)
    stored = [one for key, one in spec.quantized_weights.items() if "experts" in key]
    values = {tensor.name: tensor.example(0.05, generator) for one in stored for tensor in one.tensors}
    rank: Coordinates = ORIGIN if size == 1 else {"tensor": 1}
    held = 0
    for parameter, names, form in coded_weights(captured):
        parts = {part: captured.weights[one].evaluate(values, coordinates=rank) for part, one in names.items()}
        expected = captured.weights[parameter].evaluate(values, coordinates=rank)
        assert parts[""].dtype == torch.int16
        linear = coded_linear.CodedLinear(
            parts[""], parts["_scale"], parts.get("_offset"), parts.get("_factor"), None, form, expected.shape[2]
        )
        rtol = 5e-4 if "double" in name else 1e-6  # scales of doubly quantized weights get 16 bits
        torch.testing.assert_close(dequantize(linear, torch.float32), expected, rtol=rtol, atol=1e-7)
        # Rows of 128 inputs are short, so their factors, one a row in some formats, are left out.
        held += sum(tensor.nbytes for part, tensor in parts.items() if part != "_factor")
    texts = ("quant_state", "quant_map")  # large beside such small weights
    in_file = sum(one.nbytes for key, one in values.items() if not any(text in key for text in texts)) / size
    assert held <= (1.35 if "3-bits" in name else 1.05) * in_file  # codes of 3 bits are kept in 4


@pytest.mark.parametrize(("name", "size"), [("awq", 2), ("nvfp4", 1)])
def test_codes_are_kept_and_verified(name: str, size: int) -> None:
    captured, _, records = rewrite(spec_of(name), CompileConfig(tensor_parallel_size=size), torch.float32, kernels=KERNELS | {KERNEL})
    assert result_of(records, "quantize_experts").matched == 1
    check_verified(records)
    assert len(coded_weights(captured)) == 2


@pytest.mark.slow
def test_qwen3_30b_a3b_in_awq_takes_less_than_a_third(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of bfloat16, with embedding and head, which stay in it."""
    on_a_gpu(monkeypatch)
    folder = Path(__file__).parents[3] / "benchmarks/configs/qwen3-30b-a3b-awq"
    config = json.loads((folder / "config.json").read_text())
    layers = config["num_hidden_layers"]
    held = {}
    for quantization in (config["quantization_config"], None):
        spec = build_model(config | {"num_hidden_layers": 1, "quantization_config": quantization}, dtype=torch.bfloat16)
        captured, *_ = rewrite(spec, CompileConfig(), kernels=KERNELS | {KERNEL}, verify=False)
        names = {name for node in captured.gm.graph.nodes if node.users and (name := weight_of(node)) is not None}
        sizes = {name: captured.weights[name].spec for name in names}
        total = {True: 0, False: 0}
        for name, one in sizes.items():
            total[".layers." in name] += torch.Size(one.shape).numel() * one.dtype.itemsize
        held[quantization is None] = layers * total[True] + total[False]
    print(f"{held[False] / 1e9:.2f} GB, {held[False] / held[True]:.3f} of bfloat16's {held[True] / 1e9:.2f} GB")
    assert held[False] <= 0.30 * held[True]
