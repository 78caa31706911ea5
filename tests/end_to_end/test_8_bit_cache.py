"""SmolLM2-135M with an 8-bit KV cache: the tokens of transformers' own model with every key and value rounded in the same way.

float32 otherwise. Rounding makes small differences large now and then: a key whose last bit differs may be rounded to the next float8, an
eighth away, or to the next int8. How large depends on the CPU's order of additions, so the bounds are not constants: transformers' model
runs again with every linear's output moved by what float32 sums of its length may differ by, and its own logits say how far that reaches.
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
NUM_MOVED = 3  # passes of the reference whose last bits differ
# Our last bits and the reference's differ from exact sums independently, and maxima of few samples scatter.
MARGIN = 2.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)


def rounded(x: torch.Tensor, cache_dtype: str) -> torch.Tensor:
    """x [..., E] as the cache keeps it."""
    if cache_dtype == "fp8":
        return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    scale = x.abs().amax(-1, keepdim=True) / 127
    return (x * scale.reciprocal()).round() * scale


@pytest.fixture(scope="module")
def reference(smollm2_dir: Path) -> Any:
    return load_reference(smollm2_dir, torch.float32)


def logits_over_rounded_cache(model: Any, ids: list[int], cache_dtype: str) -> torch.Tensor:
    """Logits [T, V] of one pass in which attention sees keys and values as the cache keeps them."""
    from transformers import DynamicCache

    class RoundingCache(DynamicCache):
        def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **options: Any) -> Any:
            keys, values = rounded(keys, cache_dtype), rounded(values, cache_dtype)
            return super().update(keys, values, *args, **options)

    with torch.no_grad():
        return model(torch.tensor([ids]), past_key_values=RoundingCache(), use_cache=True).logits[0]


def move_last_bits(model: Any, seed: int) -> list[Any]:
    """Let every linear's output differ by the usual error of float32 sums: 2⁻²⁴ · √(number of products). → handles of the hooks"""
    generator = torch.Generator().manual_seed(seed)

    def move(linear: torch.nn.Linear, _: Any, out: torch.Tensor) -> torch.Tensor:
        scale = out.abs().mean() * 2.0**-24 * linear.in_features**0.5
        return out + scale * torch.randn(out.shape, generator=generator)

    return [module.register_forward_hook(move) for module in model.modules() if isinstance(module, torch.nn.Linear)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("cache_dtype", ["fp8", "int8"])
def test_greedy_tokens_over_an_8_bit_cache(
    smollm2_dir: Path, reference: Any, prompts: list[list[int]], backend: str, cache_dtype: str
) -> None:
    if backend == "cpu":
        require_cpu_kernels()
    prompts = prompts[::5]
    llm = LLM(
        str(smollm2_dir),
        dtype="float32",
        kv_cache_dtype=cache_dtype,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=48,
        enforce_eager=True,
        attention_backend=backend,
        num_threads=1,
    )
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], GREEDY, use_tqdm=False)
    llm.shutdown()
    ours, ties, moved, moved_logits = [], [], [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        assert len(tokens) == NUM_TOKENS
        every, chosen_T1 = prompt + tokens, torch.tensor(tokens)[:, None]

        def answers(logits_TV: torch.Tensor, begin: int = len(prompt) - 1) -> torch.Tensor:
            return logits_TV[begin:-1]

        logits_TV = answers(logits_over_rounded_cache(reference, every, cache_dtype))
        expected_TV = logits_TV.log_softmax(-1)
        entries = output.outputs[0].logprobs
        assert entries is not None
        found_T1 = torch.tensor([[entry[token].logprob] for entry, token in zip(entries, tokens, strict=True)])
        ours.append((found_T1 - expected_TV.gather(1, chosen_T1)).abs())
        ties.append(logits_TV.amax(1, keepdim=True) - logits_TV.gather(1, chosen_T1))
        for seed in range(NUM_MOVED):
            hooks = move_last_bits(reference, seed)
            other_TV = answers(logits_over_rounded_cache(reference, every, cache_dtype))
            for hook in hooks:
                hook.remove()
            moved.append((other_TV.log_softmax(-1) - expected_TV).gather(1, chosen_T1).abs())
            moved_logits.append((other_TV - logits_TV).abs().amax())
        with torch.no_grad():
            plain_TV = answers(reference(torch.tensor([every])).logits[0]).log_softmax(-1)
        # Rounding changes the distributions little.
        assert (plain_TV.exp() * (plain_TV - expected_TV)).sum(-1).mean() < 0.05
    assert torch.cat(ours).max() < MARGIN * torch.cat(moved).max()
    # Every token is the reference's best one, or the better one of ours: two logits may have moved towards each other.
    assert torch.cat(ties).max() < 2 * MARGIN * max(moved_logits)
    # Truncating instead of rounding adds more than the error of rounding.
    assert torch.cat(ours).mean() < MARGIN * torch.cat(moved).mean()
