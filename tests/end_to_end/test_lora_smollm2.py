"""100 adapters of SmolLM2 go through 4 slots under 64 concurrent requests. Half of the answers are compared
with what the adapter answers alone, and nothing is compiled.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from compile_and_serve import LLM, LoRARequest, SamplingParams
from tests.support.adapters import write_adapter

NUM_ADAPTERS, NUM_TOKENS = 100, 4
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False, logprobs=2)


def tokens_of(output: object) -> list[int]:
    return list(output.outputs[0].token_ids)  # type: ignore[attr-defined]


@pytest.mark.exhaustive
def test_a_hundred_adapters_through_four_slots(smollm2_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [
        LoRARequest(str(i), i + 1, str(write_adapter(tmp_path / str(i), smollm2_dir, 4, seed=i, size=0.2))) for i in range(NUM_ADAPTERS)
    ]
    prompts = [{"prompt_token_ids": [1, 100 + 7 * i, 2000 + i, 31 * i + 5]} for i in range(NUM_ADAPTERS)]
    with LLM(
        str(smollm2_dir), dtype="float32", device="cpu", cache_dir=tmp_path / "cache", enable_lora=True, max_loras=4,
        max_lora_rank=4, max_cpu_loras=8, max_num_seqs=64, max_model_len=64, enable_prefix_caching=False,
    ) as llm:  # fmt: skip
        core = llm.engine.core
        for name in ("capture", "start_piece"):  # to compile anything would fail
            monkeypatch.delattr(f"compile_and_serve.compiler.pipeline.{name}")
        alone = [
            llm.generate([prompt], PARAMS, use_tqdm=False, lora_request=request)[0]
            for prompt, request in zip(prompts[::2], requests[::2], strict=True)
        ]
        assert len({tuple(tokens_of(output)) for output in alone}) > NUM_ADAPTERS // 4
        loads = core.adapters.num_loads
        together = llm.generate(prompts, PARAMS, use_tqdm=False, lora_request=list(requests))
        assert core.adapters.num_loads - loads > NUM_ADAPTERS - 10  # host memory has room for few
    for one, other in zip(alone, together[::2], strict=True):
        for place, (token, expected) in enumerate(zip(tokens_of(other), tokens_of(one), strict=True)):
            if token != expected:  # a tie, up to rounding
                logprobs = one.outputs[0].logprobs[place]
                assert abs(logprobs[expected].logprob - logprobs[token].logprob) < 1e-4
                break
