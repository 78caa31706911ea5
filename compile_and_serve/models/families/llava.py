"""LLaVA with a SigLIP tower: each patch of an image of fixed size becomes one token of a Llama, Mistral, Qwen2 or Qwen3 decoder.

Shape legend: T tokens of the step (patches, in the encoder), D width of the encoder, P positions of patches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as functional
from torch import nn

from compile_and_serve.custom_ops.attention.encoder_attention import encoder_attention
from compile_and_serve.custom_ops.stored_weight import ArrangedWeight, StoredTensor
from compile_and_serve.models.config import DecoderConfig, UnsupportedConfigError, number, positive_int
from compile_and_serve.models.decoder_spec import decoder_spec
from compile_and_serve.models.families import register_model
from compile_and_serve.models.families.llama import LlamaAttention, LlamaDecoderLayer
from compile_and_serve.models.families.qwen2 import Qwen2Attention
from compile_and_serve.models.families.qwen3 import Qwen3Attention
from compile_and_serve.models.layers import RotaryEmbedding
from compile_and_serve.models.meta_device import meta_device
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.models.vision.decoder import VisionLanguageForCausalLM, with_encoder
from compile_and_serve.models.vision.names import GRID, PATCHES
from compile_and_serve.models.vision.patch_config import TowerConfig, vision_config
from compile_and_serve.models.vision.patches import array_input, flatten_inputs, normalization
from compile_and_serve.models.vision.rope import text_config

_ATTENTION: Mapping[str, Callable[[DecoderConfig], nn.Module]] = {
    "llama": LlamaAttention,
    "mistral": LlamaAttention,
    "qwen2": Qwen2Attention,
    "qwen3": Qwen3Attention,
}
_HEAD = ("attention.in_proj_", "attention.out_proj.", "layernorm.", "mlp.fc1.", "mlp.fc2.")  # of the tower, which pools


class TowerAttention(nn.Module):
    """Attention of patches to those of their image. [T, D] → the same"""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.head_dim = width // num_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        q, k, v = (linear(x_TD).unflatten(-1, (-1, self.head_dim))[:, None] for linear in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(encoder_attention(q, k, v, self.head_dim**-0.5).flatten(1))


class TowerMlp(nn.Module):
    def __init__(self, width: int, intermediate_size: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, intermediate_size), nn.Linear(intermediate_size, width)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.fc2(functional.gelu(self.fc1(x_TD), approximate="tanh"))


class TowerLayer(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        width, eps = positive_int(config, "hidden_size"), number(config, "layer_norm_eps", 1e-6)
        self.layer_norm1, self.layer_norm2 = nn.LayerNorm(width, eps=eps), nn.LayerNorm(width, eps=eps)
        self.self_attn = TowerAttention(width, positive_int(config, "num_attention_heads"))
        self.mlp = TowerMlp(width, positive_int(config, "intermediate_size"))

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        x_TD = x_TD + self.self_attn(self.layer_norm1(x_TD))
        return x_TD + self.mlp(self.layer_norm2(x_TD))


class TowerEmbeddings(nn.Module):
    def __init__(self, tower: TowerConfig, width: int) -> None:
        super().__init__()
        self.columns = tower.columns
        self.patch_embedding = nn.Linear(tower.values, width)
        self.position_embedding = nn.Embedding(tower.num_patches, width)

    def forward(self, x_TF: torch.Tensor, grid_T4: torch.Tensor) -> torch.Tensor:
        return self.patch_embedding(x_TF) + self.position_embedding(grid_T4[:, 0] * self.columns + grid_T4[:, 1])


class Tower(nn.Module):
    mean: torch.Tensor
    std: torch.Tensor

    def __init__(self, config: Mapping[str, Any], tower: TowerConfig, num_layers: int) -> None:
        super().__init__()
        self.embeddings = TowerEmbeddings(tower, positive_int(config, "hidden_size"))
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(TowerLayer(config) for _ in range(num_layers))})
        for name, value in normalization(tower).items():
            self.register_buffer(name, value, persistent=False)

    def forward(self, patches_TF: torch.Tensor, grid_T4: torch.Tensor) -> torch.Tensor:
        x_TF = (patches_TF.to(torch.float32) * (1 / 255) - self.mean) / self.std
        x_TD = self.embeddings(x_TF.to(self.embeddings.patch_embedding.weight.dtype), grid_T4)
        for layer in self.encoder["layers"]:  # type: ignore[attr-defined]
            x_TD = layer(x_TD)
        return x_TD


class Projector(nn.Module):
    def __init__(self, width: int, out_size: int, *, bias: bool) -> None:
        super().__init__()
        self.linear_1, self.linear_2 = nn.Linear(width, out_size, bias=bias), nn.Linear(out_size, out_size, bias=bias)

    def forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        return self.linear_2(functional.gelu(self.linear_1(x_TD)))


class LlavaEncoder(nn.Module):
    """forward(patches uint8 [T, F], grid int32 [T, 4]) → rows [T, out_size]"""

    def __init__(self, vision: Mapping[str, Any], tower: TowerConfig, num_layers: int, out_size: int, *, bias: bool) -> None:
        super().__init__()
        self.vision_tower = Tower(vision, tower, num_layers)
        self.multi_modal_projector = Projector(positive_int(vision, "hidden_size"), out_size, bias=bias)

    def forward(self, patches: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return self.multi_modal_projector(self.vision_tower(patches, grid))


def build(config: Mapping[str, Any], dtype: torch.dtype) -> ModelSpec:
    text, vision = text_config(config), vision_config(config)
    attention = _ATTENTION.get(str(text.get("model_type")))
    layer, layers = config.get("vision_feature_layer", -2), positive_int(vision, "num_hidden_layers")
    is_read = (
        attention is not None
        and vision.get("model_type") == "siglip_vision_model"
        and vision.get("hidden_act", "gelu_pytorch_tanh") == "gelu_pytorch_tanh"
        and config.get("vision_feature_select_strategy") == "full"
        and isinstance(layer, int)
        and config.get("projector_hidden_act", "gelu") == "gelu"
        and not text.get("sliding_window")
    )
    if attention is None or not is_read or not isinstance(layer, int):
        raise UnsupportedConfigError("LLaVA runs natively with a SigLIP tower, all of whose patches are read, and a decoder like Llama.")
    if layer == -1:
        raise UnsupportedConfigError("vision_feature_layer is -1: the last layer's norm is not read.")
    num_layers = layer if layer >= 0 else layers + 1 + layer
    decoder, tower = DecoderConfig.from_dict(text), TowerConfig.read(config)

    def make() -> nn.Module:
        made = (LlamaDecoderLayer(decoder, attention(decoder)) for _ in range(decoder.num_hidden_layers))
        return VisionLanguageForCausalLM(decoder, made, rope=RotaryEmbedding)

    width, name = positive_int(vision, "hidden_size"), "vision_tower.embeddings.patch_embedding.weight"
    shape = (width, tower.channels, tower.patch_size, tower.patch_size)
    unused = [f"vision_tower.head.{part}{kind}" for part in _HEAD for kind in ("weight", "bias")]
    unused += ["vision_tower.head.probe", *(f"vision_tower.post_layernorm.{kind}" for kind in ("weight", "bias"))]
    with meta_device():
        later = [name for name, _ in TowerLayer(vision).named_parameters()]
    unused += [f"vision_tower.encoder.layers.{i}.{name}" for i in range(num_layers, layers) for name in later]
    return with_encoder(
        decoder_spec(make, decoder, config, dtype),
        decoder,
        config,
        dtype,
        lambda: LlavaEncoder(vision, tower, num_layers, decoder.hidden_size, bias=bool(config.get("multimodal_projector_bias", True))),
        inputs=(array_input(PATCHES, torch.uint8, (tower.values,)), array_input(GRID, torch.int32, (4,))),
        buffers={f"vision_tower.{key}": value for key, value in normalization(tower).items()},
        stored={name: ArrangedWeight(value=(flatten_inputs, name), tensors=(StoredTensor(name=name, shape=shape, dtype=dtype),))},
        max_item_tokens=tower.num_patches,
        prefixes=("model.", ""),
        unused=unused,
        longer_names=("vision_tower.", "vision_tower.vision_model."),
    )


register_model("LlavaForConditionalGeneration", build, features=("full attention", "images"))
