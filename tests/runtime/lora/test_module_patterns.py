"""Values by patterns of module names: as Python's `re` matches them, but never in exponential time."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path

import pytest

from compile_and_serve.runtime.lora.errors import AdapterError
from compile_and_serve.runtime.lora.module_patterns import ModulePatterns

FILE = Path("adapter_config.json")
MODULES = ("model.layers.0.mlp.up_proj", "model.layers.11.self_attn.q_proj", "lm_head", "model.layers.1.mlp.experts.3.w1")


def value(pattern: str, module: str) -> int:
    return int(ModulePatterns({pattern: 1}, FILE).value(module, 0))


@pytest.mark.parametrize(
    "pattern",
    [
        "up_proj", "mlp.up_proj", "p_proj", "lm_head", "model.layers.0.mlp.up_proj", r"layers\.\d+\.mlp\.up_proj", r"layers\.(0|1)\..*",
        "^model.layers.0.mlp.up_proj", "^lm_head$", "up_proj$", r".*\.self_attn\.[qkv]_proj", r"experts\.\d{1,2}\.w[13]",
        "(?:up|down)_proj",
        "layers.1", "", ".*", r"\w+", r"q_proj\$",
    ],
)  # fmt: skip
def test_patterns_match_as_those_of_re(pattern: str) -> None:
    for module in MODULES:
        assert value(pattern, module) == bool(re.match(rf"(.*\.)?({pattern})$", module)), module


def test_the_first_key_that_matches_wins() -> None:
    patterns = ModulePatterns({"layers.0.mlp.up_proj": 1, r"layers\.\d+\.mlp\.\w+": 2, "up_proj": 3, "w1": 4}, FILE)
    found = [patterns.value(f"model.{name}", 0) for name in ("layers.0.mlp.up_proj", "layers.1.mlp.up_proj", "other.up_proj", "w1", "w2")]
    assert found == [1, 2, 3, 4, 0]


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+b", "(a|a)*b", "(a*)*b", "(.*a){25}b", "([a-z]+)*9", "(a|b)*a(a|b){1000}", "((a{100}){100}){100}", "(a?){30}(a?){30}(a?){30}x"],
)
def test_no_pattern_takes_exponential_time(pattern: str) -> None:
    began = time.monotonic()
    patterns = ModulePatterns({pattern: 1}, FILE)
    for module in ("a" * 500, "model." + "ab" * 200):
        with contextlib.suppress(AdapterError):  # some take too many states
            patterns.value(module, 0)
    assert time.monotonic() - began < 2.0


@pytest.mark.parametrize(
    "pattern", ["(", "[", r"(a)\1", "(?=a)b", r"\bq_proj", "a{2,1}", "*", "(?P<x", "(" * 400 + ")" * 400, "x" * 2000 + "+"]
)
def test_what_is_no_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(AdapterError, match=r"not a regular expression|a pattern of 2001 characters") as raised:
        ModulePatterns({pattern: 1}, FILE)
    assert "\n" not in str(raised.value)


def test_there_may_be_many_names_and_some_patterns() -> None:
    names = ModulePatterns({f"layers.{i}.q_proj": i for i in range(50_000)}, FILE)
    assert names.value("model.layers.49999.q_proj", None) == 49_999
    with pytest.raises(AdapterError, match="more than 256 patterns"):
        ModulePatterns({f"layers.{i}.+": i for i in range(300)}, FILE)
