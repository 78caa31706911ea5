"""Where weights come from: names and files, safetensors and GGUF, random ones; and how they reach a compiled model."""

from runtime.weights.checkpoint import iter_tensors, open_checkpoint, read_config
from runtime.weights.errors import WeightError
from runtime.weights.loader import LoadReport, load_weights
from runtime.weights.resolve import KNOWN_MODELS, resolve_model, user_cache_dir

__all__ = [
    "KNOWN_MODELS",
    "LoadReport",
    "WeightError",
    "iter_tensors",
    "load_weights",
    "open_checkpoint",
    "read_config",
    "resolve_model",
    "user_cache_dir",
]
