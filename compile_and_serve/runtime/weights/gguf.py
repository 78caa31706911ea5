"""GGUF files: their metadata, and their weights under Hugging Face's config keys and tensor names.

Weights are dequantized, or keep the file's blocks where the model takes them (`models/quantization/gguf.py`).
This file parses the header. That takes tens of milliseconds for a vocabulary of 50 000 tokens, and finds a truncated file
before any tensor is read. The package `gguf` dequantizes. ggml's docs/gguf.md specifies the format.

Shape legend: O rows (out features), I columns (in features).
"""

from __future__ import annotations

import math
import os
import struct
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compile_and_serve.models.quantization.gguf import GGUF_FORMATS
from compile_and_serve.runtime.weights.errors import WeightError

MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
# GGUF value type → struct code
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_DEFAULT_ALIGNMENT = 32
_MAX_RANK = 4
_MAX_NAME = 64

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# llama.cpp interleaves the rotary pairs of these; other families keep Hugging Face's two halves
_PERMUTED_ARCHITECTURES = ("llama",)

_GLOBAL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"  # Llama 3.1's divisors of the RoPE frequencies


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """Where a tensor lies in the file.

    shape: rows first, although GGUF writes columns first. kind: ggml's number of the data type. offset: bytes from the
    beginning of the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int
    num_bytes: int


class _Cursor:
    """Reads little-endian values in sequence. Raises `WeightError` at the end of a truncated file."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path, self.data, self.at = path, data, 0

    def scalar(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        return struct.unpack("<" + code, self.take(size))[0]

    def take(self, size: int) -> memoryview:
        if size > len(self.data) - self.at:
            raise WeightError(f"{self.path} is truncated: it ends inside its header; download it again.")
        self.at += size
        return self.data[self.at - size : self.at]

    def string(self) -> str:
        return str(self.take(self.scalar("Q")), encoding="utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item_kind, count = self.scalar("I"), self.scalar("Q")
            if item_kind == _ARRAY:
                raise WeightError(f"{self.path} has an array of arrays in its header, which is not supported.")
            if item_kind == _STRING:
                return [self.string() for _ in range(count)]
            code = self.code(item_kind)
            return list(struct.unpack(f"<{count}{code}", self.take(count * struct.calcsize("<" + code))))
        return self.scalar(self.code(kind))

    def code(self, kind: int) -> str:
        """The struct code of a scalar type."""
        if kind not in _SCALARS:
            raise WeightError(f"{self.path} is damaged: its header has a value of unknown type {kind}; download it again.")
        return _SCALARS[kind]


def _read_header(path: Path) -> tuple[dict[str, Any], list[TensorInfo]]:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        data = np.memmap(path, mode="r")
    except FileNotFoundError:
        raise WeightError(f"{path} does not exist: expected a .gguf file.") from None
    except ValueError:
        raise WeightError(f"{path} is empty: download it again.") from None
    cursor = _Cursor(path, data.data)
    if bytes(data[:4]) != MAGIC:
        raise WeightError(f"{path} is not a GGUF file: it does not begin with {MAGIC.decode()!r}.")
    cursor.at = 4
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise WeightError(f"{path} is GGUF version {version}, but only versions 2 and 3 are supported: convert it again.")
    num_tensors, num_values = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(num_values)}
    listed: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(num_tensors):
        name, rank = cursor.string(), cursor.scalar("I")
        if rank > _MAX_RANK:
            raise WeightError(f"{path} is damaged: {_shown(name)} has {rank} dimensions (at most {_MAX_RANK}); download it again.")
        shape = tuple(cursor.scalar("Q") for _ in range(rank))[::-1]
        listed.append((name, shape, cursor.scalar("I"), cursor.scalar("Q")))
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not _is_integer(alignment) or alignment < 1 or alignment & (alignment - 1):
        raise WeightError(f"{path} is damaged: general.alignment must be a power of two, got {_short(alignment)}; download it again.")
    data_start = -(-cursor.at // alignment) * alignment
    infos = []
    for name, shape, kind, offset in listed:
        try:
            block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except ValueError:
            raise WeightError(
                f"{path} stores {_shown(name)} in ggml type {kind}, which the package gguf does not know: update it."
            ) from None
        if 0 in shape or (shape and shape[-1] % block_elements):
            raise WeightError(
                f"{path} is damaged: {_shown(name)} has the shape {list(shape)}, but sizes must be positive and rows whole blocks of "
                f"{block_elements}; download it again."
            )
        num_bytes = math.prod(shape) // block_elements * block_bytes
        info = TensorInfo(name=name, shape=shape, kind=kind, offset=data_start + offset, num_bytes=num_bytes)
        if info.offset + info.num_bytes > len(data):
            raise WeightError(f"{path} is truncated: it ends before the data of {_shown(name)}; download it again.")
        infos.append(info)
    if len({info.name for info in infos}) < len(infos):
        raise WeightError(f"{path} is damaged: two of its tensors have the same name; download it again.")
    return metadata, infos


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(name: str) -> str:
    """A tensor's name for a message: a damaged one may be anything."""
    return name if name.isprintable() and len(name) < _MAX_NAME else _short(name)


def _short(value: object) -> str:
    """The value for a message."""
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def read_metadata(path: Path) -> dict[str, Any]:
    """Key → value of a GGUF file's header, with arrays as lists. Raises `WeightError` for a missing or damaged file."""
    return _read_header(path)[0]


def read_gguf_config(path: Path) -> dict[str, Any]:
    """The config.json that corresponds to a GGUF file. Raises `WeightError` for an unsupported architecture."""
    metadata, tensors = _read_header(path)
    infos = {info.name: info for info in tensors}
    kind = metadata.get("general.architecture")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise WeightError(f"{path} holds a model of GGUF architecture {_short(kind)}, but only {supported} are supported.")

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{kind}.{key}", default)

    def get_float(key: str, default: float) -> float:
        value = get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise WeightError(f"{path} is damaged: {kind}.{key} must be a finite number, got {_short(value)}.")
        return _float32(value)

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": get_float("rope.freq_base", 10000.0)}
    scaling = get("rope.scaling.type", "none")
    if ROPE_FACTORS in infos:
        rope |= {"rope_type": "divisors", "divisors": _dequantize(path, infos[ROPE_FACTORS]).tolist()}
    elif scaling not in ("none", ""):
        rope |= {"rope_type": scaling, "factor": get_float("rope.scaling.factor", 1.0)}
    embedding = infos.get("token_embd.weight")
    config = {
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": embedding.shape[0] if embedding else get("vocab_size"),
        "hidden_size": get("embedding_length"),
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": get("attention.head_count"),
        "num_key_value_heads": get("attention.head_count_kv", get("attention.head_count")),
        "head_dim": get("attention.key_length", get("rope.dimension_count")),
        "hidden_act": "silu",
        "max_position_embeddings": get("context_length"),
        "rms_norm_eps": get_float("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_parameters": rope,
        "attention_bias": "blk.0.attn_q.bias" in infos,
        "mlp_bias": "blk.0.ffn_gate.bias" in infos,
        "tie_word_embeddings": "output.weight" not in infos,
    }
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[f"{ours}_token_id"] = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
    config["quantization_config"] = {"quant_method": "gguf", "tensors": _kept_kinds(tensors)}
    return {name: value for name, value in config.items() if value is not None}


def _kept_kinds(tensors: list[TensorInfo]) -> dict[str, str]:
    """Hugging Face's name → kind of blocks, for the matrices whose blocks the model may keep."""
    from gguf.constants import GGMLQuantizationType

    kinds = {info.name: GGMLQuantizationType(info.kind).name for info in tensors if len(info.shape) == 2}
    return {_hugging_face_name(name): kind for name, kind in kinds.items() if kind in GGUF_FORMATS}


def _float32(value: float) -> float:
    """The decimal number that was stored as float32: 1e-05 for 9.99999975e-06."""
    return float(f"{value:.7g}")


class GgufCheckpoint:
    """A GGUF file's tensors in float32, with Hugging Face's names and order of q and k rows.

    packed: names of the tensors whose blocks are kept, as uint8 [rows, bytes].
    """

    def __init__(self, path: Path, packed: frozenset[str] = frozenset()) -> None:
        metadata, infos = _read_header(path)
        kind = metadata.get("general.architecture")
        self._path = path
        self._infos = {_hugging_face_name(info.name): info for info in infos if info.name != ROPE_FACTORS}
        self._packed = packed & self._infos.keys()
        self.shapes = {
            name: (info.shape[0], info.num_bytes // info.shape[0]) if name in self._packed else info.shape
            for name, info in self._infos.items()
        }
        self._heads: dict[str, int] = {}
        if kind in _PERMUTED_ARCHITECTURES:
            num_heads = metadata.get(f"{kind}.attention.head_count", 1)
            self._heads = {"q_proj": num_heads, "k_proj": metadata.get(f"{kind}.attention.head_count_kv", num_heads)}
        for name, info in self._infos.items():
            heads = self._num_heads(name)
            if heads is not None and (not _is_integer(heads) or heads < 1 or info.shape[0] % (2 * heads)):
                raise WeightError(f"{path} is damaged: {info.name} has {info.shape[0]} rows for {_short(heads)} heads; download it again.")

    def stream(self, names: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
        jobs = ((name, partial(self._read, name)) for name in self._infos if name in names)
        yield from _run_ahead(jobs, num_threads=min(8, os.cpu_count() or 1))

    def _read(self, name: str) -> torch.Tensor:
        info = self._infos[name]
        if name in self._packed:
            tensor = torch.from_numpy(_bytes_of(self._path, info)).view(self.shapes[name])
        else:
            tensor = torch.from_numpy(_dequantize(self._path, info))
        num_heads = self._num_heads(name)
        return tensor if num_heads is None else unpermute(tensor, num_heads)

    def _num_heads(self, name: str) -> int | None:
        """Heads of a weight whose rows are permuted; None for the others."""
        return self._heads.get(name.split(".")[-2] if "." in name else "")


def unpermute(w_OI: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Reorder the rows of each head of E rows from interleaved rotary pairs (0, 1), (2, 3) … to halves (0, E/2), (1, E/2 + 1) …

    w_OI: a weight, or a bias [O].
    """
    return w_OI.unflatten(0, (num_heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


def _hugging_face_name(name: str) -> str:
    """Hugging Face's name for a GGUF tensor; an unknown name is unchanged."""
    stem, _, leaf = name.rpartition(".")
    if stem in _GLOBAL_NAMES:
        return f"{_GLOBAL_NAMES[stem]}.{leaf}"
    block, _, part = stem.removeprefix("blk.").partition(".")
    if stem.startswith("blk.") and part in _LAYER_NAMES:
        return f"model.layers.{block}.{_LAYER_NAMES[part]}.{leaf}"
    return name


def _bytes_of(path: Path, info: TensorInfo) -> np.ndarray:
    return np.fromfile(path, dtype=np.uint8, count=info.num_bytes, offset=info.offset)


def _dequantize(path: Path, info: TensorInfo) -> np.ndarray:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    raw = _bytes_of(path, info)
    kind = GGMLQuantizationType(info.kind)
    try:
        values = dequantize(raw.reshape(*info.shape[:-1], -1) if raw.size else raw, kind)
    except NotImplementedError:
        raise WeightError(
            f"{path} stores {info.name} as {kind.name}, which the package gguf cannot dequantize: use another format."
        ) from None
    return values.astype(np.float32, copy=False).reshape(info.shape)


def _run_ahead(jobs: Iterator[tuple[str, Callable[[], torch.Tensor]]], *, num_threads: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Results in order, computed by threads at most `num_threads` + 1 ahead, so that few tensors are in memory."""
    pending: deque[tuple[str, Future[torch.Tensor]]] = deque()
    with ThreadPoolExecutor(num_threads, thread_name_prefix="dequantize") as pool:
        for name, job in jobs:
            pending.append((name, pool.submit(job)))
            if len(pending) > num_threads:
                ready, future = pending.popleft()
                yield ready, future.result()
        while pending:
            ready, future = pending.popleft()
            yield ready, future.result()
