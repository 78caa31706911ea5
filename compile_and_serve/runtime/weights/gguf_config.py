"""The config.json that corresponds to a GGUF file. Every key of the file is read, or known to change nothing, or the file is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from compile_and_serve.models.quantization.gguf import GGUF_FORMATS
from compile_and_serve.runtime.weights.errors import WeightError
from compile_and_serve.runtime.weights.gguf_architectures import (
    ARCHITECTURES,
    EXPECTED,
    KEYS,
    LONG_FACTORS,
    NO_EFFECT,
    ROPE_FACTORS,
    SHORT_FACTORS,
    Architecture,
)
from compile_and_serve.runtime.weights.gguf_file import GgufFile, is_integer, read_gguf, short, shown
from compile_and_serve.runtime.weights.gguf_tensors import EXPERT, dequantized, names_of

_READ_APART = frozenset(
    """
    rope.freq_base rope.freq_base_swa rope.dimension_count rope.scale_linear rope.scaling.type rope.scaling.factor
    rope.scaling.original_context_length rope.scaling.attn_factor rope.scaling.yarn_log_multiplier rope.scaling.yarn_ext_factor
    rope.scaling.yarn_attn_factor rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow attention.value_length
    attention.sliding_window_pattern
    """.split()
)


def architecture_of(file: GgufFile) -> Architecture:
    """The file's row of the table. Raises `WeightError` for an unsupported architecture."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise WeightError(f"{file.path} holds a model of GGUF architecture {short(name)}, but only {supported} are supported.")
    return next(row for row in ARCHITECTURES[name] if row.fits is None or row.fits(file))


def read_gguf_config(path: Path) -> dict[str, Any]:
    """The config.json of a GGUF file. Raises `WeightError` for an unsupported architecture, and for a key that is not supported."""
    file = read_gguf(path)
    row = architecture_of(file)
    keys = _Keys(file)
    config: dict[str, Any] = {"architectures": [row.model], "model_type": row.model_type, **row.fields}
    for key, field in {**KEYS, **row.keys}.items():
        value = keys.get(key)
        if value is None or (value == 0 and key in EXPECTED and 0 in EXPECTED[key]):
            continue
        config[field] = _float32(value) if isinstance(value, float) else value
    embedding = file.tensors.get("token_embd.weight")
    config["vocab_size"] = embedding.shape[0] if embedding else keys.get("vocab_size")
    config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    config.setdefault("intermediate_size", config.get("moe_intermediate_size"))
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config |= {field: file.has(tensor) for field, tensor in row.flags.items()}
    head_dim = config.get("head_dim")
    wrong = [name for name in ("hidden_size", "num_hidden_layers", "num_attention_heads") if not _is_size(config.get(name))]
    if head_dim is None and not wrong and "key_length" not in config:
        head_dim = config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    _check_keys(keys, row)
    config["rope_parameters"] = _rope(keys, row, config)
    if wrong:
        raise WeightError(f"{path} is damaged: its {wrong[0]} must be a positive integer, got {short(config.get(wrong[0]))}.")
    if "head_dim" in config and keys.get("attention.value_length", head_dim) != head_dim:
        raise keys.unsupported("attention.value_length")
    pattern = keys.get("attention.sliding_window_pattern")
    if isinstance(pattern, list):  # whether each layer has the window
        config["layer_types"] = ["sliding_attention" if has_window else "full_attention" for has_window in pattern]
    elif pattern is not None:
        config["sliding_window_pattern"] = pattern
    for name, value_of in row.derived.items():
        config[name] = value_of(file, config)
    config |= _token_ids(file)
    quantization = {"quant_method": "gguf", "tensors": _kept_kinds(file, row)} if row.quantization is None else row.quantization
    if quantization:
        config["quantization_config"] = quantization
    # Null is a value where the class has another default.
    return {name: value for name, value in config.items() if value is not None or name in row.fields or name.endswith("_token_id")}


def _is_size(value: object) -> bool:
    return isinstance(value, int) and is_integer(value) and value > 0


class _Keys:
    """The metadata of the file's architecture, checked. used: keys that were read."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.prefix = f"{file.metadata['general.architecture']}."

    def get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(self.prefix + key, default)

    def number(self, key: str, default: float) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise WeightError(f"{self.file.path} is damaged: {self.prefix}{key} must be a finite number, got {short(value)}.")
        return _float32(value)

    def unsupported(self, key: str) -> WeightError:
        what = f"{shown(self.prefix + key)} to {short(self.get(key))}"
        return WeightError(
            f"{self.file.path} sets {what}, which is not supported for this architecture and may change what the model computes: use "
            "another file of the model, or its safetensors."
        )


def _check_keys(keys: _Keys, row: Architecture) -> None:
    """Raise `WeightError` for a key that is not read and that may change numbers."""
    read = {*KEYS, *row.keys, *_READ_APART, *NO_EFFECT}
    expected = {**EXPECTED, **row.expected}
    for name, value in keys.file.metadata.items():
        key = name.removeprefix(keys.prefix)
        if key == name or key in read:
            continue
        if key not in expected or value not in expected[key]:
            raise keys.unsupported(key)
    window_keys = ("rope.freq_base_swa", "attention.sliding_window_pattern")
    for key in () if row.window_rope_theta is not None else window_keys:
        if keys.get(key) is not None and keys.get("attention.sliding_window"):
            raise keys.unsupported(key)
    for key in (*KEYS, *row.keys):
        if isinstance(keys.get(key), list):  # of another number for each layer
            raise keys.unsupported(key)


def _rope(keys: _Keys, row: Architecture, config: dict[str, Any]) -> dict[str, Any]:
    """rope_parameters. llama.cpp takes a file without a type of scaling, but with a factor, as linear."""
    file = keys.file
    theta = keys.number("rope.freq_base", row.rope.get("rope_theta", 10000.0))
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 0.0))
    kind = keys.get("rope.scaling.type") or ("linear" if factor not in (0.0, 1.0) else "none")
    magnitude = keys.number("rope.scaling.attn_factor", 1.0) * keys.number("rope.scaling.yarn_attn_factor", 1.0)
    rope: dict[str, Any] = {"rope_type": "default", **row.rope, "rope_theta": theta}
    if ROPE_FACTORS in file.tensors:
        if kind not in ("none", "linear") or factor not in (0.0, 1.0):
            raise keys.unsupported("rope.scaling.type")
        rope |= {"rope_type": "divisors", "divisors": dequantized(file.tensors[ROPE_FACTORS]).tolist()}
    elif LONG_FACTORS in file.tensors:
        rope |= _long_rope(keys, magnitude)
        magnitude = 1.0
    elif kind == "linear":
        rope |= {"rope_type": "linear", "factor": factor} if factor not in (0.0, 1.0) else {}
    elif kind == "yarn":
        rope |= _yarn(keys, row, factor or 1.0, magnitude)
        magnitude = 1.0
    elif kind != "none":
        raise keys.unsupported("rope.scaling.type")
    if magnitude != 1.0:
        raise keys.unsupported("rope.scaling.attn_factor")
    if "llama_4_scaling_beta" in config:
        rope["llama_4_scaling_beta"] = config.pop("llama_4_scaling_beta")
    rope_size, head_dim = keys.get("rope.dimension_count"), config.get("head_dim")
    if rope_size is not None and head_dim is not None and rope_size != head_dim:
        if not row.partial_rope:
            raise keys.unsupported("rope.dimension_count")
        rope["partial_rotary_factor"] = rope_size / head_dim
    if row.window_rope_theta is None:
        return rope
    window = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", row.window_rope_theta)}
    return {"full_attention": rope, "sliding_attention": window}


def _yarn(keys: _Keys, row: Architecture, factor: float, magnitude: float) -> dict[str, Any]:
    if keys.number("rope.scaling.yarn_ext_factor", 1.0) not in (1.0, -1.0):  # -1: llama.cpp's default, which is 1
        raise keys.unsupported("rope.scaling.yarn_ext_factor")
    yarn: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.get("rope.scaling.original_context_length", keys.get("context_length")),
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
    }
    log = keys.number("rope.scaling.yarn_log_multiplier", 0.0)
    if log and row.mscale_of_log is None:
        raise keys.unsupported("rope.scaling.yarn_log_multiplier")
    if log and row.mscale_of_log is not None:
        yarn |= dict.fromkeys(("mscale", "mscale_all_dim"), _float32(log * row.mscale_of_log))
    if magnitude != 1.0:
        if log:
            raise keys.unsupported("rope.scaling.attn_factor")
        yarn["attention_factor"] = magnitude * (0.1 * math.log(factor) + 1.0)
    return yarn


def _long_rope(keys: _Keys, magnitude: float) -> dict[str, Any]:
    tensors = keys.file.tensors
    if SHORT_FACTORS not in tensors:
        raise WeightError(f"{keys.file.path} has {LONG_FACTORS} but not {SHORT_FACTORS}: download it again.")
    length = keys.get("context_length")
    original = keys.get("rope.scaling.original_context_length", length)
    if not _is_size(length) or not _is_size(original):
        raise WeightError(f"{keys.file.path} is damaged: its context lengths must be positive integers, got {short(length)}.")
    return {
        "rope_type": "longrope",
        "long_factor": dequantized(tensors[LONG_FACTORS]).tolist(),
        "short_factor": dequantized(tensors[SHORT_FACTORS]).tolist(),
        "original_max_position_embeddings": original,
        "factor": length / original,
        "attention_factor": magnitude,
    }


def _token_ids(file: GgufFile) -> dict[str, Any]:
    found = {
        ours: file.metadata.get(f"tokenizer.ggml.{theirs}_token_id")
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
    }
    return {f"{name}_token_id": value for name, value in found.items()}


def _kept_kinds(file: GgufFile, row: Architecture) -> dict[str, str]:
    """Hugging Face's name → kind of blocks, for the matrices whose blocks the model may keep; of stacked experts, one name for all."""
    found: dict[str, str] = {}
    for name, info in file.tensors.items():
        if info.kind_name in GGUF_FORMATS:
            ours = names_of(name, row)
            if len(info.shape) == (3 if EXPERT in ours[0] else 2):
                found |= dict.fromkeys(ours, info.kind_name)
    return found


def _float32(value: float) -> float:
    """The decimal number that was stored as float32: 1e-05 for 9.99999975e-06."""
    return float(f"{value:.7g}")
