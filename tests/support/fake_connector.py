"""A connector without a device, for the scheduler's tests: what it loads and stores ends, fails or never comes back at random times."""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from compile_and_serve.runtime.connector.connector import PrefixQuery, SchedulerConnector
from compile_and_serve.runtime.connector.messages import BlockTransfer, FinishedTransfers, StepTransfers
from compile_and_serve.runtime.messages import RequestOutput
from compile_and_serve.runtime.scheduler.scheduler import Scheduler
from compile_and_serve.runtime.scheduler.step_messages import ModelRunnerOutput, SchedulerOutput
from tests.support.scheduler_harness import POISON, Cell, Driver, FakeRunner, State

Content = list[dict[Any, Any]]  # of a key's pages


class FakeStore(SchedulerConnector):
    """stored: content by key. chance: that it wants to store something."""

    deadline_seconds = 12.0

    def __init__(self, rng: random.Random, chance: float = 0.5) -> None:
        self.rng, self.chance = rng, chance
        self.stored: dict[bytes, Content] = {}
        self.arriving: dict[int, dict[bytes, Content]] = {}  # what stores have read, not yet usable
        self.num_resets = 0

    def match(self, query: PrefixQuery) -> int:
        assert query.max_tokens % query.alignment == query.num_cached_tokens % query.alignment == 0
        cached = {key for keys in query.keys_at(query.num_cached_tokens) for key in keys}
        for end in range(query.max_tokens, query.num_cached_tokens, -query.alignment):
            if all(key in cached or key in self.stored for keys in query.keys_at(end) for key in keys):
                return end - query.num_cached_tokens
        return 0

    def update(self, transfers: FinishedTransfers) -> None:
        for transfer_id in transfers.finished:
            self.stored |= self.arriving.pop(transfer_id, {})
        for transfer_id in transfers.failed:
            self.arriving.pop(transfer_id, None)

    def evicted(self, key: bytes) -> bool:
        return key not in self.stored and self.rng.random() < self.chance

    def finished(self, request_id: str, keys: Sequence[bytes], cached_share: float) -> Collection[bytes]:
        return [key for key in keys if key not in self.stored and self.rng.random() < self.chance]

    def prepare(self, transfer: BlockTransfer, *, is_load: bool) -> bytes:
        return b"load" if is_load else b"store"

    def reset(self) -> None:
        self.stored.clear()
        self.arriving.clear()
        self.num_resets += 1


@dataclass
class Active:
    """steps_left: None: it never comes back by itself."""

    transfer: BlockTransfer
    is_load: bool
    steps_left: int | None
    error: str | None
    content: list[Content] = field(default_factory=list)


class FakeTransferRunner(FakeRunner):
    """Asserts that no step touches what is being loaded, or writes what is being stored. answers_cancels: chance."""

    def __init__(self, scheduler: Scheduler, store: FakeStore, seed: int, answers_cancels: float) -> None:
        super().__init__(scheduler, seed)
        self.store, self.answers_cancels = store, answers_cancels
        self.chance = random.Random(seed + 1)
        self.active: dict[int, Active] = {}
        self.num_ended: Counter[str] = Counter()

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self._start(step.transfers or StepTransfers())
        result = super().execute(step)
        loaded = self._pages(is_load=True)
        assert not loaded & (self.readers.keys() | self.writers.keys()), "a step touches what is being loaded"
        assert not self._pages(is_load=False) & self.writers.keys(), "a step writes what is being stored"
        result.transfers = self._poll()
        return result

    def _pages(self, *, is_load: bool) -> set[int]:
        return {page for one in self.active.values() if one.is_load == is_load for page in one.transfer.block_ids}

    def _start(self, transfers: StepTransfers) -> None:
        assert len(transfers.loads) + len(transfers.stores) == len(
            {one.transfer_id for one in (*transfers.loads, *transfers.stores)} - self.active.keys()
        )
        for is_load, one in [*((True, one) for one in transfers.loads), *((False, one) for one in transfers.stores)]:
            assert one.meta == (b"load" if is_load else b"store")
            assert len(one.block_ids) == len(one.keys) * one.blocks_per_key
            assert self.groups[one.group].kind == "slot" or one.blocks_per_key == 1
            kind = self.chance.choices(["ends", "fails", "never"], [6, 2, 1])[0]
            error = "The other side has no room." if kind == "fails" else None
            active = Active(one, is_load, None if kind == "never" else self.chance.randint(0, 6), error)
            for number, key in enumerate(one.keys):
                pages = one.block_ids[number * one.blocks_per_key : (number + 1) * one.blocks_per_key]
                if is_load:
                    active.content.append(copy.deepcopy(self.store.stored.get(key, [])))
                    self._fill(one.group, pages, None)
                else:
                    active.content.append([self._read(page) for page in pages])
            self.active[one.transfer_id] = active
            if not is_load:
                self.store.arriving[one.transfer_id] = dict(zip(one.keys, active.content, strict=True))
        for transfer_id in transfers.cancelled:
            if transfer_id in self.active and self.chance.random() < self.answers_cancels:
                self.active[transfer_id].steps_left = self.chance.randint(0, 4)

    def _poll(self) -> FinishedTransfers | None:
        ended = FinishedTransfers()
        for transfer_id, active in list(self.active.items()):
            if active.steps_left is None:
                continue
            active.steps_left -= 1
            if active.steps_left >= 0:
                continue
            one = active.transfer
            for number, content in enumerate(active.content):
                pages = one.block_ids[number * one.blocks_per_key : (number + 1) * one.blocks_per_key]
                if active.is_load:
                    self._fill(one.group, pages, None if active.error else content)
                else:
                    assert [self._read(page) for page in pages] == content, "written while it was being stored"
            del self.active[transfer_id]
            self.num_ended[f"{'load' if active.is_load else 'store'} {'failed' if active.error else 'finished'}"] += 1
            if active.error is None:
                ended.finished.append(transfer_id)
            else:
                ended.failed[transfer_id] = active.error
        return ended if ended.finished or ended.failed else None

    def _read(self, page: int) -> dict[Any, Any]:
        cells = {place: cell for (where, place), cell in self.cache.items() if where == page}
        return copy.deepcopy(cells | {"state": self.states.get(page)})

    def _fill(self, group: int, pages: Sequence[int], content: Content | None) -> None:
        """Write pages; None: garbage."""
        info = self.groups[group]
        for part, page in enumerate(pages):
            for place in range(max(one.block_size for one in self.groups)):
                self.cache.pop((page, place), None)
            self.states.pop(page, None)
            if content is None and info.kind == "tokens":
                self.cache |= {(page, place): Cell(POISON, group, "a load", -1) for place in range(info.block_size)}
            elif content is None:
                self.states[page] = State([POISON] * 1000, group, part, -1)
            else:
                state, cells = content[part]["state"], {place: cell for place, cell in content[part].items() if place != "state"}
                self.cache |= {(page, place): cell for place, cell in cells.items()}
                if state is not None:
                    self.states[page] = state


class TransferDriver(Driver):
    """Its clock ticks with each step. Checks that blocks are pinned as long as a transfer works on them."""

    def __init__(self, scheduler: Scheduler, store: FakeStore, depth: int, seed: int, answers_cancels: float) -> None:
        super().__init__(scheduler, depth, seed)
        self.runner = self.transfers = FakeTransferRunner(scheduler, store, seed, answers_cancels)
        assert scheduler._transfers is not None
        scheduler._transfers._clock = lambda: float(self.num_ticks)
        self.num_ticks = 0
        self.waits_for_stores = True
        self.stuck: set[str] = set()  # requests that ended because transfers keep their blocks

    def has_work(self) -> bool:
        return self.scheduler.has_work() if self.waits_for_stores else bool(self.scheduler.requests)

    def sleep(self) -> None:
        """Forget what is on the device, and what is on its way."""
        self.scheduler.forget_device_memory()
        self.transfers.active.clear()
        self.transfers.store.arriving.clear()
        self.transfers.cache.clear()
        self.transfers.states.clear()
        self.check(None)
        assert self.scheduler.manager.pool.num_free == self.scheduler.manager.pool.num_blocks

    def step(self) -> SchedulerOutput | None:
        self.num_ticks += 1
        return super().step()

    def take(self, output: RequestOutput) -> None:
        if output.error is not None and output.error.endswith("are kept by transfers that do not end."):
            self.stuck.add(output.request_id)
        super().take(output)

    @property
    def num_kept(self) -> int:
        """Blocks of transfers that never end, or that need not be waited for."""
        return self.scheduler.manager.pool.num_pinned

    def check(self, step: SchedulerOutput | None) -> None:
        super().check(step)
        pool = self.scheduler.manager.pool
        transfers = self.scheduler._transfers
        assert transfers is not None
        pins: Counter[int] = Counter()
        for one in transfers._in_flight.values():
            pins.update(one.transfer.block_ids)
        for load in {id(load): load for load in transfers._loading.values()}.values():
            pins.update(load.held)
        for held in transfers._held.values():
            pins.update(held)
        assert {block.block_id: block.pins for block in pool.blocks if block.pins} == pins
        assert pool.num_pinned == sum(block.pins > 0 and block.ref_count == 0 for block in pool.blocks)
        for active in self.transfers.active.values():
            blocks = [pool.blocks[page] for page in active.transfer.block_ids]
            assert all(block.pins for block in blocks), "a block that is being transferred may be handed out"
            assert not active.is_load or not any(block.ref_count for block in blocks), "a block that is being loaded is used"
