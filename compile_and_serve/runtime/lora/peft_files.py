"""Adapters as PEFT saves them: adapter_config.json beside adapter_model.safetensors.

Shape legend: R the adapter's rank for a linear, I and O the linear's input and output features.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from safetensors import SafetensorError, safe_open

from compile_and_serve.runtime.lora.request import AdapterTarget

if TYPE_CHECKING:
    import torch

CONFIG_FILE, TENSOR_FILE = "adapter_config.json", "adapter_model.safetensors"
_LARGEST_CONFIG = 1 << 20  # bytes
_TENSOR_NAME = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(A|B)(?:\.default)?\.weight")
# Initializations that also change the base model's weights, which stay as they are here.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq")
# Options that change what an adapter computes, if they are set.
_UNSUPPORTED = {
    "use_dora": "DoRA", "modules_to_save": "modules_to_save", "lora_bias": "lora_bias", "fan_in_fan_out": "fan_in_fan_out",
    "layer_replication": "layer_replication", "target_parameters": "target_parameters", "alora_invocation_tokens": "aLoRA",
    "trainable_token_indices": "trainable_token_indices", "use_qalora": "QALoRA", "use_bdlora": "BD-LoRA",
}  # fmt: skip


class AdapterError(ValueError):
    """An adapter that cannot be used. The message is one sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterPart:
    """An adapter's tensors for one linear. a_name, b_name: in the file, [R, I] and [O, R]. scale: of B A x."""

    target: AdapterTarget
    a_name: str
    b_name: str
    rank: int
    scale: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterFile:
    """A checked adapter, whose tensors are not read yet. stamp: differs when the file has changed."""

    path: Path
    parts: tuple[AdapterPart, ...]
    stamp: tuple[int, int]

    def tensors(self) -> Iterator[tuple[AdapterPart, torch.Tensor, torch.Tensor]]:
        """(part, A [R, I], scale · B [O, R]) in float32."""
        with _open(self.path / TENSOR_FILE, "pt") as file:
            for part in self.parts:
                a_RI, b_OR = (file.get_tensor(name).float() for name in (part.a_name, part.b_name))
                yield part, a_RI, b_OR * part.scale


def open_adapter(path: Path, targets: Mapping[str, AdapterTarget], max_rank: int) -> AdapterFile:
    """Check an adapter's config, and the names and shapes of its tensors.

    targets: by the name of the module in the model's checkpoint. Raises `AdapterError`.
    """
    config = _read_config(path)
    tensor_file = path / TENSOR_FILE
    if not tensor_file.is_file():
        raise AdapterError(
            f"{path} has no {TENSOR_FILE}: save the adapter with safetensors (other formats can run code)."
        )
    found: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    with _open(tensor_file, "np") as file:  # "pt" would import torch, which an engine beside its ranks does without
        for name in file.keys():  # noqa: SIM118  (no mapping)
            match = _TENSOR_NAME.fullmatch(name)
            if match is None:
                raise AdapterError(f"{tensor_file} has {name}, which is not the A or B of a LoRA adapter's linear.")
            found.setdefault(match[1], {})[match[2]] = (name, tuple(file.get_slice(name).get_shape()))
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
        raise AdapterError(
            f"{file} was initialized with {init:.40}, which changes the base model: convert it to plain LoRA."
        )
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


def _part(
    module: str, pair: Mapping[str, tuple[str, tuple[int, ...]]], config: Mapping[str, Any],
    targets: Mapping[str, AdapterTarget], max_rank: int, path: Path,
) -> AdapterPart:  # fmt: skip
    target = targets.get(module)
    if target is None:
        raise AdapterError(
            f"{path} changes {module}, but this model takes adapters only for linears such as {next(iter(targets), 'none')}."
        )
    if len(pair) < 2:
        raise AdapterError(f"{path} has only one of A and B for {module}.")
    (a_name, a_shape), (b_name, b_shape) = pair["A"], pair["B"]
    rank = _value_for(module, config.get("rank_pattern") or {}, config["r"], path)
    expected = ((rank, target.in_features), (target.out_features, rank))
    if (a_shape, b_shape) != expected:
        raise AdapterError(
            f"{path} has A {list(a_shape)} and B {list(b_shape)} for {module}, expected {list(expected[0])} and "
            f"{list(expected[1])}: is it an adapter of another model?"
        )
    if rank > max_rank:
        raise AdapterError(f"{path} has rank {rank}, but the engine takes at most {max_rank}: raise --max-lora-rank.")
    alpha = _value_for(module, config.get("alpha_pattern") or {}, config["lora_alpha"], path)
    scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    return AdapterPart(target=target, a_name=a_name, b_name=b_name, rank=rank, scale=scale)


def _value_for(module: str, pattern: Mapping[str, Any], default: Any, path: Path) -> Any:
    """The value of the first key that a module's name ends in; keys are regular expressions."""
    for key, value in pattern.items():
        try:
            if re.match(rf"(.*\.)?({key})$", module):
                return value
        except re.error as error:
            raise AdapterError(
                f"{path} has the pattern {key!r:.100}, which is not a regular expression: {error}."
            ) from None
    return default


def _open(file: Path, framework: Literal["pt", "np"]) -> safe_open:
    try:
        return safe_open(file, framework=framework, device="cpu")
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{file} is truncated or not a safetensors file ({error}).") from None
