"""`CompiledDrafter`: a second model beside the target, compiled and loaded, whose cache lies under the target's block tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from compile_and_serve.compiler import available_kernels, compile_model
from compile_and_serve.compiler.model import Model
from compile_and_serve.custom_ops.attention.attention import AttentionBackend
from compile_and_serve.custom_ops.step import StateGroup
from compile_and_serve.models.drafters import DrafterSpec, draft_model
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.runner.attention_backends import backends_of_model
from compile_and_serve.runtime.runner.device import resolve_kv_cache_dtype
from compile_and_serve.runtime.weights import load_weights, read_config
from compile_and_serve.runtime.weights.loader import LoadReport

StageCallback = Callable[[str, float, str], None]


def build_drafter(config: EngineConfig, target: ModelSpec, dtype: torch.dtype) -> DrafterSpec | None:
    """The model that drafts for the target; None where the config names none. Raises the `ValueError` family with one sentence."""
    speculative = config.speculative
    if speculative is None or speculative.device_method is None:
        return None
    assert config.drafter_path is not None
    return draft_model(read_config(config.drafter_path), target, dtype=dtype, model_impl=config.model.model_impl)


@dataclass(kw_only=True)
class CompiledDrafter:
    """drafter: with the rank's part of its state. backends: by its attention groups. borrowed: its state group → the target's group whose
    block tables it uses. tokens_per_page: of its groups.
    """

    drafter: DrafterSpec
    model: Model
    backends: Mapping[str, AttentionBackend]
    borrowed: Mapping[str, str]
    cache_dtype: torch.dtype
    load: Callable[[], LoadReport]

    def page_bytes(self, tokens_per_page: Mapping[str, int]) -> int:
        """Bytes of its own that it keeps for each page. tokens_per_page: of the target's groups."""
        return sum(
            group.bytes_per_token(self.cache_dtype) * tokens_per_page[self.borrowed[group.name]]
            for group in self.drafter.spec.state
        )


def compile_drafter(
    config: EngineConfig, drafter: DrafterSpec, max_model_len: int, *, device: torch.device, dtype: torch.dtype,
    on_stage: StageCallback, rank: int = 0,
) -> CompiledDrafter:  # fmt: skip
    """Compile a drafter for one of the ranks that share the target. `load` of the result fills it.

    Raises the `ValueError` family with one sentence.
    """
    spec = drafter.spec
    if drafter.kind == "tokens" and spec.max_model_len < max_model_len:
        raise ValueError(
            f"The draft model's positions end at {spec.max_model_len}, but max_model_len is {max_model_len}: lower --max-model-len."
        )
    borrowed = {group.name: _borrowed(group, drafter.target) for group in spec.state}
    cache_dtype = resolve_kv_cache_dtype(config.cache.dtype, dtype)
    backends = backends_of_model(spec, config, device, dtype)
    dump_dir = config.compile.dump_dir
    options = replace(
        config.compile, max_loras=0, user_passes=(), quantization=None, quantization_exclude=None, profile_tokens=(),
        dump_dir=None if dump_dir is None else dump_dir / "drafter",
    )  # fmt: skip
    model = compile_model(
        spec, options, device=device, dtype=dtype,
        kernels=available_kernels(device=device, dtype=dtype, attention_backends=backends.values()),
        attention_backends=backends, kv_cache_dtype=cache_dtype,
        on_stage=lambda stage, seconds, detail: on_stage(f"drafter {stage}", seconds, detail),
    )  # fmt: skip
    path = config.drafter_path
    assert path is not None

    def load() -> LoadReport:
        return load_weights(
            model, spec, path, load_format=config.model.load_format, device=device, dtype=dtype, seed=config.model.seed,
            rank=rank,
        )  # fmt: skip

    size = config.num_ranks
    of_rank = replace(drafter, spec=replace(spec, state=tuple(group.of_rank(size) for group in spec.state)))
    return CompiledDrafter(
        drafter=of_rank, model=model, backends=backends, borrowed=borrowed, cache_dtype=cache_dtype, load=load
    )


def _borrowed(group: StateGroup, target: ModelSpec) -> str:
    """The target's group whose blocks hold every token that the drafter's group reads."""
    paged: list[Any] = [one for one in target.state if one.paged]
    for one in paged:
        same_window = (one.window, one.chunked) == (group.window, group.chunked)
        if one.window is None or same_window:
            return one.name
    windows = ", ".join(str(one.window) for one in paged)
    raise ValueError(
        f"The model keeps only the last tokens of a sequence (its window is {windows}), but the drafter reads "
        f"{'all' if group.window is None else group.window} of them: remove speculative_config."
    )
