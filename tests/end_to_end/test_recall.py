"""A trained hybrid answers from its memory, while freed slots and blocks are full of poison: a wrong slot or snapshot shows in the text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest

from compile_and_serve import LLM, SamplingParams
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.messages import EngineRequest, Sibling
from compile_and_serve.runtime.scheduler.block_pool import POISON_VARIABLE
from tests.support.engines import request, run_requests, tiny_config, tokens_of
from tests.support.recall import END, FOLDER, Conversation

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 3}
SUFFIX = {"method": "suffix", "num_speculative_tokens": 8}
SEEDS = (1, 3, 4, 5, 7, 9)  # of conversations that the model answers without a mistake


FINDINGS: list[list[str]] = []  # of the canary of each engine


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(POISON_VARIABLE, "1")
    yield
    assert not any(FINDINGS)
    FINDINGS.clear()


def core_of(**options: Any) -> EngineCore:
    """Its canary looks in every step."""
    defaults = {"load_format": "auto", "block_size": 16, "max_num_batched_tokens": 64, "verify_state": True}
    core = EngineCore(tiny_config(FOLDER, **(defaults | options)))
    assert core.canaries is not None
    assert core.canaries.recomputation is not None
    core.canaries.recomputation.seconds = 0.2
    [canary] = core.canaries
    canary.seconds = 0.0
    FINDINGS.append(canary.findings)
    return core


def turns(seed: int, count: int, length: int = 40) -> Iterator[tuple[list[int], list[int]]]:
    """Prompts with their right answers."""
    talk = Conversation(seed)
    for _ in range(count):
        answer = talk.ask(length)
        yield talk.prompt, answer


def ask(name: str, prompt: Sequence[int]) -> EngineRequest:
    return request(name, prompt, max_tokens=100, eos_token_ids=[END])


@pytest.mark.slow_cases
@pytest.mark.parametrize("speculative_config", [None, NGRAM, SUFFIX], ids=["plain", "ngram", "suffix"])
def test_conversations_beside_each_other(speculative_config: dict[str, Any] | None) -> None:
    """Prompts in chunks, prefixes that are found, and drafts: what one turn leaves is what the next begins with."""
    core = core_of(speculative_config=speculative_config)
    talks = {f"{seed}": list(turns(seed, 3)) for seed in SEEDS}
    for turn in range(3):
        requests = [ask(name, talk[turn][0]) for name, talk in talks.items()]
        outputs = run_requests(core, requests)
        assert tokens_of(outputs) == {name: talk[turn][1] for name, talk in talks.items()}
        for name, talk in talks.items():
            prompt, answer = talk[turn - 1] if turn else ([], [])
            # Of an answer with drafts, the last state may be too far behind what was written.
            begun = len(prompt) + (len(answer) if speculative_config is None else 0)
            assert max(one.num_cached_tokens for one in outputs[name]) >= begun - 32
    stats = core.stats()
    assert stats.num_free_blocks == stats.num_total_blocks
    if speculative_config is not None:
        assert stats.spec_decode_num_accepted_tokens > 100  # a copy is easy to guess
    core.shutdown()


def test_preempted_conversations() -> None:
    """More of them than the pool has room for."""
    core = core_of(max_model_len=256, num_kv_blocks=80)
    assert core.executor.worker.loaded.pages.pages_per_slot == {"recurrent_states": 10}  # type: ignore[attr-defined]
    talks = {f"{seed}": next(turns(seed, 1)) for seed in SEEDS}
    outputs = run_requests(core, [ask(name, prompt) for name, (prompt, _) in talks.items()])
    assert tokens_of(outputs) == {name: answer for name, (_, answer) in talks.items()}
    assert core.stats().num_preemptions
    core.shutdown()


def test_siblings_and_sleep() -> None:
    """Sequences of one prompt go on from one state; after a sleep there is none."""
    core = core_of()
    prompt, answer = next(turns(SEEDS[0], 1))
    siblings = [Sibling(f"s{i}") for i in range(3)]
    outputs = run_requests(core, [msgspec.structs.replace(ask("r", prompt), siblings=siblings)])
    assert list(tokens_of(outputs).values()) == [answer] * 4
    for level in (1, 2):
        core.sleep(level)
        core.wake_up()
        outputs = run_requests(core, [ask(f"after {level}", prompt)])
        assert list(tokens_of(outputs).values()) == [answer]
        assert max(one.num_cached_tokens for one in outputs[f"after {level}"]) == 0
    core.shutdown()


@pytest.mark.parametrize("what", ["state", "keys and values"])
def test_what_is_not_its_own_shows(what: str) -> None:
    """A question goes on from what another one left: the answer is wrong."""
    core = core_of()
    assert core.canaries is not None
    core.canaries.recomputation = None  # it would find it
    pages = core.executor.worker.runner.page_memory().parts[0][0]  # type: ignore[attr-defined]
    pool = core._scheduler.manager.pool
    (mine, answer), (other, _) = (next(turns(seed, 1, 60)) for seed in SEEDS[:2])
    kept = []
    for name, prompt in (("other", other), ("mine", mine)):
        run_requests(core, [request(name, prompt[:50], max_tokens=1)])
        first = next(entry for entry in reversed(pool.cached.values()) if entry.followers)
        kept.append([first.block_id, *(block.block_id for block in first.followers)])
    if what == "state":
        pages[kept[1]] = pages[kept[0]]
    else:
        blocks = [entry.block_id for entry in pool.cached.values() if not entry.followers]
        pages[blocks] = pages[blocks[::-1]]
    outputs = run_requests(core, [ask("mine again", mine)])
    assert max(one.num_cached_tokens for one in outputs["mine again"]) == 48
    assert tokens_of(outputs)["mine again"] != answer
    core.shutdown()


@pytest.mark.exhaustive
def test_two_ranks(tmp_path: Any) -> None:
    options: dict[str, Any] = {"dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "max_num_seqs": 4, "block_size": 16}
    params = SamplingParams(temperature=0.0, max_tokens=100, stop_token_ids=[END], detokenize=False)
    talks = [list(turns(seed, 2)) for seed in SEEDS[:3]]
    with LLM(str(FOLDER), **options, cache_dir=tmp_path, tensor_parallel_size=2, speculative_config=NGRAM) as llm:
        for turn in range(2):
            prompts: list[Any] = [{"prompt_token_ids": talk[turn][0]} for talk in talks]
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == [talk[turn][1] for talk in talks]
            assert all(output.num_cached_tokens > 0 for output in outputs) == bool(turn)
