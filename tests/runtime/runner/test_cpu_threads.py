"""The threads of a step follow what other processes leave of the cores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compile_and_serve.custom_ops.jit.cpu_kernels import cpu_kernel_library
from compile_and_serve.runtime.runner.cpu_threads import CpuThreads, idle_seconds


class Machine:
    """Cores that some busy loops share with the threads of this process, which all compute as long as they may."""

    def __init__(self, cores: int, num_threads: int) -> None:
        self.cores, self.loops = cores, 0
        self.now = self.idle = self.used = 0.0
        self.threads = CpuThreads(num_threads, idle=lambda: self.idle, used=lambda: self.used, now=lambda: self.now)

    def run(self, seconds: float, own: bool = True) -> int:
        """Steps of 10 ms. → the threads of the last one"""
        for _ in range(round(seconds / 0.01)):
            with self.threads.step():
                mine = torch.get_num_threads() if own else 0
            taken = min(self.cores, mine + self.loops)
            self.now += 0.01
            self.idle += 0.01 * (self.cores - taken)
            self.used += 0.01 * taken * mine / max(1, mine + self.loops)
        return mine


@pytest.fixture
def four_threads() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("four_threads")
def test_threads_are_as_many_as_the_cores_that_are_left() -> None:
    machine = Machine(cores=4, num_threads=4)
    assert machine.run(3.0) == 4
    machine.loops = 1
    assert machine.run(0.5) == 3
    machine.loops = 8
    assert machine.run(0.5) == 1
    machine.loops = 2
    assert machine.run(0.5) == 2
    machine.loops = 0
    assert machine.run(0.5) == 4
    assert torch.get_num_threads() == 4  # between steps


def test_half_of_what_all_threads_get_is_kept() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(16)
    machine = Machine(cores=16, num_threads=16)
    machine.loops = 16
    seen = machine.run(3.0)
    torch.set_num_threads(before)
    assert seen == 4


@pytest.mark.usefixtures("four_threads")
def test_a_machine_without_load_loses_no_step_to_it() -> None:
    machine = Machine(cores=4, num_threads=4)
    machine.run(1.0)
    machine.now += 60
    machine.idle += 4 * 60  # no requests
    assert {machine.run(0.01) for _ in range(200)} == {4}


@pytest.mark.usefixtures("four_threads")
def test_what_others_did_during_a_pause_does_not_count() -> None:
    machine = Machine(cores=4, num_threads=4)
    machine.run(1.0)
    machine.now += 60  # no requests, and others use all cores until the next one comes
    assert machine.run(0.01) == 4
    machine.loops = 4
    assert machine.run(0.5) < 4
    machine.now += 60
    assert machine.run(0.01) == 4


@pytest.mark.usefixtures("four_threads")
def test_all_threads_are_tried_again_where_others_yield() -> None:
    """Processes of a lower priority use every core that is free, and leave it to whoever wants it."""
    machine = Machine(cores=4, num_threads=4)
    machine.loops = 4
    machine.run(1.0)
    assert machine.threads.current == 1
    seen = [machine.run(0.01) for _ in range(1100)]
    assert 0 < seen.count(4) <= 25  # of 11 s
    machine.loops = 0
    assert machine.run(0.5) == 4


def test_where_the_system_says_nothing_all_threads_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert (idle_seconds() or 0) > 0
    for text in ("", "cpu 0 0 0 0 0\ncpu0 0 0 0 0 0\ncpu1 0 0 0 0 0\n"):
        file = tmp_path / "stat"
        file.write_text(text)
        monkeypatch.setattr("compile_and_serve.runtime.runner.cpu_threads.Path", lambda _, file=file: file)
        assert idle_seconds() is None
    now = iter(range(100))
    threads = CpuThreads(2, idle=lambda: None, used=lambda: 0.0, now=lambda: float(next(now)))
    for _ in range(3):
        with threads.step():
            assert threads.current == 2


@pytest.mark.skipif(cpu_kernel_library() is None, reason="needs the C++ kernels")
def test_attention_has_the_same_bits_with_fewer_threads() -> None:
    tokens, heads, size = 1500, 2, 32
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(tokens // 16 + 2, 2, heads, 16, size, generator=generator)
    q = torch.randn(1, heads, size, generator=generator)
    start, length = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([tokens], dtype=torch.int32)
    table = torch.arange(tokens // 16 + 1, dtype=torch.int32)[None]
    options = (start, length, table, torch.tensor([tokens - 1]), 1, 0, False, 0.0, None, None, None)
    before, library = torch.get_num_threads(), cpu_kernel_library()
    assert library is not None

    def attend(num_threads: int, plan: int) -> torch.Tensor:
        torch.set_num_threads(num_threads)
        library.cas_plan_threads(plan)
        return torch.ops.cas.cpu_attention(q, q, q, cache.clone(), 0.2, *options[:-1])

    try:
        two = attend(2, 0)
        assert torch.equal(attend(1, 2), two)
        assert not torch.equal(attend(1, 0), two)  # not split
    finally:
        torch.set_num_threads(before)
        library.cas_plan_threads(0)
