"""Adapters as PEFT saves them: adapter_config.json beside adapter_model.safetensors.

Shape legend: R the adapter's rank for a linear, I and O the linear's input and output features.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from compile_and_serve.runtime.lora.adapter_tensors import AdapterTensors
from compile_and_serve.runtime.lora.bounded_file import BoundedFile
from compile_and_serve.runtime.lora.errors import AdapterError
from compile_and_serve.runtime.lora.module_patterns import ModulePatterns
from compile_and_serve.runtime.lora.request import AdapterTarget

CONFIG_FILE, TENSOR_FILE = "adapter_config.json", "adapter_model.safetensors"
_LARGEST_CONFIG = 1 << 20  # bytes
_LARGEST_ALPHA, _LARGEST_RANK = 1e30, 1 << 20
_TENSOR_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.(?:lora_(A|B)(?:\.default)?\.weight|lora_embedding_(A|B)(?:\.default)?)")
# What PEFT saves of an embedding that it adapts: the base model's own weight, which did not change.
_BASE_WEIGHT = re.compile(r"(?:base_model\.model\.)?(.+)\.base_layer\.weight")
_NESTED = ".base_layer"  # one parameter of a module is adapted inside of another one's adapter
_EXPERT_NUMBER = re.compile(r"(?<=\.)\d+(?=\.[^.]+$)")
# Initializations that also change the base model's weights, which stay as they are here.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq")
# Options that change what an adapter computes, if they are set.
_UNSUPPORTED = {
    "use_dora": "DoRA",
    "modules_to_save": "modules_to_save",
    "lora_bias": "lora_bias",
    "fan_in_fan_out": "fan_in_fan_out",
    "layer_replication": "layer_replication",
    "alora_invocation_tokens": "aLoRA",
    "trainable_token_indices": "trainable_token_indices",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterPart:
    """An adapter's tensors for one target. a_name, b_name: in the file, [R, I] and [O, R]. scale: of B A x.

    expert: its number; None for other targets than experts, and for all X experts together, whose tensors are [R * X, I] and [O, R * X].
    """

    target: AdapterTarget
    a_name: str
    b_name: str
    rank: int
    scale: float
    expert: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterFile:
    """A checked adapter, whose tensors are not read yet. stamp: differs when the file has changed."""

    parts: tuple[AdapterPart, ...]
    stamp: tuple[int, int]
    stored: AdapterTensors

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[AdapterPart, torch.Tensor, torch.Tensor]]:
        """(part, A [R, I], scale · B [O, R]), all of them finite numbers of this dtype. Raises `AdapterError` and `OSError`."""
        for part in self.parts:
            a_RI = self.stored.read(part.a_name).to(dtype)
            b_OR = self.stored.read(part.b_name)
            b_OR = b_OR.to(dtype) if part.scale == 1 else (b_OR.float() * part.scale).to(dtype)
            for name, tensor in ((part.a_name, a_RI), (part.b_name, b_OR)):
                if not bool(torch.isfinite(tensor).all()):
                    raise AdapterError(
                        f"{self.stored.path} has values in {name} that are not finite as {dtype} (scaled by {part.scale:g})."
                    )
            yield part, a_RI, b_OR
        self.stored.check_unchanged()


@contextmanager
def open_adapter(
    path: Path, targets: Mapping[str, Sequence[AdapterTarget]], max_rank: int, *, deadline: float = math.inf
) -> Iterator[AdapterFile]:
    """Check an adapter's config, and the names and shapes of its tensors. Nothing in the files is trusted.

    targets: by the name of the module in the model's checkpoint. deadline: of all reading, by `time.monotonic`.
    Raises `AdapterError` and `OSError`.
    """
    config = _read_config(path, deadline)
    tensor_file = path / TENSOR_FILE
    if not tensor_file.exists():
        raise AdapterError(f"{path} has no {TENSOR_FILE}: save the adapter with safetensors (other formats can run code).")
    most_tensors = sum(2 * max(1, target.num_experts) for several in targets.values() for target in several)
    with AdapterTensors(tensor_file, most_tensors, deadline) as stored:
        found = _pairs(stored, targets)
        ranks, alphas = (ModulePatterns(config.get(name) or {}, path / CONFIG_FILE) for name in ("rank_pattern", "alpha_pattern"))
        parts = []
        for module, pair in found.items():
            stored.check_time()
            parts.append(_part(module, pair, config, ranks, alphas, targets, max_rank, path))
        yield AdapterFile(parts=tuple(parts), stamp=stored.stamp, stored=stored)


def _pairs(stored: AdapterTensors, targets: Mapping[str, Sequence[AdapterTarget]]) -> dict[str, dict[str, tuple[str, tuple[int, ...]]]]:
    """Module → "A" or "B" → the tensor's name and shape."""
    found: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    for name, shape in stored.shapes.items():
        match, base = _TENSOR_NAME.fullmatch(name), _BASE_WEIGHT.fullmatch(name)
        if base is not None and _is_vocabulary(base[1], shape, targets):
            continue
        if match is None:
            raise AdapterError(
                f"{stored.path} has {name}, which is not the A or B of a LoRA adapter: weights that replace the base model's are "
                "not supported."
            )
        other = found.setdefault(match[1], {}).setdefault(match[2] or match[3], (name, shape))
        if other[0] != name:
            raise AdapterError(f"{stored.path} has both {other[0]} and {name}: keep one of them.")
    if not found:
        raise AdapterError(f"{stored.path} holds no tensors.")
    return found


def _read_config(path: Path, deadline: float) -> dict[str, Any]:
    file = path / CONFIG_FILE
    try:
        with BoundedFile(file, deadline) as opened:
            if opened.size > _LARGEST_CONFIG:
                raise AdapterError(f"{file} has {opened.size} bytes, but a config has at most {_LARGEST_CONFIG}.")
            config = msgspec.json.decode(opened.read(0, opened.size))
    except OSError:
        raise AdapterError(f"{path} has no {CONFIG_FILE} that can be read: give the folder that PEFT saved.") from None
    except (msgspec.MsgspecError, RecursionError, UnicodeError):
        raise AdapterError(f"{file} is not JSON.") from None
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise AdapterError(f'{file} does not describe a LoRA adapter: its peft_type must be "LORA".')
    for option, name in _UNSUPPORTED.items():
        if config.get(option):
            raise AdapterError(f"{file} uses {name}, which is not supported: merge the adapter into the model instead.")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"{file} has trained biases, which are not supported: merge the adapter into the model.")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGED_BASE):
        raise AdapterError(f"{file} was initialized with {init:.40}, which changes the base model: convert it to plain LoRA.")
    ranks = [config.get("r"), *_pattern(config, "rank_pattern", file).values()]
    if not all(type(rank) is int and 0 < rank <= _LARGEST_RANK for rank in ranks):
        raise AdapterError(f"{file} must give the rank r, and those of rank_pattern, as positive integers up to {_LARGEST_RANK}.")
    alphas = [config.get("lora_alpha"), *_pattern(config, "alpha_pattern", file).values()]
    if not all(type(alpha) in (int, float) and abs(alpha) <= _LARGEST_ALPHA for alpha in alphas):
        raise AdapterError(f"{file} must give lora_alpha, and those of alpha_pattern, as numbers up to {_LARGEST_ALPHA:g}.")
    if not isinstance(config.get("use_rslora"), bool | None):
        raise AdapterError(f"{file} must give use_rslora as true or false.")
    return config


def _pattern(config: Mapping[str, Any], name: str, file: Path) -> dict[str, Any]:
    pattern = config.get(name) or {}
    if not isinstance(pattern, dict):
        raise AdapterError(f"{file}: {name} must be an object.")
    return pattern


def _is_vocabulary(module: str, shape: tuple[int, ...], targets: Mapping[str, Sequence[AdapterTarget]]) -> bool:
    """Whether a base weight [vocabulary, features] has the shape of the model's own."""
    return any(
        shape in ((target.in_features, target.out_features), (target.out_features, target.in_features))
        for target in targets.get(module, ())
    )


def _part(
    module: str,
    pair: Mapping[str, tuple[str, tuple[int, ...]]],
    config: Mapping[str, Any],
    ranks: ModulePatterns,
    alphas: ModulePatterns,
    targets: Mapping[str, Sequence[AdapterTarget]],
    max_rank: int,
    path: Path,
) -> AdapterPart:
    is_embedding = any(".lora_embedding_" in name for name, _ in pair.values())
    possible, expert = _targets(module, is_embedding, targets, path)
    if len(pair) < 2:
        raise AdapterError(f"{path} has only one of A and B for {module}.")
    (a_name, a_shape), (b_name, b_shape) = pair["A"], pair["B"]
    fits = [one for one in possible if (a_shape[-1:], b_shape[:1]) == ((one.in_features,), (one.out_features,))]
    target = (fits or possible)[0]
    stacked = target.num_experts if expert is None and target.num_experts else 1
    name = module.removesuffix(_NESTED) if stacked == 1 else target.module
    rank = ranks.value(name, config["r"])
    expected = ((rank * stacked, target.in_features), (target.out_features, rank * stacked))
    if (a_shape, b_shape) != expected:
        raise AdapterError(
            f"{path} has A {list(a_shape)} and B {list(b_shape)} for {module}, expected {list(expected[0])} and "
            f"{list(expected[1])}: is it an adapter of another model?"
        )
    if rank > max_rank:
        raise AdapterError(f"{path} has rank {rank}, but the engine takes at most {max_rank}: raise --max-lora-rank.")
    alpha = alphas.value(name, config["lora_alpha"])
    scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    return AdapterPart(target=target, a_name=a_name, b_name=b_name, rank=rank, scale=scale, expert=expert)


def _targets(
    module: str, is_embedding: bool, targets: Mapping[str, Sequence[AdapterTarget]], path: Path
) -> tuple[Sequence[AdapterTarget], int | None]:
    """What an adapter's module may be, and the number of its expert, if it is a linear of one."""
    expert = None
    found = targets.get(module.removesuffix(_NESTED)) if module.endswith(_NESTED) else targets.get(module)
    number = _EXPERT_NUMBER.search(module)
    if found is None and number is not None:
        found, expert = targets.get(_EXPERT_NUMBER.sub("{}", module)), int(number[0])
    found = [one for one in found or () if one.is_embedding == is_embedding]
    if not found:
        hint = ", and for experts only with --lora-experts (never for those of gpt-oss and Llama 4)" if "experts" in module else ""
        raise AdapterError(
            f"{path} changes {module}, but this model takes adapters only for modules such as {next(iter(targets), 'none')}{hint}."
        )
    if expert is not None and expert >= found[0].num_experts:
        raise AdapterError(f"{path} changes {module}, but this model has {found[0].num_experts} experts in a layer.")
    return found, expert
