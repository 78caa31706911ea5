"""Sleep and wake-up: memory is freed, tokens are equal afterwards, prefixes are forgotten, requests meanwhile are refused."""

from __future__ import annotations

import asyncio
import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.runtime.child_process import freeze_heap
from compile_and_serve.runtime.engine.client import AsyncEngineClient
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.scheduler.request_checks import QueueFullError
from tests.support.engines import prompt_of, request, run_requests, tiny_config, tokens_of, write_tiny_model

MIB = 1 << 20


def answers(core: EngineCore, name: str) -> list[list[int]]:
    requests = [request(f"{name}{i}", prompt_of(i, 40), max_tokens=8) for i in range(4)]
    return list(tokens_of(run_requests(core, requests)).values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("sleep") / "model")


@pytest.mark.parametrize("eager", [True, False])
def test_tokens_are_equal_and_prefixes_forgotten(folder: Path, eager: bool) -> None:
    core = EngineCore(tiny_config(folder, enforce_eager=eager))
    before = answers(core, "a")
    assert answers(core, "b") == before
    hits = core.stats().prefix_cache_hits
    assert hits > 0
    for round, level in enumerate((1, 2, 2, 1, 1)):
        core.sleep(level)
        assert core.is_sleeping
        assert not core.idle()
        core.sleep(level)  # sleeps already
        core.wake_up()
        assert not core.is_sleeping
        assert core.stats().num_free_blocks == core.stats().num_total_blocks
        assert answers(core, f"c{round}") == before
        assert core.stats().prefix_cache_hits == hits
    core.shutdown()


def test_parts_wake_by_tag(folder: Path) -> None:
    core = EngineCore(tiny_config(folder))
    before = answers(core, "a")
    for first, second in (("weights", "kv_cache"), ("kv_cache", "weights")):
        core.sleep(2)
        with pytest.raises(QueueFullError, match="The engine sleeps"):
            core.add_request(request("early", prompt_of(0, 4)))
        core.wake_up([first])
        assert core.is_sleeping
        with pytest.raises(QueueFullError, match="The engine sleeps"):
            core.add_request(request("early", prompt_of(0, 4)))
        core.wake_up([first])
        core.wake_up([second])
        assert not core.is_sleeping
        assert answers(core, second) == before
    core.wake_up()
    with pytest.raises(ValueError, match=r"tags must be among weights, kv_cache, got 'graphs'"):
        core.wake_up(["graphs"])
    with pytest.raises(ValueError, match="level must be 1 or 2, got 3"):
        core.sleep(3)
    core.shutdown()


def test_unfinished_requests_keep_the_engine_awake(folder: Path) -> None:
    core = EngineCore(tiny_config(folder))
    core.add_request(request("a", prompt_of(0, 4)))
    with pytest.raises(ValueError, match="Requests are unfinished"):
        core.sleep(1)
    core.abort(["a"])
    while core.has_work():
        core.step()
    core.sleep(1)
    core.shutdown()


def wide_model(folder: Path) -> Path:
    """About 100 MiB of weights in float32."""
    write_tiny_model(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"hidden_size": 2048, "intermediate_size": 2048}))
    return folder


def test_the_memory_of_the_process_falls(tmp_path: Path) -> None:
    core = EngineCore(tiny_config(wide_model(tmp_path / "model"), max_num_seqs=8, num_kv_blocks=64 * 1024))
    cpu = platform_of(torch.device("cpu"))
    weights = sum(t.untyped_storage().nbytes() for t in core.executor.worker.loaded.model.weight_memory())  # type: ignore[attr-defined]
    before = answers(core, "a")
    for level in (1, 2):
        state: Any = core.executor.worker.runner.state  # type: ignore[attr-defined]
        kv_bytes = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        for tensor in state.values():
            tensor.fill_(1)  # resident
        del state, tensor
        gc.collect()
        awake = cpu.used_bytes()
        core.sleep(level)
        freed = awake - cpu.used_bytes()
        assert min(kv_bytes, weights) > 64 * MIB
        # Half a part is left for what torch allocates or frees meanwhile.
        assert freed > (kv_bytes / 2 if level == 1 else kv_bytes + weights / 2)
        core.wake_up()
        assert answers(core, f"b{level}") == before
    core.shutdown()


@pytest.mark.slow
async def test_the_process_drains_before_it_sleeps(folder: Path) -> None:
    client = AsyncEngineClient(tiny_config(folder))
    await client.start()
    finished: dict[str, Any] = {}

    async def read() -> None:
        async for step in client.outputs():
            for output in step.outputs:
                if output.finish_reason is not None:
                    finished[output.request_id] = (output.finish_reason, output.error_kind)

    reader = asyncio.create_task(read())
    for i in range(8):
        await client.add_request(request(f"accepted {i}", prompt_of(i, 8), max_tokens=64))
    sleeping = asyncio.create_task(client.utility("sleep", None, {"level": 2}))
    await asyncio.sleep(0)
    await client.add_request(request("late", prompt_of(9, 8)))
    assert await sleeping == {"ok": True, "is_sleeping": True}
    await client.add_request(request("asleep", prompt_of(9, 8)))
    assert await client.utility("wake_up") == {"ok": True, "is_sleeping": False}
    for i in range(2):
        await client.add_request(request(f"long {i}", prompt_of(i, 8), max_tokens=200))
    await client.utility("sleep", None, {"mode": "abort"})
    await client.utility("wake_up")
    await client.add_request(request("awake", prompt_of(9, 8)))
    await client.add_request(request("last", prompt_of(9, 8), max_tokens=64))
    calls = [asyncio.create_task(client.utility(method)) for method in ("sleep", "sleep", "wake_up")]
    assert [answer["is_sleeping"] for answer in await asyncio.gather(*calls)] == [True, True, False]
    while len(finished) < 14:
        await asyncio.sleep(0.01)
    assert all(finished[f"accepted {i}"][0] == "length" for i in range(8))
    assert finished["late"] == finished["asleep"] == ("error", "overloaded")
    assert finished["long 0"][0] == finished["long 1"][0] == "abort"
    assert finished["awake"][0] == "length"
    await client.shutdown(drain=False)
    await reader


@pytest.mark.slow
def test_ranks_sleep_together(folder: Path) -> None:
    core = EngineCore(tiny_config(folder, tensor_parallel_size=2))
    before = answers(core, "a")
    for level in (1, 2):
        core.sleep(level)
        core.wake_up()
        assert answers(core, f"b{level}") == before
    core.shutdown()


@pytest.mark.gpu
@pytest.mark.parametrize("level", [1, 2])
def test_device_memory_is_freed_and_graphs_are_captured_again(tmp_path: Path, level: int) -> None:
    options: dict[str, Any] = {
        "device": "cuda",
        "dtype": "bfloat16",
        "enforce_eager": False,
        "block_size": 16,
        "num_kv_blocks": 64 * 1024,
        "num_threads": None,
    }
    core = EngineCore(tiny_config(wide_model(tmp_path / "model"), **options))
    device = platform_of(torch.device("cuda"))
    before = answers(core, "a")
    replays = sum(core.stats().graph_replays.values())
    assert replays > 0
    awake = device.memory().free
    for round in range(5):
        freeze_heap()  # as the engine's process does
        core.sleep(level)
        asleep = device.memory().free
        assert asleep - awake > 200 * MIB, (asleep, awake)
        core.wake_up()
        assert answers(core, f"b{round}") == before
        assert sum(core.stats().graph_replays.values()) > 0
    assert device.memory().free > awake - 64 * MIB, "waking leaks device memory"
    core.shutdown()
