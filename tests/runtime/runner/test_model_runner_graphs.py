"""The runner replays CUDA graphs of a model that can tell whether every sequence is what it should be."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

import llguidance
import numpy as np
import pytest

from compile_and_serve.compiler.cudagraphs.runner import CudaGraphRunner
from compile_and_serve.runtime.messages import EngineRequest
from compile_and_serve.runtime.runner.model_runner import ModelRunner
from compile_and_serve.runtime.sampling.decode_step import begin_step, end_step
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.runtime.scheduler.step_messages import CachedRequestData
from compile_and_serve.runtime.structured.compiler import CompiledGrammar, Grammar
from compile_and_serve.runtime.structured.grammar import byte_tokenizer, to_grammar
from compile_and_serve.runtime.structured.params import StructuredOutputsParams
from tests.support.fake_graphs import FakeDevice
from tests.support.paged_model import (
    POISON,
    Capturable,
    PagedModel,
    expected_tokens,
    make_runner,
    new_request,
    next_token,
    run_schedule,
    step,
)


def graphs_of(model: PagedModel, seqs: int = 8, **sizes: object) -> CudaGraphRunner:
    return CudaGraphRunner(
        model,
        mode="full",
        max_num_seqs=seqs,
        backends=[Capturable()],
        device=FakeDevice(),
        decode_head=begin_step,
        decode_tail=end_step,
        **sizes,  # type: ignore[arg-type]
    )


@pytest.mark.slow_cases
@pytest.mark.exhaustive_cases(but=["preempting"])
@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize("num_blocks", [256, 24], ids=["roomy", "preempting"])
def test_steps_go_on_from_what_the_step_before_left_on_the_device(depth: int, num_blocks: int) -> None:
    pytest.importorskip("triton")
    rng = np.random.default_rng(num_blocks)
    requests = [
        EngineRequest(
            request_id=f"r{i}",
            prompt_token_ids=rng.integers(0, POISON, size=rng.integers(1, 30)).tolist(),
            # Penalties too weak to change a choice: rows that are chosen outside of the graph.
            sampling_params=SamplingParams(
                temperature=0.0,
                max_tokens=int(rng.integers(1, 30)),
                presence_penalty=1e-3 if i % 7 == 3 else 0.0,
                min_tokens=5 if i % 5 == 2 else 0,
            ),
        )
        for i in range(20)
    ]
    graphs = graphs_of(PagedModel(in_graph=True), sizes=(1, 2, 4, 5, 8))
    runner = make_runner(graphs, num_blocks=num_blocks)
    graphs.bind(runner.decode_step)
    assert graphs.capture() == 5
    tokens, scheduler = run_schedule(runner, requests, num_blocks=num_blocks, budget=32, seqs=8, depth=depth, late=6, reads_at_once=True)
    for request in requests:
        count = request.sampling_params.max_tokens or 0
        assert tokens[request.request_id] == expected_tokens(request.prompt_token_ids, count), request.request_id
    assert (scheduler.stats().num_preemptions > 0) == (num_blocks == 24)
    replays = graphs.stats.replays["full"]
    assert 0 < runner.steps_on_device < replays
    assert runner.padded_tokens > 0


class BytesGrammars:
    """Compiles grammars over a vocabulary of single bytes."""

    num_words = 9

    def compile(self, grammar: str) -> Grammar:
        future: Grammar = Future()
        future.set_result(CompiledGrammar(llguidance.LLMatcher(byte_tokenizer(), grammar, log_level=0), None))
        return future


@pytest.mark.slow_cases
@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize("num_blocks", [256, 24], ids=["roomy", "preempting"])
def test_structured_sequences_replay_graphs_that_do_not_sample(depth: int, num_blocks: int) -> None:
    pytest.importorskip("triton")
    rng = np.random.default_rng(num_blocks)
    form = StructuredOutputsParams(compiled=to_grammar(StructuredOutputsParams(regex=r"[\x20-\x5f]*"), {}))
    requests = [
        EngineRequest(
            request_id=f"r{i}",
            prompt_token_ids=rng.integers(0, POISON, size=rng.integers(1, 30)).tolist(),
            sampling_params=SamplingParams(
                temperature=0.0, max_tokens=int(rng.integers(1, 30)), structured_outputs=form if i % 5 == 3 else None
            ),
        )
        for i in range(20)
    ]
    graphs = graphs_of(PagedModel(in_graph=True), sizes=(1, 2, 4, 5, 8))
    runner = make_runner(graphs, num_blocks=num_blocks)
    runner.grammars = BytesGrammars()  # type: ignore[assignment]
    graphs.bind(runner.decode_step)
    graphs._waiting_unsampled += graphs.sizes  # as if steps had asked for them
    assert graphs.capture() == 10
    tokens, _ = run_schedule(runner, requests, num_blocks=num_blocks, budget=32, seqs=8, depth=depth, late=6, reads_at_once=True)
    for request in requests:
        sequence = list(request.prompt_token_ids)
        for _ in range(request.sampling_params.max_tokens or 0):
            token = next_token(sequence)
            is_structured = request.sampling_params.structured_outputs is not None
            sequence.append(32 if is_structured and token < 32 else token)  # all others have the same logit
        assert tokens[request.request_id] == sequence[len(request.prompt_token_ids) :], request.request_id
    replays = {key: full.graph.num_replays for key, full in graphs._full.items()}  # type: ignore[attr-defined]
    assert any(count for (_, with_sampling), count in replays.items() if not with_sampling)
    assert any(count for (_, with_sampling), count in replays.items() if with_sampling)


def run_two_sequences(runner: ModelRunner, num_steps: int, between: Callable[[int], None]) -> None:
    """Steps of two prompts, then of their decodes; every token must be right. between: what happens after each step, by its number."""
    prompts = {"a": [1, 2, 3], "b": [4, 5]}
    new = [new_request(name, prompt, [i]) for i, (name, prompt) in enumerate(prompts.items())]
    results = [runner.launch(step(0, {"a": 3, "b": 2}, new_requests=new)).result()]
    for number in range(1, num_steps):
        more = [CachedRequestData(request_id=name, new_block_ids=[[10 + i, 20 + i]]) for i, name in enumerate(prompts)]
        given = {"cached_requests": more} if number == 1 else {}
        results.append(runner.launch(step(number, {"a": 1, "b": 1}, **given)).result())
        between(number)
    for name, prompt in prompts.items():
        assert [token for result in results for token in result.sampled_token_ids[name]] == expected_tokens(prompt, num_steps)


def test_a_graph_captured_between_two_steps_takes_nothing_from_them() -> None:
    """Capturing fills the arrays that decodes lie in with padding."""
    pytest.importorskip("triton")
    graphs = graphs_of(PagedModel(in_graph=True), sizes=(1, 2))
    runner = make_runner(graphs)
    graphs.bind(runner.decode_step)
    graphs.capture(1)  # the largest

    def between(number: int) -> None:
        assert number != 3 or graphs.capture_next()

    run_two_sequences(runner, 7, between)
    assert runner.steps_on_device == 4  # not the first, and not the one after the capture


def test_graphs_that_are_captured_again_between_steps_take_nothing_from_them() -> None:
    pytest.importorskip("triton")
    graphs = graphs_of(PagedModel(in_graph=True), sizes=(1, 2))
    runner = make_runner(graphs)
    graphs.bind(runner.decode_step)
    graphs.capture()

    def between(number: int) -> None:
        if number == 2:
            graphs.renew()
        assert number not in (3, 5) or graphs.capture_next()  # one step runs in the old graph

    run_two_sequences(runner, 8, between)
    assert graphs.num_waiting == 0
    assert graphs.stats.replays["full"] == 7
    assert graphs.stats.captured["full"] == 2


def test_a_sequence_that_lacks_its_last_token_alone_begins_in_a_graph() -> None:
    """As behind blocks from another engine. Chunks that lack more, and prompts of one token, are no decodes."""
    pytest.importorskip("triton")
    graphs = graphs_of(PagedModel(in_graph=True), sizes=(2, 4))
    runner = make_runner(graphs)
    graphs.bind(runner.decode_step)
    graphs.capture()
    prompt = list(range(1, 10))
    first = [new_request("first", prompt, [0, 1, 2, 3, 4])]
    results = [runner.launch(step(0, {"first": 9}, new_requests=first)).result()]
    late = new_request("late", prompt, [0, 1, 10, 11])  # its first 8 tokens lie in the other's blocks
    late.num_computed_tokens = 8
    results += [runner.launch(step(1, {"first": 1, "late": 1}, new_requests=[late])).result()]
    results += [runner.launch(step(number, {"first": 1, "late": 1})).result() for number in (2, 3)]
    assert (graphs.stats.replays["full"], runner.steps_on_device) == (3, 2)
    more = [new_request("one", [6], [6]), new_request("more", prompt, [0, 12, 13])]
    more[1].num_computed_tokens = 4
    results.append(runner.launch(step(4, {"first": 1, "late": 1, "one": 1, "more": 1}, new_requests=more)).result())
    results.append(runner.launch(step(5, {"more": 4, "one": 1}, finished_request_ids=["first", "late"])).result())
    assert graphs.stats.replays["full"] == 3
    found = {name: [token for result in results for token in result.sampled_token_ids.get(name, ())] for name in ("first", "late", "more")}
    wanted = expected_tokens(prompt, 5)
    assert found == {"first": wanted, "late": wanted[:4], "more": wanted[:1]}


def drawn_tokens(runner: ModelRunner) -> dict[str, list[int]]:
    """Seven steps of two random requests, one with a penalty, which is why tokens are drawn outside of the graph; then a third comes."""
    runner.sampler._has_triton = True  # which draws as a GPU does, in Triton's interpreter
    new = [
        new_request("plain", [1, 2, 3], [0, 1, 2], temperature=1.0, seed=7),
        new_request("penalty", [4, 5], [3, 4, 5], temperature=1.0, seed=8, presence_penalty=1e-3),
    ]
    results = [runner.launch(step(0, {"plain": 3, "penalty": 2}, new_requests=new)).result()]
    results += [runner.launch(step(number, {"plain": 1, "penalty": 1})).result() for number in range(1, 6)]
    late = [new_request("late", [6], [6])]
    results.append(runner.launch(step(6, {"plain": 1, "penalty": 1, "late": 1}, new_requests=late)).result())
    names = ("plain", "penalty")
    return {name: [token for result in results for token in result.sampled_token_ids[name]] for name in names}


def test_draws_outside_of_the_graph_are_those_without_one() -> None:
    pytest.importorskip("triton")
    graphs = graphs_of(PagedModel(in_graph=True), sizes=(1, 2))
    runner = make_runner(graphs)
    graphs.bind(runner.decode_step)
    graphs.capture()
    plain = make_runner(PagedModel())
    assert drawn_tokens(runner) == drawn_tokens(plain)
    assert runner.steps_on_device == 4
    assert runner.captures_due == plain.captures_due == 0
