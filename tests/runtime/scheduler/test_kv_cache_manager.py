"""Blocks of requests: what is allocated, shared and freed in one group of layers and in several."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from compile_and_serve.runtime.messages import EngineRequest
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.runtime.scheduler.kv_cache_manager import KVCacheManager
from compile_and_serve.runtime.scheduler.request import Prompt, Request
from compile_and_serve.runtime.scheduler.step_messages import StateGroupInfo

BLOCK = 4
FULL = StateGroupInfo("tokens", BLOCK)


def make_manager(num_blocks: int = 8, *groups: StateGroupInfo, caching: bool = True, max_step_tokens: int = 8) -> KVCacheManager:
    return KVCacheManager(num_blocks, groups or [FULL], max_step_tokens=max_step_tokens, enable_prefix_caching=caching)


def make_request(tokens: Sequence[int], *, salt: str | None = None, prompt_logprobs: int | None = None) -> Request:
    params = SamplingParams(prompt_logprobs=prompt_logprobs)
    message = EngineRequest(request_id="r", prompt_token_ids=list(tokens), sampling_params=params, cache_salt=salt)
    return Request(message, Prompt(message), key=(0.0,), max_len=1000, now=0.0)


def try_admit(manager: KVCacheManager, request: Request, *, step: int = 1) -> bool:
    """What the scheduler does with a waiting request."""
    prefix = manager.find_prefix(request, step)
    assert prefix is not None
    num_new = manager.num_new_blocks(request, prefix)
    if prefix.num_ready_tokens < prefix.num_tokens or num_new > manager.num_spare:
        return False
    spare = manager.num_spare
    manager.admit(request, prefix)
    assert manager.num_spare == spare - num_new
    return True


def admitted(manager: KVCacheManager, tokens: Sequence[int], **options: object) -> Request:
    request = make_request(tokens, **options)  # type: ignore[arg-type]
    assert try_admit(manager, request)
    return request


def run_prompt(manager: KVCacheManager, tokens: Sequence[int], salt: str | None = None, *, chunk: int = 1000) -> None:
    """Admit, compute and free a request."""
    request = admitted(manager, tokens, salt=salt)
    while (start := request.num_computed_tokens) < len(tokens):
        end = request.num_computed_tokens = min(len(tokens), start + chunk)
        manager.grow_for_chunk(request, start, end)
        manager.cache_blocks(request, end, 0)
    manager.free(request, 0)


def test_a_prompt_gets_whole_blocks_and_gives_them_back() -> None:
    manager = make_manager()
    request = admitted(manager, range(9))
    assert [len(block_ids) for block_ids in request.block_ids] == [3]
    assert request.num_held_tokens == 12
    assert manager.usage == pytest.approx(3 / 8)
    manager.free(request, 0)
    assert (request.block_ids, manager.usage) == ([], 0.0)


def test_prefix_is_reused_up_to_the_first_difference() -> None:
    manager = make_manager()
    first = admitted(manager, range(14))
    manager.cache_blocks(first, 14, 0)
    second = admitted(manager, [*range(8), 99, 99, 99, 99, 12, 13])
    assert second.block_ids[0][:2] == first.block_ids[0][:2]
    assert second.block_ids[0][2] not in first.block_ids[0]
    assert (second.num_computed_tokens, second.num_cached_tokens) == (8, 8)
    assert (manager.prefix_queries, manager.prefix_hits) == (28, 8)


def test_equal_tokens_after_different_ones_are_no_hit() -> None:
    manager = make_manager()
    run_prompt(manager, [1, 1, 1, 1, 5, 6, 7, 8, 0])
    assert admitted(manager, [2, 2, 2, 2, 5, 6, 7, 8, 0]).num_cached_tokens == 0


@pytest.mark.parametrize("length, hit", [(4, 0), (5, 4), (8, 4), (9, 8)])
def test_the_last_token_is_always_computed(length: int, hit: int) -> None:
    manager = make_manager()
    run_prompt(manager, range(length))
    assert admitted(manager, range(length)).num_computed_tokens == hit


def test_salts_keep_tenants_apart() -> None:
    manager = make_manager(32)
    for salt in (None, "", "a", "b"):
        run_prompt(manager, range(9), salt)
        assert manager.prefix_hits == 0
    for salt in (None, "", "a", "b"):
        request = admitted(manager, range(9), salt=salt)
        assert request.num_cached_tokens == 8
        manager.free(request, 0)


def test_prompt_logprobs_do_not_read_the_cache_but_fill_it() -> None:
    manager = make_manager()
    run_prompt(manager, range(5))
    request = admitted(manager, range(9), prompt_logprobs=0)
    assert request.num_cached_tokens == 0
    assert manager.prefix_queries == 5
    manager.cache_blocks(request, 9, 0)
    manager.free(request, 0)
    assert admitted(manager, range(9)).num_cached_tokens == 8


def test_a_block_is_shared_once_it_is_full_and_by_later_steps_only() -> None:
    manager = make_manager(16)
    first = admitted(manager, range(9))
    for step, (num_computed, expected) in enumerate([(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (9, 8)]):
        manager.cache_blocks(first, num_computed, step)
        grows = num_computed in (4, 8)
        assert try_admit(manager, make_request(range(9)), step=step) != grows
        other = make_request(range(9))
        assert try_admit(manager, other, step=step + 1)
        assert other.num_computed_tokens == expected
        manager.free(other, 0)


def test_generated_tokens_are_cached_too() -> None:
    manager = make_manager()
    request = admitted(manager, range(6))
    manager.cache_blocks(request, 6, 0)
    assert request.next_cache_len == 8
    request.token_ids = [*request.token_ids, 6, 7, 8]
    manager.cache_blocks(request, 8)
    manager.free(request, 0)
    assert admitted(manager, range(10)).num_cached_tokens == 8


def test_keys_beyond_the_prompt_are_the_sequence_s_own() -> None:
    manager = make_manager(32)
    message = EngineRequest(request_id="r", prompt_token_ids=list(range(6)), sampling_params=SamplingParams())
    prompt = Prompt(message)
    several = [Request(message, prompt, key=(0.0,), max_len=1000, now=0.0) for _ in range(2)]
    for token, request in enumerate(several):
        assert try_admit(manager, request)
        request.token_ids = [*request.token_ids, token, token]
        manager.cache_blocks(request, 8)
    assert several[0].keys[0] == several[1].keys[0] == prompt.keys[0]
    assert several[0].keys[1] != several[1].keys[1]
    assert len(prompt.keys) == 1
    for token in range(2):
        assert admitted(manager, [*range(6), token, token, 0]).num_cached_tokens == 8


def test_cached_free_blocks_count_as_free_only_once() -> None:
    """A hit on a free block uses it up: 4 blocks, all cached and free, cannot serve a 5-block prompt with 4 hits."""
    manager = make_manager(4)
    run_prompt(manager, range(16))
    assert not try_admit(manager, make_request(range(17)))
    assert manager.pool.num_free == 4
    assert admitted(manager, range(16)).num_cached_tokens == 12


def test_tails_are_evicted_before_heads() -> None:
    manager = make_manager(4)
    run_prompt(manager, range(16))
    other = admitted(manager, [50] * 8)
    manager.free(other, 0)
    assert admitted(manager, range(16)).num_cached_tokens == 8


def test_caching_off_finds_nothing_and_hashes_nothing() -> None:
    manager = make_manager(caching=False)
    run_prompt(manager, range(9))
    request = admitted(manager, range(9))
    assert (request.num_computed_tokens, request.keys, manager.prefix_queries) == (0, [], 0)


def test_reset_only_when_nothing_is_held() -> None:
    manager = make_manager()
    run_prompt(manager, range(9))
    request = admitted(manager, [7])
    assert not manager.reset_prefix_cache()
    manager.free(request, 0)
    assert manager.reset_prefix_cache()
    assert admitted(manager, range(9)).num_cached_tokens == 0


def test_a_long_prompt_is_hashed_within_the_budget_of_a_step() -> None:
    manager = make_manager(1000)
    tokens = list(range(2000))
    run_prompt(manager, tokens)
    request = make_request(tokens)
    num_looks = 0
    while True:
        manager.chains.budget = 300
        before = len(request.keys)
        prefix = manager.find_prefix(request, 1)
        assert (len(request.keys) - before) * BLOCK <= 300 + 64 * BLOCK
        num_looks += 1
        if prefix is not None:
            break
    assert prefix.num_tokens == 1996
    assert num_looks == 4
    manager.chains.budget = 300
    other = make_request([7, *tokens])
    assert manager.find_prefix(other, 1) is not None
    assert len(other.keys) == 64  # a prompt whose beginning is not cached is hashed no further


# Several groups. A window of 6 tokens in blocks of 2, beside full attention in blocks of 4.
WINDOW = StateGroupInfo("tokens", 2, 6)


def held(request: Request) -> list[int]:
    """Blocks per group, without placeholders."""
    return [len(ids) - freed for ids, freed in zip(request.block_ids, request.num_freed_blocks, strict=True)]


def test_a_window_group_holds_what_its_window_and_a_chunk_need() -> None:
    manager = make_manager(64, FULL, WINDOW)
    request = admitted(manager, range(40))
    assert held(request) == [10, 0]
    assert manager.num_promised == (6 + 8) // 2 + 1
    all_ids = []
    for start in range(0, 40, 8):
        new_ids = manager.grow_for_chunk(request, start, start + 8)
        assert new_ids is not None
        assert (new_ids[0], len(new_ids[1])) == ([], 4)
        assert held(request)[1] + manager.num_promised == (8 if start < 32 else held(request)[1])
        all_ids += new_ids[1]
    assert request.block_ids[1] == [0] * 13 + all_ids[13:]  # tokens 26 … 31 and the chunk 32 … 39 are held
    assert manager.num_promised == 0
    assert manager.pool.num_free == 64 - 10 - 7
    for num_computed in range(40, 60):  # decodes
        if num_computed == request.num_held_tokens:
            assert manager.grow(request, num_computed + 1, num_computed) is not None
            assert held(request)[1] <= 4
    manager.free(request, 0)
    assert manager.pool.num_free == 64


def test_a_promised_block_is_given_to_nobody_else() -> None:
    manager = make_manager(22, FULL, WINDOW)
    long = admitted(manager, range(40))  # 10 blocks, and 8 promised
    assert manager.num_spare == 4
    assert not try_admit(manager, make_request([7] * 5))  # 2 blocks, and 3 promised
    short = admitted(manager, [7])
    manager.grow_for_chunk(short, 0, 1)
    assert (manager.num_spare, manager.pool.num_free) == (2, 10)
    assert manager.grow(short, 5, 1) is None  # one block of the first group, two of the second
    for start in range(0, 40, 8):
        assert manager.grow_for_chunk(long, start, start + 8) is not None
    assert manager.grow(short, 5, 1) is not None


@pytest.mark.parametrize(
    "groups, num_blocks, expected",
    [
        ([FULL], 8, 32),
        ([FULL, FULL], 8, 16),
        ([FULL, WINDOW], 20, 48),  # 12 blocks, and the 8 of a window and a chunk
        ([FULL, WINDOW], 7, 8),
        ([WINDOW], 7, 14),
        ([WINDOW], 8, 1000),
    ],
)
def test_the_length_that_a_sequence_alone_can_have(groups: list[StateGroupInfo], num_blocks: int, expected: int) -> None:
    assert make_manager(num_blocks, *groups).max_tokens(1000) == expected


def test_a_window_group_shares_the_blocks_of_the_last_window_only() -> None:
    manager = make_manager(64, FULL, WINDOW)
    run_prompt(manager, range(40), chunk=8)
    request = admitted(manager, range(41))
    assert request.num_cached_tokens == 40
    assert request.num_freed_blocks == [0, 17]
    assert held(request) == [11, 3]


def test_a_prefix_ends_where_every_group_has_it() -> None:
    """The window of a prefix may be gone where a longer and a shorter one still have theirs."""
    manager = make_manager(64, FULL, WINDOW)
    run_prompt(manager, range(40), chunk=8)

    def lose(first: int, last: int) -> None:
        request = make_request(range(41))
        manager.find_prefix(request, 1)
        for index in range(first // 2, last // 2 + 1):
            block = manager.pool.cached.get(request.keys[index] + b"\0\1")
            assert block is not None
            manager.pool.uncache(request.keys[index] + b"\0\1")

    def hit() -> int:
        prefix = manager.find_prefix(make_request(range(41)), 1)
        assert prefix is not None
        assert len(prefix.blocks[0]) == prefix.num_tokens // 4
        return prefix.num_tokens

    assert hit() == 40
    lose(38, 39)
    assert hit() == 36
    lose(28, 31)  # needed for 36 and 32
    assert hit() == 28
    lose(0, 1)
    assert hit() == 28
    lose(22, 23)
    assert hit() == 20
    lose(8, 9)
    assert hit() == 20
    lose(16, 17)
    assert hit() == 16
    lose(14, 15)
    assert hit() == 8
    lose(2, 3)
    assert hit() == 0


def test_a_window_in_a_step_that_is_being_scheduled_is_not_ready() -> None:
    manager = make_manager(64, FULL, WINDOW)
    first = admitted(manager, range(20))
    for step, (start, end) in enumerate([(0, 8), (8, 16), (16, 20)]):
        manager.grow_for_chunk(first, start, end)
        manager.cache_blocks(first, end, step)
        prefix = manager.find_prefix(make_request(range(40)), step)
        ready = manager.find_prefix(make_request(range(40)), step, only_ready=True)
        assert prefix is not None
        assert ready is not None
        assert (prefix.num_tokens, prefix.num_ready_tokens, ready.num_tokens) == (end, start, start)


def test_groups_with_different_blocks_share_whole_blocks_of_all() -> None:
    manager = make_manager(64, StateGroupInfo("tokens", 2), StateGroupInfo("tokens", 8))
    run_prompt(manager, range(30))
    assert admitted(manager, range(30)).num_cached_tokens == 24
    assert admitted(manager, range(23)).num_cached_tokens == 16


def test_groups_never_share_with_each_other() -> None:
    manager = make_manager(64, FULL, FULL)
    run_prompt(manager, range(9))
    request = admitted(manager, range(9))
    assert not set(request.block_ids[0]) & set(request.block_ids[1])


def test_only_a_model_without_state_does_without_blocks() -> None:
    with pytest.raises(ValueError, match="at least 1 block"):
        KVCacheManager(0, [StateGroupInfo("tokens", block_size=4)], max_step_tokens=8, enable_prefix_caching=True)
    manager = KVCacheManager(0, [], max_step_tokens=8, enable_prefix_caching=True)
    assert (manager.usage, manager.max_tokens(100)) == (0.0, 100)
    assert manager.num_spare > 100
