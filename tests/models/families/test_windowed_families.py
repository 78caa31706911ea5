"""Families with windows against transformers, float32, on random checkpoints that transformers writes and texts longer than the window.

Logits are equal to float32 rounding. Greedy tokens are equal alone and in batches of mixed lengths, with prompts in chunks, from cached
prefixes, eager, compiled and on two ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_and_serve.compiler.passes import default_passes
from compile_and_serve.compiler.pieces.fingerprint import fingerprint
from compile_and_serve.compiler.pieces.splitter import Piece, split
from compile_and_serve.compiler.rewrite.graph_pass import FLOAT32_NORM_WEIGHT, GELU_LINEAR, PassContext, PassResult
from compile_and_serve.compiler.rewrite.pass_manager import PassRecord, run_passes
from compile_and_serve.compiler.rewrite.verify import PassVerifier
from compile_and_serve.models.registry import build_model
from compile_and_serve.runtime.engine.core import EngineCore
from tests.support.engines import prompt_of, request, run_requests, tiny_config, tokens_of
from tests.support.tiny_models import capture_spec
from tests.support.transformers_models import config_of, greedy_tokens, write_random_model

NUM_TOKENS = 40
LENGTHS = (3, 90, 20, 41, 60)
WINDOW = 24
KERNELS = frozenset({"rope_attention", "fused_linear", "silu_mul", "add_rms_norm", FLOAT32_NORM_WEIGHT})
KINDS = ["sliding_attention", "sliding_attention", "full_attention"]


@dataclass(frozen=True)
class Family:
    """architecture: of transformers, with config changes. pieces: distinct pieces of the compiled model, at any depth. norms: of a layer,
    that a pass has to recognize. merged, linears: linears of a layer before merging that `merge_linears` merges, and fused linears.
    """

    architecture: str
    changes: dict[str, Any] = field(default_factory=dict)
    pieces: int = 3
    norms: int = 0
    merged: int = 5
    linears: int = 4


FAMILIES = {
    "gemma2": Family("Gemma2ForCausalLM", {"query_pre_attn_scalar": 20, "sliding_window": WINDOW, "attn_logit_softcapping": 2.0}, norms=4),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        norms=6,
        changes={"query_pre_attn_scalar": 20, "sliding_window": WINDOW, "num_hidden_layers": 3, "layer_types": KINDS},
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        {
            "sliding_window": WINDOW,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 4,
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
        },
        merged=3,
        linears=3,
    ),
    "mistral": Family("MistralForCausalLM", {"sliding_window": WINDOW}),
    "qwen2": Family(
        "Qwen2ForCausalLM", {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1, "num_hidden_layers": 4}
    ),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def folder(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model"), family.architecture, **family.changes)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return greedy_tokens(folder, [prompt_of(i, length) for i, length in enumerate(LENGTHS)], NUM_TOKENS)


def served(folder: Path, lengths: Sequence[int] = LENGTHS, **options: Any) -> tuple[list[list[int]], EngineCore]:
    """Greedy tokens of prompts of these lengths in one batch; the engine afterwards."""
    core = EngineCore(tiny_config(folder, **({"load_format": "auto", "max_num_batched_tokens": 32} | options)))
    requests = [request(f"r{i}", prompt_of(i, length), max_tokens=NUM_TOKENS, ignore_eos=True) for i, length in enumerate(lengths)]
    tokens = tokens_of(run_requests(core, requests))
    return [tokens[one.request_id] for one in requests], core


def test_logits_equal_those_of_transformers(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    prompt = prompt_of(1, 120)
    core = EngineCore(tiny_config(folder, load_format="auto", max_num_batched_tokens=32))
    outputs = run_requests(core, [request("r", prompt, max_tokens=1, prompt_logprobs=20)])["r"]
    core.shutdown()
    rows = [row for step in outputs for row in step.prompt_logprobs or [] if row is not None]
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = reference(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
    assert len(rows) == len(prompt) - 1
    for position, row in enumerate(rows):
        theirs = logits[position][torch.tensor(list(row.ids))]
        torch.testing.assert_close(torch.tensor(list(row.logprobs), dtype=torch.float64), theirs, rtol=0, atol=5e-5)


def test_eager_tokens_of_a_mixed_batch_in_chunks(folder: Path, expected: list[list[int]]) -> None:
    tokens, core = served(folder)
    assert tokens == expected
    assert core.stats().num_free_blocks == core.stats().num_total_blocks
    core.shutdown()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3"], indirect=True, scope="module")
def test_compiled_tokens_and_pieces(family: Family, folder: Path, expected: list[list[int]], tmp_path: Path) -> None:
    tokens, core = served(folder, enforce_eager=False, cache_dir=tmp_path)
    assert tokens == expected
    assert core.info.compile_report["distinct_pieces"] == family.pieces
    core.shutdown()


def test_a_cached_prefix_needs_only_its_last_window(folder: Path, expected: list[list[int]]) -> None:
    core = EngineCore(tiny_config(folder, load_format="auto", max_num_batched_tokens=32))
    prompt = prompt_of(1, LENGTHS[1])
    for name in ("first", "second"):
        tokens = tokens_of(run_requests(core, [request(name, prompt, max_tokens=NUM_TOKENS, ignore_eos=True)]))
        assert tokens[name] == expected[1]
    assert core.stats().prefix_cache_hits >= LENGTHS[1] - 2 * 12
    core.shutdown()


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["gemma2"], indirect=True, scope="module")
def test_two_ranks_serve_the_same_tokens(folder: Path, expected: list[list[int]], tmp_path: Path) -> None:
    tokens, core = served(folder, tensor_parallel_size=2, enforce_eager=False, cache_dir=tmp_path)
    assert tokens == expected
    core.shutdown()


def rewritten(
    family: Family, layers: int, dtype: torch.dtype = torch.float32, *, verify: bool = True
) -> tuple[dict[str, PassRecord], list[str]]:
    """What each pass did, and the fingerprints of the pieces."""
    changes = {**family.changes, "num_hidden_layers": layers}
    if "layer_types" in changes:
        changes["layer_types"] = KINDS * (layers // 3)
    spec = build_model(config_of(family.architecture, **changes), dtype=dtype)
    captured = capture_spec(spec, dtype)
    ctx = PassContext(device=torch.device("cpu"), dtype=dtype, weights=captured.weights, fake_mode=captured.fake_mode, kernels=KERNELS)
    records = run_passes(captured.gm, default_passes(), ctx, verifier=PassVerifier(spec.buffers) if verify else None)
    pieces = [fingerprint(stage.gm) for stage in split(captured.gm) if isinstance(stage, Piece)]
    return {record.name: record for record in records}, pieces


@pytest.mark.slow_cases
@pytest.mark.exhaustive_cases(but=["gemma3"])
def test_every_site_is_matched_and_pieces_do_not_multiply(family: Family) -> None:
    distinct = []
    for layers in (3, 6):
        records, pieces = rewritten(family, layers, verify=layers == 3)
        assert len(pieces) == layers + 1
        distinct.append(set(pieces))
        matched = {"merge_linears": family.merged * layers, "fuse_rope_attention": layers, "fuse_linears": family.linears * layers + 1}
        if family.norms:
            matched["lift_norms"] = family.norms * layers + 1
        for name, count in matched.items():
            assert records[name].result == PassResult(matched=count), name
        assert all(record.verification.passed for record in records.values() if record.verification)
    assert distinct[0] == distinct[1]
    assert len(distinct[0]) == family.pieces


def test_gelu_is_multiplied_in_the_linear_where_a_kernel_does_it() -> None:
    spec = build_model(config_of("Gemma3ForCausalLM", **FAMILIES["gemma3"].changes), dtype=torch.float32)
    captured = capture_spec(spec, torch.float32)
    ctx = PassContext(
        device=torch.device("cpu"),
        dtype=torch.float32,
        weights=captured.weights,
        fake_mode=captured.fake_mode,
        kernels=KERNELS | {GELU_LINEAR},
    )
    records = run_passes(captured.gm, default_passes(), ctx, verifier=PassVerifier(spec.buffers))
    assert all(record.verification.passed for record in records if record.verification)
    fused = captured.gm.graph.find_nodes(op="call_function", target=torch.ops.cas.fused_linear.default)
    assert sum(node.args[8] for node in fused) == 3
    assert not captured.gm.graph.find_nodes(op="call_function", target=torch.nn.functional.gelu)


def test_gemma_norms_keep_float32_weights_in_a_bfloat16_model() -> None:
    """1 + weight is not rounded to bfloat16. The kernels take it, so that all of a layer's norms are recognized."""
    records, _ = rewritten(FAMILIES["gemma3"], 3, torch.bfloat16)
    assert records["lift_norms"].result == PassResult(matched=6 * 3 + 1)
    assert records["fuse_rope_attention"].result == PassResult(matched=3)
    assert records["fuse_linears"].result == PassResult(matched=4 * 3 + 1)
    assert all(record.verification.passed for record in records.values() if record.verification)


def test_blocks_outside_of_the_window_are_used_again(tmp_path: Path) -> None:
    """The cache has room for 80 tokens, and the text has 130: a window of 24 and a chunk of 32 need no more."""
    folder = write_random_model(tmp_path, "MistralForCausalLM", **FAMILIES["mistral"].changes)
    expected = greedy_tokens(folder, [prompt_of(0, 90)], NUM_TOKENS)
    tokens, core = served(folder, lengths=(90,), num_kv_blocks=20, max_model_len=160)
    assert tokens == expected
    assert core.stats().num_preemptions == 0
    core.shutdown()
