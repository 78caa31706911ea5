"""Adapters that PEFT itself wrote: batches that mix them have the logprobs of PEFT's own model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compile_and_serve import LLM, LoRARequest, SamplingParams
from tests.support.moe_models import FAMILIES, write_moe
from tests.support.transformers_models import load_reference, write_random_model

pytestmark = pytest.mark.slow
LINEARS = ["q_proj", "k_proj", "o_proj", "embed_tokens", "lm_head"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]
PROMPTS = [[5, 17, 200, 31], [7, 8, 9, 10, 11, 12, 13, 14, 15], [44, 3], [5, 17, 200, 31]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False, logprobs=1)


def write_with_peft(model: Path, folder: Path, seed: int, rank: int, **config: Any) -> Path:
    import peft

    torch.manual_seed(seed)
    settings = peft.LoraConfig(r=rank, lora_alpha=2 * rank, init_lora_weights=False, **config)
    adapted = peft.get_peft_model(load_reference(model, torch.float32), settings)
    for name, parameter in adapted.named_parameters():
        if "lora_embedding_B" in name or "lora_B" in name:
            parameter.data *= 0.3
    adapted.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["LlamaForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM"])
@pytest.mark.exhaustive_cases(but=["Llama"])
def test_logprobs_are_those_of_peft(family: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    has_experts = family in FAMILIES
    model = (write_moe if has_experts else write_random_model)(tmp_path / "model", family)
    experts = {"target_parameters": EXPERTS} if has_experts else {}
    paths = [
        write_with_peft(model, tmp_path / "a", 1, 8, target_modules=LINEARS, **experts),
        write_with_peft(model, tmp_path / "b", 2, 4, target_modules=["v_proj"], use_rslora=True, **experts),
    ]
    requests = [None, *(LoRARequest(path.name, i, str(path)) for i, path in enumerate(paths, 1)), None]
    with LLM(
        str(model), dtype="float32", device="cpu", cache_dir=tmp_path / "cache", num_kv_blocks=64, max_num_seqs=4,
        max_num_batched_tokens=8, skip_tokenizer_init=True, enable_lora=True, max_loras=2, max_lora_rank=8,
        lora_experts=has_experts,
    ) as llm:  # fmt: skip
        prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=requests)
    for output, request in zip(outputs, requests, strict=True):
        reference = load_reference(model, torch.float32)
        if request is not None:
            reference = peft.PeftModel.from_pretrained(reference, request.lora_path)
        completion = output.outputs[0]
        ids = torch.tensor([output.prompt_token_ids + completion.token_ids])
        with torch.no_grad():
            logprobs_TV = reference(ids).logits[0, len(output.prompt_token_ids) - 1 : -1].log_softmax(-1)
        for expected_V, token, entry in zip(logprobs_TV, completion.token_ids, completion.logprobs, strict=True):
            assert abs(entry[token].logprob - float(expected_V[token])) < 1e-3
