"""Logits of native models equal transformers' logits: float32, tiny random checkpoints, through the paged attention op."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from compile_and_serve.custom_ops.attention.torch_backend import TorchAttention
from compile_and_serve.custom_ops.state.metadata import AttentionMetadata
from compile_and_serve.custom_ops.step import running
from compile_and_serve.models.registry import build_model
from compile_and_serve.models.spec import ModelSpec

BLOCK_SIZE = 4


def materialize(spec: ModelSpec, folder: Path) -> torch.nn.Module:
    """The module with a checkpoint's weights, loaded without the runtime's loader."""
    tensors = load_file(folder / "model.safetensors")
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"])
    spec.module.load_state_dict(tensors, assign=True)
    for name, value in spec.buffers.items():
        owner, _, leaf = name.rpartition(".")
        spec.module.get_submodule(owner).register_buffer(leaf, value, persistent=False)
    return spec.module


def run_step(
    module: torch.nn.Module, spec: ModelSpec, kv_caches: list[torch.Tensor], chunks: list[tuple[list[int], int, list[int]]]
) -> torch.Tensor:
    """One step. chunks: per sequence, (new token ids, number of cached tokens, block ids). → the logits of every token"""
    input_ids = torch.tensor([token for tokens, _, _ in chunks for token in tokens])
    positions = torch.cat([torch.arange(done, done + len(tokens)) for tokens, done, _ in chunks])
    slots = [
        blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for tokens, done, blocks in chunks
        for position in range(done, done + len(tokens))
    ]
    lengths = [len(tokens) for tokens, _, _ in chunks]
    seq_lens = [done + len(tokens) for tokens, done, _ in chunks]
    width = max(len(blocks) for _, _, blocks in chunks)
    metadata = AttentionMetadata(
        backend=TorchAttention(),
        query_start_loc=torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=torch.tensor([blocks + [0] * (width - len(blocks)) for _, _, blocks in chunks], dtype=torch.int32),
        slot_mapping=torch.tensor(slots),
        num_seqs=len(chunks),
        num_tokens=len(input_ids),
        max_query_len=max(lengths),
        max_seq_len=max(seq_lens),
    )
    metadata.backend.plan(metadata)
    with torch.no_grad(), running(defaultdict(lambda: metadata)):
        return module(input_ids, positions, kv_caches, torch.arange(len(input_ids)))


def empty_caches(spec: ModelSpec, num_blocks: int) -> list[torch.Tensor]:
    return [torch.zeros(num_blocks, 2, c.num_kv_heads, BLOCK_SIZE, c.head_dim) for c in spec.state[0].layers]


def reference_logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("checkpoint", ["tiny_llama_dir", "tiny_qwen3_dir"])
def test_logits_equal_transformers(checkpoint: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(checkpoint)
    spec = build_model(json.loads((folder / "config.json").read_text()), dtype=torch.float32)
    module = materialize(spec, folder)
    generator = torch.Generator().manual_seed(7)
    first = torch.randint(3, spec.vocab_size, (19,), generator=generator).tolist()
    second = torch.randint(3, spec.vocab_size, (7,), generator=generator).tolist()

    caches = empty_caches(spec, num_blocks=12)
    blocks = [5, 2, 9, 1, 7], [3, 8]
    # a prefill in two chunks, the second beside another sequence's prefill, then one decode token of each
    steps = [
        run_step(module, spec, caches, [(first[:11], 0, blocks[0])]),
        run_step(module, spec, caches, [(first[11:18], 11, blocks[0]), (second[:6], 0, blocks[1])]),
        run_step(module, spec, caches, [(first[18:], 18, blocks[0]), (second[6:], 6, blocks[1])]),
    ]
    ours_first = torch.cat([steps[0], steps[1][:7], steps[2][:1]])
    ours_second = torch.cat([steps[1][7:], steps[2][1:]])
    torch.testing.assert_close(ours_first, reference_logits(folder, first), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours_second, reference_logits(folder, second), rtol=1e-4, atol=1e-4)


def test_only_selected_rows_are_projected(tiny_llama_dir: Path) -> None:
    spec = build_model(json.loads((tiny_llama_dir / "config.json").read_text()), dtype=torch.bfloat16)
    projected: list[torch.Size] = []
    spec.module.lm_head.register_forward_hook(lambda _m, args, _out: projected.append(args[0].shape))
    ids = torch.zeros(9, dtype=torch.int64, device="meta")
    caches = [cache.to("meta", torch.bfloat16) for cache in empty_caches(spec, num_blocks=3)]
    logits = spec.module(ids, ids, caches, torch.zeros(2, dtype=torch.int64, device="meta"))
    assert logits.shape == (2, spec.vocab_size)
    assert logits.dtype == torch.bfloat16
    assert projected == [torch.Size((2, 64))]


@pytest.mark.parametrize("rope_type", ["default", "linear", "llama3"])
def test_rope_frequencies_equal_transformers(rope_type: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    rope = {"rope_type": rope_type, "rope_theta": 500000.0}
    if rope_type != "default":
        rope["factor"] = 8.0
    if rope_type == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    sizes = {"hidden_size": 512, "num_attention_heads": 4, "head_dim": 128, "max_position_embeddings": 131072}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**sizes, rope_parameters=dict(rope)))
    config = sizes | {"architectures": ["LlamaForCausalLM"], "vocab_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    spec = build_model(config | {"rope_parameters": rope}, dtype=torch.bfloat16)
    frequencies = spec.buffers["model.rotary_emb.inv_freq"]
    torch.testing.assert_close(frequencies, theirs.inv_freq, rtol=1e-6, atol=0)
    # the older spelling of the same config
    old = dict(rope) | {"type": rope_type}
    del old["rope_type"], old["rope_theta"]
    older = build_model(config | {"rope_scaling": old, "rope_theta": 500000.0}, dtype=torch.bfloat16)
    torch.testing.assert_close(older.buffers["model.rotary_emb.inv_freq"], frequencies, rtol=0, atol=0)
    assert spec.max_model_len == (131072 * 8 if rope_type == "linear" else 131072)
    # and both in one file, where they mean the same
    both = build_model(config | {"rope_parameters": rope, "rope_scaling": old}, dtype=torch.bfloat16)
    torch.testing.assert_close(both.buffers["model.rotary_emb.inv_freq"], frequencies, rtol=0, atol=0)
