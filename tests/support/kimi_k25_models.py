"""Tiny random checkpoints of Kimi-K2.5 as they are published, and the tensors that transformers' class takes of images."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.moe_models import YARN

PATCH, MERGE, GROUP = 4, 2, 16
# Images of the tests have up to 210 patches, and up to 23 on a side.
SETTINGS: dict[str, Any] = {"max_patches": 200, "size": {"max_height": 20, "max_width": 20}}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP},
            "input_activations": None,
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
}
# Parts of a class's name of a tensor → those of the published name, in this order.
_PUBLISHED = (
    ("model.language_model.", "language_model.model."),
    ("lm_head.", "language_model.lm_head."),
    ("model.vision_tower.layers.", "vision_tower.encoder.blocks."),
    ("model.vision_tower.final_layernorm.", "vision_tower.encoder.final_layernorm."),
    ("model.vision_tower.patch_embed.pos_emb.position_embeddings", "vision_tower.patch_embed.pos_emb.weight"),
    ("model.vision_tower.", "vision_tower."),
    ("model.mm_projector.in_proj.", "mm_projector.proj.0."),
    ("model.mm_projector.out_proj.", "mm_projector.proj.2."),
    ("model.mm_projector.", "mm_projector."),
)
_OF_BLOCKS = (
    (".norm1.", ".norm0."),
    (".norm2.", ".norm1."),
    (".mlp.fc1.", ".mlp.fc0."),
    (".mlp.fc2.", ".mlp.fc1."),
    (".attn.proj.", ".wo."),
)
_OF_FIELDS = {
    "hidden_size": "vt_hidden_size",
    "intermediate_size": "vt_intermediate_size",
    "num_attention_heads": "vt_num_attention_heads",
    "num_hidden_layers": "vt_num_hidden_layers",
    "pos_emb_height": "init_pos_emb_height",
    "pos_emb_width": "init_pos_emb_width",
}


def text_config(sizes: dict[str, Any]) -> Any:
    latent = {
        "num_key_value_heads": 4,
        "q_lora_rank": 48,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
    }
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_group": 1, "topk_group": 1}
    return transformers.DeepseekV3Config(
        **{name: value for name, value in sizes.items() if name != "head_dim"} | latent | experts,
        first_k_dense_replace=1,
        routed_scaling_factor=1.7,
        num_mtp_layers=0,
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    )


def vision_config() -> Any:
    return transformers.models.kimi_k25.Kimi_K25VisionConfig(
        patch_size=PATCH,
        pos_emb_height=7,
        pos_emb_width=7,
        num_attention_heads=2,
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=48,
        initializer_range=0.3,
    )


def publish(model: Any, folder: Path) -> Any:
    """Write the weights under published names. → transformers' model, which has read them"""
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1)
        # The class embeds placeholders that the model itself generates as token 0.
        embeddings = model.get_input_embeddings().weight
        embeddings[[model.config.image_token_id, model.config.video_token_id]] = embeddings[0].clone()
    tensors: dict[str, torch.Tensor] = {}
    state = model.state_dict()
    heads = model.config.vision_config.num_attention_heads
    for name, tensor in state.items():
        stem, _, leaf = name.partition(".attn.q_proj.")
        if leaf:
            q, k, v = (state[f"{stem}.attn.{part}_proj.{leaf}"] for part in "qkv")
            tensors[f"{_published(stem)}.wqkv.{leaf}"] = torch.cat((_in_pairs(q, heads), _in_pairs(k, heads), v))
        elif ".experts." in name:
            for expert, matrix in enumerate(tensor):
                parts = {"gate_proj": matrix.chunk(2)[0], "up_proj": matrix.chunk(2)[1]} if "gate_up" in name else {"down_proj": matrix}
                begin = _published(name.rpartition(".")[0])
                tensors |= {f"{begin}.{expert}.{part}.weight": one for part, one in parts.items()}
        elif not any(f".attn.{part}_proj." in name for part in "kv") or "vision_tower" not in name:
            tensors[_published(name)] = tensor
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    save_file({name: one.clone() for name, one in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "preprocessor_config.json").write_text(json.dumps(SETTINGS))
    return type(model).from_pretrained(folder, dtype=torch.float32).eval()


def with_published_config(config: dict[str, Any]) -> dict[str, Any]:
    """A config.json of transformers' class under published names."""
    vision = {_OF_FIELDS.get(name, name): value for name, value in config["vision_config"].items()}
    settings = {"in_patch_limit": SETTINGS["max_patches"], "patch_limit_on_one_side": SETTINGS["size"]["max_height"]}
    return {
        **{name: value for name, value in config.items() if name != "image_token_id"},
        "architectures": ["KimiK25ForConditionalGeneration"],
        "media_placeholder_token_id": config["image_token_id"],
        "text_config": {**config["text_config"], "model_type": "kimi_k2"},
        "vision_config": {**vision, "merge_type": "sd2_tpool", "mm_projector_type": "patchmerger", "projector_ln_eps": 1e-5},
        "image_processor": {"media_proc_cfg": {**settings, "patch_size": PATCH, "merge_kernel_size": MERGE}},
    }


def with_experts_in_4_bits(folder: Path, plain: Path, published: Path) -> None:
    """Of a folder that `publish` wrote: `published` as Kimi-K2.5 comes, and `plain` with the same numbers and transformers' config."""
    tensors, dequantized = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, weight in load_file(folder / "model.safetensors").items():
        if ".mlp.experts." not in name:
            tensors[name] = dequantized[name] = weight
            continue
        groups = weight.unflatten(1, (-1, GROUP))
        scale = groups.abs().amax(-1) / 7.5
        codes = (groups / scale[..., None]).round().clamp(-8, 7)
        dequantized[name] = (codes * scale[..., None]).flatten(1)
        packed = ((codes.flatten(1) + 8).to(torch.int64).unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)).sum(-1)
        stem = name.removesuffix("weight")
        tensors[f"{stem}weight_packed"] = torch.where(packed < 2**31, packed, packed - 2**32).to(torch.int32)
        tensors |= {f"{stem}weight_scale": scale, f"{stem}weight_shape": torch.tensor(weight.shape)}
    config = json.loads((folder / "config.json").read_text())
    changed = with_published_config(config)
    changed["text_config"]["quantization_config"] = INT4
    for target, weights, one, settings in (
        (plain, dequantized, config, SETTINGS),
        (published, tensors, changed, changed.pop("image_processor")),
    ):
        target.mkdir()
        save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
        (target / "config.json").write_text(json.dumps(one))
        (target / "preprocessor_config.json").write_text(json.dumps(settings))


def image_inputs(images: Sequence[Any]) -> dict[str, torch.Tensor]:
    """What transformers' processor, which needs torchvision, would make of PIL images of any sizes."""
    from PIL.Image import Resampling

    resize, patches, grids = their_resize(), [], []
    for image in images:
        (height, width), (padded_height, padded_width) = resize(
            image.height, image.width, PATCH, MERGE, SETTINGS["max_patches"], SETTINGS["size"]["max_height"]
        )
        pixels = np.asarray(image.resize((width, height), Resampling.BICUBIC))
        pixels = np.pad(pixels, ((0, padded_height - height), (0, padded_width - width), (0, 0)))
        values = (torch.from_numpy(pixels).permute(2, 0, 1).float() / 255 - 0.5) / 0.5
        rows, columns = padded_height // PATCH, padded_width // PATCH
        patches.append(values.reshape(3, rows, PATCH, columns, PATCH).permute(1, 3, 0, 2, 4).reshape(rows * columns, 3, PATCH, PATCH))
        grids.append([1, rows, columns])
    return {"pixel_values": torch.cat(patches), "image_grid_thw": torch.tensor(grids)}


def their_resize() -> Callable[..., tuple[tuple[int, int], tuple[int, int]]]:
    """transformers' function for sizes, from a module that cannot be imported without torchvision."""
    file = Path(transformers.__file__).parent / "models" / "kimi_k25" / "image_processing_kimi_k25.py"
    functions = [one for one in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(one, ast.FunctionDef)]
    names: dict[str, Any] = {"math": math}
    exec(compile(ast.Module([one for one in functions if one.name == "navit_resize"], []), str(file), "exec"), names)
    return names["navit_resize"]


def _published(name: str) -> str:
    for own, published in _PUBLISHED:
        if own in name:
            name = name.replace(own, published)
            break
    if "encoder.blocks." in name:
        for own, published in _OF_BLOCKS:
            if own in name:
                return name.replace(own, published)
    return name


def _in_pairs(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of queries or keys whose halves RoPE rotates, in the order in which it rotates pairs of neighbours."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
