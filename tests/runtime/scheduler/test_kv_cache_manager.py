import pytest

from compile_and_serve.runtime.messages import EngineRequest
from compile_and_serve.runtime.sampling_params import SamplingParams
from compile_and_serve.runtime.scheduler.kv_cache_manager import KVCacheManager
from compile_and_serve.runtime.scheduler.request import Request

BLOCK = 4


def make_manager(num_blocks: int = 8, *, caching: bool = True) -> KVCacheManager:
    return KVCacheManager(num_blocks, BLOCK, enable_prefix_caching=caching)


def make_request(
    manager: KVCacheManager, tokens: list[int], *, salt: str | None = None, prompt_logprobs: int | None = None
) -> Request:
    params = SamplingParams(prompt_logprobs=prompt_logprobs)
    message = EngineRequest(request_id="r", prompt_token_ids=tokens, sampling_params=params)
    request = Request(message, key=(0.0,), max_len=1000, now=0.0)
    manager.hash_prompt(request, salt)
    return request


def run_prompt(manager: KVCacheManager, tokens: list[int], salt: str | None = None) -> list[int]:
    """Admit, compute and free a request; the blocks that it had."""
    request = make_request(manager, tokens, salt=salt)
    assert manager.try_admit(request, reserve=0)
    manager.cache_computed(request, len(tokens))
    blocks = request.block_ids
    manager.free(request)
    return blocks


def test_a_prompt_gets_whole_blocks_and_gives_them_back() -> None:
    manager = make_manager()
    request = make_request(manager, list(range(9)))
    assert manager.try_admit(request, reserve=0)
    assert len(request.block_ids) == 3
    assert manager.usage == pytest.approx(3 / 8)
    manager.free(request)
    assert (request.block_ids, manager.usage) == ([], 0.0)


def test_reserve_is_left_free() -> None:
    manager = make_manager()
    request = make_request(manager, list(range(9)))
    assert not manager.try_admit(request, reserve=6)
    assert manager.pool.num_free == 8
    assert manager.try_admit(request, reserve=5)


def test_prefix_is_reused_up_to_the_first_difference() -> None:
    manager = make_manager()
    first = run_prompt(manager, list(range(14)))
    second = make_request(manager, [*range(8), 99, 99, 99, 99, 12, 13])
    assert manager.try_admit(second, reserve=0)
    assert second.block_ids[:2] == first[:2]
    assert second.block_ids[2] not in first[:3]
    assert (second.num_computed_tokens, second.num_cached_tokens) == (8, 8)
    assert (manager.prefix_queries, manager.prefix_hits) == (28, 8)


def test_equal_tokens_after_different_ones_are_no_hit() -> None:
    manager = make_manager()
    run_prompt(manager, [1, 1, 1, 1, 5, 6, 7, 8, 0])
    other = make_request(manager, [2, 2, 2, 2, 5, 6, 7, 8, 0])
    assert manager.try_admit(other, reserve=0)
    assert other.num_cached_tokens == 0


@pytest.mark.parametrize("length, hit", [(4, 0), (5, 4), (8, 4), (9, 8)])
def test_the_last_token_is_always_computed(length: int, hit: int) -> None:
    manager = make_manager()
    run_prompt(manager, list(range(length)))
    again = make_request(manager, list(range(length)))
    assert manager.try_admit(again, reserve=0)
    assert again.num_computed_tokens == hit


def test_salts_keep_tenants_apart() -> None:
    manager = make_manager(32)
    tokens = list(range(9))
    for salt in (None, "", "a", "b"):
        run_prompt(manager, tokens, salt)
        assert manager.prefix_hits == 0
    for salt in (None, "", "a", "b"):
        request = make_request(manager, tokens, salt=salt)
        assert manager.try_admit(request, reserve=0)
        assert request.num_cached_tokens == 8
        manager.free(request)


def test_prompt_logprobs_do_not_read_the_cache_but_fill_it() -> None:
    manager = make_manager()
    run_prompt(manager, list(range(5)))
    request = make_request(manager, list(range(9)), prompt_logprobs=0)
    assert manager.try_admit(request, reserve=0)
    assert request.num_cached_tokens == 0
    assert manager.prefix_queries == 5
    manager.cache_computed(request, 9)
    manager.free(request)
    other = make_request(manager, list(range(9)))
    assert manager.try_admit(other, reserve=0)
    assert other.num_cached_tokens == 8


def test_a_block_is_findable_only_once_it_is_full_and_computed() -> None:
    manager = make_manager(16)
    first = make_request(manager, list(range(9)))
    assert manager.try_admit(first, reserve=0)
    for num_computed, expected in [(0, 0), (3, 0), (4, 4), (7, 4), (8, 8), (9, 8)]:
        manager.cache_computed(first, num_computed)
        other = make_request(manager, list(range(9)))
        assert manager.try_admit(other, reserve=0)
        assert other.num_computed_tokens == expected
        manager.free(other)


def test_generated_tokens_are_cached_too() -> None:
    manager = make_manager()
    request = make_request(manager, list(range(6)))
    assert manager.try_admit(request, reserve=0)
    manager.cache_computed(request, 6)
    assert request.next_cache_len == 8
    request.token_ids += [6, 7, 8]
    manager.cache_computed(request, 8)
    manager.free(request)
    follow_up = make_request(manager, list(range(10)))
    assert manager.try_admit(follow_up, reserve=0)
    assert follow_up.num_cached_tokens == 8


def test_cached_free_blocks_count_as_free_only_once() -> None:
    """A hit on a free block uses it up: 4 blocks, all cached and free, cannot serve a 5-block prompt with 4 hits."""
    manager = make_manager(4)
    run_prompt(manager, list(range(16)))
    longer = make_request(manager, list(range(17)))
    assert not manager.try_admit(longer, reserve=0)
    assert manager.pool.num_free == 4
    again = make_request(manager, list(range(16)))
    assert manager.try_admit(again, reserve=0)
    assert again.num_cached_tokens == 12


def test_tails_are_evicted_before_heads() -> None:
    manager = make_manager(4)
    blocks = run_prompt(manager, list(range(16)))
    other = make_request(manager, [50] * 8)
    assert manager.try_admit(other, reserve=0)
    assert set(other.block_ids) == set(blocks[2:])
    manager.free(other)
    again = make_request(manager, list(range(16)))
    assert manager.try_admit(again, reserve=0)
    assert again.num_cached_tokens == 8


def test_caching_off_finds_nothing_and_hashes_nothing() -> None:
    manager = make_manager(caching=False)
    run_prompt(manager, list(range(9)))
    request = make_request(manager, list(range(9)))
    assert manager.try_admit(request, reserve=0)
    assert (request.num_computed_tokens, request.block_hashes, manager.prefix_queries) == (0, [], 0)


def test_reset_only_when_nothing_is_held() -> None:
    manager = make_manager()
    run_prompt(manager, list(range(9)))
    request = make_request(manager, [7])
    assert manager.try_admit(request, reserve=0)
    assert not manager.reset_prefix_cache()
    manager.free(request)
    assert manager.reset_prefix_cache()
    again = make_request(manager, list(range(9)))
    assert manager.try_admit(again, reserve=0)
    assert again.num_cached_tokens == 0
