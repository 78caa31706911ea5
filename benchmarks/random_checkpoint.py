"""A checkpoint of random weights for a config.json, as a Hugging Face folder and as a GGUF file, so that peers run the same model."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch


def write_folder(config_folder: Path, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """transformers' own initial weights for the config."""
    import transformers

    config = json.loads((config_folder / "config.json").read_text())
    model_class = getattr(transformers, config["architectures"][0])
    torch.manual_seed(0)
    model_class(model_class.config_class.from_pretrained(config_folder)).to(dtype).save_pretrained(folder)


def write_gguf(folder: Path, file: Path) -> None:
    """The folder's weights as llama.cpp's converter writes them: matrices in bfloat16, the rest in float32; without a tokenizer.

    Raises `ValueError` for an architecture that is not written here.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, TensorNameMap, get_tensor_name_map
    from gguf.quants import quantize
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    architecture = config["architectures"][0]
    if architecture not in _WRITERS:
        raise ValueError(f"{architecture} is not written as GGUF here: only {', '.join(_WRITERS)}.")
    name, write_sizes, convert = _WRITERS[architecture]
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    writer = GGUFWriter(file, name)
    write_sizes(writer, config, tensors)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    names: TensorNameMap = get_tensor_name_map(_architecture_of(name), config["num_hidden_layers"])
    for theirs, tensor in tensors.items():
        if theirs == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        found = names.get_name(theirs.replace(".dt_bias", ".dt.bias"), try_suffixes=(".weight", ".bias"))
        if found is None:
            raise ValueError(f"llama.cpp has no name for {theirs}.")
        values = convert(theirs, tensor.float(), config).contiguous().numpy()
        # What is no matrix of a product stays in float32.
        if values.ndim == 2 and min(values.shape) > 4 and not theirs.endswith("norm.weight"):
            writer.add_tensor(found, quantize(values, GGMLQuantizationType.BF16), raw_dtype=GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(found, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _architecture_of(name: str) -> Any:
    from gguf import MODEL_ARCH, MODEL_ARCH_NAMES

    return next(architecture for architecture in MODEL_ARCH if MODEL_ARCH_NAMES[architecture] == name)


def _write_lfm2_sizes(writer: Any, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    num_layers = config["num_hidden_layers"]
    attending = {int(name.split(".")[2]) for name in tensors if ".self_attn.q_proj" in name}
    theta = (config.get("rope_parameters") or {}).get("rope_theta", config.get("rope_theta", 1e6))
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(num_layers)
    writer.add_feed_forward_length(tensors["model.layers.0.feed_forward.w1.weight"].shape[0])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv([config["num_key_value_heads"] if i in attending else 0 for i in range(num_layers)])
    writer.add_rope_freq_base(theta)
    writer.add_layer_norm_rms_eps(config["norm_eps"])
    writer.add_shortconv_l_cache(config["conv_L_cache"])


def _convert_lfm2(name: str, tensor: torch.Tensor, config: Mapping[str, Any]) -> torch.Tensor:
    return tensor.squeeze(1) if name.endswith("conv.conv.weight") else tensor


def _write_mamba2_sizes(writer: Any, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    writer.add_context_length(1 << 20)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_layer_norm_rms_eps(config.get("layer_norm_epsilon", 1e-5))
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_inner_size(config["num_heads"] * config["head_dim"])
    writer.add_ssm_state_size(config["state_size"])
    writer.add_ssm_time_step_rank(config["num_heads"])
    writer.add_ssm_group_count(config["n_groups"])


def _convert_mamba2(name: str, tensor: torch.Tensor, config: Mapping[str, Any]) -> torch.Tensor:
    if name.endswith("A_log"):
        return -tensor.exp()[:, None]
    if name.endswith(".D"):
        return tensor[:, None]
    if name.endswith("conv1d.weight"):
        return tensor.squeeze(1)
    return tensor.view(config["n_groups"], -1) if name.endswith("mixer.norm.weight") else tensor


# By Hugging Face architecture: llama.cpp's name, what writes its sizes, and what brings a tensor into its shape.
_SizeWriter = Callable[[Any, Mapping[str, Any], Mapping[str, torch.Tensor]], None]
_Converter = Callable[[str, torch.Tensor, Mapping[str, Any]], torch.Tensor]
_WRITERS: dict[str, tuple[str, _SizeWriter, _Converter]] = {
    "Lfm2ForCausalLM": ("lfm2", _write_lfm2_sizes, _convert_lfm2),
    "Mamba2ForCausalLM": ("mamba2", _write_mamba2_sizes, _convert_mamba2),
}
