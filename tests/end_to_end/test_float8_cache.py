"""SmolLM2-135M with `kv_cache_dtype="fp8"`: the tokens of transformers' own model with every key and value rounded to float8.

float32 otherwise. Rounding makes small differences large now and then (a key whose last bit differs may be rounded to the next float8, an
eighth away), so a token may differ where transformers' own two logits lie within `TIE` of each other; after one the texts part.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compile_and_serve import LLM, SamplingParams
from tests.support.kernels import require_cpu_kernels
from tests.support.transformers_models import load_reference

NUM_TOKENS = 16
TIE = 0.15
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)


def rounded(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


@pytest.fixture(scope="module")
def reference(smollm2_dir: Path) -> Any:
    return load_reference(smollm2_dir, torch.float32)


def logits_over_rounded_cache(model: Any, ids: list[int]) -> torch.Tensor:
    """Logits [T, V] of one pass in which attention sees keys and values as a float8 cache keeps them."""
    from transformers import DynamicCache

    class RoundingCache(DynamicCache):
        def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **options: Any) -> Any:
            return super().update(rounded(keys), rounded(values), *args, **options)

    with torch.no_grad():
        return model(torch.tensor([ids]), past_key_values=RoundingCache(), use_cache=True).logits[0]


@pytest.mark.parametrize("backend", [pytest.param("torch", marks=pytest.mark.slow), "cpu"])
def test_greedy_tokens_over_a_float8_cache(
    smollm2_dir: Path, reference: Any, prompts: list[list[int]], backend: str
) -> None:
    if backend == "cpu":
        require_cpu_kernels()
    prompts = prompts[::5]
    llm = LLM(
        str(smollm2_dir), dtype="float32", kv_cache_dtype="fp8", max_model_len=256, max_num_seqs=8, max_num_batched_tokens=48,
        enforce_eager=True, attention_backend=backend, num_threads=1,
    )  # fmt: skip
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY, use_tqdm=False)
    llm.shutdown()
    ours, rounding = [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        assert len(tokens) == NUM_TOKENS
        every = prompt + tokens
        logits_TV = logits_over_rounded_cache(reference, every)[len(prompt) - 1 : -1]
        chosen_T = logits_TV.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (logits_TV.max(1).values - chosen_T).max() < TIE  # every token is the reference's best one or a tie
        entries = output.outputs[0].logprobs
        assert entries is not None
        found_T = torch.tensor([entry[token].logprob for entry, token in zip(entries, tokens, strict=True)])
        expected_TV = logits_TV.log_softmax(-1)
        expected_T = expected_TV.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (found_T - expected_T).abs().max() < TIE
        with torch.no_grad():
            plain_TV = reference(torch.tensor([every])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        plain_T = plain_TV.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        ours.append((found_T - expected_T).abs())
        rounding.append((found_T - plain_T).abs())
        # Rounding changes the distributions little.
        assert (plain_TV.exp() * (plain_TV - expected_TV)).sum(-1).mean() < 0.05
    # Truncating instead of rounding more than doubles the error. The rest comes from last bits, which differ between CPUs.
    assert torch.cat(ours).mean() < 0.4 * torch.cat(rounding).mean()
