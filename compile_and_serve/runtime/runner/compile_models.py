"""Compiles the engine's model, and the models beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from compile_and_serve.compiler import available_kernels, compile_model
from compile_and_serve.compiler.config import CompileConfig
from compile_and_serve.compiler.model import Model
from compile_and_serve.custom_ops.attention.attention import AttentionBackend
from compile_and_serve.custom_ops.mesh import ORIGIN, Coordinates
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.messages import StageCallback
from compile_and_serve.runtime.runner.attention_backends import backends_of_model
from compile_and_serve.runtime.runner.device import resolve_kv_cache_dtype, resolve_state_dtype
from compile_and_serve.runtime.runner.sleeping_weights import SleepingWeights
from compile_and_serve.runtime.runner.state_memory import PageLayout, allocate_state
from compile_and_serve.runtime.side_model import SideModel
from compile_and_serve.runtime.weights import load_weights
from compile_and_serve.runtime.weights.checkpoint import Checkpoint


def compile_spec(
    spec: ModelSpec,
    config: EngineConfig,
    backends: Mapping[str, AttentionBackend],
    *,
    device: torch.device,
    dtype: torch.dtype,
    on_stage: StageCallback,
    options: CompileConfig | None = None,
    stage: int | None = None,
    stage_seconds: Mapping[str, float] | None = None,
) -> Model:
    """`compile_model` with the engine's kernels and dtypes. backends: by attention group. options: None: the engine's."""
    return compile_model(
        spec,
        options or config.compile,
        device=device,
        dtype=dtype,
        kernels=available_kernels(device=device, dtype=dtype, attention_backends=backends.values()),
        attention_backends=backends,
        kv_cache_dtype=resolve_kv_cache_dtype(config.cache.dtype, dtype),
        state_dtype=resolve_state_dtype(config.cache.state_dtype),
        stage=stage,
        stage_seconds=stage_seconds,
        on_stage=on_stage,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SideModelCompiler:
    """Compiles models beside the engine's, for one of the ranks that share it."""

    config: EngineConfig
    device: torch.device
    dtype: torch.dtype
    on_stage: StageCallback
    coordinates: Coordinates

    def compile(
        self,
        spec: ModelSpec,
        title: str,
        path: Path,
        *,
        checkpoint: Callable[[], Checkpoint] | None = None,
        borrowed: Mapping[str, str] | None = None,
        backends: Mapping[str, AttentionBackend] | None = None,
    ) -> SideModel:
        """`load` of the result fills its weights.

        Without a `tp_plan` and state, each rank runs it whole. title: for the log and the dumps. path: of its checkpoint. checkpoint: what
        is read in place of it; None: it is read itself. borrowed: see `SideModel`. backends: None: they are chosen.
        Raises the `ValueError` family with one sentence.
        """
        config, device, dtype = self.config, self.device, self.dtype
        backends = backends_of_model(spec, config, device, dtype) if backends is None else backends
        dump_dir = config.compile.dump_dir
        is_whole = not spec.tp_plan and not spec.state
        options = replace(
            config.compile,
            tensor_parallel_size=1 if is_whole else config.compile.tensor_parallel_size,
            enable_expert_parallel=config.compile.enable_expert_parallel and not is_whole,
            max_loras=0,
            user_passes=(),
            quantization=None,
            quantization_exclude=None,
            profile_tokens=(),
            dump_dir=None if dump_dir is None else dump_dir / title,
        )
        if spec.eager_reason is not None:
            options = replace(options, mode="eager", disabled_passes=frozenset(), forced_passes=frozenset())

        def report(stage: str, seconds: float, detail: str) -> None:
            self.on_stage(f"{title} {stage}", seconds, detail)

        model = compile_spec(spec, config, backends, device=device, dtype=dtype, on_stage=report, options=options)

        if spec.eager_reason is not None:
            model.report |= {"reason": spec.eager_reason}

        def load() -> None:
            start = time.perf_counter()
            load_weights(
                model,
                spec,
                path,
                load_format=config.model.load_format,
                device=device,
                dtype=dtype,
                seed=config.model.seed,
                coordinates=ORIGIN if is_whole else self.coordinates,
                checkpoint=None if checkpoint is None else checkpoint(),
                fold_cache_scales=config.cache.dtype == "fp8",
            )
            report("load", time.perf_counter() - start, str(path))

        return SideModel(
            spec=replace(spec, state=tuple(group.of_rank(options.mesh) for group in spec.state)),
            model=model,
            backends=backends,
            borrowed=borrowed or {},
            cache_dtype=resolve_kv_cache_dtype(config.cache.dtype, dtype),
            load=load,
        )


def allocate_side_state(
    side: SideModel, tokens_per_page: Mapping[str, int], num_pages: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Its keys and values, zeroed, by name. tokens_per_page: of the groups of the engine's model. num_pages: of that model."""
    state: dict[str, torch.Tensor] = {}
    for group in side.spec.state:
        layout = PageLayout.of([group], tokens_per_page[side.borrowed[group.name]], side.cache_dtype)
        state |= allocate_state([group], layout, num_pages, device=device)
    return state


def sleeping_weights(model: Model, load: Callable[[], object], *beside: SideModel | None) -> SleepingWeights:
    """The weights of a model and of those beside it. load: fills the model's from the checkpoint."""
    sides = [one for one in beside if one is not None]

    def load_all() -> None:
        for load_one in (load, *(one.load for one in sides)):
            load_one()

    return SleepingWeights([*model.weight_memory(), *(tensor for one in sides for tensor in one.weight_memory())], load_all)
