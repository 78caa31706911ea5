"""Drafters read hidden states of any family: they are those of transformers, and no token changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.messages import EngineRequest
from tests.runtime.drafting.test_heads import Reference, write_folders
from tests.support.all_families import DENSE, MOE, RECURRENT, write_family
from tests.support.drafters import check_every_draft
from tests.support.engines import prompt_of, request, run_requests, tiny_config, tokens_of
from tests.support.transformers_models import load_reference

METHODS = ("eagle", "eagle3", "medusa", "dflash")
FALLBACK = "transformers"
# Family and implementation. Each method runs with one of the first by default.
FAMILIES = [(name, "auto") for name in (*DENSE, *MOE, *RECURRENT)] + [("Qwen3ForCausalLM", FALLBACK), ("Gemma3ForCausalLM", FALLBACK)]
DEFAULT = {
    ("Gemma3ForCausalLM", "auto", "eagle"),
    ("GptOssForCausalLM", "auto", "eagle3"),
    ("MistralForCausalLM", "auto", "eagle3"),
    ("Phi3ForCausalLM", "auto", "medusa"),
    ("Qwen2ForCausalLM", "auto", "dflash"),
}
CASES = [
    pytest.param(*case, marks=[] if case in DEFAULT else pytest.mark.slow)
    for family, impl in FAMILIES
    for method in METHODS
    if (case := (family, impl, method))
]


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_folders(tmp_path_factory.mktemp("heads"))


def requests() -> list[EngineRequest]:
    drawn: dict[str, Any] = {"temperature": 0.9, "seed": 3, "top_p": 0.9}
    return [request(f"q{i}", prompt_of(i, length), max_tokens=20, **(drawn if i == 2 else {})) for i, length in enumerate((5, 40, 30))]


def engine(model: Path, impl: str, speculation: dict[str, Any] | None, **options: Any) -> EngineCore:
    given: dict[str, Any] = {"load_format": "auto", "max_num_batched_tokens": 64, "attention_backend": "torch", "model_impl": impl}
    given["max_model_len"] = 256
    return EngineCore(tiny_config(model, speculative_config=speculation, **(given | options)))


def drafting_engine(model: Path, impl: str, method: str, heads: dict[str, Path], **options: Any) -> EngineCore | None:
    """None for a model that keeps no tokens, beside which only Medusa drafts."""
    try:
        return engine(model, impl, {"method": method, "model": str(heads[method]), "num_speculative_tokens": 3}, **options)
    except ValueError as error:
        if "keeps no tokens" not in str(error) or method == "medusa":
            raise
        return None


@pytest.mark.slow_cases
@pytest.mark.exhaustive_cases
@pytest.mark.parametrize(("family", "impl", "method"), CASES)
def test_no_token_of_a_family_changes(
    family: str, impl: str, method: str, heads: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_family(tmp_path / "target", family)
    plain = engine(model, impl, None)
    expected = tokens_of(run_requests(plain, requests()))
    plain.shutdown()
    check_every_draft(monkeypatch)
    if (core := drafting_engine(model, impl, method, heads)) is None:
        return
    assert tokens_of(run_requests(core, requests())) == expected
    assert core.stats().spec_decode_num_draft_tokens > 100
    core.shutdown()


@pytest.mark.parametrize(
    ("family", "impl"),
    [pytest.param(*one, marks=[] if one in {(name, impl) for name, impl, _ in DEFAULT} else pytest.mark.slow) for one in FAMILIES],
)
@pytest.mark.exhaustive_cases(but=["LlamaForCausalLM", "Gemma2", "DeepseekV3", "KimiLinear", "FalconH1", "Qwen3ForCausalLM-transformers"])
def test_hidden_states_are_those_of_transformers(family: str, impl: str, heads: dict[str, Path], tmp_path: Path) -> None:
    """Inputs of layers, and the output of the last norm."""
    model = write_family(tmp_path / "target", family)
    tokens = np.array(prompt_of(1, 23), dtype=np.int64)
    reference = load_reference(model, torch.float32)
    reference.set_attn_implementation("eager")  # SDPA ignores Gemma 2's soft cap
    with torch.no_grad():
        states = reference(torch.tensor(tokens)[None], output_hidden_states=True).hidden_states
    for method, taps in (("eagle3", (0, 1, 2)), ("medusa", (-1,))):
        if (core := drafting_engine(model, impl, method, heads)) is None:
            return
        own = Reference(core)
        given = own.pass_over(own.target, tokens)["hidden_states"]
        core.shutdown()
        expected = torch.cat([states[tap][0] for tap in taps], dim=-1)
        torch.testing.assert_close(given, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "impl"), [("Gemma3ForCausalLM", "auto"), ("GptOssForCausalLM", "auto"), ("Qwen3ForCausalLM", FALLBACK)])
def test_a_compiled_model_gives_them_too(
    family: str, impl: str, heads: dict[str, Path], tmp_path: Path, shared_cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_family(tmp_path / "target", family)
    check_every_draft(monkeypatch)
    found = []
    for is_eager in (True, False):
        core = drafting_engine(model, impl, "eagle3", heads, enforce_eager=is_eager, cache_dir=shared_cache_dir)
        assert core is not None
        found.append((tokens_of(run_requests(core, requests())), core.stats().spec_decode_num_accepted_tokens))
        core.shutdown()
    assert found[0] == found[1]
