"""Writes a Whisper model in CTranslate2's files as a folder in Hugging Face's layout.

    python -m benchmarks.whisper_files FOLDER OUT

FOLDER: config.json, model.bin and tokenizer.json, in float32 or float16. model.bin is a list of named arrays. CTranslate2 merges the
projections of queries, keys and values, and gives keys a bias of zeros, which the original has not.
"""

from __future__ import annotations

import argparse
import json
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

_DTYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
_PARTS = {  # of a layer: its name there → here, or the names of what is merged
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "ffn/layer_norm": ("final_layer_norm",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
}
_KINDS = {"weight": "weight", "bias": "bias", "gamma": "weight", "beta": "bias"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    convert(given.folder, given.out)


def convert(folder: Path, out: Path) -> None:
    """Write `out`. Raises `ValueError` for files of another model."""
    arrays = read_arrays(folder / "model.bin")
    if "encoder/conv1/weight" not in arrays:
        raise ValueError(f"{folder} has no Whisper model.")
    tensors: dict[str, torch.Tensor] = {}
    for name, array in arrays.items():
        side, _, rest = name.partition("/")
        if rest.startswith("layer_") and not rest.startswith("layer_norm"):
            layer, _, rest = rest.partition("/")
            part, _, kind = rest.rpartition("/")
            names = _PARTS[part]
            for one, values in zip(names, np.split(array, len(names)), strict=True):
                if not (one.endswith("k_proj") and kind == "bias"):
                    tensors[f"model.{side}.layers.{layer[6:]}.{one}.{_KINDS[kind]}"] = _tensor(values)
        elif rest.startswith(("conv", "layer_norm")):
            part, _, kind = rest.rpartition("/")
            tensors[f"model.{side}.{part}.{_KINDS[kind]}"] = _tensor(array)
    tensors["model.decoder.embed_tokens.weight"] = _tensor(arrays["decoder/embeddings/weight"])
    for side in ("encoder", "decoder"):
        tensors[f"model.{side}.embed_positions.weight"] = _tensor(arrays[f"{side}/position_encodings/encodings"])
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    stated = json.loads((folder / "config.json").read_text())
    tokens = {one["content"]: one["id"] for one in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]}
    config = _config(arrays, tensors, tokens)
    (out / "config.json").write_text(json.dumps(config, indent=1))
    (out / "generation_config.json").write_text(json.dumps(_generation(stated, tokens, config), indent=1))
    shutil.copy(folder / "tokenizer.json", out)


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a model.bin by name; those with two names have the first."""
    data, at = path.read_bytes(), 0

    def number(kind: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from("<" + kind, data, at)
        at += struct.calcsize("<" + kind)
        return int(value)

    def text() -> str:
        nonlocal at
        size = number("H")
        at += size
        return data[at - size : at - 1].decode()

    number("I")  # the format's version
    text()  # the model's kind
    number("I")
    arrays: dict[str, np.ndarray] = {}
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        dtype = _DTYPES.get(number("B"))
        size = number("I")
        if dtype is None:
            raise ValueError(f"{name} in {path} has a dtype that is not read: convert the model to float32 or float16.")
        arrays[name] = np.frombuffer(data, dtype, size // np.dtype(dtype).itemsize, at).reshape(shape)
        at += size
    return arrays


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.float32))


def _config(arrays: dict[str, np.ndarray], tensors: dict[str, torch.Tensor], tokens: dict[str, int]) -> dict[str, Any]:
    vocab_size, width = tensors["model.decoder.embed_tokens.weight"].shape
    config: dict[str, Any] = {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "dtype": "float32",
        "d_model": width,
        "vocab_size": vocab_size,
        "num_mel_bins": arrays["encoder/conv1/weight"].shape[1],
        "max_source_positions": tensors["model.encoder.embed_positions.weight"].shape[0],
        "max_target_positions": tensors["model.decoder.embed_positions.weight"].shape[0],
        "bos_token_id": tokens["<|endoftext|>"],
        "eos_token_id": tokens["<|endoftext|>"],
        "pad_token_id": tokens["<|endoftext|>"],
        "decoder_start_token_id": tokens["<|startoftranscript|>"],
    }
    for side in ("encoder", "decoder"):
        layers = {name.split(".")[3] for name in tensors if name.startswith(f"model.{side}.layers.")}
        config |= {
            f"{side}_layers": len(layers),
            f"{side}_attention_heads": int(arrays[f"{side}/num_heads"]),
            f"{side}_ffn_dim": tensors[f"model.{side}.layers.0.fc1.weight"].shape[0],
        }
    return config


def _generation(stated: dict[str, Any], tokens: dict[str, int], config: dict[str, Any]) -> dict[str, Any]:
    is_multilingual = config["vocab_size"] >= 51865
    generation = {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": config["eos_token_id"],
        "pad_token_id": config["pad_token_id"],
        "decoder_start_token_id": config["decoder_start_token_id"],
        "no_timestamps_token_id": tokens["<|notimestamps|>"],
        "prev_sot_token_id": tokens["<|startofprev|>"],
        "is_multilingual": is_multilingual,
        "alignment_heads": stated.get("alignment_heads"),
        "suppress_tokens": stated.get("suppress_ids"),
        "begin_suppress_tokens": stated.get("suppress_ids_begin"),
        "max_initial_timestamp_index": 50,
        "max_length": config["max_target_positions"],
        "return_timestamps": False,
    }
    if is_multilingual:
        languages = [(name, number) for name, number in tokens.items() if number in set(stated.get("lang_ids") or ())]
        generation |= {"lang_to_id": dict(languages), "task_to_id": {task: tokens[f"<|{task}|>"] for task in ("transcribe", "translate")}}
    return generation


if __name__ == "__main__":
    main()
