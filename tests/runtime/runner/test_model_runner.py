"""The runner against a model that reads its paged cache and can tell whether every sequence is what it should be."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path

import llguidance
import numpy as np
import pytest
import torch

from compile_and_serve.compiler.cudagraphs.runner import CudaGraphRunner, PlainRunner
from compile_and_serve.custom_ops.attention.attention import AttentionMetadata
from compile_and_serve.custom_ops.attention.torch_backend import TorchAttention
from compile_and_serve.custom_ops.step import KV_CACHES, KVCacheSpec, Step
from compile_and_serve.models.spec import ModelSpec, full_attention
from compile_and_serve.runtime.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from compile_and_serve.runtime.messages import EngineRequest, RequestOutput
from compile_and_serve.runtime.runner.decode_step import begin_step, end_step
from compile_and_serve.runtime.runner.model_runner import NOT_TAKEN_IN, ModelRunner
from compile_and_serve.runtime.runner.pending_step import NOT_FINITE, PendingStep
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.runtime.scheduler.scheduler import Scheduler
from compile_and_serve.runtime.scheduler.step_messages import (
    NOTHING_LEFT,
    CachedRequestData,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
)
from compile_and_serve.runtime.structured.grammar import _byte_tokenizer, to_grammar
from compile_and_serve.runtime.structured.params import StructuredOutputsParams
from tests.support.fake_graphs import FakeDevice

VOCAB, BLOCK, MAX_LEN = 97, 4, 64
POISON = 96  # a sequence that has this token gets NaN logits


def next_token(tokens: list[int]) -> int:
    """What the model makes of a sequence: any change of any token changes it."""
    value = 1
    for token in tokens:
        value = (value * 31 + token + 7) % 1_000_003
    return value % (VOCAB - 1)


@dataclass
class PagedModel:
    """Keeps token ids instead of keys and values, through slot_mapping and block_table alone.

    in_graph: the metadata is that which a graph was captured with: its integers say nothing of the step, and its rows may be padding.
    """

    pad_to: int | None = None
    in_graph: bool = False
    cache: dict[int, int] = field(default_factory=dict)
    calls: list[tuple[int, int]] = field(default_factory=list)

    def __call__(self, step: Step) -> dict[str, torch.Tensor]:
        input_ids, positions, logits_indices = (
            step.inputs[name] for name in ("input_ids", "positions", "logits_indices")
        )
        metadata = step.metadata[KV_CACHES]
        lengths = metadata.seq_lens.tolist()
        if self.in_graph and metadata.max_query_len == 1:
            num_seqs = sum(length > 0 for length in lengths)
            metadata = replace(metadata, num_seqs=num_seqs, num_tokens=num_seqs, max_seq_len=max(lengths))
        tokens, slots, starts = input_ids.tolist(), metadata.slot_mapping.tolist(), metadata.query_start_loc.tolist()
        self.calls.append((len(tokens), metadata.num_tokens))
        assert len(tokens) == len(positions) == len(slots)
        assert slots[metadata.num_tokens :] == [-1] * (len(slots) - metadata.num_tokens)
        assert len(metadata.seq_lens) == len(metadata.block_table) == len(starts) - 1
        assert starts == sorted(starts)
        for token, slot in zip(tokens[: metadata.num_tokens], slots, strict=False):
            assert slot >= 0
            self.cache[slot] = token
        logits_T = torch.zeros(len(tokens), VOCAB)
        assert lengths[metadata.num_seqs :] == [0] * (len(lengths) - metadata.num_seqs)
        assert metadata.max_seq_len == max(lengths)
        query_lens = np.diff(starts[: metadata.num_seqs + 1])
        assert metadata.max_query_len == query_lens.max(initial=1 if self.in_graph else 0)
        for s in range(metadata.num_seqs):
            sequence = [
                self.cache[int(metadata.block_table[s, i // BLOCK]) * BLOCK + i % BLOCK] for i in range(lengths[s])
            ]
            first = lengths[s] - int(query_lens[s])
            assert positions[starts[s] : starts[s + 1]].tolist() == list(range(first, lengths[s]))
            for i in range(int(query_lens[s])):
                seen = sequence[: first + i + 1]
                logits_T[starts[s] + i, next_token(seen)] = 5.0
                if POISON in seen:
                    logits_T[starts[s] + i] = float("nan")
        return {"logits": logits_T[logits_indices]}


class PaddingRunner(PlainRunner):
    """Pads every step to a multiple of the model's pad_to."""

    model: PagedModel
    max_padded_size = 40

    def padded_size(self, num_tokens: int, num_seqs: int, max_query_len: int) -> int | None:
        pad_to = self.model.pad_to
        return None if pad_to is None else -(-num_tokens // pad_to) * pad_to


class Capturable:
    name = "capturable"
    decode_capturable = True

    def plan(self, metadata: AttentionMetadata) -> None: ...


def make_runner(
    model: PagedModel | CudaGraphRunner, *, num_blocks: int = 256, budget: int = 32, seqs: int = 8
) -> ModelRunner:
    spec = ModelSpec(
        module=torch.nn.Module(), config={}, state=(full_attention([KVCacheSpec(num_kv_heads=1, head_dim=2)]),),
        vocab_size=VOCAB, max_model_len=MAX_LEN,
    )  # fmt: skip
    config = EngineConfig(
        model=ModelConfig(model="m", path=Path("m")), cache=CacheConfig(block_size=BLOCK),
        scheduler=SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=budget),
    )  # fmt: skip
    steps = model if isinstance(model, CudaGraphRunner) else PaddingRunner(model)
    backends = {KV_CACHES: TorchAttention()}
    return ModelRunner(config, spec, steps, backends, torch.device("cpu"), torch.float32, num_blocks)


def run_schedule(
    runner: ModelRunner, requests: list[EngineRequest], *, num_blocks: int, budget: int, seqs: int, depth: int, late: int,
    reads_at_once: bool = False,
) -> tuple[dict[str, list[int]], Scheduler]:  # fmt: skip
    """All requests through a real scheduler, `late` of them only after a few steps, `depth` steps in flight.

    reads_at_once: a step's result is read before the next is launched, though the scheduler hears of it later. A GPU copies it away.
    """
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=seqs, max_num_batched_tokens=budget), CacheConfig(block_size=BLOCK),
        num_blocks=num_blocks, max_model_len=MAX_LEN,
    )  # fmt: skip
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests[: len(requests) - late]:
        scheduler.add_request(request)
    in_flight: list[tuple[SchedulerOutput, PendingStep | ModelRunnerOutput]] = []
    steps = 0
    while scheduler.has_work() or in_flight or steps < 4:
        steps += 1
        if steps == 4:
            for request in requests[len(requests) - late :]:
                scheduler.add_request(request)
        while len(in_flight) < depth and (scheduled := scheduler.schedule()) is not None:
            pending = runner.launch(scheduled)
            in_flight.append((scheduled, pending.result() if reads_at_once else pending))
        if in_flight:
            scheduled, result = in_flight.pop(0)
            result = result.result() if isinstance(result, PendingStep) else result
            for output in scheduler.update(scheduled, result):
                tokens[output.request_id] += output.new_token_ids
    return tokens, scheduler


def expected_tokens(prompt: list[int], count: int) -> list[int]:
    sequence = list(prompt)
    for _ in range(count):
        sequence.append(next_token(sequence))
    return sequence[len(prompt) :]


@pytest.mark.parametrize("pad_to", [None, 8], ids=["unpadded", "padded"])
@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize("num_blocks", [256, 24], ids=["roomy", "preempting"])
@pytest.mark.parametrize("budget", [32, 9], ids=["budget32", "budget9"])
def test_every_sequence_is_read_and_written_where_it_belongs(
    pad_to: int | None, depth: int, num_blocks: int, budget: int
) -> None:
    rng = np.random.default_rng(num_blocks + budget)
    requests = [
        EngineRequest(
            request_id=f"r{i}", prompt_token_ids=rng.integers(0, POISON, size=rng.integers(1, 30)).tolist(),
            sampling_params=SamplingParams(temperature=0.0, max_tokens=int(rng.integers(1, 30))),
        )
        for i in range(20)
    ]  # fmt: skip
    requests[7] = EngineRequest(
        request_id="r7", prompt_token_ids=requests[3].prompt_token_ids, sampling_params=requests[7].sampling_params
    )
    model = PagedModel(pad_to)
    runner = make_runner(model, num_blocks=num_blocks, budget=budget)
    tokens, scheduler = run_schedule(
        runner, requests, num_blocks=num_blocks, budget=budget, seqs=8, depth=depth, late=6
    )
    for request in requests:
        count = request.sampling_params.max_tokens or 0
        assert tokens[request.request_id] == expected_tokens(request.prompt_token_ids, count), request.request_id
    assert (scheduler.stats().num_preemptions > 0) == (num_blocks == 24)
    if pad_to is not None:
        assert all(size % pad_to == 0 for size, _ in model.calls)
        assert runner.padded_tokens == sum(size - real for size, real in model.calls)


def graphs_of(model: PagedModel, seqs: int = 8, **sizes: object) -> CudaGraphRunner:
    return CudaGraphRunner(
        model, mode="full", max_num_seqs=seqs, backends=[Capturable()], device=FakeDevice(), decode_head=begin_step,
        decode_tail=end_step, **sizes,  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize("num_blocks", [256, 24], ids=["roomy", "preempting"])
def test_steps_go_on_from_what_the_step_before_left_on_the_device(depth: int, num_blocks: int) -> None:
    pytest.importorskip("triton")
    rng = np.random.default_rng(num_blocks)
    requests = [
        EngineRequest(
            request_id=f"r{i}", prompt_token_ids=rng.integers(0, POISON, size=rng.integers(1, 30)).tolist(),
            # Penalties too weak to change a choice: rows that are chosen outside of the graph.
            sampling_params=SamplingParams(
                temperature=0.0, max_tokens=int(rng.integers(1, 30)), presence_penalty=1e-3 if i % 7 == 3 else 0.0,
                min_tokens=5 if i % 5 == 2 else 0,
            ),
        )
        for i in range(20)
    ]  # fmt: skip
    graphs = graphs_of(PagedModel(in_graph=True), sizes=(1, 2, 4, 5, 8))
    runner = make_runner(graphs, num_blocks=num_blocks)
    graphs.bind(runner.decode_step)
    assert graphs.capture() == 5
    tokens, scheduler = run_schedule(
        runner, requests, num_blocks=num_blocks, budget=32, seqs=8, depth=depth, late=6, reads_at_once=True
    )
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

    def compile(self, grammar: str) -> Future[llguidance.LLMatcher]:
        future: Future[llguidance.LLMatcher] = Future()
        future.set_result(llguidance.LLMatcher(_byte_tokenizer(), grammar, log_level=0))
        return future


@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize("num_blocks", [256, 24], ids=["roomy", "preempting"])
def test_structured_sequences_replay_graphs_that_do_not_sample(depth: int, num_blocks: int) -> None:
    pytest.importorskip("triton")
    rng = np.random.default_rng(num_blocks)
    form = StructuredOutputsParams(compiled=to_grammar(StructuredOutputsParams(regex=r"[\x20-\x5f]*"), {}))
    requests = [
        EngineRequest(
            request_id=f"r{i}", prompt_token_ids=rng.integers(0, POISON, size=rng.integers(1, 30)).tolist(),
            sampling_params=SamplingParams(
                temperature=0.0, max_tokens=int(rng.integers(1, 30)), structured_outputs=form if i % 5 == 3 else None
            ),
        )
        for i in range(20)
    ]  # fmt: skip
    graphs = graphs_of(PagedModel(in_graph=True), sizes=(1, 2, 4, 5, 8))
    runner = make_runner(graphs, num_blocks=num_blocks)
    runner.grammars = BytesGrammars()  # type: ignore[assignment]
    graphs.bind(runner.decode_step)
    graphs._waiting_unsampled += graphs.sizes  # as if steps had asked for them
    assert graphs.capture() == 10
    tokens, _ = run_schedule(
        runner, requests, num_blocks=num_blocks, budget=32, seqs=8, depth=depth, late=6, reads_at_once=True
    )
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


def test_a_graph_captured_between_two_steps_takes_nothing_from_them() -> None:
    """Capturing fills the arrays that decodes lie in with padding."""
    pytest.importorskip("triton")
    graphs = graphs_of(PagedModel(in_graph=True), sizes=(1, 2))
    runner = make_runner(graphs)
    graphs.bind(runner.decode_step)
    graphs.capture(1)  # the largest
    prompts = {"a": [1, 2, 3], "b": [4, 5]}
    new = [new_request(name, prompt, [i]) for i, (name, prompt) in enumerate(prompts.items())]
    results = [runner.launch(step(0, {"a": 3, "b": 2}, new_requests=new)).result()]
    for number in range(1, 7):
        more = [CachedRequestData(request_id=name, new_block_ids=[[10 + i, 20 + i]]) for i, name in enumerate(prompts)]
        given = {"cached_requests": more} if number == 1 else {}
        results.append(runner.launch(step(number, {"a": 1, "b": 1}, **given)).result())
        if number == 3:
            assert graphs.capture_next()
    assert runner.steps_on_device == 4  # not the first, and not the one after the capture
    for name, prompt in prompts.items():
        assert [token for result in results for token in result.sampled_token_ids[name]] == expected_tokens(prompt, 7)


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


def new_request(request_id: str, tokens: list[int], blocks: list[int], **params: object) -> NewRequestData:
    given = {"temperature": 0.0} | params
    return NewRequestData(
        request_id=request_id, token_ids=tokens, num_prompt_tokens=len(tokens), stop_token_ids=[], block_ids=[blocks],
        sampling_params=SamplingParams(**given), num_computed_tokens=0,
    )  # fmt: skip


def step(number: int, counts: dict[str, int], **fields: object) -> SchedulerOutput:
    parts = {"new_requests": [], "cached_requests": [], "finished_request_ids": []} | fields
    return SchedulerOutput(
        step=number, num_scheduled_tokens=counts, total_num_scheduled_tokens=sum(counts.values()), **parts
    )


def test_a_request_with_bad_logits_ends_with_a_sentence_and_the_others_go_on() -> None:
    runner = make_runner(PagedModel())
    new = [
        new_request("good", [1, 2], [0]),
        new_request("nan", [1, POISON], [1]),
        new_request("none", [3], [2], allowed_token_ids=[5], logit_bias={5: -np.inf}, logprobs=1),
    ]
    result = runner.launch(step(0, {"good": 2, "nan": 2, "none": 1}, new_requests=new)).result()
    assert result.errors == {"nan": NOT_FINITE, "none": NOTHING_LEFT}
    assert result.sampled_token_ids == {"good": [next_token([1, 2])]}
    assert not result.logprobs
    result = runner.launch(step(1, {"good": 1}, finished_request_ids=["nan", "none"])).result()
    assert result.sampled_token_ids == {"good": [next_token([1, 2, next_token([1, 2])])]}


def test_a_request_that_cannot_be_taken_in_ends_with_a_sentence_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = make_runner(PagedModel())
    new = [new_request("good", [1, 2], [0]), new_request("big", [5], [1], presence_penalty=1.0, logprobs=1)]

    def no_memory(*_: object) -> int:
        raise MemoryError("Unable to allocate 236 GiB")

    monkeypatch.setattr("compile_and_serve.runtime.sampling.penalties.PenaltyState.add", no_memory)
    first = runner.launch(step(0, {"good": 2, "big": 1}, new_requests=new))
    second = runner.launch(step(1, {"good": 1, "big": 1}))  # the scheduler has not heard of it yet
    assert first.result().errors == {"big": NOT_TAKEN_IN}
    good = next_token([1, 2])
    result = second.result()
    assert result.sampled_token_ids["good"] == [next_token([1, 2, good])]
    monkeypatch.undo()
    again = new_request("big", [5], [1], presence_penalty=1.0)
    result = runner.launch(step(2, {"big": 1}, finished_request_ids=["big", "good"], new_requests=[again])).result()
    assert (result.sampled_token_ids, result.errors) == ({"big": [next_token([5])]}, {})


def test_a_chunk_that_does_not_finish_its_prompt_samples_nothing() -> None:
    model = PagedModel()
    runner = make_runner(model)
    prompt = list(range(10))
    first = runner.launch(step(0, {"a": 6}, new_requests=[new_request("a", prompt, [4, 2, 7])])).result()
    assert (first.sampled_token_ids, first.errors) == ({}, {})
    second = runner.launch(step(1, {"a": 4})).result()
    assert second.sampled_token_ids == {"a": [next_token(prompt)]}


def test_prompt_logprobs_cover_each_prompt_token_once_over_chunks_and_decodes() -> None:
    runner = make_runner(PagedModel())
    prompt = [5, 9, 13, 17, 21]
    new = [
        new_request("asks", prompt, [0, 1], prompt_logprobs=2, logprobs=0),
        new_request("plain", [1], [2]),
    ]
    results = [
        runner.launch(step(0, {"asks": 3, "plain": 1}, new_requests=new)).result(),
        runner.launch(step(1, {"plain": 1, "asks": 2})).result(),
        runner.launch(step(2, {"plain": 1, "asks": 1})).result(),
    ]
    assert [len(result.prompt_logprobs.get("asks", [])) for result in results] == [3, 1, 0]
    assert all("plain" not in result.prompt_logprobs for result in results)
    entries = [entry for result in results for entry in result.prompt_logprobs.get("asks", [])]
    log_total = float(np.log(np.exp(5.0) + VOCAB - 1))
    for i, entry in enumerate(entries):
        likeliest = next_token(prompt[: i + 1])
        assert entry.ids[:2] == [prompt[i + 1], likeliest]
        assert len(entry.ids) == len(entry.logprobs) == 3
        expected = (5.0 if likeliest == prompt[i + 1] else 0.0) - log_total
        assert entry.logprobs[:2] == pytest.approx([expected, 5.0 - log_total], abs=1e-5)
    assert "asks" not in results[0].logprobs
    assert [entry.rank for entry in results[1].logprobs["asks"]] == [1]
    assert list(results[1].sampled_token_ids) == ["plain", "asks"]


def test_rows_follow_the_requests_when_the_scheduler_mixes_prefills_among_decodes() -> None:
    runner = make_runner(PagedModel())
    runner.launch(step(0, {"a": 3}, new_requests=[new_request("a", [1, 2, 3], [0])])).result()
    both = runner.launch(step(1, {"b": 2, "a": 1}, new_requests=[new_request("b", [8, 9], [3])])).result()
    a1 = next_token([1, 2, 3])
    assert both.sampled_token_ids == {"a": [next_token([1, 2, 3, a1])], "b": [next_token([8, 9])]}


def test_the_longest_decodes_are_the_first_rows_and_prompts_stay_in_order_behind_them() -> None:
    runner = make_runner(PagedModel())
    prompts = {"short": [1], "long": [2, 3, 4, 5, 6], "middle": [7, 8, 9]}
    new = [new_request(name, prompt, [3 * i, 3 * i + 1, 3 * i + 2]) for i, (name, prompt) in enumerate(prompts.items())]
    lengths = {name: len(prompt) for name, prompt in prompts.items()}
    results = [runner.launch(step(0, lengths, new_requests=new)).result()]
    assert runner.batch.layout.request_ids == list(prompts)
    versions = []
    for number in range(1, 4):
        results.append(runner.launch(step(number, dict.fromkeys(prompts, 1))).result())
        assert runner.batch.layout.request_ids == ["long", "middle", "short"]
        versions.append(runner.batch.layout.version)
    assert len(set(versions)) == 1  # the same sequences as the step before, in the order in which they are scheduled
    late = [new_request("late", [1, 2], [9]), new_request("later", [3, 4, 5], [10])]
    results.append(
        runner.launch(step(4, {"late": 2, "short": 1, "later": 3, "long": 1, "middle": 1}, new_requests=late)).result()
    )
    assert runner.batch.layout.request_ids == ["long", "middle", "short", "late", "later"]
    for name, prompt in prompts.items():
        assert [token for result in results for token in result.sampled_token_ids[name]] == expected_tokens(prompt, 5)


def test_decodes_go_on_in_blocks_that_come_later() -> None:
    runner = make_runner(PagedModel())
    sequence = [1, 2, 3]
    runner.launch(step(0, {"a": 3}, new_requests=[new_request("a", sequence, [5])])).result()
    sequence.append(next_token(sequence))
    for number in range(1, 12):
        fields = {}
        if (len(sequence) - 1) % BLOCK == 0:
            fields["cached_requests"] = [CachedRequestData(request_id="a", new_block_ids=[[40 - number]])]
        result = runner.launch(step(number, {"a": 1}, **fields)).result()
        sequence.append(next_token(sequence))
        assert result.sampled_token_ids == {"a": sequence[-1:]}


def test_the_same_id_in_finished_and_new_is_a_new_request() -> None:
    runner = make_runner(PagedModel())
    runner.launch(step(0, {"a": 2}, new_requests=[new_request("a", [1, 2], [0])])).result()
    again = new_request("a", [4, 5, 6], [1])
    result = runner.launch(step(1, {"a": 3}, finished_request_ids=["a"], new_requests=[again])).result()
    assert result.sampled_token_ids == {"a": [next_token([4, 5, 6])]}
    assert len(runner.batch) == 1


def test_min_tokens_ends_in_the_middle_of_unchanged_decodes() -> None:
    class Constant(PagedModel):
        def __call__(self, step: Step) -> dict[str, torch.Tensor]:
            logits = torch.zeros(step.num_rows, VOCAB)
            logits[:, 9], logits[:, 8] = 2.0, 1.0
            return {"logits": logits}

    runner = make_runner(Constant())
    data = new_request("a", [1], [0], min_tokens=3)
    data.stop_token_ids = [9]
    drawn = runner.launch(step(0, {"a": 1}, new_requests=[data])).result().sampled_token_ids["a"]
    drawn += [*runner.launch(step(1, {"a": 1})).result().sampled_token_ids["a"]]
    drawn += [*runner.launch(step(2, {"a": 1})).result().sampled_token_ids["a"]]
    assert drawn == [8, 8, 8]
    assert runner.launch(step(3, {"a": 1})).result().sampled_token_ids["a"] == [9]


def test_outputs_are_plain_messages() -> None:
    """What a step brings must survive a trip to another process."""
    import msgspec

    runner = make_runner(PagedModel())
    new = [new_request("a", [1, 2], [0], logprobs=2, prompt_logprobs=1)]
    result = runner.launch(step(0, {"a": 2}, new_requests=new)).result()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=type(result)) == result
    assert RequestOutput(request_id="a").error is None


@pytest.mark.parametrize("num_tokens", [1, MAX_LEN, MAX_LEN + 1, 5 * MAX_LEN - 3])
def test_no_sequence_of_a_made_up_step_is_longer_than_its_row_of_the_block_table(num_tokens: int) -> None:
    seen: list[list[int]] = []

    class Seeing(PagedModel):
        def __call__(self, step: Step) -> dict[str, torch.Tensor]:
            metadata = step.metadata[KV_CACHES]
            assert metadata.slot_mapping.tolist() == [-1] * num_tokens
            assert metadata.block_table.shape[1] * BLOCK >= max(metadata.seq_lens.tolist())
            seen.append(metadata.seq_lens.tolist())
            return {"logits": torch.zeros(step.num_rows, VOCAB)}

    make_runner(Seeing(), budget=5 * MAX_LEN).warm_up(num_tokens, 1)
    assert [sum(lengths) for lengths in seen] == [num_tokens]
    assert max(seen[0]) <= MAX_LEN
