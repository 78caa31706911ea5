"""What models of attention can, on a Gated DeltaNet, Mamba-2, Mamba and a short convolution: adapters, structured output, several answers,
sleep, 4-bit weights, and drafts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from compile_and_serve import LLM, LoRARequest, SamplingParams, StructuredOutputsParams
from compile_and_serve.compiler.config import CompileConfig
from compile_and_serve.compiler.weights.adapter_sites import adapter_sites
from compile_and_serve.models.registry import build_model
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.runtime.engine.core import EngineCore
from tests.support.adapters import merge, write_adapter
from tests.support.drafters import check_every_draft
from tests.support.engines import request, run_requests, tiny_config, tokens_of, write_tiny_model
from tests.support.group_checkpoints import write_grouped
from tests.support.recurrent_models import write_recurrent
from tests.support.rewriting import check_verified, rewrite
from tests.support.transformers_models import greedy_tokens, load_reference, write_random_model

# The linears that adapters change.
TARGETS = {
    "Qwen3_5ForCausalLM": ("in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj", "q_proj", "down_proj"),
    "Mamba2ForCausalLM": ("in_proj", "out_proj"),
    "MambaForCausalLM": ("in_proj", "x_proj", "out_proj"),
    "Lfm2ForCausalLM": ("in_proj", "out_proj", "w1"),
}
HAS_ATTENTION = ("Qwen3_5ForCausalLM", "Lfm2ForCausalLM")
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
PROMPTS = [[(seed * 131 + i * i * 7) % 317 + 3 for i in range(length)] for seed, length in enumerate((5, 40, 17))]
NUM_TOKENS = 12
OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 256, "num_threads": 1}


@pytest.fixture(scope="module", params=TARGETS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> Path:
    """With the tokenizer of another one."""
    folder = write_recurrent(tmp_path_factory.mktemp("hybrid") / request.param, request.param)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_llama_dir / name, folder)
    return folder


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), enforce_eager=True, max_num_seqs=8, max_num_batched_tokens=32, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return greedy_tokens(model, PROMPTS, NUM_TOKENS)


def spec_of(model: Path) -> ModelSpec:
    return build_model(json.loads((model / "config.json").read_text()), dtype=torch.float32)


def greedy(**params: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, **params)


def answers(llm: LLM, params: SamplingParams, adapters: list[LoRARequest | None] | None = None) -> list[list[list[int]]]:
    """Of each prompt."""
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapters)
    return [[one.token_ids for one in output.outputs] for output in outputs]


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["Qwen3_5ForCausalLM"], indirect=True, scope="module")
def test_adapters(model: Path, expected: list[list[int]], tmp_path: Path) -> None:
    """A batch of the model and an adapter: what each says alone."""
    adapter = write_adapter(tmp_path / "adapter", model, 8, targets=TARGETS[model.name])
    chosen = LoRARequest("adapter", 1, str(adapter))
    merged = merge(load_reference(model, torch.float32), adapter)
    ids = torch.tensor([PROMPTS[1]])
    with torch.no_grad():
        wanted = merged.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS)
    with LLM(str(model), enable_lora=True, max_lora_rank=8, max_num_seqs=8, cache_dir=tmp_path / "cache", **OPTIONS) as llm:
        made = answers(llm, greedy(), [None, chosen, None])
    assert [made[0][0], made[1][0], made[2][0]] == [expected[0], wanted[0, len(PROMPTS[1]) :].tolist(), expected[2]]
    assert made[1][0] != expected[1]


@pytest.mark.slow_cases
def test_several_answers_and_sleep(llm: LLM, expected: list[list[int]]) -> None:
    """Sequences of one prompt go on from one state. Random ones differ, and are the same again after a sleep."""
    assert answers(llm, greedy(n=2)) == [[tokens] * 2 for tokens in expected]
    random = SamplingParams(temperature=1.0, seed=4, n=3, max_tokens=NUM_TOKENS, ignore_eos=True)
    before = answers(llm, random)
    assert all(len({tuple(tokens) for tokens in several}) == 3 for several in before)
    llm.sleep(1)
    llm.wake_up()
    assert answers(llm, random) == before


def test_structured_output(llm: LLM) -> None:
    form = StructuredOutputsParams(regex="(ab|cd){3}x")
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = llm.generate(prompts, SamplingParams(temperature=0.8, seed=1, max_tokens=40, structured_outputs=form), use_tqdm=False)
    assert all(len(text) == 7 and text.endswith("x") and set(text[:-1]) <= set("abcd") for text in (one.outputs[0].text for one in outputs))


@pytest.mark.slow_cases
@pytest.mark.exhaustive_cases(but=["Mamba2"])
def test_projections_take_8_bits_and_adapters(model: Path) -> None:
    """What each linear gives is that of the rounded weights (the pass checks itself)."""
    spec = spec_of(model)
    captured, ctx, records = rewrite(spec, CompileConfig(quantization="int8-weight-only", max_loras=2, max_lora_rank=4))
    check_verified(records, "quantize_linears")
    assert records["quantize_linears"].result.matched >= 2 * len(spec.state[-1].layers)  # type: ignore[union-attr]
    placeholders = captured.gm.graph.find_nodes(op="placeholder")
    sites = {site.module for site in adapter_sites([ctx.weights[one.meta["weight"]] for one in placeholders if "weight" in one.meta])}
    names = [name.removesuffix(".weight") for name, parameter in spec.module.named_parameters() if parameter.dim() == 2]
    assert {name for name in names if name.endswith(TARGETS[model.name])} <= sites


def test_weights_of_4_bits(model: Path, tmp_path: Path) -> None:
    """Some linears of each mixer, under the names of checkpoints."""
    linears = [name.removesuffix(".weight") for name, one in load_file(model / "model.safetensors").items() if one.dim() == 2]
    skipped = tuple(name for name in linears if name.endswith(("x_proj", "dt_proj")))  # whose sizes groups do not fit
    plain = [name for name in linears if not name.endswith("_proj") or name in skipped]
    quantized, dequantized = write_grouped(model, tmp_path, AWQ | {"modules_to_not_convert": plain}, tuple(plain))
    made = []
    for folder in (quantized, dequantized):
        core = EngineCore(tiny_config(folder, load_format="auto", block_size=16))
        made.append(tokens_of(run_requests(core, [request(f"r{i}", prompt, ignore_eos=True) for i, prompt in enumerate(PROMPTS)])))
        core.shutdown()
    assert made[0] == made[1]


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_drafts_change_nothing(
    model: Path, expected: list[list[int]], method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_every_draft(monkeypatch)
    config: dict[str, Any] = NGRAM
    if method == "draft_model":
        config = {"method": method, "model": str(write_random_model(tmp_path / "drafter", "LlamaForCausalLM")), "num_speculative_tokens": 3}
    options: dict[str, Any] = {"load_format": "auto", "block_size": 16, "max_model_len": 256, "max_num_batched_tokens": 32}
    if method == "draft_model" and model.name not in HAS_ATTENTION:
        with pytest.raises(ValueError, match="The model keeps no tokens, in whose pages the drafter would keep its own"):
            EngineCore(tiny_config(model, speculative_config=config, **options))
        return
    core = EngineCore(tiny_config(model, speculative_config=config, **options))
    given = [request(f"r{i}", prompt, max_tokens=NUM_TOKENS, ignore_eos=True) for i, prompt in enumerate(PROMPTS)]
    outputs = tokens_of(run_requests(core, given))
    assert [outputs[one.request_id] for one in given] == expected
    stats = core.stats()
    assert stats.num_free_blocks == stats.num_total_blocks
    core.shutdown()


def test_a_hybrid_does_not_draft(model: Path, tmp_path: Path) -> None:
    target = write_tiny_model(tmp_path / "target")
    config = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}
    with pytest.raises(ValueError, match="drafters share the pages of the model's tokens, which have no room for it"):
        EngineCore(tiny_config(target, speculative_config=config))
