"""Builds, compiles and loads the model that drafts, beside the target."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from compile_and_serve.custom_ops.attention.attention import AttentionBackend
from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.step import HIDDEN_STATES
from compile_and_serve.models.drafters.drafter_spec import HEAD, DrafterSpec
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.runtime.config import EngineConfig
from compile_and_serve.runtime.drafting.compiled_drafter import CompiledDrafter
from compile_and_serve.runtime.drafting.method import method_of
from compile_and_serve.runtime.runner.compile_models import SideModelCompiler
from compile_and_serve.runtime.runner.model_facts import check_speculation, max_model_len
from compile_and_serve.runtime.side_model import SideModel
from compile_and_serve.runtime.weights import WeightError, open_checkpoint
from compile_and_serve.runtime.weights.checkpoint import Checkpoint
from compile_and_serve.runtime.weights.joined import JoinedCheckpoint, open_drafter

log = logging.getLogger(__name__)


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


def compile_drafter(compiler: SideModelCompiler, drafter: DrafterSpec) -> CompiledDrafter:
    """Compile a drafter beside its target. `load` of the result fills it. Raises the `ValueError` family with one sentence."""
    config = compiler.config
    path = config.drafter_path or config.model.path
    own = None if config.model.load_format == "dummy" else open_drafter(path)

    def compile_part(part: DrafterSpec, title: str, backends: Mapping[str, AttentionBackend] | None = None) -> SideModel:
        checkpoint = None if own is None else partial(_joined, own, part, config)
        spec = replace(part.spec, state=tuple(_in_window(group, part.target) for group in part.spec.state))
        part = replace(part, spec=spec)
        borrowed = {group.name: _borrowed(group, part.target) for group in part.spec.state}
        return compiler.compile(part.spec, title, path, checkpoint=checkpoint, borrowed=borrowed, backends=backends)

    side = compile_part(drafter, "drafter")
    layers = enumerate(drafter.later_layers, start=2)
    behind = tuple(compile_part(one, f"drafter layer {number}", side.backends) for number, one in layers)
    context = None
    if drafter.context is not None:
        context = compile_part(replace(drafter, spec=drafter.context, borrowed_weights={}), "drafter context", side.backends)
    extras = _extras(drafter, {} if own is None else own.shapes, path, compiler.device, compiler.dtype)

    def load() -> None:
        side.load()
        if own is None:
            for name, tensor in extras.items():
                tensor.zero_() if name == "d2t" else tensor.fill_(1.0 / tensor.shape[-1])
        else:
            _read_extras(own, extras)
            _check_token_map(extras, drafter.target.vocab_size, path)
        for one in compiled.others:
            one.load()

    beside = {**vars(side), "load": load}
    drafter = replace(drafter, spec=side.spec)
    compiled = CompiledDrafter(**beside, drafter=drafter, extras=extras, hidden_dtype=compiler.dtype, behind=behind, context=context)
    return compiled


def _joined(own: Checkpoint, drafter: DrafterSpec, config: EngineConfig) -> JoinedCheckpoint:
    """The drafter's tensors, with those of the target that it lacks."""
    weight_map = drafter.spec.weight_map
    present = {weight_map.get(name, name) for name in own.shapes}
    lacking = {name: held for name, held in drafter.borrowed_weights.items() if name not in present}
    rows = {}
    if drafter.maps_tokens and HEAD in lacking and "d2t" in own.shapes:
        for _, offsets in own.stream({"d2t"}):
            rows[HEAD] = offsets.long() + torch.arange(len(offsets))
    return JoinedCheckpoint(own, lambda: open_checkpoint(config.model.path), lambda name: name.startswith(drafter.prefix), lacking, rows)


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


def _read_extras(own: Checkpoint, extras: Mapping[str, torch.Tensor]) -> None:
    """Fill them. A checkpoint may hold a matrix in 8 bits, with a scale for each row or one for all."""
    scales = {f"{name}_scale" for name in extras} & own.shapes.keys()
    read = dict(own.stream(set(extras) | scales))
    for name, tensor in extras.items():
        if name in read:
            scale = read.get(f"{name}_scale")
            tensor.copy_(read[name] if scale is None else read[name].float() * scale.float())


def _check_token_map(extras: Mapping[str, torch.Tensor], vocab_size: int, path: Path) -> None:
    if "d2t" not in extras:
        return
    ids = extras["d2t"].cpu() + torch.arange(len(extras["d2t"]))
    if not bool(((ids >= 0) & (ids < vocab_size)).all()):
        raise WeightError(f"d2t in {path} maps tokens to ids outside of the model's {vocab_size}: use a drafter of this model.")


def _in_window(group: StateGroup, target: ModelSpec) -> StateGroup:
    """The group. Where the target keeps no more than the last tokens of a sequence, the drafter reads no others either."""
    kinds = [one.kind for one in target.state if one.is_attention]
    if not kinds or any(kind.covers(group.kind) for kind in kinds):
        return group
    windows = [kind for kind in kinds if kind.unit == "tokens" and kind.window is not None]
    if not windows or group.kind.window is not None:
        return group
    widest = max(windows, key=lambda kind: kind.window or 0)
    log.info("The drafter reads the last %s tokens of a sequence, since the model keeps no others", widest.window)
    return replace(group, kind=widest)


def _borrowed(group: StateGroup, target: ModelSpec) -> str:
    """The target's group whose blocks hold every token that the drafter's group reads."""
    for one in target.state:
        if one.kind.covers(group.kind):
            return one.name
    if not any(one.is_attention for one in target.state):
        raise ValueError("The model keeps no tokens, in whose pages the drafter would keep its own: use the method ngram or suffix.")
    windows = ", ".join(str(one.kind.window) for one in target.state if one.kind.window is not None)
    raise ValueError(
        f"The model keeps only the last tokens of a sequence (its window is {windows}), but the drafter reads {group.kind.window} of them: "
        "remove speculative_config."
    )
