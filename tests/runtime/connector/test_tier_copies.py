"""The worker's side of the tiers on a device with memory of its own. Its stream and events are fakes: what is enqueued is done."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import msgspec
import pytest
import torch

from compile_and_serve.custom_ops.platforms.cpu import CpuPlatform
from compile_and_serve.custom_ops.platforms.protocol import TimedEvent
from compile_and_serve.runtime.connector.messages import BlockTransfer, StepTransfers
from compile_and_serve.runtime.connector.page_memory import PageMemory
from compile_and_serve.runtime.connector.tiers import tier_copies
from compile_and_serve.runtime.connector.tiers.orders import TierOrders
from compile_and_serve.runtime.connector.tiers.tier_copies import TierCopies

NUM_BLOCKS, BLOCK_BYTES = 100, 8
SLICE = tier_copies._COPIES_AT_A_TIME
STEP_SECONDS = 0.6 * tier_copies._MIN_HOST_SECONDS  # that each look at the clock takes: one slice of copies a poll


class FakeEvent:
    def __init__(self) -> None:
        self.is_done = False

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.is_done = True

    def seconds_since(self, earlier: TimedEvent) -> float:
        return 0.0


class FakeDevice(CpuPlatform):
    """It is its own stream. calls: of the stream. events: recorded there."""

    shares_host_memory = False

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.calls: list[str] = []
        self.events: list[FakeEvent] = []

    def side_stream(self) -> FakeDevice:
        return self

    def wait(self) -> None:
        self.calls.append("wait")

    @contextmanager
    def running(self, *, waits: bool = True) -> Iterator[None]:
        self.calls.append("run after waiting" if waits else "run")
        yield

    def record_timed_event(self) -> FakeEvent:
        self.events.append(FakeEvent())
        return self.events[-1]


class Setup:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.device, self.seconds_per_look, self._now = FakeDevice(), STEP_SECONDS, 0.0
        monkeypatch.setattr(tier_copies, "platform_of", lambda _: self.device)
        monkeypatch.setattr(tier_copies, "time", SimpleNamespace(perf_counter=self._look))
        self.blocks = torch.arange(1, NUM_BLOCKS + 1, dtype=torch.uint8)[:, None].expand(-1, BLOCK_BYTES).contiguous()
        self.copies = TierCopies(NUM_BLOCKS, BLOCK_BYTES, None)
        self.copies.bind(PageMemory(parts=[[self.blocks]]))

    def _look(self) -> float:
        self._now += self.seconds_per_look
        return self._now

    @property
    def host(self) -> torch.Tensor:
        assert self.copies._host is not None
        return self.copies._host

    def num_stored(self) -> int:
        return int((self.host != 0).all(dim=1).sum())


@pytest.fixture
def setup(monkeypatch: pytest.MonkeyPatch) -> Setup:
    return Setup(monkeypatch)


def transfer(number: int, blocks: list[int], pages: list[int], *, is_load: bool = False) -> BlockTransfer:
    orders = TierOrders(pages, [False] * len(pages) if is_load else [])
    keys = [b"%d" % block for block in blocks]
    return BlockTransfer(transfer_id=number, group=0, keys=keys, block_ids=blocks, meta=msgspec.msgpack.encode(orders))


def test_copies_wait_for_the_step_and_take_a_share_of_the_time(setup: Setup) -> None:
    one = transfer(0, list(range(2 * SLICE + 3)), list(range(2 * SLICE + 3)))
    other = transfer(1, [99], [50])
    setup.copies.start(StepTransfers(stores=[one, other]))
    assert setup.num_stored() == 0  # the step is not launched yet
    assert setup.device.calls == ["wait"]  # once for all of them
    for expected in (SLICE, 2 * SLICE, 2 * SLICE + 3):
        assert setup.copies.poll().finished == []
        assert setup.num_stored() == expected
    assert setup.device.calls == ["wait", "run", "run", "run"]  # for no step that was launched later
    assert len(setup.device.events) == 1
    assert setup.copies.poll().finished == []
    assert setup.host[50].tolist() == [100] * BLOCK_BYTES
    setup.device.events[1].is_done = True
    assert setup.copies.poll().finished == [1]
    setup.device.events[0].is_done = True
    assert setup.copies.poll().finished == [0]
    assert torch.equal(setup.host[: 2 * SLICE + 3], setup.blocks[: 2 * SLICE + 3])


def test_long_steps_give_time_for_more_copies(setup: Setup) -> None:
    setup.copies.start(StepTransfers(stores=[transfer(0, list(range(64)), list(range(64)))]))
    setup._now += 100 * STEP_SECONDS
    setup.copies.poll()
    assert setup.num_stored() == 64
    setup.device.events[0].is_done = True
    assert setup.copies.poll().finished == [0]


def test_what_is_loaded_lands_in_its_blocks(setup: Setup) -> None:
    setup.host[7] = 77
    setup.host[9] = 99
    setup.copies.start(StepTransfers(loads=[transfer(0, [3, 1], [7, 9], is_load=True)]))
    assert setup.blocks[3].tolist() == [4] * BLOCK_BYTES
    setup.copies.poll()
    assert (setup.blocks[3].tolist(), setup.blocks[1].tolist()) == ([77] * BLOCK_BYTES, [99] * BLOCK_BYTES)
    setup.device.events[0].is_done = True
    assert setup.copies.poll().finished == [0]


def test_a_cancelled_transfer_ends_after_the_copies_that_are_under_way(setup: Setup) -> None:
    setup.copies.start(StepTransfers(stores=[transfer(0, list(range(60)), list(range(60)))]))
    setup.copies.poll()
    setup.copies.start(StepTransfers(cancelled=[0]))
    ended = setup.copies.poll()
    assert (ended.finished, ended.failed) == ([], {})
    assert setup.num_stored() == SLICE  # and no more
    setup.device.events[0].is_done = True
    ended = setup.copies.poll()
    assert (ended.finished, ended.failed) == ([], {0: "It was cancelled."})
    assert setup.copies.poll().failed == {}


def test_closing_waits_for_what_is_enqueued(setup: Setup) -> None:
    setup.copies.start(StepTransfers(stores=[transfer(0, list(range(60)), list(range(60)))]))
    setup.copies.poll()
    assert setup.device.events == []
    setup.copies.close()
    assert [one.is_done for one in setup.device.events] == [True]
    setup.copies.bind(PageMemory(parts=[[setup.blocks]]))
    assert setup.copies.poll().finished == []
    assert setup.num_stored() == SLICE
