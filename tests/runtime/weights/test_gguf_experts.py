"""Experts of GGUF files: the values are those of the package gguf, and on the CPU their codes stay in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from compile_and_serve.compiler import CompileConfig, compile_model
from compile_and_serve.compiler.model import Model
from compile_and_serve.models.quantization.gguf import GGUF_FORMATS
from compile_and_serve.models.registry import build_model
from compile_and_serve.runtime.weights import iter_tensors, load_weights, read_config
from compile_and_serve.runtime.weights.gguf_file import read_gguf
from tests.custom_ops.quantized.test_gguf_formats import random_rows
from tests.support.loaded_checkpoints import CPU, KERNELS, load, logits
from tests.support.numbers import relative_error

HIDDEN, INNER, EXPERTS, VOCAB = 256, 256, 4, 300
ATTENTION = {"attn_q": (256, HIDDEN), "attn_k": (128, HIDDEN), "attn_v": (128, HIDDEN), "attn_output": (HIDDEN, 256)}
STACKS = {"ffn_gate_exps": (INNER, HIDDEN), "ffn_up_exps": (INNER, HIDDEN), "ffn_down_exps": (HIDDEN, INNER)}
# Kinds of gate, up and down.
SAME = {kind: (kind, kind, kind) for kind in GGUF_FORMATS}
MIXED = {"Q4_K_M": ("Q4_K", "Q4_K", "Q6_K")}


def write(file: Path, kinds: tuple[str, str, str], architecture: str = "qwen3moe") -> Path:
    """A mixture of experts with one layer, whose stacks have random blocks."""
    writer = GGUFWriter(file, architecture)
    writer.add_block_count(1)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(2)
    norms = {"attn_norm": HIDDEN, "ffn_norm": HIDDEN}
    if architecture == "qwen3moe":
        writer.add_expert_feed_forward_length(INNER)
        writer.add_key_length(64)
        writer.add_value_length(64)
        norms |= {"attn_q_norm": 64, "attn_k_norm": 64}
    for name, size in norms.items():
        writer.add_tensor(f"blk.0.{name}.weight", torch.ones(size).numpy())
    writer.add_tensor("output_norm.weight", torch.ones(HIDDEN).numpy())
    torch.manual_seed(0)
    plain = {"token_embd": (VOCAB, HIDDEN), "blk.0.ffn_gate_inp": (EXPERTS, HIDDEN)}
    for name, shape in (plain | {f"blk.0.{name}": shape for name, shape in ATTENTION.items()}).items():
        writer.add_tensor(f"{name}.weight", (torch.randn(shape) * 0.05).numpy())
    for seed, ((name, (rows, columns)), kind) in enumerate(zip(STACKS.items(), kinds, strict=True)):
        if kind in GGUF_FORMATS:
            blocks = random_rows(kind, EXPERTS * rows, columns, seed=seed).reshape(EXPERTS, rows, -1)
            writer.add_tensor(f"blk.0.{name}.weight", blocks, raw_dtype=GGMLQuantizationType[kind])
        else:
            writer.add_tensor(f"blk.0.{name}.weight", (torch.randn(EXPERTS, rows, columns) * 0.05).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def held(model: Model) -> dict[str, torch.Tensor]:
    return dict(model.module.named_parameters())  # type: ignore[attr-defined]


def stack_bytes(file: Path) -> int:
    return sum(info.num_bytes for name, info in read_gguf(file).tensors.items() if "_exps" in name)


@pytest.mark.parametrize("kinds", [*SAME.values(), *MIXED.values(), ("Q4_K", "Q6_K", "Q8_0"), ("F32", "F32", "Q4_0")], ids="-".join)
def test_dequantized_experts_are_those_of_the_package(kinds: tuple[str, str, str], tmp_path: Path) -> None:
    """In any mixture: where gate and up differ, they are dequantized."""
    file = write(tmp_path / "m.gguf", kinds)
    spec = build_model(read_config(file), dtype=torch.float32)
    stored = {name.rpartition(".")[2] for name in spec.quantized_weights if "experts" in name}
    assert stored == ({"gate_up_proj"} if kinds[0] == kinds[1] != "F32" else set()) | {"down_proj"}
    model, expected = held(load(file)), dict(iter_tensors(file))
    for expert in range(EXPERTS):
        theirs = {part: expected[f"model.layers.0.mlp.experts.{expert}.{part}_proj.weight"] for part in ("gate", "up", "down")}
        assert torch.equal(model["model.layers.0.mlp.experts.down_proj"][expert], theirs["down"])
        both = torch.cat((theirs["gate"], theirs["up"]))
        assert torch.equal(model["model.layers.0.mlp.experts.gate_up_proj"][expert], both)


def test_another_family_has_other_names(tmp_path: Path) -> None:
    """Mixtral's files are of the architecture llama."""
    file = write(tmp_path / "m.gguf", SAME["Q4_0"], "llama")
    blocks, plain = load(file), load(file, requantize=True)
    assert {name.rpartition(".")[2] for name in blocks.spec.quantized_weights} >= {"gate_up_proj", "down_proj"}  # type: ignore[attr-defined]
    assert not plain.spec.quantized_weights  # type: ignore[attr-defined]
    for name, tensor in held(plain).items():
        assert torch.equal(held(blocks)[name], tensor), name


KEPT = ["Q8_0", "Q4_K_M", *(pytest.param(name, marks=pytest.mark.slow) for name in SAME if name not in ("Q8_0", "Q4_K"))]


@pytest.mark.slow
@pytest.mark.exhaustive_cases(but=["Q4_K_M"])
@pytest.mark.parametrize("name", KEPT)
def test_compiled_experts_keep_their_codes(name: str, tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", (SAME | MIXED)[name])
    spec = build_model(read_config(file), dtype=torch.float32)
    config = CompileConfig(cache_dir=tmp_path / "cache", verify_passes=name == "Q4_K_M")
    model = compile_model(spec, config, device=CPU, dtype=torch.float32, kernels=KERNELS | {"packed_experts"})
    load_weights(model, spec, file, load_format="auto", device=CPU, dtype=torch.float32, seed=0)
    row: dict[str, Any] = next(row for row in model.report["passes"] if row["name"] == "quantize_experts")
    assert (row["matched"], row["near_misses"]) == (1, [])
    assert relative_error(logits(model), logits(load(file))) < 2e-3
    kept = sum(tensor.nbytes for key, tensor in model.weights.items() if "experts" in key)  # type: ignore[attr-defined]
    print(name, "takes", round(kept / stack_bytes(file), 3), "of the file")
    assert kept <= 1.05 * stack_bytes(file)
