"""Adapters as PEFT saves them: adapter_config.json beside adapter_model.safetensors.

Shape legend: R the adapter's rank for a linear, I and O the linear's input and output features.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from safetensors import SafetensorError, safe_open

from compile_and_serve.runtime.lora.request import AdapterTarget

if TYPE_CHECKING:
    import torch

CONFIG_FILE, TENSOR_FILE = "adapter_config.json", "adapter_model.safetensors"
_LARGEST_CONFIG = 1 << 20  # bytes
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


class AdapterError(ValueError):
    """An adapter that cannot be used. The message is one sentence."""


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

    path: Path
    parts: tuple[AdapterPart, ...]
    stamp: tuple[int, int]

    def tensors(self) -> Iterator[tuple[AdapterPart, torch.Tensor, torch.Tensor]]:
        """(part, A [R, I], scale · B [O, R]), in the file's dtype or float32."""
        with _open(self.path / TENSOR_FILE, "pt") as file:
            for part in self.parts:
                a_RI, b_OR = file.get_tensor(part.a_name), file.get_tensor(part.b_name)
                yield part, a_RI, b_OR if part.scale == 1 else b_OR.float() * part.scale


def open_adapter(path: Path, targets: Mapping[str, Sequence[AdapterTarget]], max_rank: int) -> AdapterFile:
    """Check an adapter's config, and the names and shapes of its tensors.

    targets: by the name of the module in the model's checkpoint. Raises `AdapterError`.
    """
    config = _read_config(path)
    tensor_file = path / TENSOR_FILE
    if not tensor_file.is_file():
        raise AdapterError(f"{path} has no {TENSOR_FILE}: save the adapter with safetensors (other formats can run code).")
    found: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    with _open(tensor_file, "np") as file:  # "pt" would import torch, which an engine beside its ranks does without
        for name in file.keys():  # noqa: SIM118  (no mapping)
            match, base = _TENSOR_NAME.fullmatch(name), _BASE_WEIGHT.fullmatch(name)
            shape = tuple(file.get_slice(name).get_shape())
            if base is not None and _is_vocabulary(base[1], shape, targets):
                continue
            if match is None:
                raise AdapterError(
                    f"{tensor_file} has {name}, which is not the A or B of a LoRA adapter: weights that replace the base model's are "
                    "not supported."
                )
            found.setdefault(match[1], {})[match[2] or match[3]] = (name, shape)
    if not found:
        raise AdapterError(f"{tensor_file} holds no tensors.")
    parts = tuple(_part(module, pair, config, targets, max_rank, path) for module, pair in found.items())
    status = tensor_file.stat()
    return AdapterFile(path=path, parts=parts, stamp=(status.st_mtime_ns, status.st_size))


def _read_config(path: Path) -> dict[str, Any]:
    file = path / CONFIG_FILE
    try:
        with file.open("rb") as opened:
            config = json.loads(opened.read(_LARGEST_CONFIG))
    except OSError:
        raise AdapterError(f"{path} has no {CONFIG_FILE} that can be read: give the folder that PEFT saved.") from None
    except ValueError:
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
    if not all(isinstance(rank, int) and rank > 0 for rank in ranks):
        raise AdapterError(f"{file} must give the rank r, and those of rank_pattern, as positive integers.")
    alphas = [config.get("lora_alpha"), *_pattern(config, "alpha_pattern", file).values()]
    if not all(isinstance(alpha, (int, float)) for alpha in alphas):
        raise AdapterError(f"{file} must give lora_alpha, and those of alpha_pattern, as numbers.")
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
    rank = _value_for(name, config.get("rank_pattern") or {}, config["r"], path)
    expected = ((rank * stacked, target.in_features), (target.out_features, rank * stacked))
    if (a_shape, b_shape) != expected:
        raise AdapterError(
            f"{path} has A {list(a_shape)} and B {list(b_shape)} for {module}, expected {list(expected[0])} and "
            f"{list(expected[1])}: is it an adapter of another model?"
        )
    if rank > max_rank:
        raise AdapterError(f"{path} has rank {rank}, but the engine takes at most {max_rank}: raise --max-lora-rank.")
    alpha = _value_for(name, config.get("alpha_pattern") or {}, config["lora_alpha"], path)
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


def _value_for(module: str, pattern: Mapping[str, Any], default: Any, path: Path) -> Any:
    """The value of the first key that a module's name ends in; keys are regular expressions."""
    for key, value in pattern.items():
        try:
            if re.match(rf"(.*\.)?({key})$", module):
                return value
        except re.error as error:
            raise AdapterError(f"{path} has the pattern {key!r:.100}, which is not a regular expression: {error}.") from None
    return default


def _open(file: Path, framework: Literal["pt", "np"]) -> safe_open:
    try:
        return safe_open(file, framework=framework, device="cpu")
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{file} is truncated or not a safetensors file ({error}).") from None
