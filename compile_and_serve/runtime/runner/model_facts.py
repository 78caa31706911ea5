"""What the options and a model's spec say about each other: limits, refusals, and facts for the engine."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import torch

from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.recurrent.cpu_kernels import cpu_unsupported_reason
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.models.vision.ahead import TOKENS_AHEAD
from compile_and_serve.runtime.config import EngineConfig, ModelConfig
from compile_and_serve.runtime.media.info import MediaInfo
from compile_and_serve.runtime.pooling.files import PoolingFilesError, max_text_tokens, pooling_type_of, prompts_of
from compile_and_serve.runtime.pooling.projections import output_width
from compile_and_serve.runtime.pooling.rerankers import pair_template
from compile_and_serve.runtime.pooling_params import PoolingInfo

log = logging.getLogger(__name__)


def max_model_len(config: EngineConfig, spec: ModelSpec) -> int:
    """The longest sequence in tokens. Raises `ValueError` if the positions end before the length that was asked for."""
    wanted = config.model.max_model_len
    if wanted is None:
        trained = None if spec.pooling is None else max_text_tokens(config.model)
        return spec.max_model_len if trained is None else min(trained, spec.max_model_len)
    if wanted > spec.max_model_len:
        raise ValueError(
            f"max_model_len is {wanted}, but the model's positions end at {spec.max_model_len}: lower --max-model-len, or extend them with "
            "--hf-overrides (rope_scaling, max_position_embeddings)."
        )
    return wanted


def pooling_info(config: EngineConfig, spec: ModelSpec) -> PoolingInfo | None:
    """What a pooling model computes; None for a model that generates."""
    pooling = spec.pooling
    if pooling is None:
        return None
    prompts, default = prompts_of(config.model)
    return PoolingInfo(
        kind=pooling.kind,
        width=output_width(config.model, pooling.width),
        activation=pooling.activation,
        labels=list(pooling.labels),
        pooling=pooling_type_of(config.model, pooling.pooling),
        is_normalized=pooling.is_normalized,
        prompts=prompts,
        default_prompt=default,
        keeps_specials=spec.whole_prompts,
        dimensions=_matryoshka_dimensions(spec.config),
        pair_template=pair_template(spec.config),
    )


def _matryoshka_dimensions(config: Mapping[str, Any]) -> list[int]:
    given = config.get("matryoshka_dimensions") or []
    if not isinstance(given, list) or not all(isinstance(one, int) and one > 0 for one in given):
        raise PoolingFilesError(f"matryoshka_dimensions in the model's config must be a list of lengths, got {given!r:.100}.")
    return given


def media_info(model: ModelConfig, spec: ModelSpec) -> MediaInfo:
    """What processes that prepare media are told."""
    return MediaInfo(
        config=json.dumps(dict(spec.config)).encode(),
        folder=str(model.path),
        limits={str(kind): int(count) for kind, count in (model.limit_mm_per_prompt or {}).items()},
        domains=list(model.allowed_media_domains),
        max_audio_seconds=model.max_audio_seconds,
        by_transformers=spec.encoder is not None and spec.encoder.eager_reason is not None,
        sees_ahead=TOKENS_AHEAD in spec.inputs,
        embeds=model.enable_mm_embeds,
    )


def check_speculation(spec: ModelSpec, num_tokens: int) -> None:
    """Raise `ValueError` with one sentence for a model that cannot check `num_tokens` draft tokens."""
    if spec.pooling is not None:
        raise ValueError("A pooling model generates no tokens: remove speculative_config.")
    recurrent = ", ".join(group.name for group in spec.state if not group.kind.can_roll_back(1))
    if recurrent:
        raise ValueError(
            f"The model keeps recurrent state ({recurrent}), from which rejected tokens cannot be removed: remove speculative_config."
        )
    for group in spec.state:
        if not group.kind.can_roll_back(num_tokens):
            raise ValueError(
                f"{group.kind.rollback_tokens} tokens at most can be removed from the model's state ({group.name}), but "
                f"num_speculative_tokens is {num_tokens}: lower it."
            )


def prefix_caching_unsupported(spec: ModelSpec) -> str | None:
    """Why other requests cannot reuse the model's cache, as a sentence; None: they can, or it has none."""
    if spec.whole_prompts and spec.state:
        return "the model reads whole prompts, so that the beginning of one depends on its end"
    recurrent = ", ".join(group.name for group in spec.state if not group.kind.is_shareable)
    return f"the model keeps recurrent state ({recurrent}), which no other request can take up" if recurrent else None


def flat_report(report: dict[str, Any]) -> dict[str, int | float | str]:
    """Numbers and strings of a compile report; those of a nested dict as `outer.inner`."""
    flat: dict[str, int | float | str] = {}
    for name, value in report.items():
        if isinstance(value, dict):
            flat |= {f"{name}.{inner}": inner_value for inner, inner_value in flat_report(value).items()}
        elif isinstance(value, (int, float, str)):
            flat[name] = value
    return flat


def recurrent_kernels(spec: ModelSpec, device: torch.device) -> dict[str, str]:
    """What the report says of recurrent layers on a CPU. A slow reference is logged, too."""
    groups = [group for group in spec.state if group.kind.unit == "slot"]
    if not groups or not platform_of(device).runs_cpp_kernels:
        return {}
    reason = next((found for group in groups if (found := cpu_unsupported_reason(group)) is not None), None)
    if reason is not None:
        log.warning("Recurrent layers run the slow torch reference: %s.", reason)
    return {"recurrent_kernels": "C++" if reason is None else f"torch reference: {reason}"}
