"""Embeddings equal transformers' hidden states, pooled: tiny models and SmolLM2, in chunks, in batches of mixed lengths, on two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compile_and_serve import LLM, PoolingParams, SamplingParams
from compile_and_serve.runtime.pooling.results import UnsupportedTaskError
from compile_and_serve.runtime.sampling_params import SamplingParamsError
from tests.support.transformers_models import write_random_model

LENGTHS = (1, 2, 7, 16, 33, 50)
PROMPTS = [[(7 * i + 11 * p + p * p) % 320 for p in range(length)] for i, length in enumerate(LENGTHS)]
OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_num_seqs": 8, "num_kv_blocks": 256, "num_threads": 1, "block_size": 4}


def hidden_states(folder: Path, prompts: list[list[int]]) -> list[np.ndarray]:
    """float32 [T, D] of each prompt after the last norm, each prompt alone."""
    from transformers import AutoModel

    # transformers' SDPA attention ignores Gemma 2's soft cap.
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        return [model(torch.tensor([prompt])).last_hidden_state[0].numpy() for prompt in prompts]


def pooled(rows_TD: np.ndarray, pooling: str, *, normalize: bool = True) -> np.ndarray:
    row = {"last": rows_TD[-1], "mean": rows_TD.mean(0), "cls": rows_TD[0]}[pooling]
    return row / np.linalg.norm(row) if normalize else row


def embed(llm: LLM, prompts: list[list[int]], **params: Any) -> list[np.ndarray]:
    outputs = llm.embed([{"prompt_token_ids": p} for p in prompts], pooling_params=PoolingParams(**params), use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    return [np.array(output.outputs.embedding) for output in outputs]


@pytest.fixture(scope="module")
def llm(tiny_llama_dir: Path) -> Iterator[LLM]:
    """Chunks of at most 12 tokens."""
    with LLM(str(tiny_llama_dir), runner="pooling", enforce_eager=True, max_num_batched_tokens=12, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(tiny_llama_dir: Path) -> list[np.ndarray]:
    return hidden_states(tiny_llama_dir, PROMPTS)


@pytest.mark.parametrize("pooling", ["last", "mean", "cls"])
def test_chunks_of_mixed_lengths(llm: LLM, expected: list[np.ndarray], pooling: str) -> None:
    for ours, theirs in zip(embed(llm, PROMPTS, pooling=pooling), expected, strict=True):
        np.testing.assert_allclose(ours, pooled(theirs, pooling), atol=2e-5)


def test_a_request_alone_and_repeated_gives_the_same(llm: LLM, expected: list[np.ndarray]) -> None:
    """The second time its prefix is cached, which a mean must not use."""
    for pooling in ("last", "mean"):
        for _ in range(2):
            [ours] = embed(llm, PROMPTS[-1:], pooling=pooling)
            np.testing.assert_allclose(ours, pooled(expected[-1], pooling), atol=2e-5)
    batch = embed(llm, PROMPTS * 3, pooling="mean")
    for i, ours in enumerate(batch):  # other chunks of the same prompts
        np.testing.assert_allclose(ours, batch[i % len(PROMPTS)], atol=2e-6)


def test_dimensions_are_cut_before_normalizing(llm: LLM, expected: list[np.ndarray]) -> None:
    [ours] = embed(llm, PROMPTS[:1], dimensions=8)
    cut = expected[0][-1][:8]
    np.testing.assert_allclose(ours, cut / np.linalg.norm(cut), atol=2e-5)
    [raw] = embed(llm, PROMPTS[:1], use_activation=False)
    np.testing.assert_allclose(raw, expected[0][-1], atol=2e-4)
    with pytest.raises(SamplingParamsError, match=r"dimensions must be in \[1, 64\], got 65"):
        embed(llm, PROMPTS[:1], dimensions=65)


def test_encode_gives_every_token(llm: LLM, expected: list[np.ndarray]) -> None:
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    params = PoolingParams(use_activation=False)
    for output, theirs in zip(llm.encode(prompts, pooling_params=params, use_tqdm=False), expected, strict=True):
        np.testing.assert_allclose(output.outputs.data.numpy(), theirs, atol=2e-4)


def test_score_is_the_cosine(llm: LLM) -> None:
    texts = ["a cat", "a dog", "the sea"]
    found = [output.outputs.score for output in llm.score(texts[0], texts[1:], use_tqdm=False)]
    first, *others = (np.array(o.outputs.embedding) for o in llm.embed(texts, use_tqdm=False))
    np.testing.assert_allclose(found, [first @ other for other in others], atol=1e-6)
    with pytest.raises(ValueError, match="3 texts to compare with 2"):
        llm.score(texts, texts[:2], use_tqdm=False)


def test_tasks_that_the_model_cannot_do(llm: LLM, tiny_llama_dir: Path) -> None:
    with pytest.raises(UnsupportedTaskError, match="cannot do the task classify: it does embed, token_embed, score"):
        llm.classify("a", use_tqdm=False)
    with pytest.raises(UnsupportedTaskError, match="generates no text"):
        llm.generate("a", SamplingParams(max_tokens=1), use_tqdm=False)
    with (
        LLM(str(tiny_llama_dir), enforce_eager=True, **OPTIONS) as generates,
        pytest.raises(UnsupportedTaskError, match="--runner pooling"),
    ):
        generates.embed("a", use_tqdm=False)


def test_truncation_side(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("one two three four five six")
    assert len(ids) > 6
    for side, kept in (("left", ids[-3:]), ("right", ids[:3])):
        params = PoolingParams(truncate_prompt_tokens=3, truncation_side=side)  # type: ignore[arg-type]
        [output] = llm.embed("one two three four five six", pooling_params=params, use_tqdm=False)
        assert output.prompt_token_ids == kept


def test_infinite_hidden_states_fail_only_their_request(llm: LLM) -> None:
    runner = llm.engine.core.executor.worker.runner  # type: ignore[attr-defined]
    weight = runner.steps.model.module.model.embed_tokens.weight
    saved = weight[5].clone()
    weight.data[5] = float("nan")
    try:
        with pytest.raises(RuntimeError, match="not finite"):
            embed(llm, [[5, 5]])
        assert np.isfinite(embed(llm, [[6, 7]])[0]).all()
    finally:
        weight.data[5] = saved
    assert np.isfinite(embed(llm, [[5, 5]])[0]).all()


@pytest.mark.parametrize("architecture", ["Qwen3Model", "Gemma2ForCausalLM", "MistralModel", "MixtralForCausalLM"])
def test_families(architecture: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"sliding_window": 8} if architecture != "Qwen3Model" else {"use_sliding_window": False}
    if architecture == "MixtralForCausalLM":
        changes = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    folder = write_random_model(tmp_path / "model", architecture, **changes)
    is_bare = architecture.endswith("Model")
    with LLM(
        str(folder),
        runner="auto" if is_bare else "pooling",
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_num_batched_tokens=12,
        **OPTIONS,
    ) as llm:
        for ours, theirs in zip(embed(llm, PROMPTS, pooling="mean"), hidden_states(folder, PROMPTS), strict=True):
            np.testing.assert_allclose(ours, pooled(theirs, "mean"), atol=5e-5)


@pytest.mark.exhaustive
def test_compiled(tiny_llama_dir: Path, expected: list[np.ndarray], shared_cache_dir: Path) -> None:
    with LLM(str(tiny_llama_dir), runner="pooling", cache_dir=shared_cache_dir, max_num_batched_tokens=24, **OPTIONS) as llm:
        assert int(llm.info.compile_report["distinct_pieces"]) <= 3
        for pooling in ("last", "mean"):
            for ours, theirs in zip(embed(llm, PROMPTS, pooling=pooling), expected, strict=True):
                np.testing.assert_allclose(ours, pooled(theirs, pooling), atol=2e-5)


@pytest.mark.exhaustive
def test_two_ranks(tiny_llama_dir: Path, expected: list[np.ndarray], shared_cache_dir: Path) -> None:
    with LLM(
        str(tiny_llama_dir), runner="pooling", cache_dir=shared_cache_dir, tensor_parallel_size=2, max_num_batched_tokens=24, **OPTIONS
    ) as llm:
        for ours, theirs in zip(embed(llm, PROMPTS, pooling="mean"), expected, strict=True):
            np.testing.assert_allclose(ours, pooled(theirs, "mean"), atol=2e-5)


@pytest.mark.exhaustive
def test_smollm2(smollm2_dir: Path) -> None:
    prompts = [PROMPTS[1], PROMPTS[3], PROMPTS[5] * 3]
    with LLM(
        str(smollm2_dir), runner="pooling", dtype="float32", device="cpu", max_model_len=256, max_num_batched_tokens=64, max_num_seqs=4
    ) as llm:
        for pooling in ("last", "mean"):
            for ours, theirs in zip(embed(llm, prompts, pooling=pooling), hidden_states(smollm2_dir, prompts), strict=True):
                np.testing.assert_allclose(ours, pooled(theirs, pooling), atol=1e-4)
