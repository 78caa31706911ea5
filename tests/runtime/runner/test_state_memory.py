"""How many pages there are, what an impossible cache says, and that state tensors share one allocation without overlapping."""

from __future__ import annotations

import pytest
import torch

from compile_and_serve.custom_ops.state.group import StateGroup
from compile_and_serve.custom_ops.state.kind import StateTensor
from compile_and_serve.custom_ops.state.recurrent import Recurrent, RecurrentLayer, gather_slot, scatter_slot
from compile_and_serve.custom_ops.state.tokens import KVCacheSpec, TokenWindow
from compile_and_serve.models.spec import full_attention
from compile_and_serve.runtime.config import CacheConfig
from compile_and_serve.runtime.runner import state_memory
from compile_and_serve.runtime.runner.state_memory import (
    CPU_DEFAULT_LIMIT,
    GIB,
    KVCacheTooSmallError,
    PageLayout,
    allocate_state,
    log_grown_pages,
    page_parts,
    plan_num_pages,
)
from tests.support.platforms import OwnMemory

GROUPS = [full_attention([KVCacheSpec(num_kv_heads=2, head_dim=8), KVCacheSpec(num_kv_heads=4, head_dim=16)])]
BLOCK_BYTES = (2 * 2 * 8 + 2 * 4 * 16) * 16 * 2  # of 16 tokens in bfloat16


def plan(config: CacheConfig, **overrides: object) -> int:
    given: dict[str, object] = {
        "max_model_len": 100,
        "max_num_seqs": 4,
        "max_step_tokens": 64,
        "free_bytes": 8 * GIB,
        "shares_host_memory": True,
    }
    layout = PageLayout.of(GROUPS, config.tokens_per_block, torch.bfloat16)
    return plan_num_pages(config, GROUPS, layout, **(given | overrides))  # type: ignore[arg-type]


def test_page_bytes() -> None:
    assert PageLayout.of(GROUPS, 16, torch.bfloat16).page_bytes == BLOCK_BYTES
    assert PageLayout.of(GROUPS, 4, torch.float32).page_bytes == BLOCK_BYTES // 2


FULL = StateGroup(name="full", layers=(KVCacheSpec(num_kv_heads=2, head_dim=8),) * 2)
WINDOW = StateGroup(name="near", layers=(KVCacheSpec(num_kv_heads=1, head_dim=8),) * 9, kind=TokenWindow(size=20))
PARTS = StateTensor(shape=(12, 300)), StateTensor(shape=(2, 5), dtype=torch.bfloat16)  # a page holds 3 of the 12 units
RECURRENT = StateGroup(name="slots", layers=(RecurrentLayer(parts=PARTS),) * 2, kind=Recurrent(snapshots=True))


def test_pages_of_all_groups_have_equal_bytes() -> None:
    layout = PageLayout.of([FULL, WINDOW, RECURRENT], 16, torch.bfloat16)
    assert layout.page_bytes == 16 * 9 * 2 * 8 * 2  # the window group takes the most bytes per token
    assert layout.tokens_per_page == {"full": 32, "near": 16}
    assert layout.pages_per_slot == {"slots": 2 * 4}
    # 100 tokens: 4 pages of the full group; of the window group what 20 + 8 tokens lie in; two slots.
    assert layout.pages_per_request([FULL, WINDOW, RECURRENT], 100, 8) == 4 + 3 + 2 * 8


def test_groups_take_turns_in_one_pool() -> None:
    groups = [FULL, WINDOW, RECURRENT]
    layout = PageLayout.of(groups, 16, torch.bfloat16)
    state = allocate_state(groups, layout, 12, device=torch.device("cpu"))
    assert state["full.1"].shape == (13, 2, 2, 32, 8)  # with the page of padding
    assert state["near.8"].shape == (13, 2, 1, 16, 8)
    of_tokens = [tensor for name, tensor in state.items() if not name.startswith("slots")]
    for index, tensor in enumerate(of_tokens):
        owner = 0 if index < 2 else 1  # page 0 belongs to the full group, page 1 to the window's
        tensor[owner] = index + 1
    slot = torch.tensor([[9, 3, 5, 2, 11, 4, 7, 8]], dtype=torch.int32)
    values = {}
    for name in ("slots.0.0", "slots.0.1", "slots.1.0", "slots.1.1"):
        parts = PARTS[int(name[-1])]
        assert state[name].dtype == (parts.dtype or torch.float32)
        values[name] = torch.randn(1, *parts.shape).to(state[name].dtype)
        scatter_slot(values[name], state[name], state[f"{name}.columns"], slot)
    for name, value in values.items():
        assert gather_slot(state[name], state[f"{name}.columns"], slot, value.shape[1]).equal(value)
    for index, tensor in enumerate(of_tokens):
        assert (tensor[0 if index < 2 else 1] == index + 1).all()
        assert not any(tensor[page].any() for page in (6, 10, 12))  # which nobody has


def test_small_tensors_of_slots_share_pages_and_large_units_make_them_grow(caplog: pytest.LogCaptureFixture) -> None:
    parts = StateTensor(shape=(2, 7)), StateTensor(shape=(1, 1))
    small = StateGroup(name="small", layers=(RecurrentLayer(parts=parts),), kind=Recurrent())
    placed = PageLayout.of([FULL, small], 16, torch.bfloat16).groups["small"]
    assert (placed.pages_per_slot, placed.columns) == (1, {"small.0.0": (0,), "small.0.1": (0,)})
    assert [one.offset for one in placed.tensors.values()] == [0, 64]
    large = StateGroup(name="large", layers=(RecurrentLayer(parts=(StateTensor(shape=(3, 128, 65)),)),), kind=Recurrent())
    layout = PageLayout.of([FULL, large], 16, torch.bfloat16)
    assert layout.page_bytes == 128 * 65 * 4
    caplog.set_level("INFO")
    log_grown_pages([FULL, small], 16, torch.bfloat16)
    assert not caplog.records
    log_grown_pages([FULL, large], 16, torch.bfloat16)
    assert "33280 bytes instead of the 2048 of 16 tokens: it holds a unit of large" in caplog.text
    assert layout.pages_per_slot == {"large": 3}
    assert layout.tokens_per_page["full"] == 128 * 65 * 4 // (16 * 2 * 2 * 2 * 8 * 2) * 16


def test_forced_sizes_are_taken_as_they_are() -> None:
    assert plan(CacheConfig(num_blocks=1234)) == 1234
    assert plan(CacheConfig(memory_bytes=50 * BLOCK_BYTES + 3)) == 50


def test_no_more_than_all_sequences_can_use() -> None:
    assert plan(CacheConfig()) == 4 * 7
    assert plan(CacheConfig(), shares_host_memory=False) == 4 * 7


def test_the_cpu_default_takes_a_part_of_what_is_free() -> None:
    many = {"max_num_seqs": 10**9}
    assert plan(CacheConfig(), free_bytes=400 * BLOCK_BYTES, **many) == 100
    assert plan(CacheConfig(), free_bytes=400 * BLOCK_BYTES, shares_host_memory=False, **many) == 400
    assert plan(CacheConfig(), free_bytes=1 << 60, **many) == CPU_DEFAULT_LIMIT // BLOCK_BYTES
    # up to a half for one long request, and not beyond
    assert plan(CacheConfig(), free_bytes=400 * BLOCK_BYTES, max_model_len=150 * 16) == 150
    with pytest.raises(KVCacheTooSmallError):
        plan(CacheConfig(), free_bytes=400 * BLOCK_BYTES, max_model_len=201 * 16)


@pytest.mark.parametrize("config", [CacheConfig(num_blocks=6), CacheConfig(memory_bytes=6 * BLOCK_BYTES), CacheConfig(memory_bytes=1)])
def test_a_cache_too_small_for_one_request_says_what_to_change(config: CacheConfig) -> None:
    with pytest.raises(KVCacheTooSmallError, match=r"max_model_len=100 .*--max-model-len or raise --kv-cache-memory"):
        plan(config)


def test_a_device_without_room_says_so_too() -> None:
    sentence = "room for 0 tokens .* lower --max-model-len, --max-num-batched-tokens or .* raise --gpu-memory-utilization"
    with pytest.raises(KVCacheTooSmallError, match=sentence):
        plan(CacheConfig(), shares_host_memory=False, free_bytes=-5 * GIB)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layers_are_views_of_one_allocation(dtype: torch.dtype) -> None:
    layout = PageLayout.of(GROUPS, 16, dtype)
    state = allocate_state(GROUPS, layout, 3, device=torch.device("cpu"))
    caches = list(state.values())
    assert [tuple(cache.shape) for cache in caches] == [(3, 2, 2, 16, 8), (3, 2, 4, 16, 16)]
    assert all(cache.is_contiguous() and cache.dtype == dtype and not cache.any() for cache in caches)
    assert len({cache.untyped_storage().data_ptr() for cache in caches}) == 1
    caches[0].fill_(1)
    assert not caches[1].any()
    caches[1].fill_(2)
    assert (caches[0] == 1).all()
    assert caches[0].data_ptr() % 64 == 0


def test_a_device_with_its_own_memory_has_contiguous_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_memory, "platform_of", OwnMemory)
    layout = PageLayout.of(GROUPS, 16, torch.float32)
    state = allocate_state(GROUPS, layout, 3, device=torch.device("cpu"))
    pool = next(iter(state.values())).untyped_storage()
    for page in range(3):
        for number, cache in enumerate(state.values()):
            cache[page].fill_(10 * page + number)
    begin, size = next(iter(state.values())).storage_offset(), layout.page_bytes // 4
    pages = torch.tensor([], dtype=torch.float32).set_(pool)[begin:].view(3, size)
    assert [set(page.tolist()) for page in pages] == [{0, 1}, {10, 11}, {20, 21}]


def test_a_large_cache_costs_no_memory_before_it_is_used() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4096

    before = resident()
    layout = PageLayout.of(GROUPS, 16, torch.float32)
    caches = allocate_state(GROUPS, layout, 200_000, device=torch.device("cpu")).values()
    assert sum(cache.nbytes for cache in caches) > GIB
    assert resident() - before < 64 << 20


@pytest.mark.parametrize("groups", [[FULL], [RECURRENT], [FULL, WINDOW, RECURRENT]])
def test_the_parts_of_a_page_are_all_of_its_content_and_nothing_of_other_pages(groups: list[StateGroup]) -> None:
    layout = PageLayout.of(groups, 16, torch.bfloat16)
    state = allocate_state(groups, layout, 12, device=torch.device("cpu"))
    for group, parts in zip(groups, page_parts(groups, layout, state), strict=True):
        for part in parts:
            part[5] = 1
        for name in layout.groups[group.name].tensors:
            assert state[name][5].view(torch.uint8).ne(0).any()
            assert not state[name][:5].view(torch.uint8).any()
            assert not state[name][6:].view(torch.uint8).any()
        for part in parts:
            part[5] = 0
        assert not any(state[name].view(torch.uint8).any() for name in layout.groups[group.name].tensors)
