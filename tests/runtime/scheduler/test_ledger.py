"""Planted waits and misses: the ledger of the request names each, with its time and its cause. The clock is the test's own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np
import pytest

from compile_and_serve.custom_ops.step_data import MediaItem, StepArray
from compile_and_serve.runtime.config import CacheConfig, SchedulerConfig
from compile_and_serve.runtime.connector.connector import PrefixQuery, SchedulerConnector
from compile_and_serve.runtime.connector.messages import FinishedTransfers
from compile_and_serve.runtime.drafting.speculator import Speculator
from compile_and_serve.runtime.ledger.records import Miss, RequestLedger, StepRan
from compile_and_serve.runtime.lora.request import LoRARequest
from compile_and_serve.runtime.messages import EngineRequest, EngineStats, Tenant
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.runtime.scheduler.encoder_cache import EncoderCache
from compile_and_serve.runtime.scheduler.move_requests import adopt, take_all
from compile_and_serve.runtime.scheduler.scheduler import Scheduler
from compile_and_serve.runtime.scheduler.step_ledger import StepLedger
from compile_and_serve.runtime.scheduler.step_messages import EncoderInfo, ModelRunnerOutput, SchedulerOutput, StateGroupInfo
from compile_and_serve.runtime.speculative_config import SpeculativeConfig
from tests.support.scheduler_harness import VOCAB, Cell, Driver, FakeRunner, make_request, make_scheduler, next_token

STEP = 0.1  # seconds of a step, on the test's clock


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    monkeypatch.setattr(time, "time", clock)
    return clock


class Ledgers:
    """Runs a scheduler whose steps take `STEP` seconds, and keeps the last ledger of each request."""

    def __init__(self, scheduler: Scheduler, clock: Clock) -> None:
        self.scheduler, self.clock = scheduler, clock
        self.runner = FakeRunner(scheduler)
        self.of: dict[str, RequestLedger] = {}
        self.ran = StepRan()

    def add(self, name: str, prompt: Any, *, tenant: str | None = None, waits_for: Any = None, **options: Any) -> None:
        request = make_request(name, prompt, ignore_eos=True, **options)
        if tenant is not None:
            request = msgspec.structs.replace(request, tenant=Tenant(tenant, max_running=1))
        self.scheduler.add_request(request, waits_for or {})

    def step(self) -> SchedulerOutput | None:
        scheduled = self.scheduler.schedule()
        self.clock.now += STEP
        if scheduled is None:
            return None
        result = self.runner.execute(scheduled)
        result.ran = self.ran if scheduled.encodes else StepRan()
        for output in self.scheduler.update(scheduled, result, STEP):
            if output.ledger is not None:
                self.of[output.request_id] = output.ledger
        return scheduled

    def run(self) -> Ledgers:
        for _ in range(300):
            if not self.scheduler.has_work():
                return self
            self.step()
        raise AssertionError("requests do not end")


def unlike(number: int, length: int = 8) -> list[int]:
    return [(10 + number) % VOCAB, *(token % VOCAB for token in range(length - 1))]


def waits_for_slots(ledgers: Ledgers) -> None:
    ledgers.add("first", unlike(1), max_tokens=5)
    ledgers.step()
    ledgers.add("late", unlike(2))


def waits_for_blocks(ledgers: Ledgers) -> None:
    ledgers.add("first", unlike(1, 50), max_tokens=5)
    ledgers.step()
    ledgers.add("late", unlike(2, 30))


def waits_for_the_budget(ledgers: Ledgers) -> None:
    ledgers.add("first", unlike(1, 32 * 4), max_tokens=2)
    ledgers.step()
    ledgers.add("late", unlike(2), max_tokens=2)


def waits_for_a_shared_prefix(ledgers: Ledgers) -> None:
    prompt = unlike(1, 100)
    ledgers.add("first", prompt)
    ledgers.add("late", [*prompt[:96], 1, 2, 3, 4])


def waits_for_its_key(ledgers: Ledgers) -> None:
    ledgers.add("first", unlike(1), max_tokens=5, tenant="a")
    ledgers.step()
    ledgers.add("late", unlike(2), tenant="a")


def waits_for_the_step(ledgers: Ledgers) -> None:
    scheduled = ledgers.scheduler.schedule() if ledgers.scheduler.has_work() else None
    assert scheduled is None
    ledgers.add("first", unlike(1), max_tokens=9)
    ledgers.step()
    ledgers.add("late", unlike(2))
    ledgers.clock.now += 0.07


def waits_for_prompt_logprobs(ledgers: Ledgers) -> None:
    ledgers.add("first", unlike(1, 256), max_tokens=2, prompt_logprobs=1)
    ledgers.add("late", unlike(2, 8), max_tokens=2, prompt_logprobs=1)


@pytest.mark.parametrize(
    ("plant", "options", "queue"),
    [
        (waits_for_slots, {"max_num_seqs": 1}, {"slots": 4 * STEP}),
        (waits_for_blocks, {"num_blocks": 16}, {"blocks": 5 * STEP}),
        (waits_for_the_budget, {}, {"budget": 3 * STEP}),
        (waits_for_a_shared_prefix, {"budget": 256}, {"prefix": STEP}),
        (waits_for_its_key, {}, {"key": 4 * STEP}),
        (waits_for_the_step, {}, {"step": 0.07}),
        (waits_for_prompt_logprobs, {"budget": 300, "max_model_len": 300, "num_blocks": 100}, {"prompt_logprobs": STEP}),
    ],
)
def test_a_wait_in_the_queue_has_its_reason(
    plant: Callable[[Ledgers], None], options: dict[str, Any], queue: dict[str, float], clock: Clock
) -> None:
    ledgers = Ledgers(make_scheduler(**{"max_model_len": 160, **options}), clock)
    plant(ledgers)
    found = ledgers.run().of["late"].queue
    assert {name: seconds for name, seconds in found.items() if seconds > 1e-6} == pytest.approx(queue, abs=0.002)
    assert sum(ledgers.of["first"].queue.values()) == pytest.approx(0.0, abs=0.002)


@pytest.mark.parametrize("what", ["grammar", "adapter"])
def test_what_is_prepared_for_a_request_is_no_wait_in_the_queue(what: Any, clock: Clock) -> None:
    ledgers = Ledgers(make_scheduler(), clock)
    future: Future[None] = Future()
    ledgers.add("first", unlike(1), max_tokens=12)
    ledgers.add("late", unlike(2), waits_for={future: what})
    for _ in range(5):
        ledgers.step()
    clock.now += 0.03
    future.set_result(None)
    clock.now += 0.04
    found = ledgers.run().of["late"]
    assert found.preparing == pytest.approx({what: 5 * STEP + 0.03})
    assert found.queue == pytest.approx({"step": 0.04}, abs=1e-6)


def test_a_request_waits_for_a_slot_of_adapters(clock: Clock) -> None:
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)
    scheduler = Scheduler(config, CacheConfig(block_size=4), num_blocks=64, max_model_len=64, num_adapter_slots=1)
    ledgers = Ledgers(scheduler, clock)
    for number, name in enumerate(("first", "late"), 1):
        lora = LoRARequest(f"adapter {number}", number, "/nowhere")
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        scheduler.add_request(EngineRequest(request_id=name, prompt_token_ids=[1, 2, 3], sampling_params=params, lora=lora))
    assert ledgers.run().of["late"].queue == pytest.approx({"adapter_slots": 4 * STEP})


def test_a_request_waits_for_the_encoder(clock: Clock) -> None:
    info = EncoderInfo(arrays=["patches"], max_tokens=12, max_item_tokens=12, num_pages=32, rows_per_page=2)
    config = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=64)
    cache = CacheConfig(block_size=4, enable_prefix_caching=False)
    scheduler = Scheduler(config, cache, num_blocks=64, max_model_len=100, encoder=EncoderCache(info))
    ledgers = Ledgers(scheduler, clock)
    ledgers.ran = StepRan(encode=0.03)
    for number, name in enumerate(("first", "late")):
        patches = StepArray.of(np.full((12, 1), number, dtype=np.float32), start=0)
        request = make_request(name, [7] * 16, max_tokens=3)
        request.media = [MediaItem(key=name.encode(), position=0, length=12, arrays={"patches": patches})]
        scheduler.add_request(request)
    found = ledgers.run().of["late"]
    assert found.queue == pytest.approx({"encoder": STEP})
    assert (found.encoded_items, found.encode) == (1, 0.03)


def test_slots_that_are_given_away_in_groups(clock: Clock) -> None:
    ledgers = Ledgers(make_scheduler(max_num_seqs=32, num_blocks=400, budget=160, admit_in_groups=True), clock)
    for number in range(32):
        ledgers.add(f"first {number}", unlike(number, 4), max_tokens=4 if number == 0 else 12)
    ledgers.step()
    for number in range(3):
        ledgers.add(f"late {number}", unlike(20 + number, 4), max_tokens=4)
    found = ledgers.run().of["late 0"].queue
    assert found == pytest.approx({"slots": 3 * STEP, "group": 8 * STEP}, abs=0.002)


def test_a_preemption_has_its_time_and_its_tokens(clock: Clock) -> None:
    ledgers = Ledgers(make_scheduler(num_blocks=10, caching=False), clock)
    ledgers.add("first", unlike(1, 14), max_tokens=12)
    ledgers.add("late", unlike(2, 14), max_tokens=12)
    found = ledgers.run().of["late"]
    assert found.preemptions == 1
    assert found.preempted == pytest.approx(found.queue["blocks"] + found.queue.get("step", 0.0), abs=0.002)
    assert found.preempted > STEP
    assert found.recomputed == pytest.approx(STEP)
    assert found.prefill == pytest.approx(STEP)
    assert found.recomputed_tokens > 14


def test_the_chunks_of_a_prompt_and_the_steps_that_they_took(clock: Clock) -> None:
    ledgers = Ledgers(make_scheduler(budget=16), clock)
    ledgers.add("first", unlike(1, 40), max_tokens=2)
    found = ledgers.run().of["first"]
    assert (found.chunks, found.prefill_steps, found.computed_tokens) == (3, 3, 40)
    assert found.prefill == pytest.approx(3 * STEP)
    assert (found.transport, found.beside_tokens) == (0.0, 0)


def test_a_prompt_beside_which_a_longer_one_is_computed(clock: Clock) -> None:
    ledgers = Ledgers(make_scheduler(budget=64), clock)
    ledgers.add("first", unlike(1, 50), max_tokens=2)
    ledgers.add("late", unlike(2, 6), max_tokens=2)
    found = ledgers.run().of["late"]
    assert (found.computed_tokens, found.prefill_steps, found.beside_tokens) == (6, 1, 50)


def test_a_request_that_no_replica_had_room_for(clock: Clock) -> None:
    ledgers = Ledgers(make_scheduler(), clock)
    late = msgspec.structs.replace(make_request("late", unlike(1), ignore_eos=True), arrival_time=clock.now - 0.5, held_seconds=0.45)
    ledgers.scheduler.add_request(late)
    found = ledgers.run().of["late"]
    assert found.queue == pytest.approx({"slots": 0.45}, abs=1e-6)
    assert found.transport == pytest.approx(0.05)


def test_a_request_that_moves_to_another_scheduler_keeps_its_waits(clock: Clock) -> None:
    """As between data groups, and where ranks join or leave."""
    ledgers = Ledgers(make_scheduler(max_num_seqs=1), clock)
    ledgers.add("first", unlike(1), max_tokens=20)
    ledgers.step()
    ledgers.add("late", unlike(2))
    for _ in range(3):
        ledgers.step()
    [_, (late, tenant)] = take_all(ledgers.scheduler)
    clock.now += 0.2
    other = Ledgers(make_scheduler(), clock)
    assert adopt(other.scheduler, late, tenant) is None
    clock.now += 0.04
    assert other.run().of["late"].queue == pytest.approx({"slots": 3 * STEP + 0.2, "step": 0.04}, abs=1e-6)


class Tier(SchedulerConnector):
    """Has the first 16 tokens of every prompt."""

    def match(self, query: PrefixQuery) -> int:
        return 16 - query.num_cached_tokens

    def tiers_of(self, keys: Iterable[bytes]) -> dict[str, int]:
        return {"disk": sum(1 for _ in keys)}

    def update(self, transfers: FinishedTransfers) -> None:
        pass

    def reset(self) -> None:
        pass


@pytest.mark.parametrize("error", ["", "The file is damaged."])
def test_blocks_that_come_from_a_tier_or_another_engine(error: str, clock: Clock) -> None:
    ledgers = Ledgers(make_scheduler(connector=Tier()), clock)
    ledgers.add("late", range(20), max_tokens=1)
    scheduled = ledgers.scheduler.schedule()
    assert scheduled is not None
    assert scheduled.transfers is not None
    [load] = scheduled.transfers.loads
    clock.now += 0.3
    for place in range(16):
        ledgers.runner.cache[load.block_ids[place // 4], place % 4] = Cell(place, 0, "tier", -1)
    result = ledgers.runner.execute(scheduled)
    ended = {"failed": {load.transfer_id: error}} if error else {"finished": [load.transfer_id]}
    result.transfers = FinishedTransfers(**ended)
    ledgers.scheduler.update(scheduled, result, 0.3)
    clock.now += 0.05
    found = ledgers.run().of["late"]
    assert found.preparing == pytest.approx({"kv_load": 0.3})
    assert found.queue == pytest.approx({"step": 0.05}, abs=1e-6)
    assert found.loaded_tokens == ({} if error else {"disk": 16})
    assert found.misses == ([Miss("prefix", "not_loaded")] if error else [])


def test_without_ledgers_nothing_is_kept(clock: Clock) -> None:
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, request_ledger=False)
    ledgers = Ledgers(Scheduler(config, CacheConfig(block_size=4), num_blocks=64, max_model_len=64), clock)
    ledgers.add("first", unlike(1))
    assert ledgers.run().of == {}


def prefix_miss(ledgers: Ledgers, name: str) -> Miss:
    [miss] = ledgers.run().of[name].misses
    assert ledgers.scheduler.misses["prefix." + miss.reason] >= 1
    return miss


@pytest.fixture
def after_one(clock: Clock) -> Ledgers:
    """A request with the tokens 0 … 39 has been answered."""
    ledgers = Ledgers(make_scheduler(num_blocks=16), clock)
    ledgers.add("before", range(40), max_tokens=2)
    return ledgers.run()


def test_the_first_prompt_is_the_first(after_one: Ledgers) -> None:
    assert [miss.reason for miss in after_one.of["before"].misses] == ["first"]


def test_where_a_prompt_differs(after_one: Ledgers) -> None:
    after_one.add("now", [*range(25), 39, 38, 37, *range(10)])
    miss = prefix_miss(after_one, "now")
    assert (miss.reason, miss.other, miss.position) == ("differs", "before", 25)
    assert (miss.mine[:3], miss.theirs[:3]) == ([39, 38, 37], [25, 26, 27])
    assert after_one.of["now"].cached_tokens == 24


def test_a_prompt_that_goes_on_from_an_answer_misses_nothing(after_one: Ledgers) -> None:
    after_one.add("now", [*range(40), next_token(list(range(40)))])
    assert after_one.run().of["now"].misses == []


def test_another_salt_tells_nothing_of_the_text(after_one: Ledgers) -> None:
    after_one.add("now", range(40), salt="other")
    assert prefix_miss(after_one, "now") == Miss("prefix", "salt")


def test_another_api_key_tells_nothing_of_the_text(after_one: Ledgers) -> None:
    after_one.add("now", [*range(25), *range(15)], tenant="somebody")
    assert prefix_miss(after_one, "now") == Miss("prefix", "first")


def test_another_adapter(clock: Clock) -> None:
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)
    scheduler = Scheduler(config, CacheConfig(block_size=4), num_blocks=64, max_model_len=64, num_adapter_slots=2)
    ledgers = Ledgers(scheduler, clock)
    for number, name in enumerate(("before", "now"), 1):
        lora = LoRARequest(f"adapter {number}", number, "/nowhere")
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        one = EngineRequest(
            request_id=name, prompt_token_ids=list(range(20)), sampling_params=params, lora=lora, prefix_key=f"lora {number}"
        )
        scheduler.add_request(one)
        ledgers.run()
    assert prefix_miss(ledgers, "now") == Miss("prefix", "adapter")


def test_evicted_blocks(after_one: Ledgers) -> None:
    after_one.add("large", unlike(1, 60), max_tokens=2)
    after_one.run()
    after_one.clock.now += 5.0
    after_one.add("now", [*range(40), next_token(list(range(40)))], max_tokens=1)
    miss = prefix_miss(after_one, "now")
    assert (miss.reason, miss.other) == ("evicted", "before")
    assert miss.seconds == pytest.approx(5.0, abs=5 * STEP)


def test_a_snapshot_that_is_missing(clock: Clock) -> None:
    groups = [StateGroupInfo("slot", 4, pages_per_slot=2, snapshots=True), StateGroupInfo("tokens", 4)]
    driver = Driver(make_scheduler(groups=groups, num_blocks=60, budget=100))
    found: dict[str, RequestLedger] = {}
    for name, prompt in (("before", range(40)), ("now", [*range(30), *range(10)])):
        driver.add(make_request(name, [token % 40 for token in prompt], max_tokens=2, ignore_eos=True))
        driver.run()
        [found[name]] = [output.ledger for output in driver.answers[name].outputs if output.ledger is not None]
    [miss] = found["now"].misses
    assert (miss.reason, miss.other) == ("snapshot", "before")


@pytest.mark.parametrize(
    ("options", "request_options", "reason"),
    [({"caching": False}, {}, "off"), ({}, {"prompt_logprobs": 1}, "reads_all"), ({}, {"length": 4}, "short")],
)
def test_a_request_that_cannot_share(options: dict[str, Any], request_options: dict[str, Any], reason: str, clock: Clock) -> None:
    ledgers = Ledgers(make_scheduler(**options), clock)
    ledgers.add("now", unlike(1, request_options.pop("length", 20)), **request_options)
    assert prefix_miss(ledgers, "now") == Miss("prefix", reason)


def test_steps_are_added_up_by_kind_with_their_misses(clock: Clock) -> None:
    scheduler = make_scheduler()
    ledger, pool = StepLedger(weight_bytes=1000, page_bytes=10), scheduler.manager.pool
    scheduler.add_request(make_request("a", range(9), max_tokens=3, ignore_eos=True))
    for kind, miss, tokens in (("piecewise", "", 9), ("plain", "not_captured", 1), ("full", "", 1)):
        scheduled = scheduler.schedule()
        assert scheduled is not None
        ran = StepRan(kind, miss, 3)  # type: ignore[arg-type]
        sampled = {"a": [5]}
        result = ModelRunnerOutput(step=scheduled.step, sampled_token_ids=sampled, logprobs={}, prompt_logprobs={}, errors={}, ran=ran)
        before = ledger.totals.copy()
        ledger.add(scheduled, result, 0.25, [pool])
        scheduler.update(scheduled, result, 0.25)
        added = ledger.totals.since(before)
        assert (added.steps, added.seconds, added.tokens, added.padded_tokens) == ({kind: 1}, {kind: 0.25}, tokens, 3)
        assert added.prompt_steps == (kind == "piecewise")
        assert added.misses == ({f"graph.{miss}": 1} if miss else {})
        assert added.bytes == added.row_bytes == 1000 + 3 * 10
    stats = EngineStats()
    ledger.add_to(stats, scheduler.misses)
    assert stats.misses == {"prefix.first": 1, "graph.not_captured": 1}
    assert stats.last_step is not None
    assert (stats.last_step.kind, stats.last_step.decodes, stats.last_step.prompts) == ("full", 1, 0)
    assert stats.last_step.held == 3 / 64


@pytest.mark.parametrize(("options", "reason"), [({"speculate": False}, "request"), ({}, "none_found"), ({"batch": 1}, "batch")])
def test_why_a_step_has_no_drafts(options: dict[str, Any], reason: str, clock: Clock) -> None:
    config = SpeculativeConfig(method="ngram", num_speculative_tokens=2, disable_by_batch_size=options.pop("batch", None))
    scheduler = make_scheduler(speculator=Speculator(config, 64, is_asynchronous=False))
    ledgers = Ledgers(scheduler, clock)
    ledgers.add("a", range(20, 30), max_tokens=3, **options)
    ledgers.step()
    scheduled = ledgers.step()
    assert scheduled is not None
    assert scheduled.missed_drafts == reason
