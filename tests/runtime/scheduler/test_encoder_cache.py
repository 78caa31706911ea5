"""The scheduler's side of an encoder: what a step reads is there, nobody's rows are overwritten, and every request ends."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest

from compile_and_serve.custom_ops.step_data import MediaItem, StepArray
from compile_and_serve.runtime.config import CacheConfig, SchedulerConfig
from compile_and_serve.runtime.messages import EngineRequest
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.runtime.scheduler.encoder_cache import EncoderCache
from compile_and_serve.runtime.scheduler.scheduler import Scheduler
from compile_and_serve.runtime.scheduler.step_messages import EncoderInfo, ModelRunnerOutput, SchedulerOutput

LONGEST, BUDGET, PAGES, ROWS_PER_PAGE = 12, 16, 9, 2


def make_scheduler(num_blocks: int = 40, *, budget: int = BUDGET, pages: int = PAGES, caching: bool = True) -> Scheduler:
    info = EncoderInfo(arrays=["patches"], max_tokens=budget, max_item_tokens=LONGEST, num_pages=pages, rows_per_page=ROWS_PER_PAGE)
    config = SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=10)
    cache = CacheConfig(block_size=4, enable_prefix_caching=caching)
    return Scheduler(config, cache, num_blocks=num_blocks, max_model_len=100, encoder=EncoderCache(info))


def item(content: int, position: int, length: int) -> MediaItem:
    patches = StepArray.of(np.full((length, 1), content, dtype=np.float32), start=position)
    return MediaItem(key=f"{content} {length}".encode(), position=position, length=length, arrays={"patches": patches})


def random_request(name: str, rng: random.Random) -> EngineRequest:
    media: list[MediaItem] = []
    position = rng.randrange(5)
    for _ in range(rng.randrange(4)):
        length = rng.randint(1, LONGEST)
        media.append(item(rng.randrange(6), position, length))
        position += length + rng.randrange(3)
    params = SamplingParams(temperature=0.0, max_tokens=rng.randint(1, 12), ignore_eos=True)
    one = EngineRequest(request_id=name, prompt_token_ids=[7] * (position + rng.randint(1, 6)), sampling_params=params)
    one.media = media
    return one


class Device:
    """What the runner does with a step's messages: its rows, and who reads which."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int], tuple[float, int]] = {}  # (page, place in it) → (content, number of the item's token)
        self.reads: dict[str, dict[int, tuple[int, int]]] = {}  # request → token → row
        self.computed: dict[str, int] = {}
        self.prompts: dict[str, EngineRequest] = {}
        self.num_encoded = 0

    def launch(self, step: SchedulerOutput) -> ModelRunnerOutput:
        for name in step.finished_request_ids:
            self.reads.pop(name, None)
        for data in step.new_requests:
            self.reads[data.request_id] = {}
            self.computed[data.request_id] = data.num_computed_tokens
            assert "patches" not in data.arrays
        assert sum(one.length for one in step.encodes if one.arrays) <= BUDGET
        for one in step.encodes:
            places = [(page, place) for page in one.page_ids for place in range(ROWS_PER_PAGE)][: one.length]
            assert len(places) == one.length
            if one.arrays:
                self.num_encoded += 1
                values = one.arrays["patches"].rows(0, one.length)
                for number, place in enumerate(places):
                    self.rows[place] = float(values[number, 0]), number
            self.reads[one.request_id] |= {one.position + number: place for number, place in enumerate(places)}
        sampled = {}
        for name, count in step.num_scheduled_tokens.items():
            begin, end = self.computed[name], self.computed[name] + count
            for media in self.prompts[name].media:
                content = float(media.arrays["patches"].rows(media.position, media.position + 1)[0, 0])
                for token in range(max(begin, media.position), min(end, media.position + media.length)):
                    assert self.rows[self.reads[name][token]] == (content, token - media.position), (step.step, name, token)
            self.computed[name] = end
            sampled[name] = [3]
        return ModelRunnerOutput(step=step.step, sampled_token_ids=sampled, logprobs={}, prompt_logprobs={}, errors={})


def run_all(scheduler: Scheduler, device: Device, rng: random.Random, *, depth: int, aborts: bool) -> set[str]:
    """Run until nothing is left. → the requests that ended by themselves"""
    ended: set[str] = set()
    in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
    for _ in range(4000):
        while len(in_flight) < depth and (step := scheduler.schedule()) is not None:
            in_flight.append((step, device.launch(step)))
        if not in_flight:
            break
        for output in scheduler.update(*in_flight.popleft()):
            if output.finish_reason is not None:
                ended.add(output.request_id)
        if aborts and rng.random() < 0.05 and device.prompts:
            scheduler.abort([rng.choice(list(device.prompts))])
    assert not scheduler.has_work()
    return ended


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("depth", [1, 2])
def test_every_step_reads_what_is_there(seed: int, depth: int) -> None:
    rng = random.Random(seed)
    scheduler, device = make_scheduler(num_blocks=rng.choice([18, 40]), caching=seed % 3 > 0), Device()
    aborts = seed % 2 == 1
    requests = [random_request(f"r{number}", rng) for number in range(30)]
    for one in requests:
        device.prompts[one.request_id] = one
        scheduler.add_request(one)
    ended = run_all(scheduler, device, rng, depth=depth, aborts=aborts)
    if not aborts:
        assert len(ended) == 30
    assert scheduler.encoder is not None
    assert scheduler.encoder.pool.num_free == PAGES
    assert scheduler.encoder.num_encoded == device.num_encoded
    assert scheduler.stats().num_free_blocks == scheduler.stats().num_total_blocks
    assert scheduler.reset_prefix_cache()
    assert not scheduler.encoder.pool.cached


def test_the_seeds_preempt_and_evict() -> None:
    """What the test above is about does happen in it."""
    num_preemptions = num_evicted = 0
    for seed in range(0, 12, 2):
        rng = random.Random(seed)
        scheduler, device = make_scheduler(num_blocks=rng.choice([18, 40]), caching=seed % 3 > 0), Device()
        contents = set()
        for one in [random_request(f"r{number}", rng) for number in range(30)]:
            device.prompts[one.request_id] = one
            contents |= {media.key for media in one.media}
            scheduler.add_request(one)
        run_all(scheduler, device, rng, depth=1, aborts=False)
        num_preemptions += scheduler.stats().num_preemptions
        num_evicted += device.num_encoded - len(contents)
    assert num_preemptions > 5
    assert num_evicted > 20


def test_an_item_that_waits_is_not_overtaken() -> None:
    """The large item of the first request needs all that is free; the small one behind it waits, although it would fit."""
    scheduler, device = make_scheduler(pages=6), Device()
    for name, media in (("first", item(1, 8, 12)), ("large", item(2, 1, 12)), ("small", item(3, 1, 1))):
        params = SamplingParams(temperature=0.0, max_tokens=1)
        device.prompts[name] = EngineRequest(request_id=name, prompt_token_ids=[7] * 24, sampling_params=params)
        device.prompts[name].media = [media]
        scheduler.add_request(device.prompts[name])
    order: list[str] = []
    while (step := scheduler.schedule()) is not None:
        result = device.launch(step)
        order += [one.request_id for one in step.encodes]
        scheduler.update(step, result)
    assert order == ["first", "large", "small"]
