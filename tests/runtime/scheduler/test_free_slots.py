"""Batch slots that become free are given away in groups, or at once."""

import pytest

from compile_and_serve.runtime.config import SchedulerConfig
from compile_and_serve.runtime.scheduler import free_slots
from tests.support.scheduler_harness import Driver, make_request, make_scheduler


def _full_batch(monkeypatch: pytest.MonkeyPatch) -> Driver:
    """32 batch slots, all taken by requests of which one ends with each step, and 9 waiting requests of 8 tokens each."""
    monkeypatch.setattr(free_slots, "GROUP_FRACTION", 4)
    driver = Driver(make_scheduler(num_blocks=400, max_num_seqs=32, budget=512, admit_in_groups=True))
    driver.add(*(make_request(f"r{i}", [1] * 8, max_tokens=3 + i) for i in range(32)))
    driver.add(*(make_request(f"w{i}", [1] * 8, max_tokens=30) for i in range(9)))
    return driver


def _admitted(driver: Driver, num_steps: int) -> list[int]:
    steps = [driver.step() for _ in range(num_steps)]
    return [len(step.new_requests) for step in steps if step is not None]


def test_slots_of_a_full_batch_are_given_away_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first ends with its third step; a quarter of the slots is free eight steps later, in the eleventh.
    assert _admitted(_full_batch(monkeypatch), 11) == [32, *[0] * 9, 8]

    monkeypatch.setattr(free_slots, "GROUP_TOKENS", 24)
    assert _admitted(_full_batch(monkeypatch), 9) == [32, 0, 0, 0, 0, 3, 0, 0, 3]

    monkeypatch.setattr(free_slots, "GROUP_STEPS", 1)
    assert _admitted(_full_batch(monkeypatch), 7) == [32, 0, 0, 0, 2, 0, 2]


def test_free_slots_are_held_back_only_while_more_requests_wait_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = _full_batch(monkeypatch)
    _admitted(driver, 5)
    assert driver.scheduler.stats().num_running == 29
    driver.scheduler.abort([f"w{i}" for i in range(4, 9)])
    assert _admitted(driver, 2) == [0, 4]  # 3 slots are free, then 4

    driver = _full_batch(monkeypatch)
    _admitted(driver, 5)
    driver.scheduler.abort([f"w{i}" for i in range(9)])
    assert _admitted(driver, 1) == [0]
    driver.add(make_request("late", [1] * 8))
    assert _admitted(driver, 1) == [1]


@pytest.mark.parametrize(("num_slots", "admit_in_groups"), [(8, True), (32, False)])
def test_slots_are_given_away_at_once_in_a_small_batch_and_where_groups_are_off(num_slots: int, admit_in_groups: bool) -> None:
    driver = Driver(make_scheduler(num_blocks=400, max_num_seqs=num_slots, budget=64, admit_in_groups=admit_in_groups))
    driver.add(*(make_request(f"r{i}", [1], max_tokens=3 + i) for i in range(num_slots + 9)))
    assert _admitted(driver, 5) == [num_slots, 0, 0, 1, 1]


def test_a_step_that_has_a_prompt_anyway_takes_more_of_them() -> None:
    driver = Driver(make_scheduler(num_blocks=400, max_num_seqs=64, budget=128, max_model_len=256, admit_in_groups=True))
    driver.add(*(make_request(f"r{i}", [1], max_tokens=2 + i) for i in range(3)))
    driver.add(*(make_request(f"s{i}", [1], max_tokens=30) for i in range(60)))
    driver.add(make_request("long", [1] * 150, max_tokens=30))
    driver.add(*(make_request(f"w{i}", [1] * 8, max_tokens=30) for i in range(4)))
    steps = [step for _ in range(4) if (step := driver.step()) is not None]
    assert [step.num_scheduled_tokens["long"] for step in steps] == [65, 65, 20, 1]
    assert [len(step.new_requests) for step in steps] == [64, 0, 1, 0]  # the fourth step has no prompt anyway


def test_slots_are_given_away_in_groups_on_a_gpu_in_order_of_arrival() -> None:
    defaults = {
        (is_gpu, policy): SchedulerConfig(policy=policy).for_device(is_asynchronous=is_gpu).admit_in_groups
        for is_gpu in (False, True)
        for policy in ("fcfs", "priority")
    }
    assert defaults == {(False, "fcfs"): False, (False, "priority"): False, (True, "fcfs"): True, (True, "priority"): False}
    assert SchedulerConfig(admit_in_groups=True).for_device(is_asynchronous=False).admit_in_groups
    assert not SchedulerConfig().for_device(is_asynchronous=True, longest_whole_prompt=512).admit_in_groups  # it has no decodes
