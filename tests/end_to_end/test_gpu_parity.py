"""On a CUDA device: greedy tokens of SmolLM2-135M against transformers' with every kind of graphs, and every head size against the
reference attention.

In bfloat16 a token may differ only where rounding decides: where transformers' own logits of the two tokens lie closer together, in
float32, than its bfloat16 logits are from its float32 ones. After such a token the texts part, so the comparison of that prompt ends.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_and_serve import LLM, SamplingParams
from tests.end_to_end.test_greedy_parity import NUM_TOKENS, check, generate
from tests.support.tiny_models import tiny_config
from tests.support.transformers_models import load_reference

pytestmark = pytest.mark.gpu

MODES = ("none", "piecewise", "full", "full_and_piecewise")


@pytest.fixture(scope="module")
def references(smollm2_dir: Path) -> dict[torch.dtype, Any]:
    return {dtype: load_reference(smollm2_dir, dtype).to("cuda") for dtype in (torch.float32, torch.bfloat16)}


@pytest.fixture(scope="module")
def expected(references: dict[torch.dtype, Any], prompts: list[list[int]]) -> dict[torch.dtype, list[list[int]]]:
    found: dict[torch.dtype, list[list[int]]] = {}
    for dtype, model in references.items():
        found[dtype] = []
        for prompt in prompts:
            ids = torch.tensor([prompt], device="cuda")
            with torch.no_grad():
                out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NUM_TOKENS)
            found[dtype].append(out[0, len(prompt) :].tolist())
    return found


def check_up_to_rounding(
    references: dict[torch.dtype, Any], prompts: list[list[int]], got: list[list[int]], expected: list[list[int]]
) -> int:
    """How many prompts part from transformers' bfloat16 text, each at a tie."""
    parted = 0
    for prompt, ours, theirs in zip(prompts, got, expected, strict=True):
        assert len(ours) == NUM_TOKENS
        if ours == theirs:
            continue
        at = next(i for i in range(NUM_TOKENS) if ours[i] != theirs[i])
        ids = torch.tensor([prompt + theirs[:at]], device="cuda")
        with torch.no_grad():
            exact, rounded = (references[dtype](ids).logits[0, -1].float() for dtype in (torch.float32, torch.bfloat16))
        gap, rounding = abs(float(exact[theirs[at]] - exact[ours[at]])), float((exact - rounded).abs().max())
        assert gap < rounding, f"token {at} of {prompt[:8]}…: {ours[at]} instead of {theirs[at]}, {gap:.3f} apart"
        parted += 1
    return parted


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_greedy_tokens(
    mode: Any,
    dtype: torch.dtype,
    smollm2_dir: Path,
    references: dict[torch.dtype, Any],
    prompts: list[list[int]],
    expected: dict[torch.dtype, list[list[int]]],
) -> None:
    llm = LLM(
        str(smollm2_dir),
        dtype=str(dtype).removeprefix("torch."),
        device="cuda",
        max_model_len=512,
        max_num_seqs=32,
        num_kv_blocks=1024,
        enable_prefix_caching=False,
        cudagraph_mode=mode,
        async_scheduling=True,
    )
    while llm.engine.core.idle():
        pass
    for batch in ([[prompt] for prompt in prompts[:4]], [prompts]):
        got = [tokens for part in batch for tokens in generate(llm, part)]
        chosen = prompts[: len(got)]
        if dtype == torch.float32:
            check_on_device(references[dtype], chosen, got, expected[dtype][: len(got)])
        else:
            parted = check_up_to_rounding(references, chosen, got, expected[dtype][: len(got)])
            print(f"{mode}: {parted} of {len(got)} bfloat16 texts part at a tie")
    replays = llm.engine.core.stats().graph_replays
    assert (replays.get("full", 0) > 0) == (mode in ("full", "full_and_piecewise"))
    assert mode == "full_and_piecewise" or (replays.get("piecewise", 0) > 0) == (mode == "piecewise")
    llm.shutdown()


def check_on_device(reference: Any, prompts: list[list[int]], got: list[list[int]], expected: list[list[int]]) -> None:
    """`check` with a reference on the device."""
    check(lambda ids: reference(ids.to("cuda")), prompts, got, expected)


@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
@pytest.mark.parametrize("head_dim", [32, 48, 64, 80, 96, 128, 256])
def test_head_sizes(head_dim: int, backend: str, tmp_path: Path) -> None:
    if backend == "flashinfer" and head_dim not in (64, 128, 256):
        pytest.skip("FlashInfer's kernels are for other head sizes")
    heads: dict[str, Any] = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": head_dim}
    config = tiny_config(**heads, max_position_embeddings=2048, initializer_range=0.1)
    (tmp_path / "config.json").write_text(json.dumps(config))
    # One prompt long enough for FA3, short ones beside it, then decodes.
    prompts = [[(7 * i + j * j) % 320 for j in range(length)] for i, length in enumerate((1, 5, 33, 200, 1300))]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2, prompt_logprobs=0)
    found: dict[str, Any] = {}
    for name in ("torch", backend):
        llm = LLM(
            str(tmp_path),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            device="cuda",
            max_num_seqs=8,
            num_kv_blocks=512,
            attention_backend=name,
            cache_dir=tmp_path / "cache",
            enable_prefix_caching=False,
            cudagraph_mode="none" if name == "torch" else "full_and_piecewise",
        )
        assert llm.info.compile_report["attention_backend"] == name
        given: Any = [{"prompt_token_ids": prompt} for prompt in prompts]
        found[name] = llm.generate(given, params, use_tqdm=False)
        llm.shutdown()
    for theirs, ours in zip(found["torch"], found[backend], strict=True):
        expected, got = (
            torch.tensor([entry[token].logprob for entry, token in zip(o.prompt_logprobs[1:], o.prompt_token_ids[1:], strict=True)])
            for o in (theirs, ours)
        )
        assert (expected - got).abs().max() < 0.1 if len(expected) else True
        assert (expected - got).pow(2).mean().sqrt() < 0.02 if len(expected) else True
        first_theirs, first_ours = theirs.outputs[0], ours.outputs[0]
        for position, (a, b) in enumerate(zip(first_theirs.token_ids, first_ours.token_ids, strict=True)):
            if a != b:  # a tie, after which the texts part
                best = sorted((entry.logprob for entry in first_theirs.logprobs[position].values()), reverse=True)
                assert best[0] - best[1] < 0.1
                break
