"""Routing by load, by prefix, and by both."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from msgspec.structs import replace

from compile_and_serve.custom_ops.step_data import MediaItem
from compile_and_serve.runtime.engine.router import AFFINITY, Router
from compile_and_serve.runtime.kv_events.wire import AllBlocksCleared, BlockRemoved, BlockStored
from compile_and_serve.runtime.messages import EngineStats, Sibling
from compile_and_serve.runtime.scheduler.prefix_keys import extend_keys, root_key
from tests.support.engines import request

BLOCK = 4


def make_router(num_replicas: int = 2, **options: int | None) -> Router:
    return Router(num_replicas, **({"max_num_seqs": 32, "num_blocks": 1000, "block_size": BLOCK} | options))  # type: ignore[arg-type]


def prompt(seed: int, length: int = 10 * BLOCK) -> list[int]:
    return random.Random(seed).choices(range(300), k=length)


def test_different_prompts_spread_evenly() -> None:
    router = make_router(3)
    busy = Counter(router.route(request(f"r{i}", prompt(i))) for i in range(30))
    assert busy == {0: 10, 1: 10, 2: 10}
    for i in range(30):
        router.finish(f"r{i}")
    assert [router.load(r) for r in range(3)] == [0, 0, 0]
    # one after another, with none in flight in between
    idle = Counter()
    for i in range(30, 60):
        idle[router.route(request(f"r{i}", prompt(i)))] += 1
        router.finish(f"r{i}")
    assert idle == {0: 10, 1: 10, 2: 10}


def test_a_long_prompt_weighs_more_than_a_short_one() -> None:
    router = make_router(num_blocks=400)
    long = router.route(request("long", prompt(0, 800)))
    shorts = [router.route(request(f"short{i}", prompt(i + 1, 8))) for i in range(10)]
    assert shorts == [1 - long] * 10


def test_a_prompt_returns_to_the_replica_that_has_its_beginning() -> None:
    router = make_router(4)
    homes = {}
    for i in range(8):
        homes[i] = router.route(request(f"first{i}", prompt(i)))
        router.finish(f"first{i}")
    assert len(set(homes.values())) == 4
    for i in random.Random(0).sample(range(8), 8):
        longer = prompt(i) + prompt(100 + i, 7)
        assert router.route(request(f"second{i}", longer)) == homes[i]
        router.finish(f"second{i}")


def test_salts_and_short_overlaps_are_no_prefix() -> None:
    router = make_router()
    home = router.route(request("a", prompt(0)))
    router.finish("a")
    salted = request("b", prompt(0))
    salted.cache_salt = "tenant"
    assert router.route(salted) == 1 - home  # equal load, and the other replica had no request yet
    router.finish("b")
    other = prompt(0)[: BLOCK - 1] + prompt(1)
    first = router.route(request("c", other))
    assert router.route(request("d", prompt(0)[: BLOCK - 1] + prompt(2))) == 1 - first


def test_a_prompt_returns_to_the_replica_that_has_its_image() -> None:
    router = make_router()
    homes = []
    for name, key in (("a", b"cat"), ("b", b"dog"), ("c", b"cat"), ("d", b"dog")):
        one = request(name, prompt(0))
        one.media = [MediaItem(key=key, position=1, length=2)]
        homes.append(router.route(one))
        router.finish(name)
    assert homes[0] != homes[1]
    assert homes[2:] == homes[:2]


def test_a_prefix_that_all_requests_share_spreads_when_its_replica_fills_up() -> None:
    router = make_router(2)
    shared = prompt(0)
    chosen = [router.route(request(f"r{i}", shared + prompt(i + 1, BLOCK))) for i in range(32)]
    home = chosen[0]
    first_other = chosen.index(1 - home)
    # the difference is AFFINITY times 32 slots (the KV cache contributes little here)
    assert 2 < first_other <= AFFINITY * 32 + 1
    assert abs(chosen.count(0) - chosen.count(1)) <= 6


def test_no_request_waits_or_is_refused_while_another_replica_has_room() -> None:
    shared = prompt(0, 4000)  # worth more than any difference of load below
    router = make_router(2, max_num_seqs=4, max_waiting=2, num_blocks=1_000_000)
    counts: Counter[int] = Counter()
    for i in range(12):
        counts[router.route(request(f"r{i}", shared))] += 1
        assert max(counts.values()) <= 4 or min(counts.values()) >= 4
    assert counts == {0: 6, 1: 6}
    router.route(request("one too many", shared))  # either replica refuses it


def test_room_is_what_a_replica_would_start_soon() -> None:
    router = make_router(2, max_num_seqs=16, num_blocks=1_000_000)  # and 3 ahead of free slots
    many = replace(request("many", prompt(99)), siblings=[Sibling(f"s{i}") for i in range(16)])
    for i in range(2 * (16 + 3)):
        one = request(f"r{i}", prompt(i))
        assert router.has_room(one)
        router.route(one)
    assert not router.has_room(request("late", prompt(50)))
    assert router.has_room(many)  # it would wait anywhere
    assert router.accepts(request("late", prompt(50)), 1000)
    router.finish("r7")
    assert router.has_room(request("late", prompt(50)))
    home = router.route(request("late", prompt(50)))
    # a full KV cache: 4 run and the others wait
    for index in range(2):
        router.observe(index, EngineStats(num_running=4, num_waiting=15))
    for name in router.requests_of(home)[:11]:
        router.finish(name)
    assert not router.has_room(request("later", prompt(51)))  # 8 in flight, 4 slots and 3 ahead
    router.observe(home, EngineStats(num_running=6, num_waiting=2))
    assert router.has_room(request("later", prompt(51)))


def test_the_queues_of_all_replicas_limit_what_is_held_back() -> None:
    router = make_router(2, max_num_seqs=4, max_waiting=2, num_blocks=1_000_000)
    for i in range(10):
        router.route(request(f"r{i}", prompt(i)))
    assert not router.has_room(request("a", prompt(20)))
    assert router.accepts(request("a", prompt(20)), 1)
    assert not router.accepts(request("a", prompt(20)), 2)


@pytest.mark.parametrize("seed", range(3))
def test_holding_back_ends_a_burst_sooner(seed: int) -> None:
    """A simulation: 200 requests at once, a few of them long, on 2 replicas of 8 slots; a step takes 1 and serves all running."""
    lengths = [400 if random.Random(100 * seed + i).random() < 0.05 else 20 for i in range(200)]

    def simulated(*, holds: bool) -> tuple[int, int]:
        """→ steps until all have ended, and steps in which one replica had free slots while requests waited elsewhere"""
        router = make_router(2, max_num_seqs=8, num_blocks=1_000_000)
        held = list(range(len(lengths)))
        queues: list[list[int]] = [[], []]
        left = dict(enumerate(lengths))
        steps = wasted = 0
        while left:
            while held and (not holds or router.has_room(request(f"r{held[0]}", prompt(held[0])))):
                i = held.pop(0)
                queues[router.route(request(f"r{i}", prompt(i)))].append(i)
            wasted += bool(held or max(map(len, queues)) > 8) and min(map(len, queues)) < 8
            for queue in queues:
                for i in queue[:8]:
                    left[i] -= 1
                    if not left[i]:
                        del left[i]
                        router.finish(f"r{i}")
                queue[:] = [i for i in queue if i in left]
            for index, queue in enumerate(queues):
                router.observe(index, EngineStats(num_running=min(8, len(queue)), num_waiting=max(0, len(queue) - 8)))
            steps += 1
        return steps, wasted

    (with_hold, wasted), (without, wasted_before) = simulated(holds=True), simulated(holds=False)
    assert with_hold <= without
    assert wasted <= 20 < wasted_before  # at most the time of what went ahead


def test_the_load_that_a_replica_reports_counts() -> None:
    router = make_router(2)
    home = router.route(request("a", prompt(0)))
    router.observe(home, EngineStats(kv_cache_usage=AFFINITY + 0.1))
    assert router.route(request("b", prompt(0))) == 1 - home
    # an idle replica has no load, whatever it reported before its requests were aborted
    router.finish("a")
    assert router.load(home) == 0.0


def test_requests_are_found_and_forgotten() -> None:
    router = make_router()
    indices = {name: router.route(request(name, prompt(i))) for i, name in enumerate("abcd")}
    assert {name: router.replica_of(name) for name in "abcd"} == indices
    assert sorted(router.requests_of(0) + router.requests_of(1)) == list("abcd")
    router.finish("a")
    router.finish("a")
    router.finish("nobody")
    assert router.replica_of("a") is None
    assert len(router.requests_of(0) + router.requests_of(1)) == 3


def test_prompts_that_no_longer_fit_the_caches_are_forgotten() -> None:
    """Two caches of 50 blocks hold 10 prompts of 10 blocks."""
    router = make_router(2, num_blocks=50)
    homes = []
    for i in range(20):
        homes.append(router.route(request(f"r{i}", prompt(i))))
        router.finish(f"r{i}")

    def returns_home(i: int) -> bool:
        """Whether the prompt goes to its replica although that one has a request more than the other."""
        router.route(request("filler", prompt(1000 + i, 1)))
        home = router.replica_of("filler")
        while home != homes[i]:
            router.finish("filler")
            home = router.route(request("filler", prompt(1000 + i, 1)))
        chosen = router.route(request("again", prompt(i)))
        router.finish("again")
        router.finish("filler")
        return chosen == homes[i]

    assert returns_home(19)
    assert not returns_home(0)
    router.forget_prefixes()
    assert not returns_home(18)


def test_without_prefix_caches_only_load_counts() -> None:
    router = make_router(2, enable_prefix_caching=False)
    chosen = [router.route(request(f"r{i}", prompt(0))) for i in range(10)]
    assert chosen.count(0) == chosen.count(1) == 5


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_a_prompt_is_a_load_of_its_share_of_the_kv_cache(enable_prefix_caching: bool) -> None:
    router = make_router(1, max_num_seqs=10, num_blocks=100, enable_prefix_caching=enable_prefix_caching)
    router.route(request("a", prompt(0, 200)))
    assert router.load(0) == 1 / 10 + 200 / (100 * BLOCK)


def test_all_sequences_of_a_request_go_to_one_replica_that_has_room_for_them() -> None:
    router = make_router(2, max_num_seqs=4)
    router.route(request("first", prompt(0)))  # replica 0
    router.finish("first")
    router.route(request("single", prompt(1)))  # replica 1, as the one with fewer requests so far
    siblings = [Sibling(f"s{i}") for i in range(3)]
    home = router.route(replace(request("r", prompt(1)), siblings=siblings))
    assert home == 0  # replica 1 has the prefix, but not four free slots
    assert {router.replica_of(name) for name in ("r", "s0", "s1", "s2")} == {home}
    # They share the cache of one prompt.
    assert router.load(home) == pytest.approx(4 / 4 + 10 * BLOCK / (1000 * BLOCK))
    for name in ("r", "s0", "s1"):
        router.finish(name)
    assert router.requests_of(home) == ["s2"]
    router.finish("s2")
    assert router.load(home) == 0.0
    many = replace(request("many", prompt(2)), siblings=[Sibling(f"m{i}") for i in range(9)])
    assert router.route(many) == home  # nobody has room for ten: the least loaded gets them


def test_events_say_where_a_prefix_is_and_where_it_is_no_longer() -> None:
    router = make_router(3)
    wanted, keys = prompt(0), list[bytes]()
    extend_keys(keys, root_key(None), wanted, BLOCK, 10)
    stored = BlockStored(
        block_hashes=keys,
        parent_block_hash=None,
        token_ids=wanted,
        block_size=BLOCK,
        lora_id=None,
        medium="GPU",
        lora_name=None,
        group_idx=0,
    )
    for replica, event in ((1, stored), (0, replace(stored, group_idx=1)), (0, replace(stored, medium="CPU"))):
        router.observe_events(replica, [event])
    assert router.route(request("a", wanted)) == 1
    router.finish("a")
    router.observe_events(2, [stored])
    router.observe_events(1, [BlockRemoved(block_hashes=keys[2:], medium="GPU", group_idx=0)])
    assert router.route(request("b", wanted)) == 2
    router.finish("b")
    router.observe_events(2, [AllBlocksCleared()])
    assert router._cached_prefixes(keys) == [0, 2, 0]
