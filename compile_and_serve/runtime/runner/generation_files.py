"""What a model must know of its folder's generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compile_and_serve.models.families.whisper import ALIGNMENT_HEADS
from compile_and_serve.runtime.audio.speech_tokens import ALIGNMENT_REFUSED
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.json_files import read_json_object

_BEGINS = ("decoder_start_token_id", "forced_bos_token_id")


def with_generation_files(model_config: Mapping[str, Any], config: EngineConfig) -> dict[str, Any]:
    """The config with what generation_config.json says of how decoders with an encoder begin; of a Whisper model with its alignment heads,
    or with the reason why there are none.
    """
    given = read_json_object(config.model.path / "generation_config.json")
    begins = {name: given[name] for name in _BEGINS if given.get(name) is not None}
    if "WhisperForConditionalGeneration" not in (model_config.get("architectures") or ()):
        return {**model_config, **begins}
    heads = given.get("alignment_heads")
    if not heads:
        reason = "the model's generation_config.json has no alignment_heads"
    elif config.mesh.tensor > 1:
        reason = "they need a tensor parallel size of 1"
    elif config.cache.dtype == "int8":
        reason = "they need a KV cache of another dtype than int8"
    else:
        return {**model_config, ALIGNMENT_HEADS: heads}
    return {**model_config, ALIGNMENT_REFUSED: reason}
