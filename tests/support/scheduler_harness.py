"""What the scheduler's tests share: a runner that keeps its cache in a plain dict, and a driver that checks invariants.

The runner reads every token of a sequence back through its block table, so a block handed out wrongly shows as a wrong token.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from compile_and_serve.runtime.config import CacheConfig, SchedulerConfig
from compile_and_serve.runtime.messages import EngineRequest, RequestOutput, TokenLogprobs
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.runtime.scheduler.request import RequestStatus
from compile_and_serve.runtime.scheduler.scheduler import Scheduler
from compile_and_serve.runtime.scheduler.step_messages import ModelRunnerOutput, NewRequestData, SchedulerOutput

BLOCK = 4
VOCAB = 40
END_ID = 0


def next_token(tokens: list[int]) -> int:
    """The model: a function of every token and its place."""
    state = 17
    for token in tokens:
        state = (state * 31 + token + 1) % 1_000_003
    return state * 7919 % 1_000_003 % VOCAB


@dataclass
class Held:
    data: NewRequestData
    tokens: list[int]
    blocks: list[int]
    computed: int


class FakeRunner:
    """Keeps the contract of runtime/scheduler/step_messages.py. `fail_on`: request → sentence, reported the next time that it runs."""

    def __init__(self) -> None:
        self.held: dict[str, Held] = {}
        self.cache: dict[tuple[int, int], int] = {}
        self.fail_on: dict[str, str] = {}

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in step.finished_request_ids:
            del self.held[request_id]
        for new in step.new_requests:
            assert new.request_id not in self.held
            held = Held(new, list(new.token_ids), list(new.block_ids), new.num_computed_tokens)
            assert self.read(held) == held.tokens[: held.computed], "a cached prefix is not computed yet"
            self.held[new.request_id] = held
        for grown in step.cached_requests:
            self.held[grown.request_id].blocks += grown.new_block_ids
        result = ModelRunnerOutput(step=step.step, sampled_token_ids={}, logprobs={}, prompt_logprobs={}, errors={})
        for request_id, count in step.num_scheduled_tokens.items():
            self._run(request_id, count, result)
            if request_id in self.fail_on:
                result.errors[request_id] = self.fail_on[request_id]
                result.sampled_token_ids.pop(request_id, None)
        return result

    def read(self, held: Held) -> list[int]:
        return [self.cache[held.blocks[position // BLOCK], position % BLOCK] for position in range(held.computed)]

    def _run(self, request_id: str, count: int, result: ModelRunnerOutput) -> None:
        held = self.held[request_id]
        start, end = held.computed, held.computed + count
        assert end <= len(held.tokens), "a token that does not exist was scheduled"
        for position in range(start, end):
            self.cache[held.blocks[position // BLOCK], position % BLOCK] = held.tokens[position]
        held.computed = end
        context = self.read(held)
        assert context == held.tokens[:end], "the cache holds something else than this sequence"
        if held.data.sampling_params.prompt_logprobs is not None:
            last = min(end, held.data.num_prompt_tokens - 1)
            result.prompt_logprobs[request_id] = [
                prompt_logprob(position, held.tokens[position]) for position in range(start + 1, last + 1)
            ]
        if end == len(held.tokens):
            token = next_token(context)
            held.tokens.append(token)
            result.sampled_token_ids[request_id] = token
            if held.data.sampling_params.logprobs is not None:
                result.logprobs[request_id] = TokenLogprobs([token], [-1.0], 1)


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
            assert self.prompt_logprobs is None, "prompt logprobs came twice"
            self.prompt_logprobs = output.prompt_logprobs
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

    def __init__(self, scheduler: Scheduler, depth: int = 0) -> None:
        self.scheduler, self.depth = scheduler, depth
        self.runner = FakeRunner()
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.answers: dict[str, Answer] = {}
        self.steps: list[SchedulerOutput] = []

    def add(self, *requests: EngineRequest) -> None:
        for request in requests:
            self.scheduler.add_request(request)
            self.answers[request.request_id] = Answer()

    def step(self) -> SchedulerOutput | None:
        step = self.scheduler.schedule()
        self.check(step)
        if step is not None:
            self.steps.append(step)
            self.in_flight.append((step, self.runner.execute(step)))
        while self.in_flight and (len(self.in_flight) > self.depth or step is None):
            self.update()
        return step

    def update(self) -> None:
        for output in self.scheduler.update(*self.in_flight.popleft()):
            self.answers[output.request_id].take(output)
        self.check(None)

    def run(self, max_steps: int = 5000) -> dict[str, Answer]:
        while self.scheduler.has_work() or self.in_flight:
            max_steps -= 1
            assert max_steps > 0, "requests do not finish"
            assert self.step() is not None or not self.scheduler.has_work() or self.depth > 0, (
                "nothing runs, nothing comes"
            )
        assert self.scheduler.manager.pool.num_free == self.scheduler.manager.pool.num_blocks
        return self.answers

    def check(self, step: SchedulerOutput | None) -> None:
        scheduler, pool = self.scheduler, self.scheduler.manager.pool
        running = scheduler._running
        owners = Counter(block_id for request in running for block_id in request.block_ids)
        assert {block.block_id: block.ref_count for block in pool.blocks if block.ref_count != 0} == owners
        free = pool.free_queue.block_ids()
        assert sorted(free) == [block.block_id for block in pool.blocks if block.ref_count == 0]
        assert len(free) == pool.num_free
        assert all(pool.blocks[block_id].block_hash is not None for block_id, count in owners.items() if count > 1)
        assert all(len(set(request.block_ids)) == len(request.block_ids) for request in running)
        assert all(request.status is RequestStatus.RUNNING for request in running)
        assert [request.key for request in running] == sorted(request.key for request in running)
        assert all(not request.block_ids for _, request in scheduler._waiting)
        if step is not None:
            counts = step.num_scheduled_tokens
            assert step.total_num_scheduled_tokens == sum(counts.values()) <= scheduler.config.max_num_batched_tokens
            assert 1 <= len(counts) <= scheduler.config.max_num_seqs
            assert min(counts.values()) >= 1


def make_scheduler(
    *, num_blocks: int = 64, max_num_seqs: int = 8, budget: int = 32, max_model_len: int = 128, caching: bool = True,
    policy: str = "fcfs", max_waiting: int | None = None, admit_in_groups: bool = False,
) -> Scheduler:  # fmt: skip
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, policy=policy, max_waiting=max_waiting,  # type: ignore[arg-type]
        admit_in_groups=admit_in_groups,
    )  # fmt: skip
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=caching)
    return Scheduler(config, cache, num_blocks=num_blocks, max_model_len=max_model_len)


def make_request(
    request_id: str, prompt: Iterable[int], *, priority: int = 0, salt: str | None = None, end_ids: Iterable[int] = (),
    stop_ids: Iterable[int] = (), max_tokens: int | None = 8, **params: int | bool | None,
) -> EngineRequest:  # fmt: skip
    sampling_params = SamplingParams(max_tokens=max_tokens, **params)  # type: ignore[arg-type]
    return EngineRequest(
        request_id=request_id, prompt_token_ids=list(prompt), sampling_params=sampling_params, priority=priority, cache_salt=salt,
        eos_token_ids=list(end_ids), stop_token_ids=list(stop_ids),
    )  # fmt: skip


def assert_as_alone(answer: Answer, request: EngineRequest, max_len: int) -> None:
    expected = expected_answer(request, max_len)
    assert answer.tokens == expected.tokens
    assert (answer.finish_reason, answer.stop_reason) == (expected.finish_reason, expected.stop_reason)
    assert answer.prompt_logprobs == expected.prompt_logprobs
