"""Options of the balance of experts, in the JSON of vLLM's `--eplb-config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from compile_and_serve.option_fields import json_object

_NAME = "eplb_config"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertBalanceConfig:
    """When experts are placed anew.

    window_size: steps whose tokens count. step_interval: steps between two plans. num_redundant_experts: slots beyond one for each expert.
    log_balancedness: log the load of the busiest rank over the mean, with each plan.
    bytes_per_step: weights that a rank receives beside a step at most, but one exchange of two experts. A step has two moves at most.
    """

    window_size: int = 1000
    step_interval: int = 3000
    num_redundant_experts: int = 0
    log_balancedness: bool = False
    bytes_per_step: int = 32 << 20


# Keys of vLLM's that change nothing here: weights always move beside steps, by one policy.
_IGNORED = ("use_async", "policy", "log_balancedness_interval", "communicator")


def parse_eplb_config(given: Mapping[str, Any] | str | None) -> ExpertBalanceConfig | None:
    """A JSON object, or what it says. Raises `ValueError` with one sentence."""
    if given is None:
        return None
    found = {key: value for key, value in json_object(_NAME)(given).items() if key not in _IGNORED}
    known = [one.name for one in fields(ExpertBalanceConfig)]
    if unknown := [str(key) for key in found if key not in known]:
        raise ValueError(f"{_NAME} has no key {', '.join(unknown):.200}: known are {', '.join((*known, *_IGNORED))}.")
    for name, value in found.items():
        is_flag = name == "log_balancedness"
        least = 0 if name == "num_redundant_experts" else 1
        if is_flag and not isinstance(value, bool):
            raise ValueError(f"{_NAME}: {name} must be true or false, got {value!r:.200}.")
        if not is_flag and not (type(value) is int and value >= least):
            raise ValueError(f"{_NAME}: {name} must be an integer of at least {least}, got {value!r:.200}.")
    return ExpertBalanceConfig(**found)
