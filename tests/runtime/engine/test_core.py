"""The engine in this process on a tiny random Llama: a request's tokens do not depend on how it is run."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from msgspec import structs

from compile_and_serve.runtime.engine.client import SyncEngine
from compile_and_serve.runtime.engine.connection import EngineDeadError
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.messages import EngineRequest, Sibling, TokenLogprobs
from compile_and_serve.runtime.runner.attention_backends import AttentionBackendError
from compile_and_serve.runtime.runner.state_memory import KVCacheTooSmallError
from compile_and_serve.runtime.scheduler.step_messages import StateGroupInfo, WorkerInfo
from tests.support.engines import (
    VOCAB_SIZE,
    mixed_requests,
    of_two_keys,
    prompt_of,
    request,
    run_requests,
    tiny_config,
    tokens_of,
    write_tiny_model,
)
from tests.support.tiny_models import plain_logits


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("engine") / "tiny")


@pytest.fixture(scope="module")
def core(model_dir: Path) -> EngineCore:
    return EngineCore(tiny_config(model_dir))


@pytest.fixture(scope="module")
def alone(core: EngineCore) -> dict[str, list[int]]:
    """Each request's tokens when nothing else runs."""
    result = {}
    for one in mixed_requests():
        result |= tokens_of(run_requests(core, [one]))
    return result


def test_in_a_batch(core: EngineCore, alone: dict[str, list[int]]) -> None:
    assert tokens_of(run_requests(core, mixed_requests())) == alone
    assert all(alone.values())


def test_with_a_cached_prefix(core: EngineCore, alone: dict[str, list[int]]) -> None:
    core.utility("reset_prefix_cache")
    run_requests(core, mixed_requests())
    outputs = run_requests(core, mixed_requests())
    assert tokens_of(outputs) == alone
    assert sum(step.num_cached_tokens for steps in outputs.values() for step in steps) > 100


@pytest.mark.parametrize(
    "options",
    [
        {"async_scheduling": True},
        {"max_num_batched_tokens": 16},
        {"max_num_batched_tokens": 16, "async_scheduling": True, "enable_prefix_caching": False},
        {"max_num_seqs": 3},
        {"attention_backend": "torch"},
    ],
    ids=["async", "chunked", "async-chunked", "few-slots", "torch-attention"],
)
def test_under_other_options(model_dir: Path, alone: dict[str, list[int]], options: dict[str, object]) -> None:
    assert tokens_of(run_requests(EngineCore(tiny_config(model_dir, **options)), mixed_requests())) == alone


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_after_preemptions(model_dir: Path, alone: dict[str, list[int]], is_async: bool) -> None:
    options = {"num_kv_blocks": 30, "max_model_len": 120, "async_scheduling": is_async, "enable_prefix_caching": False}
    core = EngineCore(tiny_config(model_dir, **options))
    assert tokens_of(run_requests(core, mixed_requests())) == alone
    assert core.stats().num_preemptions > 0


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_while_costly_decodes_of_one_key_sit_out_steps(
    model_dir: Path, alone: dict[str, list[int]], is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = EngineCore(tiny_config(model_dir, async_scheduling=is_async))
    outputs = run_requests(core, of_two_keys(mixed_requests(), monkeypatch))
    assert tokens_of(outputs) == alone


@pytest.mark.slow
def test_compiled(model_dir: Path, alone: dict[str, list[int]], tmp_path: Path) -> None:
    config = tiny_config(model_dir, enforce_eager=False, cache_dir=tmp_path)
    assert tokens_of(run_requests(EngineCore(config), mixed_requests())) == alone


def test_blocks_and_slots_come_back_after_64_requests(core: EngineCore) -> None:
    before = core.stats()
    outputs = run_requests(core, [request(f"c{i}", prompt_of(i, 5 + i % 20)) for i in range(64)])
    assert all(steps[-1].finish_reason == "length" for steps in outputs.values())
    after = core.stats()
    assert (after.num_free_blocks, after.num_running, after.num_waiting) == (before.num_total_blocks, 0, 0)
    core.step()
    run_requests(core, [request("last", [1])])  # its step tells the runner which requests have ended
    assert len(core.executor.worker.runner.batch) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("seed", [None, 5])
def test_siblings_are_the_requests_that_they_stand_for(model_dir: Path, seed: int | None) -> None:
    prompt = prompt_of(1, 70)
    params = {"temperature": 1.0, "max_tokens": 8}
    siblings = [Sibling(f"s{i}", None if seed is None else seed + i) for i in range(1, 4)]
    together = tokens_of(
        run_requests(EngineCore(tiny_config(model_dir)), [structs.replace(request("s0", prompt, seed=seed, **params), siblings=siblings)])
    )
    alone = tokens_of(
        run_requests(
            EngineCore(tiny_config(model_dir)),
            [request(f"s{i}", prompt, seed=None if seed is None else seed + i, **params) for i in range(4)],
        )
    )
    assert together == alone
    assert len(set(map(tuple, alone.values()))) == 4


def test_an_abort_in_the_middle_leaves_the_others_alone(core: EngineCore, alone: dict[str, list[int]]) -> None:
    requests = mixed_requests()
    for one in requests:
        core.add_request(one)
    tokens: dict[str, list[int]] = {one.request_id: [] for one in requests}
    for number in range(1000):
        if not core.has_work():
            break
        if number == 4:
            core.abort(["r2", "r4", "nobody"])
        for output in core.step().outputs:
            assert number < 4 or output.request_id not in ("r2", "r4")
            tokens[output.request_id] += output.new_token_ids
    assert {name: ids for name, ids in tokens.items() if name not in ("r2", "r4")} == {
        name: ids for name, ids in alone.items() if name not in ("r2", "r4")
    }
    assert core.stats().num_free_blocks == core.stats().num_total_blocks


def reference_logprobs(core: EngineCore, tokens: list[int]) -> torch.Tensor:
    """log softmax at every position of a sequence, in one pass of the plain module."""
    spec = core.executor.worker.runner.steps.model.spec  # type: ignore[attr-defined]
    return plain_logits(spec, tokens, torch.float32).log_softmax(-1)


def check_entry(entry: TokenLogprobs | None, expected_V: torch.Tensor, token: int, count: int) -> None:
    assert entry is not None
    assert entry.ids == [token, *expected_V.topk(count).indices.tolist()]
    assert entry.logprobs == pytest.approx(expected_V[entry.ids].tolist(), abs=1e-4)
    assert entry.rank == 1 + int((expected_V > expected_V[token]).sum())


@pytest.mark.parametrize("budget", [2048, 8], ids=["whole", "chunked"])
def test_logprobs_and_prompt_logprobs(model_dir: Path, core: EngineCore, budget: int) -> None:
    engine = EngineCore(tiny_config(model_dir, max_num_batched_tokens=budget))
    prompt = prompt_of(3, 21)
    asks = request("asks", prompt, logprobs=3, prompt_logprobs=2, temperature=1.0, seed=7, max_tokens=5)
    outputs = run_requests(engine, [asks, request("other", prompt_of(1, 12)), request("asks too", prompt, logprobs=0)])
    parts = [step.prompt_logprobs for step in outputs["asks"] if step.prompt_logprobs is not None]
    assert len(parts) == (1 if budget == 2048 else 3)
    assert all(len(part) <= budget + 1 for part in parts)  # the first token's None is one more
    prompt_entries = [entry for part in parts for entry in part]
    assert [step.prompt_logprobs for step in outputs["asks"][: len(parts)]] == parts
    steps = outputs["asks"][len(parts) - 1 :]  # from the first token on
    tokens = [token for step in steps for token in step.new_token_ids]
    expected_TV = reference_logprobs(core, prompt + tokens)
    assert len(prompt_entries) == len(prompt)
    assert prompt_entries[0] is None
    for position in range(1, len(prompt)):
        check_entry(prompt_entries[position], expected_TV[position - 1], prompt[position], 2)
    for i, step in enumerate(steps):
        assert step.new_logprobs is not None
        check_entry(step.new_logprobs[0], expected_TV[len(prompt) + i - 1], tokens[i], 3)
    assert all(step.new_logprobs is not None and len(step.new_logprobs[0].ids) == 1 for step in outputs["asks too"])
    assert all(step.new_logprobs is None for step in outputs["other"])


def test_max_tokens_0_scores_the_prompt_and_generates_nothing(core: EngineCore) -> None:
    outputs = run_requests(core, [request("score", prompt_of(2, 9), max_tokens=0, prompt_logprobs=0)])["score"]
    assert len(outputs) == 1
    assert (outputs[0].new_token_ids, outputs[0].finish_reason) == ([], "length")
    assert outputs[0].prompt_logprobs is not None
    assert len(outputs[0].prompt_logprobs) == 9


def test_stop_ids_end_a_request_but_not_before_min_tokens(core: EngineCore) -> None:
    tokens = tokens_of(run_requests(core, [request("free", [3, 1, 4], max_tokens=12)]))["free"]
    stop = tokens[4]
    first = tokens.index(stop)
    stopped = run_requests(core, [request("stopped", [3, 1, 4], max_tokens=12, stop_token_ids=[stop])])["stopped"]
    assert tokens_of({"stopped": stopped})["stopped"] == tokens[: first + 1]
    assert (stopped[-1].finish_reason, stopped[-1].stop_reason) == ("stop", stop)
    later = run_requests(core, [request("later", [3, 1, 4], max_tokens=12, stop_token_ids=[stop], min_tokens=first + 3)])
    assert stop not in tokens_of(later)["later"][: first + 3]
    assert len(tokens_of(later)["later"]) >= first + 3


@pytest.mark.parametrize(
    ("bad", "sentence"),
    [
        (request("bad", []), "no tokens"),
        (request("bad", [VOCAB_SIZE]), f"token id {VOCAB_SIZE}, but the model's ids are 0 to {VOCAB_SIZE - 1}"),
        (request("bad", [-1]), "token id -1"),
        (request("bad", [1] * 300), "256"),
        (request("bad", [1], temperature=-3.0), "temperature must be in"),
        (request("bad", [1], logit_bias={999: 1.0}), "logit_bias has token id 999"),
        (request("bad", [1], allowed_token_ids=[-2]), "allowed_token_ids has token id -2"),
        (request("bad", [1], bad_words_token_ids=[[1, 5000]]), "bad_words has token id 5000"),
        (request("bad", [1], bad_words_token_ids=[[1] * 257]), "may have 256 tokens, but one has at least 257"),
        (request("bad", [1], bad_words_token_ids=[[1, 2]] * 9000), "16384 tokens together, but they have at least 18000"),
        (request("bad", [1], stop_token_ids=[320]), "stop_token_ids has token id 320"),
    ],
    ids=lambda value: value[:12].replace(" ", "-") if isinstance(value, str) else "",
)
def test_a_request_that_cannot_run_is_refused_with_a_sentence(core: EngineCore, bad: EngineRequest, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        core.add_request(bad)
    assert not core.has_work()


@pytest.mark.parametrize(
    ("options", "error", "sentence"),
    [
        ({"max_model_len": 500}, ValueError, "max_model_len is 500, but the model's positions end at 256"),
        ({"num_kv_blocks": 3}, KVCacheTooSmallError, "room for 12 tokens .* lower --max-model-len or raise"),
        ({"attention_backend": "flash"}, AttentionBackendError, "no attention backend 'flash': known are cpu, "),
        ({"attention_backend": "flashinfer"}, AttentionBackendError, "'flashinfer' does not run here: "),
    ],
)
def test_options_that_cannot_work_are_refused_with_a_sentence(
    model_dir: Path, options: dict[str, object], error: type[ValueError], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        EngineCore(tiny_config(model_dir, **options))


def test_no_more_requests_run_than_a_step_has_tokens(model_dir: Path) -> None:
    info = EngineCore(tiny_config(model_dir, max_num_seqs=8, max_num_batched_tokens=4, max_waiting=1)).info
    assert (info.max_running, info.max_in_flight) == (4, 5)


def test_the_worker_says_how_its_cache_is_laid_out(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = WorkerInfo(
        num_blocks=24,
        block_size=4,
        page_bytes=1024,
        is_asynchronous=False,
        has_idle_tasks=False,
        device="fake",
        dtype="float32",
        max_model_len=256,
        vocab_size=320,
        groups=[StateGroupInfo("tokens", 4), StateGroupInfo("tokens", 8, window=16)],
        prefix_caching_unsupported="Its recurrent state is that of one sequence.",
        compile_report={},
    )
    executor = SimpleNamespace(info=worker, shutdown=lambda: None)
    monkeypatch.setattr("compile_and_serve.runtime.engine.core.make_executor", lambda *_: executor)
    info = EngineCore(tiny_config(model_dir, max_num_seqs=8, max_num_batched_tokens=16)).info
    assert (info.max_running, info.prefix_caching) == (8, False)
    assert info.max_sequence_len == 76  # 19 blocks, and the 5 of a window and a step
    assert caplog.text.count("Prefix caching is off: Its recurrent state is that of one sequence.") == 1


def test_stages_are_reported_in_order_with_times(model_dir: Path) -> None:
    stages: list[tuple[str, float, str]] = []
    engine = EngineCore(tiny_config(model_dir), on_stage=lambda *stage: stages.append(stage))
    assert [stage for stage, _, _ in stages] == ["read", "load", "kv cache", "warm up"]
    assert all(seconds >= 0 for _, seconds, _ in stages)
    assert engine.info.max_model_len == 256
    assert engine.info.num_kv_blocks == 2048
    assert (engine.info.dtype, engine.info.device, engine.info.block_size) == ("float32", "cpu", 4)


def test_utility_calls(core: EngineCore) -> None:
    assert core.utility("ping") == {"ok": True}
    assert core.utility("stats")["num_running"] == 0
    assert core.utility("reset_prefix_cache") == {"ok": True}
    with pytest.raises(ValueError, match="no method 'dance': known are ping, reset_prefix_cache, stats"):
        core.utility("dance")


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_every_step_reports_its_number_of_tokens(model_dir: Path, async_scheduling: bool) -> None:
    engine = EngineCore(tiny_config(model_dir, async_scheduling=async_scheduling))
    engine.add_request(request("a", prompt_of(1, 100), max_tokens=3))
    seen = []
    while engine.has_work():
        stats = engine.step().stats
        assert stats is not None
        seen.append(stats.step_tokens)
    assert seen == [100, 1, 1]
    assert engine.stats().step_tokens == 0


def test_abort_all_ends_every_request_with_an_output(model_dir: Path) -> None:
    engine = EngineCore(tiny_config(model_dir, async_scheduling=True))
    for i in range(3):
        engine.add_request(request(f"r{i}", [1, 2, i]))
    engine.step()
    outputs = engine.abort_all()
    assert {output.request_id: output.finish_reason for output in outputs} == {f"r{i}": "abort" for i in range(3)}
    assert not engine.has_work()
    assert engine.stats().num_free_blocks == engine.stats().num_total_blocks


def test_shutdown_frees_the_cache(model_dir: Path) -> None:
    engine = SyncEngine(tiny_config(model_dir))
    cache = weakref.ref(engine.core.executor.worker.runner.state["kv_caches.0"])
    run_requests(engine.core, [request("a", [1, 2])])
    engine.shutdown()
    engine.shutdown()
    assert cache() is None
    with pytest.raises(EngineDeadError, match="shut down"):
        engine.step()


def test_a_request_without_a_seed_draws_from_a_generator_of_its_replica(model_dir: Path) -> None:
    def drawn(replica: int) -> dict[str, list[int]]:
        config = tiny_config(model_dir)
        config = replace(config, parallel=replace(config.parallel, data_parallel_size=2, data_parallel_rank=replica))
        core = EngineCore(config)
        return tokens_of(run_requests(core, [request(name, [1, 2, 3], temperature=2.0) for name in "ab"]))

    first = drawn(0)
    assert first["a"] != first["b"]
    assert first == drawn(0)
    assert first["a"] not in drawn(1).values()
