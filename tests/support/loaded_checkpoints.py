"""Small checkpoints that tests quantize, and what models compute that have read a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from compile_and_serve.compiler import CompileConfig, compile_model
from compile_and_serve.compiler.model import Model
from compile_and_serve.models.registry import build_model
from compile_and_serve.runtime.weights import load_weights, read_config
from tests.support.tiny_models import caches, step

CPU = torch.device("cpu")
EAGER = CompileConfig(mode="eager")
KERNELS = frozenset({"rope_attention", "fused_linear"})
TOKENS = [5, 6, 7, 8, 200, 41]


def write_plain(folder: Path, dtype: torch.dtype, family: str = "Llama", **changes: Any) -> Path:
    """A random model of transformers with 2 layers and 4 heads of 32 features. Biases are not 0."""
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 320, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "initializer_range": 0.08}
    config = getattr(transformers, f"{family}Config")(**(sizes | {"tie_word_embeddings": False} | changes))
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return folder


def load(path: Path, config: CompileConfig = EAGER, dtype: torch.dtype = torch.float32, requantize: bool = False, **options: Any) -> Model:
    """A model with a checkpoint's weights. options: of `load_weights`."""
    spec = build_model(read_config(path), dtype=dtype, requantize=requantize)
    model = compile_model(spec, config, device=CPU, dtype=dtype, kernels=KERNELS)
    load_weights(model, spec, path, **({"load_format": "auto", "device": CPU, "dtype": dtype, "seed": 0} | options))
    return model


def logits(model: Model, cache_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return step(model, TOKENS, 0, caches(model.spec, cache_dtype))  # type: ignore[attr-defined]
