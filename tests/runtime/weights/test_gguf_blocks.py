"""GGUF files whose blocks stay quantized: all kinds in one file, a tied head, and the fallback to dequantized weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter

from compile_and_serve.compiler import CompileConfig
from compile_and_serve.compiler.model import Model
from compile_and_serve.custom_ops.quantized.group_linear import layout_unsupported_reason
from compile_and_serve.models.quantization.gguf import GGUF_FORMATS
from compile_and_serve.runtime.weights import iter_tensors
from tests.custom_ops.quantized.test_gguf_formats import random_rows
from tests.support.loaded_checkpoints import load, logits
from tests.support.numbers import relative_error

CPU = torch.device("cpu")
HIDDEN, INNER, VOCAB, LAYERS = 256, 512, 300, 2
SHAPES = {
    "attn_q": (HIDDEN, HIDDEN),
    "attn_k": (128, HIDDEN),
    "attn_v": (128, HIDDEN),
    "attn_output": (HIDDEN, HIDDEN),
    "ffn_gate": (INNER, HIDDEN),
    "ffn_up": (INNER, HIDDEN),
    "ffn_down": (HIDDEN, INNER),
}
KINDS = ("Q4_0", "Q4_0", "Q6_K", "Q5_0", "Q4_K", "Q4_K", "Q5_K", "Q4_1", "Q4_1", "Q8_0", "Q5_1", "IQ4_NL", "IQ4_NL", "Q8_0")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Llama whose matrices have random blocks of all kinds."""
    file = tmp_path_factory.mktemp("gguf") / "mixed.gguf"
    writer = GGUFWriter(file, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    matrices = {"token_embd.weight": ("Q4_1", (VOCAB, HIDDEN))}
    kinds = iter(KINDS)
    for layer in range(LAYERS):
        matrices |= {f"blk.{layer}.{name}.weight": (next(kinds), shape) for name, shape in SHAPES.items()}
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", torch.ones(HIDDEN).numpy())
    writer.add_tensor("output_norm.weight", torch.ones(HIDDEN).numpy())
    for seed, (name, (kind, shape)) in enumerate(matrices.items()):
        rows = random_rows(kind, *shape, seed=seed)
        writer.add_tensor(name, rows, raw_dtype=GGMLQuantizationType[kind])
    assert set(KINDS) == GGUF_FORMATS.keys()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def quantize_row(model: Model) -> dict[str, object]:
    return next(row for row in model.report["passes"] if row["name"] == "quantize_linears")


def test_eager_weights_are_the_dequantized_ones(mixed: Path) -> None:
    model = load(mixed)
    held = dict(model.module.named_parameters())  # type: ignore[attr-defined, union-attr]
    expected = dict(iter_tensors(mixed))
    assert held.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(held[name], tensor), name


@pytest.mark.slow
def test_all_kinds_in_one_file(mixed: Path, tmp_path: Path) -> None:
    if (reason := layout_unsupported_reason(CPU, 32)) is not None:
        pytest.skip(reason)
    model = load(mixed, CompileConfig(cache_dir=tmp_path / "cache"))
    row = quantize_row(model)
    # Per layer q+k, v, o, gate+up and down, one pair of another kind apart; the embedding and the head.
    assert row["near_misses"] == []
    assert all(w.dtype not in (torch.float32,) or w.dim() != 2 for w in model.weights.values())  # type: ignore[attr-defined]
    reference = logits(load(mixed))
    assert relative_error(logits(model), reference) < 1e-3
    packed = sum(w.nbytes for name, w in model.weights.items() if "bits." in name)  # type: ignore[attr-defined]
    assert packed < 0.45 * 4 * sum(p.numel() for p in model.spec.module.parameters())  # type: ignore[attr-defined]


@pytest.mark.exhaustive
def test_another_quantization_starts_from_dequantized_weights(mixed: Path, tmp_path: Path) -> None:
    config = CompileConfig(cache_dir=tmp_path / "cache", quantization="int8-weight-only")
    model = load(mixed, config, requantize=True)
    reference = logits(load(mixed))
    assert relative_error(logits(model), reference) < 0.05
