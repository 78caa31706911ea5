"""Engines whose model is cut into stages, each on a rank of its own: they say what one rank says.

Pieces are not compiled, for compiling is not the subject, except in the test of the artifact.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from compile_and_serve.compiler.artifacts.store import ArtifactStore
from compile_and_serve.compiler.config import CompileConfig
from compile_and_serve.compiler.pipeline import compile_model
from compile_and_serve.custom_ops.mesh import Mesh
from compile_and_serve.models.registry import build_model
from compile_and_serve.runtime.distributed.executor import RankFailedError
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.lora.request import LoRARequest
from compile_and_serve.runtime.messages import EngineRequest, RequestOutput
from compile_and_serve.runtime.structured.grammar import to_grammar
from compile_and_serve.runtime.structured.params import StructuredOutputsParams
from compile_and_serve.runtime.text.load_tokenizer import load_tokenizer
from tests.support.adapters import write_adapter
from tests.support.drafters import check_every_draft
from tests.support.engines import mixed_requests, prompt_of, request, run_requests, tiny_config, tokens_of, write_tiny_model
from tests.support.staged_engine import REPLAYS, plugged_in, use_plain_pieces

LAYERS = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> Path:
    made = write_tiny_model(tmp_path_factory.mktemp("stages") / "model")
    config = json.loads((made / "config.json").read_text()) | {"num_hidden_layers": LAYERS}
    (made / "config.json").write_text(json.dumps(config))
    for file in tiny_llama_dir.glob("*token*"):
        (made / file.name).symlink_to(file)
    return made


@pytest.fixture(scope="module", autouse=True)
def plain_pieces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        plugged_in(tmp_path_factory.mktemp("site"), patch)
        use_plain_pieces(patch)
        yield


def start(folder: Path, stages: int = 2, **options: Any) -> EngineCore:
    """With few blocks, so that requests are preempted."""
    given = {"max_model_len": 120, "num_kv_blocks": 60, "max_num_batched_tokens": 64, "use_cache": False, "enforce_eager": False}
    return EngineCore(tiny_config(folder, **(given | {"pipeline_parallel_size": stages} | options)))


def start_one(folder: Path, **options: Any) -> EngineCore:
    """One rank, without preemptions."""
    return start(folder, 1, **({"num_kv_blocks": 2048} | options))


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[RequestOutput]]:
    core = start_one(folder)
    outputs = run_requests(core, mixed_requests())
    assert core.stats().num_preemptions == 0
    core.shutdown()
    return outputs


@pytest.fixture(scope="module")
def core(folder: Path) -> Iterator[EngineCore]:
    core = start(folder)
    yield core
    core.shutdown()


def logprobs_of(outputs: list[RequestOutput]) -> list[float]:
    entries = [entry for one in outputs for entry in (*(one.new_logprobs or ()), *(one.prompt_logprobs or ())) if entry is not None]
    return [value for entry in entries for value in entry.logprobs]


def check_same(core: EngineCore, expected: dict[str, list[RequestOutput]]) -> None:
    """Greedy and seeded, with penalties, bad words, allowed tokens and logprobs; preempted, in several chunks."""
    before = core.stats().num_preemptions
    outputs = run_requests(core, mixed_requests())
    assert tokens_of(outputs) == tokens_of(expected)
    for name in ("r6", "r9"):  # of outputs, and of a prompt
        ours, theirs = logprobs_of(outputs[name]), logprobs_of(expected[name])
        assert len(ours) > 16
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-3)
    stats = core.stats()
    assert stats.num_preemptions > before
    assert stats.num_free_blocks == stats.num_total_blocks


def test_two_stages_say_what_one_rank_says(core: EngineCore, expected: dict[str, list[RequestOutput]]) -> None:
    check_same(core, expected)
    assert core.stats().stage_wait_seconds > 0


def test_as_many_steps_are_in_flight_as_there_are_stages(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of other sequences, which are divided evenly."""
    launched: list[set[str]] = []
    in_flight: list[int] = []
    launch, result = core.executor.launch, core.executor.result

    def noted(scheduled: Any) -> Any:
        launched.append(set(scheduled.num_scheduled_tokens))
        in_flight.append(len(launched) - taken[0])
        return launch(scheduled)

    def took(handle: Any) -> Any:
        taken[0] += 1
        return result(handle)

    taken = [0]
    monkeypatch.setattr(core.executor, "launch", noted)
    monkeypatch.setattr(core.executor, "result", took)
    run_requests(core, [request(f"d{i}", prompt_of(i, 4), max_tokens=12, ignore_eos=True) for i in range(6)])
    assert max(in_flight) == 2
    decodes = launched[4:-2]
    assert all(first.isdisjoint(second) for first, second in itertools.pairwise(decodes))
    assert {len(one) for one in decodes[:16]} == {3}


def test_cached_prefixes_are_taken_up_by_both_stages(core: EngineCore, expected: dict[str, list[RequestOutput]]) -> None:
    one, before = mixed_requests()[4], core.stats().prefix_cache_hits
    for _ in range(2):
        assert tokens_of(run_requests(core, [one])) == {one.request_id: tokens_of(expected)[one.request_id]}
    assert core.stats().prefix_cache_hits >= before + 56


def structured(folder: Path) -> tuple[list[EngineRequest], Callable[[dict[str, list[int]]], None]]:
    """Requests for texts of a form, and a function that checks their tokens."""
    tokenizer = load_tokenizer(folder)
    form = StructuredOutputsParams(compiled=to_grammar(StructuredOutputsParams(regex="([0-9a-f]{2} ){6}"), {}))
    ends = {"stop_token_ids": tokenizer.eos_token_ids, "eos_token_ids": tokenizer.eos_token_ids}
    requests = [request(f"s{i}", prompt_of(i, 5 + i), max_tokens=60, structured_outputs=form, **ends) for i in range(3)]

    def check(found: dict[str, list[int]]) -> None:
        for one in found.values():
            assert re.fullmatch("([0-9a-f]{2} ){6}", tokenizer.decode([token for token in one if token not in tokenizer.eos_token_ids]))

    return requests, check


def test_structured_output(core: EngineCore, folder: Path) -> None:
    requests, check = structured(folder)
    check(tokens_of(run_requests(core, requests)))


def test_both_stages_sleep_and_wake(core: EngineCore, expected: dict[str, list[RequestOutput]]) -> None:
    core.sleep(1)
    core.wake_up()
    check_same(core, expected)


@pytest.mark.exhaustive
def test_three_uneven_stages_run_ahead(folder: Path, expected: dict[str, list[RequestOutput]]) -> None:
    core = start(folder, 3, async_scheduling=True, pipeline_parallel_layers=[2, 1, 1])
    assert core.info.compile_report["stage_cuts"] == "kv_caches.1, kv_caches.2"
    check_same(core, expected)
    core.shutdown()


@pytest.mark.exhaustive
def test_stages_of_two_ranks_with_a_draft_model_beside_the_last(
    folder: Path, expected: dict[str, list[RequestOutput]], monkeypatch: pytest.MonkeyPatch
) -> None:
    check_every_draft(monkeypatch)
    config = {"method": "draft_model", "num_speculative_tokens": 4, "model": str(folder)}
    core = start(folder, tensor_parallel_size=2, speculative_config=config)
    assert core.executor.mesh == Mesh(pipe=2, tensor=2)
    check_same(core, expected)
    assert core.stats().spec_decode_num_accepted_tokens > 50
    core.shutdown()


@pytest.mark.slow
def test_graphs_of_both_stages_run_ahead(
    folder: Path, expected: dict[str, list[RequestOutput]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sequence alone, whose steps follow each other, and several. Greedy ones: on the CPU nobody fills in what graphs sample with."""
    pytest.importorskip("triton")
    monkeypatch.setenv(REPLAYS, str(tmp_path))
    core = start(folder, async_scheduling=True, max_num_seqs=4)
    greedy = [one for one in mixed_requests() if one.sampling_params.temperature == 0]
    for requests in ([greedy[1]], greedy):
        outputs = tokens_of(run_requests(core, requests))
        assert outputs == {name: tokens for name, tokens in tokens_of(expected).items() if name in outputs}
    replays, ahead = core.stats().graph_replays, core.stats().steps_on_device
    core.shutdown()
    assert len(list(tmp_path.iterdir())) == 2
    assert replays["full"] > 3
    assert ahead > 8


@pytest.mark.exhaustive
def test_adapters_lie_on_both_stages_and_drafts_change_no_token(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = build_model(json.loads((folder / "config.json").read_text()), dtype=torch.float32)
    save_file({name: torch.zeros(one.shape) for name, one in spec.module.named_parameters()}, tmp_path / "model.safetensors")
    lora = LoRARequest("a", 1, str(write_adapter(tmp_path / "adapter", tmp_path, rank=4)))
    plain = [request(f"l{i}", prompt_of(3, 20), max_tokens=40) for i in range(2)]
    requests = [msgspec.structs.replace(plain[0], lora=lora), plain[1]]
    check_every_draft(monkeypatch)
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    found = []
    for stages, config in ((1, None), (2, ngram)):
        core = start(folder, stages, enable_lora=True, max_lora_rank=8, speculative_config=config)
        found.append(tokens_of(run_requests(core, requests)))
        stats = core.stats()
        core.shutdown()
    assert found[0] == found[1]
    assert found[0]["l0"] != found[0]["l1"]
    assert stats.spec_decode_num_draft_tokens > 20


@pytest.mark.exhaustive
def test_stages_use_the_artifact_of_one_rank(folder: Path, tmp_path: Path, expected: dict[str, list[RequestOutput]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("STAGES_TEST_PLAIN_PIECES")
        from compile_and_serve.compiler import inductor, pipeline

        patch.setattr(pipeline, "start_piece", inductor.start_piece)
        core = start_one(folder, use_cache=True, cache_dir=tmp_path)
        assert tokens_of(run_requests(core, mixed_requests())) == tokens_of(expected)
        core.shutdown()
        keys = [entry.key for entry in ArtifactStore(tmp_path).entries()]
        for cut_by in ("bytes of weights", "measured time"):  # the first start in stages measures
            core = start(folder, use_cache=True, cache_dir=tmp_path)
            assert core.info.compile_report["artifact"] == "hit"
            assert core.info.compile_report["stage_cuts_by"] == cut_by
            assert [entry.key for entry in ArtifactStore(tmp_path).entries()] == keys
            check_same(core, expected)
            core.shutdown()


@pytest.mark.multigpu
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"cudagraph_mode": "none"}, id="no graphs"),
        pytest.param({}, id="graphs"),
        pytest.param({"async_scheduling": False}, id="sync"),
        pytest.param({"tensor_parallel_size": 2}, id="tensor", marks=pytest.mark.multigpu(4)),
    ],
)
def test_several_gpus(folder: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("STAGES_TEST_PLAIN_PIECES")
        from compile_and_serve.compiler import inductor, pipeline

        patch.setattr(pipeline, "start_piece", inductor.start_piece)
        given = {"device": "cuda", "block_size": 16, "num_kv_blocks": 256, "attention_backend": "triton"}
        given |= {"use_cache": True, "cache_dir": tmp_path}
        one = start_one(folder, **given)
        wanted = tokens_of(run_requests(one, mixed_requests()))
        one.shutdown()
        several = start(folder, **(given | options))
        for _ in range(3):
            assert tokens_of(run_requests(several, mixed_requests())) == wanted
            while several.idle():
                pass
        several.shutdown()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"expert_metrics": True}, "but expert_metrics needs a model in one piece"),
        ({"distributed_executor_backend": "ray"}, "but distributed_executor_backend 'ray' needs a model in one piece"),
        ({"enforce_eager": True}, "but only a compiled model can be cut: remove enforce_eager"),
    ],
)
def test_what_stages_cannot_do_is_a_sentence(folder: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        tiny_config(folder, **({"pipeline_parallel_size": 2} | options))


def test_a_model_with_too_few_layers_is_a_sentence(folder: Path) -> None:
    spec = build_model(json.loads((folder / "config.json").read_text()), dtype=torch.float32)

    def cut(size: int, layers: tuple[int, ...] | None = None) -> None:
        config = CompileConfig(use_cache=False, pipeline_parallel_size=size, pipeline_parallel_layers=layers)
        compile_model(spec, config, device=torch.device("cpu"), dtype=torch.float32, stage=0)

    with pytest.raises(ValueError, match=r"pipeline_parallel_size is 5, but the model can be cut in 3 places: set it to 4 or lower\."):
        cut(5)
    with pytest.raises(ValueError, match=r"pipeline_parallel_layers is 3, 2, but must be 2 positive numbers with the sum 4"):
        cut(2, (3, 2))


@pytest.mark.slow
def test_a_stage_that_is_killed_ends_the_engine_with_a_sentence(core: EngineCore) -> None:
    """The last test of this engine."""
    for one in mixed_requests():
        core.add_request(one)
    core.step()
    processes = core.executor._host._processes  # type: ignore[attr-defined]
    os.kill(processes[0].pid, signal.SIGKILL)

    def go_on() -> None:
        while True:
            core.step()

    with pytest.raises(RankFailedError, match=r"^Rank 0 of 2 was ended by signal 9"):
        go_on()
