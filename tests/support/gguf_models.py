"""GGUF files of tiny random models, as llama.cpp's converter writes them: names from the package gguf, rows in ggml's order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import quantize

from tests.support.transformers_models import SIZES

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A tiny model. changes: of the config. without: names of `SIZES` that its config lacks. keys: of the file, after the architecture.

    arrange: what the converter does with the tensors, by Hugging Face's names.
    """

    architecture: str
    model: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    keys: Mapping[str, Any] = field(default_factory=dict)
    arrange: Callable[[Tensors, Any], Tensors] = lambda tensors, config: tensors


def interleaved(tensors: Tensors, config: Any) -> Tensors:
    """Rows of queries and keys with rotary pairs side by side."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    found = {}
    for name, tensor in tensors.items():
        count = heads.get(name.split(".")[-2])
        found[name] = tensor if count is None else tensor.unflatten(0, (count, 2, -1)).transpose(1, 2).flatten(0, 2)
    return found


def with_one_added(tensors: Tensors, config: Any) -> Tensors:
    """Gemma's norms, by which llama.cpp multiplies."""
    return {name: tensor + 1.0 if "norm" in name else tensor for name, tensor in tensors.items()}


def one_after_the_other(tensors: Tensors, config: Any) -> Tensors:
    """Falcon's groups of heads as queries, keys, values."""
    found = {}
    for name, tensor in tensors.items():
        if "query_key_value" in name:
            kv = config.num_kv_heads if config.new_decoder_architecture else 1
            size = config.hidden_size // config.num_attention_heads
            groups = tensor.unflatten(0, (kv, -1, size))
            tensor = torch.cat([groups[:, :-2].flatten(0, 2), groups[:, -2].flatten(0, 1), groups[:, -1].flatten(0, 1)])
        found[name] = tensor
    return found


def one_dimension_less(tensors: Tensors, config: Any) -> Tensors:
    return {name: tensor.squeeze(0) if name.endswith("shared_expert_gate.weight") else tensor for name, tensor in tensors.items()}


def absorbed(tensors: Tensors, config: Any) -> Tensors:
    """DeepSeek's kv_b as a matrix for keys and one for values."""
    found = {}
    for name, tensor in tensors.items():
        if "kv_b_proj" in name:
            heads = tensor.unflatten(0, (config.num_attention_heads, -1))
            keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], 1)
            found |= {name.replace("kv_b", "k_b"): keys.transpose(1, 2), name.replace("kv_b", "v_b"): values}
        else:
            found[name] = tensor
    return found


def experts_apart(tensors: Tensors, config: Any) -> Tensors:
    """gpt-oss's experts: gate and up columns alternate, and matrices are [inputs, outputs]. Sinks are a weight."""
    found = {}
    for name, tensor in tensors.items():
        stem, _, leaf = name.rpartition(".")
        if leaf == "sinks":
            found[f"{name}.weight"] = tensor
            continue
        if leaf.startswith("gate_up_proj"):
            rows = tensor if leaf.endswith("bias") else tensor.transpose(1, 2)
            kind = "bias" if leaf.endswith("bias") else "weight"
            found |= {f"{stem}.gate_proj.{kind}": rows[:, ::2], f"{stem}.up_proj.{kind}": rows[:, 1::2]}
        elif leaf.startswith("down_proj") and stem.endswith("experts"):
            found[f"{stem}.down_proj.{'bias' if leaf.endswith('bias') else 'weight'}"] = (
                tensor if leaf.endswith("bias") else tensor.transpose(1, 2)
            )
        else:
            found[name] = tensor
    return found


def write_model(file: Path, case: Case, model: Any, kind: str = "F32", parts: int = 1, only: str = "") -> Path:
    """Write the model's file, or its parts. kind: of matrices whose rows are whole blocks; only: those with this in their names.

    → the file, or the first part
    """
    config = model.config
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == case.architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    tied = set(model.all_tied_weights_keys)
    tensors = {name: tensor.float() for name, tensor in model.state_dict().items() if name not in tied}
    written: dict[str, torch.Tensor] = {}
    rope = getattr(config, "rope_parameters", None) or {}
    for which in ("long", "short"):  # LongRoPE's factors are tensors
        if f"{which}_factor" in rope:
            written[f"rope_factors_{which}.weight"] = torch.tensor(rope[f"{which}_factor"])
    for name, tensor in _without_stacks(case.arrange(tensors, config)).items():
        ours = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert ours is not None, name
        written[ours] = tensor
    files = [file] if parts == 1 else [file.with_name(f"{file.stem}-{i:05}-of-{parts:05}.gguf") for i in range(1, parts + 1)]
    for part, path in enumerate(files):
        writer = gguf.GGUFWriter(path, case.architecture)
        if part == 0:
            _add_keys(writer, case, config)
        if parts > 1:
            writer.add_uint16("split.no", part)
            writer.add_uint16("split.count", parts)
            writer.add_int32("split.tensors.count", len(written))
        for name in list(written)[part::parts]:
            _add_tensor(writer, name, np.ascontiguousarray(written[name].numpy()), kind if only in name else "F32")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return files[0]


def _without_stacks(tensors: Tensors) -> Tensors:
    """Gate and up rows of experts apart, under names that the package knows; the other names are Hugging Face's."""
    found = {}
    for name, tensor in tensors.items():
        stem, _, leaf = name.rpartition(".")
        if leaf in ("gate_up_proj", "down_proj") and tensor.dim() == 3 and stem.endswith("experts"):
            parts = {"down_proj": tensor} if leaf == "down_proj" else dict(zip(("gate_proj", "up_proj"), tensor.chunk(2, 1), strict=True))
            found |= {f"{stem}.{part}.weight": rows for part, rows in parts.items()}
        else:
            found[name.replace("e_score_correction_bias", "e_score_correction.bias")] = tensor
    return found


def _add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, kind: str) -> None:
    ggml = gguf.GGMLQuantizationType[kind]
    block = gguf.GGML_QUANT_SIZES[ggml][0]
    if values.ndim < 2 or values.shape[-1] % block or "norm" in name or kind == "F32":
        writer.add_tensor(name, values)
    else:
        writer.add_tensor(name, quantize(values, ggml), raw_dtype=ggml)


def _add_keys(writer: gguf.GGUFWriter, case: Case, config: Any) -> None:
    common: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": getattr(config, "intermediate_size", None) or getattr(config, "ffn_hidden_size", None),
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": getattr(config, "num_key_value_heads", None) or SIZES["num_key_value_heads"],
        "rope.freq_base": 10000.0,
    }
    if getattr(config, "head_dim", None) and case.architecture not in ("deepseek2", "falcon"):
        common |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if getattr(config, "rms_norm_eps", None):
        common["attention.layer_norm_rms_epsilon"] = config.rms_norm_eps
    for key, value in {**common, **case.keys}.items():
        if value is not None:
            add_key(writer, f"{case.architecture}.{key}", value)


def add_key(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add a value with the type that the converter writes."""
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    kinds[type(value)](key, value)
