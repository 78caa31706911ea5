"""The runner against a model that reads its paged cache and can tell whether every sequence is what it should be."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from compile_and_serve.custom_ops.state.tokens import KV_CACHES
from compile_and_serve.custom_ops.step import Step
from compile_and_serve.runtime.messages import EngineRequest, RequestOutput
from compile_and_serve.runtime.runner.model_runner import NOT_TAKEN_IN
from compile_and_serve.runtime.runner.pending_step import NOT_FINITE
from compile_and_serve.runtime.runner.warm_up import run_dummy_step, run_mixed_step
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.runtime.scheduler.step_messages import NOTHING_LEFT, CachedRequestData
from tests.support.paged_model import (
    BLOCK,
    MAX_LEN,
    POISON,
    VOCAB,
    PagedModel,
    expected_tokens,
    make_runner,
    new_request,
    next_token,
    run_schedule,
    step,
)


@pytest.mark.slow_cases
@pytest.mark.parametrize("pad_to", [None, 8], ids=["unpadded", "padded"])
@pytest.mark.parametrize("depth", [1, 2], ids=["sync", "async"])
@pytest.mark.parametrize("num_blocks", [256, 24], ids=["roomy", "preempting"])
@pytest.mark.parametrize("budget", [32, 9], ids=["budget32", "budget9"])
def test_every_sequence_is_read_and_written_where_it_belongs(pad_to: int | None, depth: int, num_blocks: int, budget: int) -> None:
    rng = np.random.default_rng(num_blocks + budget)
    requests = [
        EngineRequest(
            request_id=f"r{i}",
            prompt_token_ids=rng.integers(0, POISON, size=rng.integers(1, 30)).tolist(),
            sampling_params=SamplingParams(temperature=0.0, max_tokens=int(rng.integers(1, 30))),
        )
        for i in range(20)
    ]
    requests[7] = EngineRequest(request_id="r7", prompt_token_ids=requests[3].prompt_token_ids, sampling_params=requests[7].sampling_params)
    model = PagedModel(pad_to)
    runner = make_runner(model, num_blocks=num_blocks, budget=budget)
    tokens, scheduler = run_schedule(runner, requests, num_blocks=num_blocks, budget=budget, seqs=8, depth=depth, late=6)
    for request in requests:
        count = request.sampling_params.max_tokens or 0
        assert tokens[request.request_id] == expected_tokens(request.prompt_token_ids, count), request.request_id
    assert (scheduler.stats().num_preemptions > 0) == (num_blocks == 24)
    if pad_to is not None:
        assert all(size % pad_to == 0 for size, _ in model.calls)
        assert runner.padded_tokens == sum(size - real for size, real in model.calls)


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


def test_a_request_that_cannot_be_taken_in_ends_with_a_sentence_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
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
    new = [new_request("asks", prompt, [0, 1], prompt_logprobs=2, logprobs=0), new_request("plain", [1], [2])]
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
    results.append(runner.launch(step(4, {"late": 2, "short": 1, "later": 3, "long": 1, "middle": 1}, new_requests=late)).result())
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
def test_no_sequence_of_a_dummy_step_is_longer_than_its_row_of_the_block_table(num_tokens: int) -> None:
    seen: list[list[int]] = []

    class Seeing(PagedModel):
        def __call__(self, step: Step) -> dict[str, torch.Tensor]:
            metadata = step.metadata[KV_CACHES]
            assert metadata.slot_mapping.tolist() == [-1] * num_tokens
            assert metadata.block_table.shape[1] * BLOCK >= max(metadata.seq_lens.tolist())
            seen.append(metadata.seq_lens.tolist())
            return {"logits": torch.zeros(step.num_rows, VOCAB)}

    run_dummy_step(make_runner(Seeing(), budget=5 * MAX_LEN), num_tokens, 1)
    assert [sum(lengths) for lengths in seen] == [num_tokens]
    assert max(seen[0]) <= MAX_LEN


@pytest.mark.parametrize("num_tokens", [8, 2 * MAX_LEN, 5 * MAX_LEN])
def test_a_mixed_step_has_decodes_and_prompts_with_and_without_cached_tokens(num_tokens: int) -> None:
    seen: list[tuple[list[int], list[int]]] = []

    class Seeing(PagedModel):
        def __call__(self, step: Step) -> dict[str, torch.Tensor]:
            metadata = step.metadata[KV_CACHES]
            assert metadata.block_table.shape[1] * BLOCK >= max(metadata.seq_lens.tolist())
            seen.append((metadata.query_start_loc.diff().tolist(), metadata.seq_lens.tolist()))
            return {"logits": torch.zeros(step.num_rows, VOCAB)}

    run_mixed_step(make_runner(Seeing(), budget=5 * MAX_LEN), num_tokens)
    ((new, total),) = seen
    assert new[:3] == [1, 1, 2]
    assert new[3] == new[4] > 1
    assert sum(new) <= num_tokens
    assert total[4] == new[4]
    assert all(n < length <= MAX_LEN for n, length in zip(new[:4], total[:4], strict=True))
