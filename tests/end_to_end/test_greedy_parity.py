"""Greedy tokens of SmolLM2-135M equal transformers', float32, same weights, however a request is run.

A token may differ only at a tie: where transformers' own two logits lie within `TIE` of each other; after one the texts part, so
the comparison of that prompt ends there. At most one prompt may do so.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_and_serve import LLM, SamplingParams
from tests.support.made_once import made_once
from tests.support.transformers_models import load_reference

NUM_TOKENS = 16
ALL = 20  # prompts, all of them in one batch
TIE = 1e-3
Reference = Callable[[torch.Tensor], Any]  # token ids → transformers' output with logits
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def reference(smollm2_dir: Path) -> Reference:
    """transformers' model, loaded when it is first called."""
    load = cache(lambda: load_reference(smollm2_dir, torch.float32))
    return lambda ids: load()(ids)


@pytest.fixture(scope="module")
def expected(smollm2_dir: Path, prompts: list[list[int]], run_dir: Path) -> list[list[int]]:
    def make(folder: Path) -> None:
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        model = load_reference(smollm2_dir, torch.float32)
        with torch.no_grad():
            out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NUM_TOKENS)
        (folder / "tokens.json").write_text(json.dumps(out[:, longest:].tolist()))

    folder = made_once(run_dir / "greedy-tokens-of-transformers", make)
    return json.loads((folder / "tokens.json").read_text())


def check(reference: Reference, prompts: list[list[int]], got: list[list[int]], expected: list[list[int]]) -> None:
    ties = 0
    for prompt, ours, theirs in zip(prompts, got, expected, strict=True):
        assert len(ours) == NUM_TOKENS
        if ours == theirs:
            continue
        at = next(i for i in range(NUM_TOKENS) if ours[i] != theirs[i])
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + theirs[:at]])).logits[0, -1]
        gap = abs(float(logits[theirs[at]] - logits[ours[at]]))
        assert gap < TIE, f"token {at} of {prompt[:8]}…: {ours[at]} instead of {theirs[at]}, {gap:.4f} apart"
        ties += 1
    assert ties <= 1


def generate(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.slow
def test_alone_in_a_batch_and_behind_cached_prefixes(
    smollm2_dir: Path, reference: Reference, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    llm = LLM(str(smollm2_dir), dtype="float32", max_model_len=512, max_num_seqs=16)  # some requests wait for others to end
    assert 1 <= int(llm.info.compile_report["distinct_pieces"]) <= 4
    with torch.compiler.set_stance("fail_on_recompile"):
        alone = [0, 9, ALL - 1]  # the last is the longest
        by_itself = [generate(llm, [prompts[i]])[0] for i in alone]
        check(reference, [prompts[i] for i in alone], by_itself, [expected[i] for i in alone])
        assert llm.engine.core._scheduler.manager.reset_prefix_cache()
        check(reference, prompts, generate(llm, prompts), expected)
        hits = llm.engine.core.stats().prefix_cache_hits
        check(reference, prompts, generate(llm, prompts), expected)
        assert llm.engine.core.stats().prefix_cache_hits > hits
    llm.shutdown()


@pytest.mark.exhaustive
def test_through_transformers_own_implementation(
    smollm2_dir: Path, reference: Reference, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    llm = LLM(str(smollm2_dir), model_impl="transformers", dtype="float32", max_model_len=512, max_num_seqs=ALL)
    assert llm.info.compile_report["distinct_pieces"] == 3
    check(reference, prompts, generate(llm, prompts), expected)
    llm.shutdown()
