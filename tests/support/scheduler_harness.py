"""Shared by the scheduler's tests: a runner that keeps its cache in a plain dict, and a driver that checks invariants."""

from __future__ import annotations

import random
import sys
from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from compile_and_serve.runtime.config import CacheConfig, SchedulerConfig
from compile_and_serve.runtime.connector.connector import SchedulerConnector
from compile_and_serve.runtime.drafting.speculator import Speculator
from compile_and_serve.runtime.messages import EngineRequest, RequestOutput, Sibling, TokenLogprobs
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.runtime.scheduler.request import RequestStatus
from compile_and_serve.runtime.scheduler.scheduler import Scheduler
from compile_and_serve.runtime.scheduler.step_messages import ModelRunnerOutput, NewRequestData, SchedulerOutput, StateGroupInfo

BLOCK = 4
VOCAB = 40
END_ID = 0
POISON = VOCAB  # no token of the model


def next_token(tokens: list[int]) -> int:
    """The model: a function of every token and its place."""
    state = 17
    for token in tokens:
        state = (state * 31 + token + 1) % 1_000_003
    return state * 7919 % 1_000_003 % VOCAB


@dataclass
class Held:
    """read: of each group of slots, the pages that the next step reads; `blocks` has those that it writes."""

    data: NewRequestData
    tokens: list[int]
    blocks: list[list[int]]
    computed: int
    read: dict[int, list[int]]


@dataclass
class Cell:
    """What one token left in the cache of a group: the token, and who wrote it in which step."""

    token: int
    group: int
    writer: str
    step: int


@dataclass
class State:
    """What a step left in page `part` of a slot: the tokens that it is the state after."""

    tokens: list[int]
    group: int
    part: int
    step: int


class FakeRunner:
    """Keeps the contract of runtime/scheduler/step_messages.py.

    It reads every token that attention would read through the block tables, and the states of slots, so a block that is
    handed out or freed wrongly shows as a wrong token. Nor may one request write a page in the step in which another reads
    it. Decodes accept a random number of their drafts.
    fail_on: request → sentence, reported the next time that it runs. poison: requests whose prefills leave POISON in the
    cache; a request that reads it samples a wrong token.
    """

    def __init__(self, scheduler: Scheduler, seed: int = 0) -> None:
        self.groups = scheduler.groups
        self.num_slots = scheduler.config.max_num_seqs
        self.rng = random.Random(seed)
        self.held: dict[str, Held] = {}
        self.cache: dict[tuple[int, int], Cell] = {}
        self.states: dict[int, State] = {}
        self.readers: dict[int, set[str]] = {}  # of this step
        self.writers: dict[int, str] = {}
        self.fail_on: dict[str, str] = {}
        self.poison: set[str] = set()
        self.num_prefilled = 0  # tokens computed in prefill chunks

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in step.finished_request_ids:
            del self.held[request_id]
        for new in step.new_requests:
            assert new.request_id not in self.held
            blocks = [list(block_ids) for block_ids in new.block_ids]
            held = self.held[new.request_id] = Held(new, list(new.token_ids), blocks, new.num_computed_tokens, {})
            for number, group in self._slot_groups:
                size = group.pages_per_slot
                assert len(blocks[number]) == (2 * size if new.num_computed_tokens else size)
                held.read[number], blocks[number] = blocks[number][:-size], blocks[number][-size:]
        assert len(self.held) <= self.num_slots, "the runner was not told who has gone"
        for grown in step.cached_requests:
            held = self.held[grown.request_id]
            for number, new_ids in enumerate(grown.new_block_ids):
                if self.groups[number].kind == "tokens":
                    held.blocks[number] += new_ids
                elif new_ids:
                    assert len(new_ids) == self.groups[number].pages_per_slot
                    held.blocks[number] = list(new_ids)
            assert len(grown.new_block_ids) == len(self.groups)
        result = ModelRunnerOutput(step=step.step, sampled_token_ids={}, logprobs={}, prompt_logprobs={}, errors={})
        self.readers, self.writers = {}, {}
        for request_id, count in step.num_scheduled_tokens.items():
            self._run(request_id, count, step.step, result)
            if request_id in self.fail_on:
                result.errors[request_id] = self.fail_on[request_id]
                result.sampled_token_ids.pop(request_id, None)
        for page, writer in self.writers.items():
            assert self.readers.get(page, set()) <= {writer}, "read by one request and written by another"
        return result

    @property
    def _slot_groups(self) -> list[tuple[int, StateGroupInfo]]:
        return [(number, group) for number, group in enumerate(self.groups) if group.kind == "slot"]

    def _write(self, page: int, request_id: str) -> None:
        assert self.writers.setdefault(page, request_id) == request_id, "written by two requests"

    def _run(self, request_id: str, count: int, step: int, result: ModelRunnerOutput) -> None:
        held = self.held[request_id]
        start = held.computed
        if start < len(held.data.token_ids):
            assert start + count <= len(held.data.token_ids), "a prefill beyond the tokens of its request"
            self.num_prefilled += count
            num_new = int(start + count == len(held.tokens))
            inputs = held.tokens[start : start + count]
        else:
            assert start == len(held.tokens) - 1
            num_new = self.rng.randint(1, count)
            known = [*held.tokens, *continuation(held.tokens, num_new - 1)]
            inputs = known[start:] + [self.rng.randrange(VOCAB) for _ in range(count - num_new)]  # rejected drafts
        if request_id in self.poison:
            inputs = [POISON] * count
        for offset, token in enumerate(inputs):
            for number, group in enumerate(self.groups):
                if group.kind == "tokens":
                    block, place = divmod(start + offset, group.block_size)
                    page = held.blocks[number][block]
                    self._write(page, request_id)
                    self.states.pop(page, None)
                    self.cache[page, place] = Cell(token, number, request_id, step)
        is_poisoned = self._check_reads(request_id, start, start + count, step)
        for number, group in self._slot_groups:
            is_poisoned |= self._advance_slot(request_id, number, group, inputs, step)
        held.computed += num_new if start >= len(held.data.token_ids) else count
        prompt_len = held.data.num_prompt_tokens
        if held.data.sampling_params.prompt_logprobs is not None:
            result.prompt_logprobs[request_id] = [
                prompt_logprob(position, held.tokens[position]) for position in range(start + 1, min(start + count, prompt_len - 1) + 1)
            ]
        if num_new:
            sampled = [POISON] * num_new if is_poisoned else continuation(held.tokens, num_new)
            held.tokens += sampled
            result.sampled_token_ids[request_id] = sampled
            if held.data.sampling_params.logprobs is not None:
                result.logprobs[request_id] = [TokenLogprobs([token], [-1.0], 1) for token in sampled]

    def _check_reads(self, request_id: str, start: int, end: int, step: int) -> bool:
        """Read what attention reads for tokens start … end - 1; whether there was poison in it."""
        held = self.held[request_id]
        is_poisoned = False
        for number, group in enumerate(self.groups):
            if group.kind != "tokens":
                continue
            first = 0 if group.window is None else max(0, start - group.window + 1)
            for position in range(first, end):
                block, place = divmod(position, group.block_size)
                self.readers.setdefault(held.blocks[number][block], set()).add(request_id)
                cell = self.cache[held.blocks[number][block], place]
                assert cell.writer == request_id or cell.step < step, "read in the launch that writes it"
                assert cell.group == number, "a block of another group"
                if cell.token == POISON:
                    is_poisoned = True
                elif position < len(held.tokens):
                    assert cell.token == held.tokens[position] or position >= start, "the cache of another sequence"
        return is_poisoned

    def _advance_slot(self, request_id: str, number: int, group: StateGroupInfo, inputs: list[int], step: int) -> bool:
        """Read the state after the tokens before `inputs`, write the state after them; whether there was poison in what was read."""
        held = self.held[request_id]
        start, before = held.computed, list[int]()
        for part, page in enumerate(held.read.get(number, []) if start else []):
            self.readers.setdefault(page, set()).add(request_id)
            state = self.states[page]
            assert (state.group, state.part) == (number, part), "the page of another group"
            assert state.step < step, "read in the launch that writes it"
            assert 0 <= len(state.tokens) - start <= group.rollback_tokens, "the state cannot be rolled back so far"
            before = state.tokens[:start]
            assert before == held.tokens[:start] or POISON in before, "the state of another sequence"
        assert len(before) == start, "no state to begin from"
        for part, page in enumerate(held.blocks[number]):
            self._write(page, request_id)
            for place in range(max(group.block_size for group in self.groups)):
                self.cache.pop((page, place), None)
            self.states[page] = State(before + inputs, number, part, step)
        held.read[number] = held.blocks[number]
        return POISON in before or POISON in inputs


def continuation(tokens: list[int], count: int) -> list[int]:
    """The next tokens of a sequence."""
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(tokens) - count :]


def prompt_logprob(position: int, token: int) -> TokenLogprobs:
    return TokenLogprobs([token], [-float(position)], 1)


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    outputs: list[RequestOutput] = field(default_factory=list)

    def take(self, output: RequestOutput) -> None:
        assert self.finish_reason is None, "output after the end"
        self.tokens += output.new_token_ids
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
        if output.prompt_logprobs is not None:
            assert len(self.outputs) == sum(one.prompt_logprobs is not None for one in self.outputs), "prompt logprobs behind tokens"
            self.prompt_logprobs = [*(self.prompt_logprobs or []), *output.prompt_logprobs]
        self.outputs.append(output)


def expected_answer(request: EngineRequest, max_len: int) -> Answer:
    """What the request gives alone, without a scheduler."""
    params = request.sampling_params
    tokens = list(request.prompt_token_ids)
    limit = max_len if params.max_tokens is None else min(max_len, len(tokens) + params.max_tokens)
    answer = Answer(finish_reason="length")
    while len(tokens) < limit:
        token = next_token(tokens)
        tokens.append(token)
        answer.tokens.append(token)
        if len(answer.tokens) >= params.min_tokens:
            if token in request.eos_token_ids and not params.ignore_eos:
                answer.finish_reason = "stop"
                break
            if token in request.stop_token_ids:
                answer.finish_reason, answer.stop_reason = "stop", token
                break
    if params.prompt_logprobs is not None:
        prompt = request.prompt_token_ids
        answer.prompt_logprobs = [None, *(prompt_logprob(index, prompt[index]) for index in range(1, len(prompt)))]
    return answer


class Driver:
    """Runs a scheduler with `depth` steps in flight, checks its invariants before and after each, collects the answers."""

    def __init__(self, scheduler: Scheduler, depth: int = 0, seed: int = 0) -> None:
        self.scheduler, self.depth = scheduler, depth
        self.runner = FakeRunner(scheduler, seed)
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.answers: dict[str, Answer] = {}
        self.steps: list[SchedulerOutput] = []

    def add(self, *requests: EngineRequest) -> None:
        for request in requests:
            self.scheduler.add_request(request)
            self.answers |= {request_id: Answer() for request_id in request.request_ids}

    def step(self) -> SchedulerOutput | None:
        step = self.scheduler.schedule()
        self.check(step)
        if step is not None:
            self.check_windows()
            self.steps.append(step)
            self.in_flight.append((step, self.runner.execute(step)))
        while self.in_flight and (len(self.in_flight) > self.depth or step is None):
            self.update()
        return step

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def update(self) -> None:
        for output in self.scheduler.update(*self.in_flight.popleft()):
            self.take(output)
        self.check(None)

    def take(self, output: RequestOutput) -> None:
        self.answers[output.request_id].take(output)

    def run(self, max_steps: int = 5000) -> dict[str, Answer]:
        while self.has_work() or self.in_flight:
            max_steps -= 1
            assert max_steps > 0, "requests do not finish"
            assert self.step() is not None or not self.has_work() or self.depth > 0, "nothing runs, nothing comes"
        assert self.scheduler.manager.pool.num_free + self.num_kept == self.scheduler.manager.pool.num_blocks
        return self.answers

    num_kept = 0  # blocks that are not free though no request uses them
    stuck: Collection[str] = frozenset()  # requests that ended for lack of these

    def check_windows(self) -> None:
        """No block that the next step may read is freed. The runner is at the true positions: it has run all steps before."""
        for request in self.scheduler._running:
            held = self.runner.held.get(request.request_id)
            for group, num_freed in zip(self.scheduler.groups, request.num_freed_blocks, strict=True):
                if held is not None and num_freed:
                    assert group.window is not None
                    assert num_freed * group.block_size <= held.computed - group.window + 1

    def check(self, step: SchedulerOutput | None) -> None:
        scheduler, manager = self.scheduler, self.scheduler.manager
        pool, running, groups = manager.pool, scheduler._running, scheduler.groups
        drafts = 0 if scheduler._drafting is None else scheduler._drafting._speculator.max_tokens
        owners: Counter[int] = Counter()
        for request in running:
            assert len(request.block_ids) == len(groups)
            held = []
            for group, block_ids, num_freed in zip(groups, request.block_ids, request.num_freed_blocks, strict=True):
                assert block_ids[:num_freed] == [0] * num_freed
                assert num_freed == 0 or group.window is not None
                held += block_ids[num_freed:]
                assert group.kind == "tokens" or len(block_ids) == group.pages_per_slot
                if group.window is not None:
                    # Of drafts in flight, which may all be rejected, nothing is freed.
                    reach = group.window + scheduler.config.token_budget
                    reach += (self.depth + 1) * (1 + drafts) if drafts else 0
                    assert len(block_ids) - num_freed <= -(-reach // group.block_size) + 1
            assert len(set(held)) == len(held)
            owners.update(held)
            tokens = [number for number, group in enumerate(groups) if group.kind == "tokens"]
            room = min([len(request.block_ids[number]) * groups[number].block_size for number in tokens], default=sys.maxsize)
            must_move = len(tokens) < len(groups) and request.num_held_tokens == request.num_computed_tokens
            assert request.num_held_tokens == room or must_move
            assert request.num_computed_tokens <= request.num_held_tokens
        assert {block.block_id: block.ref_count for block in pool.blocks if block.ref_count != 0} == owners
        free = pool.free_queue.block_ids()
        assert sorted(free) == [block.block_id for block in pool.blocks if block.is_free]
        assert len(free) == pool.num_free
        assert all(pool.cached[key].key == key for key in pool.cached)
        entries = [[block, *block.followers] for block in pool.cached.values()]
        assert sum(block.key is not None for block in pool.blocks) == sum(map(len, entries))
        for entry in entries:
            assert len({(block.key, block.ref_count, block.pins) for block in entry}) == 1
            if entry[0].is_free:  # the first is handed out before the others
                place = free.index(entry[0].block_id)
                assert free[place : place + len(entry)] == [block.block_id for block in entry]
        assert manager.num_promised == sum(request.num_promised_blocks for request in running)
        assert 0 <= manager.num_promised <= pool.num_free or scheduler._transfers is not None or manager.may_lack_room
        assert all(request.status is RequestStatus.RUNNING for request in running)
        assert [request.key for request in running] == sorted(request.key for request in running)
        assert all(not request.block_ids and not request.num_promised_blocks for request in scheduler._admission.waiting)
        if step is not None:
            counts = step.num_scheduled_tokens
            assert step.total_num_scheduled_tokens == sum(counts.values()) <= scheduler.config.max_num_batched_tokens
            assert len(counts) <= scheduler.config.max_num_seqs
            assert min(counts.values(), default=1) >= 1
            assert counts or scheduler._transfers is not None


def make_scheduler(
    *, num_blocks: int = 64, max_num_seqs: int = 8, budget: int = 32, max_model_len: int = 128, caching: bool = True,
    policy: str = "fcfs", max_waiting: int | None = None, admit_in_groups: bool = False,
    groups: Sequence[StateGroupInfo] | None = None, speculator: Speculator | None = None,
    drafts_run_ahead: bool = False, whole_prompts: bool = False, connector: SchedulerConnector | None = None,
) -> Scheduler:  # fmt: skip
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        policy=policy,
        max_waiting=max_waiting,  # type: ignore[arg-type]
        admit_in_groups=admit_in_groups,
    )
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=caching)
    return Scheduler(
        config,
        cache,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        groups=groups,
        speculator=speculator,
        drafts_run_ahead=drafts_run_ahead,
        whole_prompts=whole_prompts,
        connector=connector,
    )


def make_request(
    request_id: str,
    prompt: Iterable[int],
    *,
    priority: int = 0,
    salt: str | None = None,
    end_ids: Iterable[int] = (),
    stop_ids: Iterable[int] = (),
    max_tokens: int | None = 8,
    **params: int | bool | None,
) -> EngineRequest:
    sampling_params = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampling_params=sampling_params,
        priority=priority,
        cache_salt=salt,
        eos_token_ids=list(end_ids),
        stop_token_ids=list(stop_ids),
    )


def assert_as_alone(answer: Answer, request: EngineRequest, max_len: int) -> None:
    expected = expected_answer(request, max_len)
    assert answer.tokens == expected.tokens
    assert (answer.finish_reason, answer.stop_reason) == (expected.finish_reason, expected.stop_reason)
    assert answer.prompt_logprobs == expected.prompt_logprobs


def random_requests(rng: random.Random, count: int, max_len: int) -> list[EngineRequest]:
    """Their prompts begin with one of two prefixes, or are the next turn after another."""
    prefixes = [[rng.randrange(VOCAB) for _ in range(rng.randrange(24))] for _ in range(2)]
    requests: list[EngineRequest] = []
    for index in range(count):
        before = rng.choice(prefixes)
        if requests and rng.random() < 0.3:
            before = rng.choice(requests).prompt_token_ids
            before = before + continuation(before, rng.randint(1, 12))
        prompt = before + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 8))]
        max_tokens = rng.choice([None, None, 0, 1, rng.randint(2, 40), rng.randint(2, 40)])
        request = make_request(
            f"r{index}",
            prompt,
            priority=rng.randrange(3),
            salt=rng.choice([None, None, "a"]),
            end_ids=[END_ID],
            stop_ids=[END_ID, *rng.sample(range(VOCAB), rng.randrange(2))],
            max_tokens=max_tokens,
            min_tokens=0 if max_tokens in (0, 1) else rng.choice([0, 2]),
            ignore_eos=False,
            prompt_logprobs=rng.choice([None, None, 0]),
            logprobs=rng.choice([None, 0]),
        )
        if rng.random() < 0.2:
            request = msgspec.structs.replace(request, siblings=[Sibling(f"r{index}.{number}") for number in range(1, 3)])
        if len(prompt) < max_len:
            requests.append(request)
    return requests


def run_random_workload(rng: random.Random, driver: Driver, requests: list[EngineRequest], num_aborts: int) -> tuple[Driver, set[str]]:
    """Returns the ids of the requests that were aborted or failed, too."""
    lost: set[str] = set()
    to_add = requests.copy()
    while to_add:
        for _ in range(rng.randint(0, 4)):
            if to_add:
                driver.add(to_add.pop(0))
        for _ in range(rng.randint(0, 5)):
            driver.step()
        if num_aborts > len(lost) and rng.random() < 0.5:
            request_id = rng.choice(requests).request_id
            if request_id in driver.answers and driver.answers[request_id].finish_reason is None:
                lost.add(request_id)
                if rng.random() < 0.5:
                    driver.runner.fail_on[request_id] = "Its logits are not finite."
                    driver.runner.poison.add(request_id)
                    continue
            if request_id in driver.answers:
                driver.scheduler.abort([request_id, "unknown"])
                driver.check(None)
    driver.run()
    return driver, lost
