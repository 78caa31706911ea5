"""Reads the options of speculative decoding, in the JSON of vLLM's `--speculative-config`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from compile_and_serve.runtime.drafting.method import known_methods, method_of
from compile_and_serve.runtime.speculative_config import SpeculativeConfig

MAX_DRAFT_TOKENS = 64


def parse_speculative_config(given: Mapping[str, Any] | str | None) -> SpeculativeConfig | None:
    """A JSON object, or what it says. Raises `ValueError` with one sentence for an unknown key or a value out of range."""
    if given is None:
        return None
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except json.JSONDecodeError as error:
            raise ValueError(f"speculative_config must be a JSON object, but {error}: got {given!r:.200}.") from None
    if not isinstance(given, Mapping):
        raise ValueError(f'speculative_config must be an object like {{"method": "ngram"}}, got {given!r:.200}.')
    known = [one.name for one in fields(SpeculativeConfig)]
    unknown = [str(key) for key in given if key not in known]
    if unknown:
        raise ValueError(f"speculative_config has no key {', '.join(unknown):.200}: known are {', '.join(known)}.")
    methods = known_methods()
    method: Any = given.get("method")
    if method is None and isinstance(given.get("model"), str):
        method = _method_of_model(given["model"])
        given = {**given, "method": method}
    if not isinstance(method, str) or method not in methods:
        raise ValueError(f"speculative_config: method must be one of {', '.join(methods)}, got {method!r:.200}.")
    if given.get("num_speculative_tokens") is None:
        given = {**given, "num_speculative_tokens": methods[method].default_tokens}
    config = SpeculativeConfig(**given)
    _check(config)
    return config


def _method_of_model(model: str) -> str:
    """The method of a drafter that is given without one: what its name says, as in vLLM; else it is a draft model."""
    name = model.lower().replace("-", "").replace("_", "")
    return next((method for method in ("eagle3", "eagle", "medusa", "dflash") if method in name), "draft_model")


def _check(config: SpeculativeConfig) -> None:
    if method_of(config).takes_model:
        _require(bool(config.model) and isinstance(config.model, str), "model", "a folder or a Hub id", config.model)
    elif config.model is not None:
        raise ValueError(f"speculative_config: the method {config.method!r} takes no model: remove it.")
    _integer("num_speculative_tokens", config.num_speculative_tokens, 1, MAX_DRAFT_TOKENS)
    for name in ("prompt_lookup_min", "prompt_lookup_max", "disable_by_batch_size"):
        _integer(name, getattr(config, name), 1)
    _integer("suffix_decoding_max_tree_depth", config.suffix_decoding_max_tree_depth, 2)
    _integer("suffix_decoding_max_cached_requests", config.suffix_decoding_max_cached_requests, 0)
    shortest, longest = config.ngram_lengths
    _require(shortest <= longest, "prompt_lookup_min", f"at most prompt_lookup_max={longest}", config.prompt_lookup_min)
    _number("suffix_decoding_max_spec_factor", config.suffix_decoding_max_spec_factor, 0.0, MAX_DRAFT_TOKENS)
    _number("suffix_decoding_min_token_prob", config.suffix_decoding_min_token_prob, 0.0, 1.0)
    sample_methods = ("greedy", "probabilistic")
    _require(config.draft_sample_method in sample_methods, "draft_sample_method", " or ".join(sample_methods), config.draft_sample_method)
    if config.synthetic_acceptance_rate is not None:
        _number("synthetic_acceptance_rate", config.synthetic_acceptance_rate, 0.0, 1.0)


def _integer(name: str, value: object, smallest: int, largest: int | None = None) -> None:
    if value is not None:
        ok = type(value) is int and value >= smallest and (largest is None or value <= largest)
        limits = f"at least {smallest}" if largest is None else f"from {smallest} to {largest}"
        _require(ok, name, f"an integer {limits}", value)


def _number(name: str, value: object, smallest: float, largest: float) -> None:
    ok = type(value) in (int, float) and smallest <= value <= largest  # type: ignore[operator]
    _require(ok, name, f"a number from {smallest:g} to {largest:g}", value)


def _require(ok: bool, name: str, expected: str, value: object) -> None:
    if not ok:
        raise ValueError(f"speculative_config: {name} must be {expected}, got {value!r:.200}.")
