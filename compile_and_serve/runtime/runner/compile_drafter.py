"""Builds, compiles and loads the model that drafts, beside the target."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from compile_and_serve.compiler import available_kernels, compile_model
from compile_and_serve.compiler.model import Model
from compile_and_serve.custom_ops.attention.attention import AttentionBackend
from compile_and_serve.custom_ops.mesh import ORIGIN, Coordinates
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.step import HIDDEN_STATES
from compile_and_serve.models.drafters.drafter_spec import DrafterSpec
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.drafting.compiled_drafter import CompiledDrafter
from compile_and_serve.runtime.drafting.method import method_of
from compile_and_serve.runtime.runner.attention_backends import backends_of_model
from compile_and_serve.runtime.runner.device import resolve_kv_cache_dtype
from compile_and_serve.runtime.runner.model_facts import check_speculation, max_model_len
from compile_and_serve.runtime.runner.sleeping_weights import SleepingWeights
from compile_and_serve.runtime.runner.state_memory import PageLayout, allocate_state
from compile_and_serve.runtime.weights import WeightError, load_weights, open_checkpoint
from compile_and_serve.runtime.weights.checkpoint import Checkpoint
from compile_and_serve.runtime.weights.joined import JoinedCheckpoint, open_drafter

StageCallback = Callable[[str, float, str], None]


def build_drafter(config: EngineConfig, target: ModelSpec, dtype: torch.dtype) -> DrafterSpec | None:
    """The model that drafts for the target; None where there is none. Raises the `ValueError` family with one sentence, also for a target
    that cannot check drafts.
    """
    speculative = config.speculative
    if speculative is None:
        return None
    device_drafts, num_tokens = method_of(speculative).device, speculative.num_speculative_tokens
    check_speculation(target, num_tokens)
    drafter = None if device_drafts is None else device_drafts().build_model(config, target, dtype)
    if drafter is None:
        return None
    if drafter.max_tokens is not None and num_tokens > drafter.max_tokens:
        raise ValueError(f"The drafter makes {drafter.max_tokens} tokens at a time, but num_speculative_tokens is {num_tokens}: lower it.")
    limit = max_model_len(config, target)
    if drafter.max_model_len is not None and drafter.max_model_len < limit:
        raise ValueError(
            f"The draft model's positions end at {drafter.max_model_len}, but max_model_len is {limit}: lower --max-model-len."
        )
    return drafter


def compile_drafter(
    config: EngineConfig,
    drafter: DrafterSpec,
    *,
    device: torch.device,
    dtype: torch.dtype,
    on_stage: StageCallback,
    coordinates: Coordinates = ORIGIN,
    backends: Mapping[str, AttentionBackend] | None = None,
    title: str = "drafter",
) -> CompiledDrafter:
    """Compile a drafter for one of the ranks that share the target. `load` of the result fills it.

    backends: by its attention groups; None: they are chosen. title: for the log and the dumps.
    Raises the `ValueError` family with one sentence.
    """
    spec = drafter.spec
    borrowed = {group.name: _borrowed(group, drafter.target) for group in spec.state}
    cache_dtype = resolve_kv_cache_dtype(config.cache.dtype, dtype)
    if backends is None:
        backends = dict(backends_of_model(spec, config, device, dtype))
    dump_dir = config.compile.dump_dir
    options = replace(
        config.compile,
        max_loras=0,
        user_passes=(),
        quantization=None,
        quantization_exclude=None,
        profile_tokens=(),
        dump_dir=None if dump_dir is None else dump_dir / title,
    )
    model = compile_model(
        spec,
        options,
        device=device,
        dtype=dtype,
        kernels=available_kernels(device=device, dtype=dtype, attention_backends=backends.values()),
        attention_backends=backends,
        kv_cache_dtype=cache_dtype,
        on_stage=lambda stage, seconds, detail: on_stage(f"{title} {stage}", seconds, detail),
    )
    compile_other = partial(
        compile_drafter, config, device=device, dtype=dtype, on_stage=on_stage, coordinates=coordinates, backends=backends
    )
    behind = tuple(compile_other(one, title=f"drafter layer {number}") for number, one in enumerate(drafter.later_layers, start=2))
    context = None
    if drafter.context is not None:
        spec_of_context = replace(drafter, spec=drafter.context, context=None, borrowed_weights={})
        context = compile_other(spec_of_context, title="drafter context")
    path = config.drafter_path or config.model.path
    is_dummy = config.model.load_format == "dummy"
    own = None if is_dummy else open_drafter(path)
    extras = _extras(drafter, {} if own is None else own.shapes, path, device, dtype)

    def load() -> None:
        start = time.perf_counter()
        checkpoint = None if own is None else _joined(own, drafter, config)
        load_weights(
            model,
            spec,
            path,
            load_format=config.model.load_format,
            device=device,
            dtype=dtype,
            seed=config.model.seed,
            coordinates=coordinates,
            checkpoint=checkpoint,
            fold_cache_scales=config.cache.dtype == "fp8",
        )
        if own is None:
            for name, tensor in extras.items():
                tensor.zero_() if name == "d2t" else tensor.fill_(1.0 / tensor.shape[-1])
        else:
            for name, tensor in own.stream(set(extras)):
                extras[name].copy_(tensor)
            _check_token_map(extras, drafter.target.vocab_size, path)
        on_stage(f"{title} load", time.perf_counter() - start, str(path))
        for one in behind if context is None else (*behind, context):
            one.load()

    of_rank = replace(drafter, spec=replace(spec, state=tuple(group.of_rank(config.mesh) for group in spec.state)))
    return CompiledDrafter(
        drafter=of_rank,
        model=model,
        backends=backends,
        borrowed=borrowed,
        cache_dtype=cache_dtype,
        extras=extras,
        hidden_dtype=dtype,
        behind=behind,
        context=context,
        load=load,
    )


def sleeping_weights(model: Model, drafter: CompiledDrafter | None, load: Callable[[], object]) -> SleepingWeights:
    """The weights of a model and of its drafter. load: fills the model's from the checkpoint."""
    if drafter is None:
        return SleepingWeights(model.weight_memory(), load)

    def load_both() -> None:
        load()
        drafter.load()

    return SleepingWeights([*model.weight_memory(), *drafter.weight_memory()], load_both)


def _joined(own: Checkpoint, drafter: DrafterSpec, config: EngineConfig) -> JoinedCheckpoint:
    """The drafter's tensors, with those of the target that it lacks."""
    weight_map = drafter.spec.weight_map
    present = {weight_map.get(name, name) for name in own.shapes}
    lacking = {name: held for name, held in drafter.borrowed_weights.items() if name not in present}
    return JoinedCheckpoint(own, lambda: open_checkpoint(config.model.path), lambda name: name.startswith(drafter.prefix), lacking)


def _extras(
    drafter: DrafterSpec, shapes: Mapping[str, tuple[int, ...]], path: Path, device: torch.device, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    expected: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    if drafter.combine:
        size = next(one for one in drafter.target.outputs if one.name == HIDDEN_STATES).dims[1]
        expected["fc.weight"] = ((drafter.hidden_size, int(size)), dtype)
        if "fc.bias" in shapes:
            expected["fc.bias"] = ((drafter.hidden_size,), dtype)
    if drafter.maps_tokens:
        head = drafter.spec.module.get_parameter("lm_head.weight")
        expected["d2t"] = ((head.shape[0],), torch.int64)
    for name, (shape, _) in expected.items():
        if shapes and shapes.get(name) != shape:
            found = f"has shape {list(shapes[name])}" if name in shapes else "is missing"
            raise WeightError(f"{name} in {path} {found}, but must have shape {list(shape)}: use a drafter of this model.")
    return {name: torch.zeros(shape, dtype=kind, device=device) for name, (shape, kind) in expected.items()}


def _check_token_map(extras: Mapping[str, torch.Tensor], vocab_size: int, path: Path) -> None:
    if "d2t" not in extras:
        return
    ids = extras["d2t"].cpu() + torch.arange(len(extras["d2t"]))
    if not bool(((ids >= 0) & (ids < vocab_size)).all()):
        raise WeightError(f"d2t in {path} maps tokens to ids outside of the model's {vocab_size}: use a drafter of this model.")


def _borrowed(group: StateGroup, target: ModelSpec) -> str:
    """The target's group whose blocks hold every token that the drafter's group reads."""
    for one in target.state:
        if one.kind.covers(group.kind):
            return one.name
    windows = ", ".join(str(one.kind.window) for one in target.state if one.kind.window is not None)
    raise ValueError(
        f"The model keeps only the last tokens of a sequence (its window is {windows}), but the drafter reads "
        f"{'all' if group.kind.window is None else group.kind.window} of them: remove speculative_config."
    )


def allocate_drafter_state(
    compiled: CompiledDrafter, tokens_per_page: Mapping[str, int], num_pages: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """The keys and values of a drafter, zeroed, by name. tokens_per_page: of the target's groups. num_pages: of the target."""
    state: dict[str, torch.Tensor] = {}
    for group in compiled.drafter.spec.state:
        layout = PageLayout.of([group], tokens_per_page[compiled.borrowed[group.name]], compiled.cache_dtype)
        state |= allocate_state([group], layout, num_pages, device=device)
    return state
