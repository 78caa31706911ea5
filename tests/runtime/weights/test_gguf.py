"""GGUF files give the same tensors and config as the Hugging Face folders that they were made from."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from safetensors.torch import load_file

from compile_and_serve.models.config import ModelConfigError
from compile_and_serve.models.registry import build_model
from compile_and_serve.runtime.weights import WeightError, iter_tensors, open_checkpoint, read_config
from compile_and_serve.runtime.weights.gguf_file import read_metadata
from compile_and_serve.runtime.weights.gguf_tensors import unpermute

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{NAMES[part]}.weight"
    return f"{NAMES[stem]}.weight"


def interleave(w: np.ndarray, num_heads: int) -> np.ndarray:
    """Put row e of each head's first half next to row e of its second half, as llama.cpp's converter does."""
    heads = w.reshape(num_heads, 2, w.shape[0] // num_heads // 2, -1)
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(w.shape)


def write_gguf(folder: Path, file: Path, *, architecture: str, kind: GGMLQuantizationType, **extra: Any) -> Path:
    config = read_config(folder)
    writer = GGUFWriter(file, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    writer.add_token_list(["a", "é", "<|x|>"])
    writer.add_token_types([1, 1, 3])
    writer.add_eos_token_id(2)
    for name, tensor in (load_file(folder / "model.safetensors") | extra).items():
        values = tensor.numpy()
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            values = interleave(values, heads)
        out_name = name if name in extra else gguf_name(name)
        if values.ndim == 1:
            writer.add_tensor(out_name, values)
        else:
            writer.add_tensor(out_name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.fixture
def llama_gguf(tiny_llama_dir: Path, tmp_path: Path) -> Path:
    return write_gguf(tiny_llama_dir, tmp_path / "m.gguf", architecture="llama", kind=GGMLQuantizationType.F32)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1"])
@pytest.mark.parametrize(("checkpoint", "architecture"), [("tiny_llama_dir", "llama"), ("tiny_qwen3_dir", "qwen3")])
def test_tensors_equal_those_of_the_folder(
    checkpoint: str, architecture: str, kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    folder, ggml = request.getfixturevalue(checkpoint), GGMLQuantizationType[kind]
    file = write_gguf(folder, tmp_path / "m.gguf", architecture=architecture, kind=ggml)
    expected = load_file(folder / "model.safetensors")
    found = dict(iter_tensors(file))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        stored = tensor.numpy()
        if tensor.ndim > 1:
            stored = dequantize(quantize(stored, ggml), ggml)
        assert torch.equal(found[name], torch.from_numpy(stored)), name
        assert found[name].dtype == torch.float32


@pytest.mark.parametrize(("checkpoint", "architecture"), [("tiny_llama_dir", "llama"), ("tiny_qwen3_dir", "qwen3")])
def test_config_builds_the_same_model(checkpoint: str, architecture: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder = request.getfixturevalue(checkpoint)
    file = write_gguf(folder, tmp_path / "m.gguf", architecture=architecture, kind=GGMLQuantizationType.F16)
    from_gguf = build_model(read_config(file), dtype=torch.float32)
    from_folder = build_model(read_config(folder), dtype=torch.float32)
    shapes = [{name: p.shape for name, p in spec.module.named_parameters()} for spec in (from_gguf, from_folder)]
    assert shapes[0] == shapes[1]
    assert from_gguf.state == from_folder.state
    assert from_gguf.max_model_len == from_folder.max_model_len
    for ours, theirs in zip(from_gguf.buffers.values(), from_folder.buffers.values(), strict=True):
        assert torch.equal(ours, theirs)
    assert read_config(file)["rms_norm_eps"] == read_config(folder)["rms_norm_eps"]


def test_llama3_divisors_scale_the_frequencies(tiny_llama_dir: Path, tmp_path: Path) -> None:
    divisors = torch.tensor([1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0])
    extra = {"rope_freqs.weight": divisors}
    file = write_gguf(tiny_llama_dir, tmp_path / "m.gguf", architecture="llama", kind=GGMLQuantizationType.F32, **extra)
    assert "rope_freqs.weight" not in open_checkpoint(file).shapes
    (scaled,) = build_model(read_config(file), dtype=torch.float32).buffers.values()
    (plain,) = build_model(read_config(tiny_llama_dir), dtype=torch.float32).buffers.values()
    torch.testing.assert_close(scaled, plain / divisors)


def test_metadata_has_the_tokenizer(llama_gguf: Path) -> None:
    metadata = read_metadata(llama_gguf)
    assert metadata["tokenizer.ggml.tokens"] == ["a", "é", "<|x|>"]
    assert metadata["tokenizer.ggml.token_type"] == [1, 1, 3]
    assert metadata["tokenizer.ggml.eos_token_id"] == 2
    assert metadata["general.architecture"] == "llama"


def test_unpermute_undoes_interleaving() -> None:
    w = torch.randn(24, 5)
    assert torch.equal(unpermute(torch.from_numpy(interleave(w.numpy(), 3)), 3), w)
    assert torch.equal(unpermute(torch.from_numpy(interleave(w[:, :1].numpy(), 3))[:, 0], 3), w[:, 0])


@pytest.mark.parametrize("keep", [3, 10, 100, 700, -5000])
def test_truncated_file_is_one_sentence(llama_gguf: Path, keep: int) -> None:
    llama_gguf.write_bytes(llama_gguf.read_bytes()[:keep])
    with pytest.raises(WeightError) as error:
        open_checkpoint(llama_gguf)
    assert str(llama_gguf) in str(error.value)
    assert "truncated" in str(error.value) or "not a GGUF file" in str(error.value)
    assert "\n" not in str(error.value)


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def header(values: dict[str, bytes] | None = None, *, shape: tuple[int, ...] = (32,), kind: int = 0, tensors: int = 1) -> bytes:
    """A GGUF file with raw values (type and data) and equal tensors `w`. shape: columns first."""
    values = values or {}
    data = b"GGUF" + struct.pack("<IQQ", 3, tensors, len(values))
    for key, value in values.items():
        data += string(key) + value
    for _ in range(tensors):
        data += string("w") + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, 0)
    return data + bytes(4096)


ARRAY, STRING, UINT32, INT8 = (struct.pack("<I", kind) for kind in (9, 8, 4, 1))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (header({"general.alignment": UINT32 + struct.pack("<I", 0)}), "general.alignment must be a power of two, got 0"),
        (header({"general.alignment": UINT32 + struct.pack("<I", 24)}), "power of two, got 24"),
        (header({"general.alignment": STRING + string("32")}), "power of two, got '32'"),
        (header({"k": (ARRAY + ARRAY + struct.pack("<Q", 1)) * 1}), "array of arrays"),
        (header({"k": ARRAY + (ARRAY + struct.pack("<Q", 1)) * 5000 + INT8}), "array of arrays"),
        (header({"k": ARRAY + struct.pack("<I", 77) + struct.pack("<Q", 1)}), "unknown type 77"),
        (header({"k": ARRAY + UINT32 + struct.pack("<Q", 2**62)}), "truncated"),
        (header({"k": ARRAY + STRING + struct.pack("<Q", 2**63)}), "truncated"),
        (header(shape=(2**32, 2**32)), "truncated"),  # 2⁶⁴ elements are 0 in 64 bits
        (header(shape=(2**32, 2**31)), "truncated"),  # 2⁶³ are negative
        (header(shape=(2**63 + 32,)), "truncated"),
        (header(shape=(32, 0)), "sizes must be positive"),
        (header(shape=(0,)), "sizes must be positive"),
        (header(shape=(33,), kind=8), "whole blocks of 32"),
        (header(shape=(1,) * 5), "5 dimensions"),
        (header(tensors=2), "same name"),
    ],
)
def test_damaged_headers_are_one_sentence(content: bytes, says: str, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(content)
    with pytest.raises(WeightError, match=says) as error:
        read_metadata(file)
    assert str(file) in str(error.value)
    assert "\n" not in str(error.value)


def test_the_header_of_the_damaged_ones_is_sound(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(header({"general.alignment": UINT32 + struct.pack("<I", 64)}))
    assert open_checkpoint(file).shapes == {"w": (32,)}


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda writer: writer.add_array("general.architecture", [1]), r"architecture \[1\], but only"),
        (lambda writer: writer.add_string("llama.rope.freq_base", "much"), "rope.freq_base must be a finite number, got 'much'"),
        (lambda writer: writer.add_float32("llama.rope.freq_base", float("nan")), "finite number, got nan"),
    ],
)
def test_metadata_of_a_wrong_type_is_one_sentence(damage: Callable[[GGUFWriter], None], says: str, tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.kv_data[0].pop("general.architecture")
    damage(writer)
    if "general.architecture" not in writer.kv_data[0]:
        writer.add_string("general.architecture", "llama")
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    with pytest.raises(WeightError, match=says):
        read_config(tmp_path / "m.gguf")


def test_wrong_head_counts_are_one_sentence(tiny_llama_dir: Path, tmp_path: Path) -> None:
    file = write_gguf(tiny_llama_dir, tmp_path / "m.gguf", architecture="llama", kind=GGMLQuantizationType.F32)
    key = b"llama.attention.head_count"
    content = bytearray(file.read_bytes())
    for heads in (0, 7):
        at = content.index(key + UINT32) + len(key) + 4
        content[at : at + 4] = struct.pack("<I", heads)
        file.write_bytes(content)
        with pytest.raises(WeightError, match=f"rows for {heads} heads"):
            open_checkpoint(file)


def test_flipped_bits_are_one_sentence_or_read(llama_gguf: Path) -> None:
    """No flip in the header raises anything else, or gives a tensor without elements."""
    content = llama_gguf.read_bytes()
    rng = random.Random(0)
    size = content.index(b"output_norm.weight")
    errors = []
    for _ in range(600):
        at, bit = rng.randrange(size), rng.randrange(8)
        damaged = bytearray(content)
        damaged[at] ^= 1 << bit
        llama_gguf.write_bytes(damaged)
        try:
            build_model(read_config(llama_gguf), dtype=torch.float32)
            assert all(min(shape) > 0 for shape in open_checkpoint(llama_gguf).shapes.values())
        except (WeightError, ModelConfigError) as error:
            errors.append(str(error))
    assert len(errors) > 100
    assert all(error.isprintable() and len(error) < 1000 for error in errors)


def test_foreign_files_are_one_sentence(tiny_llama_dir: Path, tmp_path: Path) -> None:
    fake = tmp_path / "fake.gguf"
    fake.write_bytes(b"PK\x03\x04" + b"0" * 100)
    with pytest.raises(WeightError, match="not a GGUF file"):
        read_metadata(fake)
    fake.write_bytes(b"")
    with pytest.raises(WeightError, match="empty"):
        read_metadata(fake)
    with pytest.raises(WeightError, match="does not exist"):
        read_metadata(tmp_path / "absent.gguf")
    mamba = write_gguf(tiny_llama_dir, tmp_path / "m.gguf", architecture="mamba", kind=GGMLQuantizationType.F32)
    with pytest.raises(WeightError, match="'mamba', but only llama, mistral3, qwen2"):
        read_config(mamba)


def test_smollm2(smollm2_gguf: Path) -> None:
    config = read_config(smollm2_gguf)
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert (config["rms_norm_eps"], config["rope_parameters"]["rope_theta"]) == (1e-5, 1e5)
    assert config["tie_word_embeddings"]
    spec = build_model(config, dtype=torch.bfloat16)
    shapes = open_checkpoint(smollm2_gguf).shapes
    assert {name: tuple(p.shape) for name, p in spec.module.named_parameters()} == shapes
    assert sum(p.numel() for p in spec.module.parameters()) == 134_515_008
