"""Mixtures of experts that transformers wrote: the same greedy tokens, with prompts in chunks and beside decodes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compile_and_serve import LLM, SamplingParams
from compile_and_serve.compiler.pieces.fingerprint import fingerprint
from compile_and_serve.compiler.pieces.splitter import Piece, split
from compile_and_serve.compiler.rewrite.graph_pass import PassResult
from compile_and_serve.models.registry import build_model
from compile_and_serve.runtime.weights.folder_config import read_folder_config
from tests.support.moe_models import FAMILIES, write_moe
from tests.support.rewriting import rewrite
from tests.support.transformers_models import greedy_tokens

PROMPTS = [[7, 21, 300, 9, 44], [5], list(range(30, 53)), list(range(100, 139))]
NUM_TOKENS = 32
# A native family with a shared expert, one with latent attention, and a class of transformers with a dense layer.
COMPILED = ("Qwen2MoeForCausalLM", "DeepseekV3ForCausalLM", pytest.param("Ernie4_5_MoeForCausalLM", marks=pytest.mark.slow))


@pytest.mark.slow
@pytest.mark.exhaustive_cases(but=["DeepseekV3"])
@pytest.mark.parametrize("architecture", COMPILED)
def test_greedy_tokens_equal_generate(architecture: str, tmp_path: Path) -> None:
    folder = write_moe(tmp_path / "model", architecture)
    expected = greedy_tokens(folder, PROMPTS, NUM_TOKENS)
    with LLM(
        str(folder),
        dtype="float32",
        max_num_seqs=4,
        num_kv_blocks=64,
        device="cpu",
        skip_tokenizer_init=True,
        attention_backend="torch" if architecture.startswith("Deepseek") else None,  # not in the interpreter
        max_num_batched_tokens=16,  # so that prompts come in chunks, beside decodes of other sequences
        cache_dir=tmp_path / "cache",
    ) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], greedy, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected


@pytest.mark.slow_cases
@pytest.mark.exhaustive_cases(but=["Glm4Moe", "DeepseekV3", "Olmoe", "Qwen2Moe"])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_experts_are_fused_and_layers_share_their_pieces(architecture: str, tmp_path: Path) -> None:
    """Routing neither splits a layer nor makes layers differ; some families have one layer without experts."""
    spec = build_model(read_folder_config(write_moe(tmp_path, architecture)), dtype=torch.float32)
    captured, _, records = rewrite(spec, dtype=torch.float32, verify=False)
    dense = architecture.startswith(("Glm4", "Ernie", "Deepseek"))
    two_kinds = dense or architecture.startswith("Llama4")  # whose layers have RoPE, or none
    assert records["fuse_experts"].result == PassResult(matched=3 - dense)
    assert len({fingerprint(stage.gm) for stage in split(captured.gm) if isinstance(stage, Piece)}) == 3 + two_kinds


@pytest.mark.exhaustive
def test_llama4_on_two_ranks(tmp_path: Path) -> None:
    folder = write_moe(tmp_path / "model", "Llama4ForCausalLM")
    expected = greedy_tokens(folder, PROMPTS, NUM_TOKENS)
    with LLM(
        str(folder),
        dtype="float32",
        max_num_seqs=4,
        num_kv_blocks=64,
        device="cpu",
        skip_tokenizer_init=True,
        cache_dir=tmp_path / "cache",
        tensor_parallel_size=2,
    ) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], greedy, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
