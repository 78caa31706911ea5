"""Two engines side by side in one process: what a step sets for its ops is its thread's own."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from compile_and_serve import LLM, SamplingParams
from compile_and_serve.custom_ops.moe.expert_load import count_call, counting_experts
from compile_and_serve.custom_ops.tuning.tuner import is_tuning_on, tuning_off


@pytest.fixture
def switching_often() -> Iterator[None]:
    """Threads take turns within each layer of a step."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def generate(llm: LLM, count: int) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    return [
        list(output.outputs[0].token_ids)
        for output in llm.generate([f"Prompt {i}" * (i + 1) for i in range(count)], params, use_tqdm=False)
    ]


@pytest.mark.usefixtures("switching_often")
def test_each_engine_gives_the_same_tokens_as_alone(tiny_llama_dir: Path, tiny_qwen3_dir: Path) -> None:
    with ExitStack() as stack:
        llms = [
            stack.enter_context(LLM(str(folder), device="cpu", enforce_eager=True, max_model_len=128, num_kv_blocks=64, num_threads=1))
            for folder in (tiny_llama_dir, tiny_qwen3_dir, tiny_llama_dir)
        ]
        counts = (5, 3, 2)
        alone = [generate(llm, count) for llm, count in zip(llms, counts, strict=True)]
        with ThreadPoolExecutor(len(llms)) as threads:
            for _ in range(3):
                assert list(threads.map(generate, llms, counts)) == alone


def test_a_thread_neither_counts_nor_stops_tuning_for_another() -> None:
    inside, leave = threading.Event(), threading.Event()

    def serve() -> int:
        with tuning_off(), counting_experts() as loads:
            inside.set()
            assert leave.wait(10)
            assert not is_tuning_on()
            return len(loads)

    with ThreadPoolExecutor(1) as thread:
        serving = thread.submit(serve)
        assert inside.wait(10)
        assert is_tuning_on()
        count_call(torch.zeros(1, 1, dtype=torch.int32), torch.zeros(2, 1))
        leave.set()
        assert serving.result() == 0
