"""The engine and the sampler on a CUDA device: graphs, asynchronous scheduling and kernels change no token."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.messages import EngineRequest
from compile_and_serve.runtime.sampling.sampler import Sampler
from compile_and_serve.runtime.sampling_params import SamplingParams
from tests.support.engines import VOCAB_SIZE, of_two_keys, request, run_requests, tiny_config, tokens_of, write_tiny_model

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("engine") / "tiny")


def requests() -> list[EngineRequest]:
    options: list[dict[str, object]] = [
        {},
        {"temperature": 0.8, "seed": 1},
        {"max_tokens": 40},
        {"temperature": 1.0, "seed": 2, "top_p": 0.9, "min_p": 0.01},
        {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "presence_penalty": 0.2, "max_tokens": 30},
        {"temperature": 1.2, "seed": 3, "top_k": 12, "logit_bias": {7: 2.0}},
        {"allowed_token_ids": list(range(50, 90)), "logprobs": 2},
        {"bad_words_token_ids": [[5], [6, 7]], "presence_penalty": 1.0},
        {"min_tokens": 9, "max_tokens": 25, "prompt_logprobs": 1},
    ]
    return [
        request(f"r{i}", [(i * 37 + j * 11 + j * j) % VOCAB_SIZE for j in range(1 + 7 * i)], eos_token_ids=[11], **given)
        for i, given in enumerate(options)
    ]


def cuda_core(model_dir: Path, **options: object) -> EngineCore:
    given: dict[str, object] = {"device": "cuda", "block_size": 16, "num_kv_blocks": 256, "attention_backend": "triton"}
    return EngineCore(tiny_config(model_dir, **(given | options)))


@pytest.fixture(scope="module")
def alone(model_dir: Path) -> dict[str, list[int]]:
    core = cuda_core(model_dir)
    result = {}
    for one in requests():
        result |= tokens_of(run_requests(core, [one]))
    return result


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": True},
        {"async_scheduling": True, "num_kv_blocks": 45, "max_model_len": 160, "block_size": 4, "enable_prefix_caching": False},
        {"async_scheduling": True, "max_num_batched_tokens": 32},
        {"enforce_eager": False, "async_scheduling": True},
        {"enforce_eager": False, "async_scheduling": True, "cudagraph_mode": "piecewise"},
    ],
    ids=["batch", "async", "preempting", "chunked", "graphs", "piecewise"],
)
def test_same_tokens(model_dir: Path, alone: dict[str, list[int]], tmp_path: Path, options: dict[str, object]) -> None:
    core = cuda_core(model_dir, cache_dir=tmp_path, **options)
    for _ in range(2):
        assert tokens_of(run_requests(core, requests())) == alone
    stats = core.stats()
    assert stats.num_free_blocks == stats.num_total_blocks
    if options.get("enforce_eager") is False:
        mode = "piecewise" if options.get("cudagraph_mode") == "piecewise" else "full"
        assert stats.graph_replays[mode] > 0
        assert (stats.steps_on_device > 0) == (mode == "full")
    if options.get("num_kv_blocks"):
        assert stats.num_preemptions > 0


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_while_costly_decodes_of_one_key_sit_out_steps(
    model_dir: Path, alone: dict[str, list[int]], tmp_path: Path, enforce_eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = cuda_core(model_dir, cache_dir=tmp_path, async_scheduling=True, enforce_eager=enforce_eager)
    for _ in range(2):
        assert tokens_of(run_requests(core, of_two_keys(requests(), monkeypatch))) == alone


@pytest.mark.parametrize("cache_dtype", ["fp8", "int8"])
def test_an_8_bit_cache_under_graphs(model_dir: Path, tmp_path: Path, cache_dtype: str) -> None:
    """The kernels compute the same from quantized keys and values as plain torch."""
    logprobs = []
    for options in (
        {"attention_backend": "torch"},
        {"enforce_eager": False, "async_scheduling": True, "cache_dir": tmp_path, "max_num_batched_tokens": 32},
    ):
        core = cuda_core(model_dir, kv_cache_dtype=cache_dtype, **options)
        asked = [
            request(f"r{i}", [(i * 37 + j * 11) % VOCAB_SIZE for j in range(5 + 20 * i)], logprobs=1, max_tokens=1, prompt_logprobs=1)
            for i in range(5)
        ]
        outputs = run_requests(core, asked)
        found = [entry for steps in outputs.values() for step in steps for entry in step.prompt_logprobs or [] if entry]
        logprobs.append(np.array([entry.logprobs[0] for entry in found]))
    assert len(logprobs[0]) == sum(4 + 20 * i for i in range(5))
    # A difference in the last bit may quantize a key to the neighboring float8, which differs by an eighth, or to the next int8.
    difference = np.abs(logprobs[0] - logprobs[1])
    assert np.quantile(difference, 0.9) < 1e-2
    assert difference.max() < 0.5


def test_the_cache_is_sized_from_what_the_device_has_free(model_dir: Path, tmp_path: Path) -> None:
    core = cuda_core(model_dir, num_kv_blocks=None, gpu_memory_utilization=0.5, enforce_eager=False, cache_dir=tmp_path)
    assert core.info.num_kv_blocks == 32 * 256 // 16  # the model is so small that max_num_seqs sequences fit
    assert tokens_of(run_requests(core, [request("a", [1, 2, 3])]))["a"]


def test_draws_follow_the_distribution() -> None:
    vocab, rows, draws = 50, 64, 100
    device = torch.device("cuda")
    logits = torch.linspace(-2, 2, vocab, device=device)
    for params, kept in ((SamplingParams(temperature=0.7), vocab), (SamplingParams(top_k=7), 7), (SamplingParams(top_p=0.5), None)):
        sampler = Sampler(vocab_size=vocab, num_slots=rows, device=device)
        empty = np.empty(0, dtype=np.int64)
        for slot in range(rows):
            sampler.add(slot, msgspec.structs.replace(params, seed=slot), [], empty, empty)
        plan = sampler.plan(list(range(rows)))
        counts: Counter[int] = Counter()
        for _ in range(draws):
            inputs = {name: torch.from_numpy(values).to(device) for name, values in sampler.inputs(plan).items()}
            counts.update(sampler.sample(logits.expand(rows, -1).contiguous(), plan, inputs).tokens_S.tolist())
        probs = (logits / params.temperature).softmax(-1)
        order = probs.argsort(descending=True)
        if kept is None:
            kept = int((probs[order].cumsum(0) < params.top_p).sum()) + 1
        expected = torch.zeros_like(probs)
        expected[order[:kept]] = probs[order[:kept]] / probs[order[:kept]].sum()
        total = rows * draws
        for token, p in enumerate(expected.tolist()):
            assert abs(counts[token] - total * p) <= 5 * (total * p * (1 - p)) ** 0.5 + 4 * (p > 0), (token, params)


def test_a_row_of_nan_is_seen() -> None:
    device = torch.device("cuda")
    logits = torch.zeros(3, 40_000, device=device)
    logits[1, 17] = float("nan")
    logits[2] = float("-inf")
    empty = np.empty(0, dtype=np.int64)
    for params in (SamplingParams(temperature=0.0), SamplingParams(seed=1), SamplingParams(top_p=0.5, top_k=3, seed=1)):
        sampler = Sampler(vocab_size=40_000, num_slots=3, device=device)
        for slot in range(3):
            sampler.add(slot, params, [], empty, empty)
        plan = sampler.plan([0, 1, 2])
        inputs = {name: torch.from_numpy(values).to(device) for name, values in sampler.inputs(plan).items()}
        sampled = sampler.sample(logits, plan, inputs)
        assert torch.isfinite(sampled.best_S).tolist() == [True, False, False]
        assert 0 <= int(sampled.tokens_S.min()) <= int(sampled.tokens_S.max()) < 40_000
