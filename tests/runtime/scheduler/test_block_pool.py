import random

import pytest

from compile_and_serve.runtime.scheduler.block_pool import POISON_VARIABLE, BlockPool, FreeBlockQueue, KVCacheBlock


def test_queue_keeps_order_under_random_operations() -> None:
    rng = random.Random(0)
    blocks = [KVCacheBlock(block_id) for block_id in range(20)]
    queue, mirror = FreeBlockQueue(blocks[:10]), list(range(10))
    for _ in range(2000):
        outside = [block for block in blocks if block.block_id not in mirror]
        match rng.randrange(4):
            case 0 if outside:
                block = rng.choice(outside)
                queue.append(block)
                mirror.append(block.block_id)
            case 1 if outside:
                block = rng.choice(outside)
                queue.append_left(block)
                mirror.insert(0, block.block_id)
            case 2 if mirror:
                count = rng.randint(1, len(mirror))
                assert [block.block_id for block in queue.pop_left(count)] == mirror[:count]
                del mirror[:count]
            case 3 if mirror:
                block_id = rng.choice(mirror)
                queue.remove(blocks[block_id])
                mirror.remove(block_id)
        assert queue.length == len(mirror)
        assert queue.block_ids() == mirror


def test_empty_queue_gives_nothing() -> None:
    with pytest.raises(AssertionError, match="1 blocks wanted, 0 free"):
        FreeBlockQueue().pop_left(1)


def test_allocate_and_free_count() -> None:
    pool = BlockPool(4)
    first = pool.allocate(3)
    assert (first, pool.num_free) == ([0, 1, 2], 1)
    assert all(pool.blocks[block_id].ref_count == 1 for block_id in first)
    with pytest.raises(AssertionError, match="2 blocks wanted, 1 free"):
        pool.allocate(2)
    pool.free(first)
    assert pool.num_free == 4
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free([0])


def test_least_recently_freed_content_is_evicted_first_and_empty_blocks_before_it() -> None:
    pool = BlockPool(6)
    a = pool.allocate(2)
    b = pool.allocate(2)
    for block_id in a + b:
        pool.cache(block_id, b"key %d" % block_id)
    c = pool.allocate(2)  # never cached
    pool.free(reversed(b))
    pool.free(reversed(a))
    pool.free(reversed(c))
    assert pool.free_queue.block_ids() == [4, 5, 3, 2, 1, 0]
    assert pool.allocate(3) == [4, 5, 3]
    assert b"key 3" not in pool.cached
    assert [pool.cached[b"key %d" % block_id].block_id for block_id in (2, 1, 0)] == [2, 1, 0]
    assert len(pool.cached) == 3


def test_a_hit_keeps_the_block_from_eviction() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for block_id in blocks:
        pool.cache(block_id, b"%d" % block_id)
    pool.free(blocks)
    pool.share([pool.blocks[0]])
    pool.share([pool.blocks[0]])
    assert pool.blocks[0].ref_count == 2
    assert pool.allocate(2) == [1, 2]
    pool.free([0])
    assert pool.blocks[0].ref_count == 1
    pool.free([0])
    assert pool.cached[b"0"].block_id == 0
    assert pool.free_queue.block_ids() == [0]


def test_equal_content_is_named_once() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.cache(first, b"same")
    pool.cache(second, b"same")
    assert pool.cached[b"same"].block_id == first
    assert pool.blocks[second].key is None
    pool.free([first, second])
    assert pool.allocate(1) == [second]
    assert pool.cached[b"same"].block_id == first


def test_all_content_is_forgotten_only_while_every_block_is_free() -> None:
    pool = BlockPool(2)
    [block_id] = pool.allocate(1)
    pool.cache(block_id, b"x")
    assert not pool.uncache_all()
    assert pool.cached[b"x"].block_id == block_id
    pool.free([block_id])
    assert pool.uncache_all()
    assert b"x" not in pool.cached
    assert len(pool.cached) == 0
    assert pool.allocate(2)


def test_pinned_blocks_are_not_handed_out_until_they_are_unpinned_as_often() -> None:
    pool = BlockPool(4)
    a, b = pool.allocate(2)
    pool.cache(a, b"a")
    pool.pin([a, b, 3])
    pool.pin([a])
    pool.free([b, a])
    assert (pool.num_free, pool.num_pinned) == (1, 3)
    assert pool.allocate(1) == [2]
    pool.share([pool.cached[b"a"]])
    assert (pool.num_free, pool.num_pinned) == (0, 2)
    pool.unpin([a, b])
    assert pool.allocate(1) == [b]
    pool.free([a])
    assert (pool.num_free, pool.num_pinned) == (0, 2)
    pool.unpin([a, 3])
    assert pool.free_queue.block_ids() == [3, a]
    with pytest.raises(AssertionError, match="unpinned twice"):
        pool.unpin([a])


def test_unpinned_content_is_evicted_last_or_next() -> None:
    pool = BlockPool(4)
    ids = pool.allocate(4)
    pool.cache_together(ids[:2], b"both", 0)
    pool.cache(ids[2], b"one")
    pool.pin(ids[:2])
    pool.free(ids)
    pool.unpin(ids[:2])
    assert pool.free_queue.block_ids() == [3, 2, 0, 1]
    pool.pin(ids[:2])
    pool.unpin(ids[:2], evict_next=True)
    assert pool.free_queue.block_ids() == [0, 1, 3, 2]


def test_cached_content_may_be_kept_when_it_is_evicted() -> None:
    pool = BlockPool(5)
    ids = pool.allocate(5)
    pool.cache_together(ids[:2], b"both", 0)
    pool.cache(ids[2], b"kept too")
    pool.cache(ids[3], b"lost")
    asked: list[bytes | None] = []

    def on_evict(block: KVCacheBlock) -> bool:
        asked.append(block.key)
        if block.key == b"lost":
            return False
        pool.pin([one.block_id for one in (block, *block.followers)])
        return True

    pool.on_evict = on_evict
    pool.free(ids)
    assert pool.allocate(2) == [4, 3]
    assert asked == [b"both", b"kept too", b"lost"]
    assert (pool.num_free, pool.num_pinned, sorted(pool.cached)) == (0, 3, [b"both", b"kept too"])


def test_content_that_is_pinned_can_be_forgotten() -> None:
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    pool.cache(block, b"a")
    pool.pin([block])
    assert not pool.uncache_all()
    pool.free([block])
    assert pool.uncache_all()
    assert (pool.cached, pool.num_free) == ({}, 1)


def test_blocks_that_lose_their_content_are_named_for_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    assert BlockPool(1).take_emptied() == []
    monkeypatch.setenv(POISON_VARIABLE, "1")
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    pool.cache(first, b"key")
    assert pool.take_emptied() == [first, second]
    pool.free([second, first])
    assert pool.take_emptied() == [second]  # the other can still be found
    assert first in pool.allocate(3)
    assert sorted(pool.take_emptied()) == [0, 1, 2]
    assert pool.take_emptied() == []


def test_content_goes_by_worth_and_recency() -> None:
    """What is worth 4 times as much stays while the rest is replaced 4 times; what is worth little goes before all of its time."""
    pool = BlockPool(8)
    dear, followers, cheap, *common = ([block] for block in pool.allocate(8))
    pool.cache_together([*dear, *followers], b"dear", 0, worth=4.5)
    pool.cache_together(cheap, b"cheap", 0, worth=0.25)
    for [block] in common:
        pool.cache(block, f"{block}".encode(), 0)
        pool.free([block])
    pool.free([*dear, *followers, *cheap])
    gone: list[bytes] = []
    pool.on_evict = lambda block: gone.append(block.key or b"") or False  # type: ignore[func-returns-value]
    assert pool.free_queue.block_ids() == [2, 3, 4, 5, 6, 7, 0, 1]
    number = 0
    while b"dear" in pool.cached:
        [block] = pool.allocate(1)
        if b"dear" in pool.cached:
            pool.cache(block, b"new %d" % number, 0)
        pool.free([block])
        number += 1
    assert gone[0] == b"cheap"
    assert gone[1:6] == [b"3", b"4", b"5", b"6", b"7"]
    assert 3 * 6 < number < 5 * 6
    assert pool.free_queue.block_ids()[:2] == [0, 1]  # of what followed it nothing can be used
