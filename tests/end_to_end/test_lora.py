"""LoRA adapters: batches that mix adapters say what each merged model says alone; loading compiles nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compile_and_serve import LLM, LoRARequest, SamplingParams
from compile_and_serve.runtime.llm import RequestOutput
from tests.support.adapters import ALL, merge, write_adapter
from tests.support.transformers_models import load_reference, write_random_model

PROMPTS = [[5, 17, 200, 31], [7, 8, 9, 10, 11, 12, 13, 14, 15], [44], [5, 17, 200, 31], [5, 17, 200, 31]]
NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False, logprobs=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model"), "LlamaForCausalLM")


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of ranks 8, 16 and 64; the last with rsLoRA and patterns, on some linears."""
    folder = tmp_path_factory.mktemp("adapters")
    return [
        write_adapter(folder / "r8", model, 8, seed=1),
        write_adapter(folder / "r16", model, 16, seed=2, targets=("q_proj", "v_proj")),
        write_adapter(
            folder / "r64", model, 64, seed=3, use_rslora=True, rank_pattern={"down_proj": 3},
            alpha_pattern={"down_proj": 2.0}, target_modules=r".*\.(self_attn|mlp)\..*",
        ),
    ]  # fmt: skip


def make_llm(model: Path, cache_dir: Path, **options: Any) -> LLM:
    given = {
        "dtype": "float32", "cache_dir": cache_dir, "num_kv_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 8,
        "skip_tokenizer_init": True, "device": "cpu", "enable_lora": True, "max_loras": 3, "max_lora_rank": 64,
    }  # fmt: skip
    return LLM(str(model), **given | options)


def generate(llm: LLM, prompts: list[list[int]], adapters: list[LoRARequest | None]) -> list[RequestOutput]:
    return llm.generate([{"prompt_token_ids": p} for p in prompts], GREEDY, use_tqdm=False, lora_request=adapters)


def check(output: RequestOutput, model: Path, adapter: Path | None, tolerance: float) -> None:
    """The tokens and logprobs of the merged model, one token at a time on the same text."""
    reference = load_reference(model, torch.float32)
    if adapter is not None:
        merge(reference, adapter)
    completion = output.outputs[0]
    with torch.no_grad():
        ids = torch.tensor([output.prompt_token_ids + completion.token_ids])
        logprobs_TV = reference(ids).logits[0, len(output.prompt_token_ids) - 1 : -1].log_softmax(-1)
    assert completion.logprobs is not None
    for expected_V, token, entry in zip(logprobs_TV, completion.token_ids, completion.logprobs, strict=True):
        assert abs(entry[token].logprob - float(expected_V[token])) < tolerance
        assert float(expected_V.max() - expected_V[token]) < tolerance  # a token of the largest logit


@pytest.mark.parametrize("options", [{}, {"tensor_parallel_size": 2}], ids=["one rank", "two ranks"])
def test_one_batch_mixes_the_base_and_ranks(
    options: dict[str, Any], model: Path, adapters: list[Path], tmp_path: Path
) -> None:
    requests = [None, *(LoRARequest(path.name, i, str(path)) for i, path in enumerate(adapters, 1)), None]
    paths = [None, *adapters, None]
    with make_llm(model, tmp_path, verify_passes=not options, **options) as llm:
        report = llm.info.compile_report
        assert report["pass_sites.apply_lora.matched"] == 3 * len(ALL)
        assert report["pass_sites.apply_lora.expected"] == 3 * len(ALL)
        outputs = generate(llm, PROMPTS, requests)
        assert outputs[0].outputs[0].token_ids != outputs[3].outputs[0].token_ids  # equal prompts, other adapters
        assert outputs[0].outputs[0].token_ids == outputs[4].outputs[0].token_ids
        for output, path in zip(outputs, paths, strict=True):
            check(output, model, path, 1e-3)
