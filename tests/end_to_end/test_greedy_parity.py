"""Greedy tokens of SmolLM2-135M equal transformers', float32, same weights, whichever way a request is run.

A token may differ only at a tie: where transformers' own two logits lie within `TIE` of each other; after one the texts part, so
the comparison of that prompt ends there. At most one prompt of the twenty may do so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compile_and_serve import LLM, SamplingParams
from tests.support.transformers_models import load_reference

NUM_TOKENS = 64
ALL = 20  # prompts, all of them in one batch: half the steps of sixteen, then four
TIE = 1e-3
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def reference(smollm2_dir: Path) -> Any:
    return load_reference(smollm2_dir, torch.float32)


@pytest.fixture(scope="module")
def expected(reference: Any, prompts: list[list[int]]) -> list[list[int]]:
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.no_grad():
        out = reference.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=NUM_TOKENS)
    return out[:, longest:].tolist()


def check(reference: Any, prompts: list[list[int]], got: list[list[int]], expected: list[list[int]]) -> None:
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


@pytest.mark.parametrize("mode", ["compiled", "eager"])
def test_alone_and_in_a_batch(
    mode: str, smollm2_dir: Path, reference: Any, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    llm = LLM(
        str(smollm2_dir), dtype="float32", max_model_len=512, enable_prefix_caching=False, enforce_eager=mode == "eager",
        max_num_seqs=16 if mode == "compiled" else ALL,  # compiled, some wait until others have ended
    )  # fmt: skip
    if mode == "compiled":
        assert 1 <= int(llm.info.compile_report["distinct_pieces"]) <= 4
    with torch.compiler.set_stance("fail_on_recompile"):
        alone = prompts if mode == "compiled" else prompts[:2]  # op by op, one token at a time, is slow
        check(reference, alone, [generate(llm, [prompt])[0] for prompt in alone], expected[: len(alone)])
        check(reference, prompts, generate(llm, prompts), expected)
    llm.shutdown()


def test_through_transformers_own_implementation(
    smollm2_dir: Path, reference: Any, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    llm = LLM(str(smollm2_dir), model_impl="transformers", dtype="float32", max_model_len=512, max_num_seqs=ALL)
    assert llm.info.compile_report["distinct_pieces"] == 3
    check(reference, prompts, generate(llm, prompts), expected)
    llm.shutdown()


def test_small_token_budget(
    smollm2_dir: Path, reference: Any, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    llm = LLM(str(smollm2_dir), dtype="float32", max_model_len=512, max_num_seqs=16, max_num_batched_tokens=32)
    check(reference, prompts, generate(llm, prompts), expected)
    llm.shutdown()


def test_after_preemption(
    smollm2_dir: Path, reference: Any, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    llm = LLM(
        str(smollm2_dir), dtype="float32", max_model_len=192, max_num_seqs=16, num_kv_blocks=24,
        enable_prefix_caching=False,
    )  # fmt: skip
    check(reference, prompts, generate(llm, prompts), expected)
    stats = llm.engine.core.stats()
    assert stats.num_preemptions > 0
    assert stats.num_free_blocks == stats.num_total_blocks
    llm.shutdown()


def test_cached_prefix(smollm2_dir: Path, reference: Any, prompts: list[list[int]], expected: list[list[int]]) -> None:
    llm = LLM(str(smollm2_dir), dtype="float32", max_model_len=512, max_num_seqs=ALL)
    check(reference, prompts, generate(llm, prompts), expected)
    hits = llm.engine.core.stats().prefix_cache_hits
    check(reference, prompts, generate(llm, prompts), expected)
    assert llm.engine.core.stats().prefix_cache_hits > hits
    llm.shutdown()
