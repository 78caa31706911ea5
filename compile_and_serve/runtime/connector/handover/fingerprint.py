"""What two engines must have alike to hand blocks to each other. Numbers of ranks may differ."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256

from compile_and_serve import __version__
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.connector.tiers.fingerprint import contents_of


def handover_fingerprint(config: EngineConfig, dtype: str) -> str:
    """Of the model's files, the options that change keys and values, and the drafter, if it keeps some. dtype: of the model."""
    model, cache, compiled = config.model, config.cache, config.compile
    digest = sha256()
    options = (model.model_impl, model.hf_overrides, model.load_format, model.load_format == "dummy" and model.seed, dtype)
    kept = (cache.dtype, cache.state_dtype, cache.tokens_per_block, compiled.quantization, compiled.quantization_exclude)
    drafter = None if config.speculative is None or config.drafter_path is None else replace(config.speculative, model=None).method
    digest.update(repr((__version__, options, kept, drafter)).encode())
    for path in (model.path, config.drafter_path, model.merge_lora):
        for part in () if path is None else contents_of(path):
            digest.update(sha256(part).digest())
    return digest.hexdigest()[:32]
