"""How many tokens a block of the KV cache has, and what the report says of decodes of latent attention then."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compile_and_serve.custom_ops.attention import flash_mla
from compile_and_serve.custom_ops.platforms.cpu import CpuPlatform
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.state.kind import StateTensor
from compile_and_serve.custom_ops.state.recurrent import Recurrent, RecurrentLayer
from compile_and_serve.custom_ops.state.tokens import KVCacheSpec, LatentCacheSpec
from compile_and_serve.models.spec import full_attention
from compile_and_serve.runtime.config import CacheConfig, EngineConfig, ModelConfig
from compile_and_serve.runtime.runner.block_size import latent_decode_kernels, with_block_size

CPU, BF16, FP8 = torch.device("cpu"), torch.bfloat16, torch.float8_e4m3fn
LATENT = full_attention([LatentCacheSpec(latent_size=512, rope_size=64)] * 3)
FULL = full_attention([KVCacheSpec(num_kv_heads=2, head_dim=64)])


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuPlatform, "runs_cuda_kernels", True)
    monkeypatch.setattr(CpuPlatform, "compute_capability", (9, 0))
    monkeypatch.setattr(flash_mla, "_load", lambda: None)


SMALL = StateGroup(name="slots", layers=(RecurrentLayer(parts=(StateTensor(shape=(3, 128, 64)),)),), kind=Recurrent())
LARGE = StateGroup(
    name="slots", layers=(RecurrentLayer(parts=(StateTensor(shape=(3, 128, 1000)),)),), kind=Recurrent()
)  # pages of 128 tokens


def config_of(backend: str | None = None, **cache: Any) -> EngineConfig:
    return EngineConfig(model=ModelConfig(model="m", path=Path("m")), cache=CacheConfig(**cache), attention_backend=backend)


@pytest.mark.parametrize(
    ("config", "groups", "cache_dtype", "size", "said"),
    [
        (config_of(), [LATENT], BF16, 64, "FlashMLA"),
        (config_of("triton"), [LATENT, SMALL], BF16, 64, "FlashMLA"),
        (config_of(block_size=64), [LATENT], BF16, 64, "FlashMLA"),
        (config_of(block_size=16), [LATENT], BF16, 16, "Triton: FlashMLA needs pages of 64 tokens, not 16"),
        (config_of(block_size=128), [LATENT], BF16, 128, "Triton: FlashMLA needs pages of 64 tokens, not 128"),
        (config_of(), [LATENT, LARGE], BF16, 16, "Triton: FlashMLA needs pages of 64 tokens, not 144"),
        (config_of(), [LATENT], FP8, 16, f"Triton: FlashMLA is used for a cache in bfloat16, not {FP8}"),
        (config_of("torch"), [LATENT], BF16, 16, None),
        (config_of(), [FULL], BF16, 16, None),
        (config_of(), [], BF16, 16, None),
    ],
)
def test_the_block_size_is_what_flash_mla_needs_where_it_runs(
    config: EngineConfig, groups: list[StateGroup], cache_dtype: torch.dtype, size: int, said: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="compile_and_serve.runtime"):
        found = with_block_size(config, groups, CPU, BF16, cache_dtype)
    assert found == replace(config, cache=replace(config.cache, block_size=size))
    assert ("have 64 tokens: FlashMLA needs them" in caplog.text) is (size == 64 != config.cache.block_size)
    backends: Any = {group.name: SimpleNamespace(name=config.attention_backend or "triton") for group in groups}
    assert latent_decode_kernels(found, groups, backends, CPU, BF16, cache_dtype) == ({} if said is None else {"latent_decodes": said})


def test_elsewhere_it_is_16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_mla, "_load", lambda: "FlashMLA is not installed (package sgl-flash-mla)")
    assert with_block_size(config_of(), [LATENT], CPU, BF16, BF16).cache.block_size == 16
    monkeypatch.undo()
    assert with_block_size(config_of(), [LATENT], CPU, BF16, BF16).cache.block_size == 16
