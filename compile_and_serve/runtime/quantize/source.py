"""The unquantized model that is quantized, as a folder in Hugging Face's layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from compile_and_serve.runtime.text.load_tokenizer import load_tokenizer
from compile_and_serve.runtime.weights import read_config

_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")


def require_unquantized(path: Path) -> None:
    """Raise `ValueError` if the checkpoint in this folder is quantized already. (A .gguf file is dequantized instead.)"""
    if path.suffix != ".gguf" and read_config(path).get("quantization_config"):
        raise ValueError(f"{path} is quantized already (its config.json has a quantization_config): give the unquantized model.")


def write_weights(path: Path, folder: Path) -> None:
    """Write the weights of the .gguf file or folder `path` to `folder` in bfloat16, in Hugging Face's layout, and the config."""
    import torch
    from safetensors.torch import save_file

    from compile_and_serve.runtime.weights import iter_tensors

    config = read_config(path) | {"dtype": "bfloat16"}
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in iter_tensors(path)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def write_gguf_tokenizer(path: Path, folder: Path) -> None:
    """Write the tokenizer, chat template and end tokens of a .gguf file to `folder`, as Hugging Face stores them."""
    tokenizer = load_tokenizer(path)
    (folder / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if template := tokenizer.chat_templates.get("default"):
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    if ends := tokenizer.eos_token_ids:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}), encoding="utf-8")


def copy_other_files(source: Path, folder: Path) -> None:
    """Copy tokenizer, chat template and other small files that `folder` does not have yet."""
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith(_NOT_COPIED) and not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)
