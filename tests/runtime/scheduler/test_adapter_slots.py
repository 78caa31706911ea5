"""Slots of LoRA adapters: the least recently used goes first, and one that runs never; waiting for a slot is fair."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from compile_and_serve.runtime.config import CacheConfig, SchedulerConfig
from compile_and_serve.runtime.lora.request import LoRARequest
from compile_and_serve.runtime.messages import EngineRequest
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.runtime.scheduler.adapter_slots import AdapterSlots
from compile_and_serve.runtime.scheduler.scheduler import Scheduler
from compile_and_serve.runtime.scheduler.step_messages import ModelRunnerOutput, SchedulerOutput


def test_the_least_recently_used_goes_first() -> None:
    slots = AdapterSlots(2)
    assert (slots.acquire(7), slots.acquire(8)) == (0, 1)
    assert slots.take_new() == [(0, 7), (1, 8)]
    assert not slots.has_room(9)
    assert slots.has_room(7)
    slots.release(8)
    slots.release(7)
    assert slots.acquire(8) == 1  # it lies there still
    slots.release(8)
    assert slots.take_new() == []
    assert slots.acquire(9) == 0  # 7 was used less recently
    assert slots.take_new() == [(0, 9)]


def test_a_slot_that_changes_twice_before_a_step_is_loaded_once() -> None:
    slots = AdapterSlots(1)
    slots.acquire(1)
    slots.release(1)
    slots.acquire(2)
    assert slots.take_new() == [(0, 2)]


def test_pinned_adapters_keep_their_slots_and_leave_one() -> None:
    slots = AdapterSlots(2)
    slots.pin(7)
    assert slots.acquire(7) == 0
    slots.release(7)
    for other in (8, 9):  # 7 was used less recently
        assert slots.has_room(other)
        assert slots.acquire(other) == 1
        slots.release(other)
    with pytest.raises(ValueError, match="1 adapters are pinned"):
        slots.pin(8)
    slots.acquire(9)
    assert not slots.has_room(8)
    slots.unpin(7)
    assert slots.acquire(8) == 0
    with pytest.raises(ValueError, match="raise --max-loras"):
        AdapterSlots(1).pin(1)


def make_scheduler(num_slots: int) -> Scheduler:
    return Scheduler(
        SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
        CacheConfig(),
        num_blocks=64,
        max_model_len=64,
        num_adapter_slots=num_slots,
    )


def request(name: str, adapter: int | None, max_tokens: int = 1) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=[1, 2, 3],
        sampling_params=SamplingParams(max_tokens=max_tokens),
        lora=None if adapter is None else LoRARequest(f"adapter {adapter}", adapter, ""),
    )


def finish_step(scheduler: Scheduler, scheduled: SchedulerOutput) -> None:
    tokens = {name: [5] for name in scheduled.num_scheduled_tokens}
    scheduler.update(
        scheduled, ModelRunnerOutput(step=scheduled.step, sampled_token_ids=tokens, logprobs={}, prompt_logprobs={}, errors={})
    )


def run_step(scheduler: Scheduler) -> tuple[list[str], list[tuple[int, int]]]:
    scheduled = scheduler.schedule()
    assert scheduled is not None
    finish_step(scheduler, scheduled)
    return list(scheduled.num_scheduled_tokens), scheduled.adapter_loads


def test_requests_wait_for_a_slot_in_their_order() -> None:
    scheduler = make_scheduler(1)
    for name, adapter in (("a", 1), ("b", 2), ("c", 1), ("base", None)):
        scheduler.add_request(request(name, adapter))
    assert run_step(scheduler) == (["a", "base"], [(0, 1)])  # c does not overtake b, although its adapter is there
    assert run_step(scheduler) == (["b"], [(0, 2)])
    assert run_step(scheduler) == (["c"], [(0, 1)])
    assert not scheduler.has_work()
    assert not scheduler.adapter_slots.is_used(1)


def test_requests_carry_their_slot_and_wait_for_their_file() -> None:
    scheduler = make_scheduler(2)
    reading: Future[None] = Future()
    scheduler.add_request(request("slow", 1), {reading: "adapter"})
    scheduler.add_request(request("other", 2, max_tokens=2))
    scheduled = scheduler.schedule()
    assert scheduled is not None
    assert [(new.request_id, new.step_data) for new in scheduled.new_requests] == [("other", {"adapter_slot": 1})]
    finish_step(scheduler, scheduled)
    reading.set_result(None)
    scheduled = scheduler.schedule()
    assert scheduled is not None
    assert [(new.request_id, new.step_data) for new in scheduled.new_requests] == [("slow", {"adapter_slot": 2})]
    assert scheduled.adapter_loads == [(1, 1)]


def test_equal_prompts_share_prefixes_only_within_an_adapter() -> None:
    keys = set()
    scheduler = make_scheduler(2)
    for name, adapter in (("a", 1), ("b", 2), ("c", None), ("d", 1)):
        asked = request(name, adapter)
        asked.prefix_key = None if adapter is None else f"lora {adapter}"
        scheduler.add_request(asked)
        keys.add(scheduler.requests[name].prompt.root_key)
    assert len(keys) == 3
