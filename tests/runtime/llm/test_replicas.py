"""`LLM(data_parallel_size=…)`: replicas in processes of their own answer as one model in this process does."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from compile_and_serve import LLM, SamplingParams
from compile_and_serve.runtime.engine.connection import EngineDeadError
from compile_and_serve.runtime.engine.replicas import DataParallelClient
from compile_and_serve.runtime.engine.sync_replicas import SyncReplicas

OPTIONS = {"dtype": "float32", "device": "cpu", "enforce_eager": True, "max_model_len": 256, "num_threads": 1}
PROMPTS = ["Once upon a time", "The sea is", "One two three", "Why", "Hello there, you", "A"]


@pytest.fixture(scope="module")
def llm(tiny_llama_dir: Path) -> Iterator[LLM]:
    with LLM(str(tiny_llama_dir), data_parallel_size=2, **OPTIONS) as made:
        yield made


def test_it_answers_as_one_engine_does(llm: LLM, tiny_llama_dir: Path) -> None:
    params = [SamplingParams(temperature=0, max_tokens=3 + number, n=1 + number % 2) for number in range(len(PROMPTS))]
    with LLM(str(tiny_llama_dir), **OPTIONS) as one:
        expected = one.generate(PROMPTS, params, use_tqdm=False)
    for _ in range(2):
        results = llm.generate(PROMPTS, params, use_tqdm=False)
        texts = [[output.text for output in result.outputs] for result in results]
        assert texts == [[output.text for output in result.outputs] for result in expected]
    assert not llm.engine.has_work()


def test_a_request_that_cannot_run_is_refused_and_others_go_on(llm: LLM) -> None:
    with pytest.raises(ValueError, match="256"):
        llm.generate({"prompt_token_ids": [5] * 300}, use_tqdm=False)
    assert len(llm.generate("Why", SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)[0].outputs[0].token_ids) == 4


def test_it_sleeps_and_wakes(llm: LLM) -> None:
    before = llm.generate("Why", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)[0].outputs[0].text
    llm.sleep()
    assert llm.is_sleeping
    llm.wake_up(["weights"])
    assert llm.is_sleeping
    llm.wake_up()
    assert not llm.is_sleeping
    assert llm.generate("Why", SamplingParams(temperature=0, max_tokens=4), use_tqdm=False)[0].outputs[0].text == before


@pytest.mark.slow
def test_a_dead_replica_ends_the_call(llm: LLM) -> None:
    """The last test: the replicas are gone afterwards."""
    engine = llm.engine
    assert isinstance(engine, SyncReplicas)
    assert isinstance(engine._client, DataParallelClient)
    os.kill(engine._client.replicas[1].pid, signal.SIGKILL)  # type: ignore[attr-defined]
    with pytest.raises((EngineDeadError, RuntimeError), match="Replica 1 of 2: .* was ended by signal 9"):
        llm.generate(PROMPTS, SamplingParams(max_tokens=64, ignore_eos=True), use_tqdm=False)
