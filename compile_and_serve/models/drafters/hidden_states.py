"""`with_hidden_states`: any decoder gets an output of hidden states, of chosen layers.

Hooks on the layers note what these are given while `forward` runs. So they work for every class whose layers lie in an `nn.ModuleList`,
native or of the transformers package, eager or captured: hooks run outside of the blocks that Dynamo traces once.

Shape legend: T tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from compile_and_serve.custom_ops import step
from compile_and_serve.custom_ops.step import StepOutput
from compile_and_serve.models.config import ModelConfigError, positive_int
from compile_and_serve.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class DecoderLayers:
    """A decoder's layers in order, and the norm behind the last one; None: there is none."""

    layers: nn.ModuleList
    norm: nn.Module | None


@dataclass(slots=True)
class _Tapped:
    """What hooks noted in the `forward` that runs, by layer. last: what the last layer gave."""

    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    last: torch.Tensor | None = None


class _GivesHiddenStates(nn.Module):
    """Goes before a model's own class: its `forward` returns the model's result and the hidden states [T, D · taps]."""

    cas_taps: tuple[int, ...]
    cas_tapped: _Tapped
    cas_norm: nn.Module | None

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        tapped = self.cas_tapped
        result = super().forward(*args, **kwargs)
        given = [tapped.inputs[tap] for tap in self.cas_taps if tap in tapped.inputs]
        if tapped.last is not None:
            assert self.cas_norm is not None
            given.append(self.cas_norm(tapped.last))
        tapped.inputs.clear()
        tapped.last = None
        hidden_TF = torch.cat(given, dim=-1)
        if hidden_TF.dim() == 3:  # of a class written for batches
            hidden_TF = hidden_TF[0]
        return (*result, hidden_TF) if isinstance(result, tuple) else (result, hidden_TF)


def text_config(spec: ModelSpec) -> Mapping[str, Any]:
    """The part of a config.json that describes the decoder."""
    nested = spec.config.get("text_config")
    return nested if isinstance(nested, Mapping) else spec.config


def decoder_layers(spec: ModelSpec) -> DecoderLayers:
    """Where a decoder's layers lie. Raises `ModelConfigError` for a model in which they are not found."""
    config = text_config(spec)
    num_layers = config.get("num_hidden_layers") or config.get("n_layer") or config.get("num_layers")
    lists = [(name.count("."), name, len(one)) for name, one in spec.module.named_modules() if isinstance(one, nn.ModuleList)]
    # Some configs count layers otherwise than their module lists do.
    found = [one for one in lists if one[2] == num_layers] or [one for one in lists if one[1].endswith("layers")]
    if not found:
        architecture = (spec.config.get("architectures") or ["The model"])[0]
        raise ModelConfigError(
            f"{architecture} gives no hidden states to a drafter, because its layers lie in no list: use the method draft_model, ngram or "
            "suffix."
        )
    _, name, _ = min(found)
    layers = spec.module.get_submodule(name)
    assert isinstance(layers, nn.ModuleList)
    parent, _, own = name.rpartition(".")
    children = dict(spec.module.get_submodule(parent).named_children())
    after = [*children][[*children].index(own) + 1 :]
    norms = [one for one in after if any(part in one for part in ("norm", "ln_f"))]
    return DecoderLayers(layers, children[norms[-1]] if norms else None)


def embedding_names(spec: ModelSpec) -> tuple[str, ...]:
    """What a checkpoint may call the embedding of tokens."""
    modules = [(name, one) for name, one in spec.module.named_modules() if isinstance(one, nn.Embedding)]
    sized = [name for name, one in modules if one.num_embeddings == spec.vocab_size] or [name for name, _ in modules]
    return _checkpoint_names(spec, [f"{name}.weight" for name in sized[:1]])


def head_names(spec: ModelSpec) -> tuple[str, ...]:
    """What a checkpoint may call the output head, which may be the embedding."""
    modules = spec.module.named_modules()
    heads = [name for name, one in modules if isinstance(one, nn.Linear) and one.out_features == spec.vocab_size and "." not in name]
    return *_checkpoint_names(spec, [f"{name}.weight" for name in heads]), *embedding_names(spec)


def _checkpoint_names(spec: ModelSpec, parameters: Sequence[str]) -> tuple[str, ...]:
    return *parameters, *(name for name, parameter in spec.weight_map.items() if parameter in parameters)


def num_layers_of(spec: ModelSpec) -> int:
    """Layers of a decoder. Raises `ModelConfigError` where they are not found."""
    return len(decoder_layers(spec).layers)


def hidden_size_of(target: ModelSpec) -> int:
    """Features of a hidden state. Raises `ModelConfigError` for a model without layers to tap."""
    num_layers_of(target)
    config = text_config(target)
    return positive_int(config, "hidden_size" if "hidden_size" in config else "n_embd")


def with_hidden_states(spec: ModelSpec, taps: tuple[int, ...]) -> ModelSpec:
    """The model with an output [T, D · taps]: the inputs of the layers of these numbers, side by side.

    The number of layers stands for the output of the last norm. The module is changed in place. Raises `ModelConfigError` for layers that
    the model lacks.
    """
    found, size = decoder_layers(spec), hidden_size_of(spec)
    num_layers = len(found.layers)
    if not taps or not all(0 <= tap <= num_layers for tap in taps) or tuple(sorted(set(taps))) != taps:
        raise ModelConfigError(
            f"The drafter reads the hidden states of the layers {', '.join(map(str, taps))}, but the model has {num_layers} layers: use a "
            "drafter that was trained for this model."
        )
    module, tapped = spec.module, _Tapped()
    for tap in taps:
        if tap < num_layers:
            found.layers[tap].register_forward_pre_hook(_InputHook(tapped, tap), with_kwargs=True)
    if num_layers in taps:
        if found.norm is None:
            raise ModelConfigError("The drafter reads what the model's last norm gives, but no norm follows its last layer.")
        found.layers[-1].register_forward_hook(_OutputHook(tapped))
    own = type(module)
    module.__class__ = type(own.__name__, (_GivesHiddenStates, own), {"__module__": own.__module__, "__doc__": own.__doc__})
    vars(module).update(cas_taps=taps, cas_tapped=tapped, cas_norm=found.norm)
    return replace(
        spec,
        config={**spec.config, "hidden_state_taps": list(taps)},  # it is a part of what the module computes
        outputs=(*spec.outputs, StepOutput(name=step.HIDDEN_STATES, dims=(step.TOKENS, size * len(taps)))),
    )


class _InputHook:
    """Notes what a layer is given."""

    def __init__(self, tapped: _Tapped, layer: int) -> None:
        self.tapped, self.layer = tapped, layer

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tapped.inputs[self.layer] = args[0] if args else kwargs["hidden_states"]


class _OutputHook:
    """Notes what the last layer gives."""

    def __init__(self, tapped: _Tapped) -> None:
        self.tapped = tapped

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.tapped.last = output[0] if isinstance(output, tuple) else output
