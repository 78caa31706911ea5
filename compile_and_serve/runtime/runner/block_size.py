"""How many tokens a block of the KV cache has, where the options do not say, and which kernels run decodes of latent attention then."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch

from compile_and_serve.custom_ops.attention.attention import AttentionBackend
from compile_and_serve.custom_ops.attention.flash_mla import FLASH_MLA_PAGE, flash_mla_unsupported_reason
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.state.tokens import LatentCacheSpec
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.runner.state_memory import PageLayout

logger = logging.getLogger(__name__)


def with_block_size(
    config: EngineConfig, groups: Sequence[StateGroup], device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype
) -> EngineConfig:
    """The config with its cache's block size decided: if the options say none, 64 where FlashMLA then runs latent attention's decodes.

    groups: of the whole model. dtype: of the model. cache_dtype: of the KV cache.
    """
    size = config.cache.tokens_per_block
    if config.cache.block_size is None and config.attention_backend in (None, "triton"):
        reasons = _flash_mla_reasons(config, groups, FLASH_MLA_PAGE, device, dtype, cache_dtype)
        if reasons and not any(reasons.values()):
            size = FLASH_MLA_PAGE
            logger.info(
                "Blocks of the KV cache have %d tokens: FlashMLA needs them. With --block-size 16 Triton's kernel runs instead.", size
            )
    return replace(config, cache=replace(config.cache, block_size=size))


def latent_decode_kernels(
    config: EngineConfig,
    groups: Sequence[StateGroup],
    backends: Mapping[str, AttentionBackend],
    device: torch.device,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
) -> dict[str, str]:
    """What the report says of decodes of latent attention; nothing where there are none, or their backend is another one than `triton`."""
    reasons = _flash_mla_reasons(config, groups, config.cache.tokens_per_block, device, dtype, cache_dtype)
    said = [f"Triton: {reason}" if reason else "FlashMLA" for name, reason in reasons.items() if backends[name].name == "triton"]
    return {"latent_decodes": "; ".join(dict.fromkeys(said))} if said else {}


def _flash_mla_reasons(
    config: EngineConfig, groups: Sequence[StateGroup], block_size: int, device: torch.device, dtype: torch.dtype, cache_dtype: torch.dtype
) -> dict[str, str | None]:
    """By name of each group of latent caches, why FlashMLA does not run its decodes; None: it does."""
    own = [group.of_rank(config.mesh) for group in groups]
    pages = PageLayout.of(own, block_size, cache_dtype).tokens_per_page
    reasons = {}
    for group in own:
        if "latent" in group.features:
            layer = cast(LatentCacheSpec, group.layers[0])
            sizes = layer.latent_size, layer.rope_size, pages[group.name]
            reasons[group.name] = flash_mla_unsupported_reason(device, dtype, cache_dtype, *sizes)
    return reasons
