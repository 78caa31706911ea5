"""SmolLM2 with every MLP copied into experts, in Mixtral's format, answers like the dense model, whatever the router says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compile_and_serve import LLM, SamplingParams

NUM_EXPERTS, TOP_K, NUM_TOKENS = 4, 2, 24
PROMPTS = ["The capital of France is", "Water boils at"]
LINEARS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}

pytestmark = pytest.mark.slow


def upcycle(dense: Path, folder: Path) -> Path:
    """Copy the checkpoint with each MLP as NUM_EXPERTS equal experts and random routers."""
    shutil.copytree(dense, folder)
    config = json.loads((dense / "config.json").read_text())
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(dense / "model.safetensors").items():
        layer, _, linear = name.partition(".mlp.")
        if not linear:
            tensors[name] = tensor
            continue
        for expert in range(NUM_EXPERTS):
            leaf = LINEARS[linear.removesuffix(".weight")]
            tensors[f"{layer}.block_sparse_moe.experts.{expert}.{leaf}.weight"] = tensor.clone()
        router = torch.randn(NUM_EXPERTS, config["hidden_size"]) * 0.05
        tensors.setdefault(f"{layer}.block_sparse_moe.gate.weight", router.to(tensor.dtype))
    save_file(tensors, folder / "model.safetensors")
    config |= {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": NUM_EXPERTS,
        "num_experts_per_tok": TOP_K,
        "sliding_window": None,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def answers(folder: Path, cache_dir: Path) -> list[list[int]]:
    with LLM(str(folder), dtype="float32", device="cpu", num_kv_blocks=64, max_model_len=512, max_num_seqs=2, cache_dir=cache_dir) as llm:
        greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, greedy, use_tqdm=False)]


def test_equal_experts_answer_like_the_dense_model(smollm2_dir: Path, tmp_path: Path) -> None:
    sparse = upcycle(smollm2_dir, tmp_path / "sparse")
    assert answers(sparse, tmp_path / "cache") == answers(smollm2_dir, tmp_path / "cache")
