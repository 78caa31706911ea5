"""Options of speculative decoding, in the JSON of vLLM's `--speculative-config`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, cast, get_args

HostMethod = Literal["ngram", "suffix"]
DeviceMethod = Literal["draft_model", "eagle", "eagle3", "mtp", "medusa", "dflash"]
Method = Literal[HostMethod, DeviceMethod]
METHODS: tuple[str, ...] = (*get_args(HostMethod), *get_args(DeviceMethod))
MAX_DRAFT_TOKENS = 64
_DEFAULT_DRAFT_TOKENS: Mapping[str, int] = {
    "ngram": 5,
    "suffix": 24,
    "draft_model": 4,
    "eagle": 3,
    "eagle3": 3,
    "mtp": 1,
    "medusa": 3,
    "dflash": 7,
}
_NEEDS_MODEL: frozenset[str] = frozenset({"draft_model", "eagle", "eagle3", "medusa", "dflash"})
_DEFAULT_NGRAM = (3, 5)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeculativeConfig:
    """How tokens are drafted. The names are vLLM's.

    method: "ngram" copies what followed the last tokens earlier in the same sequence; "suffix" also looks in the outputs of earlier
    requests, and weighs all places where the longest suffix occurred; "draft_model" is a smaller model of the same vocabulary. "eagle",
    "eagle3" (EAGLE heads), "mtp" (the layer that DeepSeek-V3's checkpoints bring), "medusa" (Medusa heads) and "dflash"
    (a block drafter) read the model's hidden states.
    model: the drafter: a folder, a .gguf file, a known name or a Hub id.
    num_speculative_tokens: the most draft tokens of a sequence in one step. None: 5 for ngram, 24 for suffix, 4 for a draft model, 1 for
    mtp, 7 for dflash, 3 for the others.
    prompt_lookup_min, prompt_lookup_max: lengths of the suffixes that ngram looks up, the longest first; None: 3 and 5. If only one is
    given, it is both.
    suffix_decoding_max_tree_depth: the longest suffix that is compared, in tokens. suffix_decoding_max_cached_requests: how many past
    outputs are kept; 0: none. suffix_decoding_max_spec_factor: draft tokens per matched token.
    suffix_decoding_min_token_prob: drafts end where their estimated probability falls below it.
    disable_by_batch_size: no drafts while at least this many sequences decode; None: measured step times decide alone.
    synthetic_acceptance_rate: for benchmarks with random weights. There is a draft for every token, and each is accepted with this
    probability, given the one before it, whatever the model says. How many are checked is decided as usual. The output is meaningless.
    """

    method: Method
    model: str | None = None
    num_speculative_tokens: int | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    disable_by_batch_size: int | None = None
    synthetic_acceptance_rate: float | None = None

    @property
    def num_tokens(self) -> int:
        """The most draft tokens of a sequence in one step."""
        return self.num_speculative_tokens or _DEFAULT_DRAFT_TOKENS[self.method]

    @property
    def device_method(self) -> DeviceMethod | None:
        """The method, if the runner drafts with a model; None: the scheduler drafts from token histories."""
        return None if self.method in get_args(HostMethod) else cast(DeviceMethod, self.method)

    def drafts_on_device(self, *, is_asynchronous: bool) -> bool:
        """Whether the runner drafts. is_asynchronous: of the device. Where it is not, n-grams are looked up on the host."""
        return self.device_method is not None or (self.method == "ngram" and is_asynchronous)

    @property
    def ngram_lengths(self) -> tuple[int, int]:
        """Shortest and longest suffix that ngram looks up."""
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        if shortest is None and longest is None:
            return _DEFAULT_NGRAM
        return shortest or longest or 0, longest or shortest or 0


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
    method = given.get("method")
    if method not in METHODS:
        raise ValueError(f"speculative_config: method must be one of {', '.join(METHODS)}, got {method!r:.200}.")
    config = SpeculativeConfig(**given)
    _check(config)
    return config


def _check(config: SpeculativeConfig) -> None:
    if config.method in _NEEDS_MODEL:
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
