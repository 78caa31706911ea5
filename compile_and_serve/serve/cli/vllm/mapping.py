"""How flags of vLLM become flags of ours: functions from a flag's values to our arguments."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

# Values that mean that the flag is as if it was not given.
LEFT_OUT = "\0"
ATTENTION_BACKENDS = {
    "FLASHINFER": "flashinfer",
    "FLASHINFER_MLA": "flashinfer",
    "TRITON_ATTN": "triton",
    "TRITON_MLA": "triton",
    "TORCH_SDPA": "torch",
    "CPU_ATTN": "cpu",
}
_EAGER_MODES = ("0", "none")
_CUDAGRAPH_MODES = {"full_decode_only": "full"}
_POOLING_TYPES = ("last", "mean", "cls")

To = Callable[[Sequence[str]], "Mapped"]


class Mapped(NamedTuple):
    """What a flag becomes: our arguments, the model, and the parts without effect: name → why."""

    arguments: Sequence[str] = ()
    model: str | None = None
    ignored: Mapping[str, str] = {}


def parsed_json(flag: str, text: str) -> Any:
    """The value of JSON text. Raises `ValueError` with one sentence."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(f"{flag} must be JSON ({error}), got {text!r:.200}.") from None


def _object(flag: str, text: str) -> dict[str, Any]:
    found = parsed_json(flag, text)
    if not isinstance(found, dict):
        raise ValueError(f"{flag} must be a JSON object, got {text!r:.200}.")
    return found


def renamed(ours: str) -> To:
    """A flag that has another name here. ours: with "=VALUE" for a switch that becomes a value."""
    if "=" in ours:
        return when_on(ours)
    return lambda values: Mapped([ours, *values])


def when_on(ours: str) -> To:
    """A switch that becomes one of our arguments."""
    return lambda values: Mapped([ours] if values == ["on"] else [])


def words(flag: str, ours: Mapping[str, str]) -> To:
    """A flag of ours, where some of vLLM's values have other names."""

    def to(values: Sequence[str]) -> Mapped:
        named = [ours.get(value, value) for value in values]
        return Mapped([] if LEFT_OUT in named else [flag, *named])

    return to


def joined(ours: str) -> To:
    """Several values that are one list, separated by commas, here."""
    return lambda values: Mapped([ours, ",".join(part for value in values for part in value.split())])


def json_list(flag: str) -> To:
    """A JSON list, or a single word, that is a flag for each element here."""

    def to(values: Sequence[str]) -> Mapped:
        elements: list[str] = []
        for value in values:
            found = parsed_json(flag, value) if value.startswith("[") else [value]
            elements += [str(one) for one in found]
        return Mapped([word for element in elements for word in (flag, element)])

    return to


def model(values: Sequence[str]) -> Mapped:
    """`--model`, which is an argument here."""
    return Mapped(model=values[0])


def convert(values: Sequence[str]) -> Mapped:
    """What a model that generates becomes."""
    if values[0] in ("embed", "classify", "reward"):
        return Mapped(["--runner", "pooling"])
    return Mapped()


def task(values: Sequence[str]) -> Mapped:
    """What earlier versions called the runner."""
    if values[0] == "auto":
        return Mapped()
    return Mapped(["--runner", "generate" if values[0] in ("generate", "transcription") else "pooling"])


def pooler_config(values: Sequence[str]) -> Mapped:
    """The fields of a pooler that are options here."""
    given = _object("--pooler-config", values[0])
    kind = str(given.pop("pooling_type", None) or given.pop("seq_pooling_type", None) or "").lower()
    if kind and kind not in _POOLING_TYPES:
        raise ValueError(f"--pooler-config: the pooling_type {kind!r:.50} is not supported: use LAST, MEAN or CLS.")
    return Mapped(
        ["--pooling-type", kind] if kind else [], ignored=_without_effect("--pooler-config", given, "requests have fields for it")
    )


def override(field: str) -> To:
    """A flag that changes one field of config.json."""

    def to(values: Sequence[str]) -> Mapped:
        value = parsed_json(f"--{field.replace('_', '-')}", values[0])
        return Mapped(["--hf-overrides", json.dumps({field: value})])

    return to


def drafts(field: str) -> To:
    """A flag that is one key of --speculative-config."""

    def to(values: Sequence[str]) -> Mapped:
        value = int(values[0]) if values[0].isdecimal() else values[0]
        return Mapped(["--speculative-config", json.dumps({field: value})])

    return to


def speculative_model(values: Sequence[str]) -> Mapped:
    """The drafter as earlier versions took it: a model, or the word [ngram]."""
    if values[0] == "[ngram]":
        return Mapped(["--speculative-config", json.dumps({"method": "ngram"})])
    return Mapped(["--speculative-config", json.dumps({"model": values[0]})])


def structured_outputs_config(values: Sequence[str]) -> Mapped:
    """The settings of structured output: the reasoning parser is an option here."""
    given = _object("--structured-outputs-config", values[0])
    if given.pop("enable_in_reasoning", False):
        raise ValueError("--structured-outputs-config: enable_in_reasoning is not supported: a grammar begins after the reasoning.")
    parser = given.pop("reasoning_parser", "")
    ignored = _without_effect("--structured-outputs-config", given, "a request's grammar is always enforced, by llguidance")
    return Mapped(["--reasoning-parser", str(parser)] if parser else [], ignored=ignored)


def compilation_config(values: Sequence[str]) -> Mapped:
    """vLLM's compiler: the choice of CUDA graphs, and whether there is any compilation."""
    text = values[0]
    given: dict[str, Any] = {"mode": text} if text.isdecimal() else _object("--compilation-config", text)
    arguments: list[str] = []
    mode = given.pop("mode", given.pop("level", None))
    if mode is not None and str(mode).lower() in _EAGER_MODES:
        arguments.append("--enforce-eager")
    sizes = given.pop("cudagraph_capture_sizes", None)
    if isinstance(sizes, list) and sizes:
        arguments += ["--cudagraph-capture-sizes", ",".join(map(str, sizes))]
    graphs = str(given.pop("cudagraph_mode", None) or "").lower()
    if graphs:
        arguments += ["--cudagraph-mode", _CUDAGRAPH_MODES.get(graphs, graphs)]
    return Mapped(arguments, ignored=_without_effect("--compilation-config", given, "the compiler is another; see --pass and --force-pass"))


def optimization_level(values: Sequence[str]) -> Mapped:
    """Level 0 compiles nothing. The others differ in what starting costs, which is an artifact's here."""
    return Mapped(["--enforce-eager"] if values[0].lstrip("O") == "0" else [])


def attention_config(values: Sequence[str]) -> Mapped:
    """The attention backend; its settings are chosen by measuring them."""
    given = _object("--attention-config", values[0])
    backend = given.pop("backend", None)
    named = [] if backend is None else ["--attention-backend", ATTENTION_BACKENDS.get(str(backend), str(backend))]
    return Mapped(named, ignored=_without_effect("--attention-config", given, "the kernels are chosen by measuring them"))


def certificate_requirement(values: Sequence[str]) -> Mapped:
    """Python's ssl.CERT_NONE, CERT_OPTIONAL and CERT_REQUIRED."""
    return Mapped(["--ssl-require-client-cert"] if values[0] == "2" else [])


def log_level(values: Sequence[str]) -> Mapped:
    """How much is logged."""
    return Mapped(["--verbose"] if values[0].lower() in ("debug", "trace") else [])


def _without_effect(flag: str, given: Mapping[str, Any], why: str) -> dict[str, str]:
    return {f"{flag}.{key}": why for key in given}
