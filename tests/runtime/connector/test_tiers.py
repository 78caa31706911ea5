"""The host's memory and a folder as tiers of the KV cache: what the device has lost comes back, and no token changes."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from compile_and_serve.custom_ops.platform import register_platform
from compile_and_serve.custom_ops.platforms.cpu import CpuPlatform
from compile_and_serve.runtime.connector.messages import BlockTransfer, FinishedTransfers
from compile_and_serve.runtime.connector.tiers.disk_folder import DiskFolder
from compile_and_serve.runtime.connector.tiers.host_pages import HostPages
from compile_and_serve.runtime.connector.tiers.tier_copies import TierCopies
from compile_and_serve.runtime.connector.tiers.tier_index import TierIndex
from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.kv_events.wire import BlockRemoved, BlockStored
from compile_and_serve.runtime.options import make_engine_config
from compile_and_serve.runtime.scheduler.event_recorder import EventRecorder
from compile_and_serve.runtime.scheduler.step_messages import StateGroupInfo
from tests.support.engines import mixed_requests, prompt_of, request, run_requests, tiny_config, tokens_of, write_tiny_model
from tests.support.platforms import OwnMemory
from tests.support.processes import wait_until
from tests.support.recurrent_models import write_recurrent

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiers") / "tiny")


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> dict[str, list[int]]:
    core = EngineCore(tiny_config(model_dir))
    tokens = tokens_of(run_requests(core, mixed_requests()))
    core.shutdown()
    return tokens


@pytest.fixture
def start(model_dir: Path) -> Iterator[Callable[..., EngineCore]]:
    cores: list[EngineCore] = []

    def make(folder: Path = model_dir, **options: Any) -> EngineCore:
        cores.append(EngineCore(tiny_config(folder, **options)))
        return cores[-1]

    yield make
    for core in cores:
        core.shutdown()


def index_of(core: EngineCore) -> TierIndex:
    transfers = core._scheduler._transfers
    assert transfers is not None
    assert isinstance(transfers._connector, TierIndex)
    return transfers._connector


def copies_of(core: EngineCore) -> TierCopies:
    connector = core.executor.worker._connector  # type: ignore[attr-defined]
    assert isinstance(connector, TierCopies)
    return connector


def lose_the_cache(core: EngineCore) -> None:
    assert core._scheduler.manager.reset_prefix_cache()
    assert index_of(core)._host.num_pages > 0


def num_cached(core: EngineCore, request_id: str, length: int = 60) -> tuple[int, list[int]]:
    outputs = run_requests(core, [request(request_id, prompt_of(3, length))])
    return outputs[request_id][0].num_cached_tokens, tokens_of(outputs)[request_id]


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_what_is_evicted_goes_to_the_host_and_comes_back(start: Callable[..., EngineCore], expected: dict[str, list[int]]) -> None:
    core = start(kv_offloading_size=0.01, num_kv_blocks=40, max_model_len=120)
    for _ in range(3):
        assert tokens_of(run_requests(core, mixed_requests())) == expected
    assert core.stats().num_preemptions > 0
    stats = core.stats().kv_tiers
    assert stats["host_stored_bytes"] > 0
    assert stats["host_loaded_bytes"] > 0
    assert stats["host_failures"] == 0
    assert 0 < stats["host_usage"] <= 1
    pool = core._scheduler.manager.pool
    assert pool.num_free == pool.num_blocks


@pytest.fixture
def own_memory() -> Iterator[None]:
    """Engines run on a device with memory of its own, as a GPU's."""
    pytest.importorskip("triton")
    register_platform("cpu", OwnMemory)
    yield
    register_platform("cpu", CpuPlatform)


@pytest.mark.slow
def test_a_device_with_memory_of_its_own(own_memory: None, start: Callable[..., EngineCore]) -> None:
    """Its copies are enqueued after steps."""
    expected = tokens_of(run_requests(start(), mixed_requests()))  # by its own kernels
    core = start(kv_offloading_size=0.01, num_kv_blocks=40, max_model_len=120)
    for _ in range(2):
        assert tokens_of(run_requests(core, mixed_requests())) == expected
    stats = core.stats().kv_tiers
    assert stats["host_loaded_bytes"] > 0
    assert stats["host_failures"] == 0
    assert not copies_of(core)._running
    pool = core._scheduler.manager.pool
    assert pool.num_free == pool.num_blocks


def test_events_tell_what_the_host_has(start: Callable[..., EngineCore]) -> None:
    """Applied in their order, they name what lies there."""
    core = start(kv_offloading_size=2**-15, num_kv_blocks=40, max_model_len=120)
    index, recorder = index_of(core), EventRecorder([StateGroupInfo("tokens", 4)])
    index.events = recorder
    present: set[bytes] = set()
    num_stored = num_removed = 0
    for _ in range(2):
        run_requests(core, mixed_requests())
        batch = recorder.take()
        for event in [] if batch is None else batch.events:
            assert isinstance(event, BlockStored | BlockRemoved)
            assert event.medium == "CPU"
            if isinstance(event, BlockStored):
                assert present.isdisjoint(event.block_hashes)
                present.update(event.block_hashes)
                num_stored += len(event.block_hashes)
            else:
                assert present.issuperset(event.block_hashes)
                present.difference_update(event.block_hashes)
                num_removed += len(event.block_hashes)
        assert present == {key[:32] for key in index._host._entries if key in index._host}
    assert num_stored > num_removed > 0


def test_the_least_recently_used_gives_way_on_the_host(start: Callable[..., EngineCore], expected: dict[str, list[int]]) -> None:
    core = start(kv_offloading_size=2**-15, num_kv_blocks=40, max_model_len=120)  # 32 KiB: a few blocks
    for _ in range(3):
        assert tokens_of(run_requests(core, mixed_requests())) == expected
    assert core.stats().kv_tiers["host_evicted"] > 0


def test_a_restart_finds_what_requests_left(start: Callable[..., EngineCore], tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    first = start(kv_offload_dir=folder)
    found, tokens = num_cached(first, "first")
    assert found == 0
    first.shutdown()
    assert files(folder)
    assert {path.stat().st_mode & 0o777 for path in files(folder)} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    second = start(kv_offload_dir=folder)
    outputs = run_requests(second, [request("second", prompt_of(3, 60))])
    assert tokens_of(outputs)["second"] == tokens
    assert (outputs["second"][0].num_cached_tokens, outputs["second"][0].num_loaded_tokens) == (56, {"disk": 56})
    assert second.stats().kv_tiers["disk_loaded_bytes"] > 0
    other = start(kv_offload_dir=folder, block_size=8)  # other keys and pages: a folder of its own
    assert num_cached(other, "other")[0] == 0


@pytest.mark.parametrize("damage", ["flipped", "short", "empty", "foreign", "gone"])
def test_damaged_files_are_computed_again(
    start: Callable[..., EngineCore], tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    first = start(kv_offload_dir=tmp_path)
    _, tokens = num_cached(first, "first")
    first.shutdown()
    kept = files(tmp_path)
    for path in kept:
        content = bytearray(path.read_bytes())
        if damage == "flipped":
            content[5000] ^= 1
        elif damage == "foreign":
            content[:8] = b"somebody"
        path.write_bytes({"short": content[:-100], "empty": b""}.get(damage, bytes(content)))
    second = start(kv_offload_dir=tmp_path)
    if damage == "gone":
        disk = index_of(second)._disk
        assert disk is not None
        disk.has = lambda key: True  # type: ignore[method-assign]
        for path in kept:
            path.unlink()
    assert num_cached(second, "second") == (0, tokens)
    assert second.stats().kv_tiers["disk_failures"] > 0
    assert caplog.text.count("and are computed again") == 1
    assert not second.has_work()


def test_a_folder_that_cannot_be_made_is_refused(start: Callable[..., EngineCore], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="--kv-offload-dir .* cannot be used: Not a directory"):
        start(kv_offload_dir=tmp_path / "file" / "kept")


def test_a_folder_that_disappears_changes_no_token(start: Callable[..., EngineCore], tmp_path: Path) -> None:
    core = start(kv_offload_dir=tmp_path / "kept")
    _, tokens = num_cached(core, "first")
    copies_of(core)._flush()
    shutil.rmtree(tmp_path / "kept")
    for number in range(4):
        run_requests(core, [request(f"other {number}", prompt_of(10 + number, 60))])
        lose_the_cache(core)
        assert num_cached(core, f"again {number}")[1] == tokens
    copies_of(core)._flush()
    assert files(tmp_path / "kept")  # it is made again


def test_a_full_disk_changes_no_token(
    start: Callable[..., EngineCore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("compile_and_serve.runtime.connector.tiers.disk_folder._write_all", full)
    core = start(kv_offload_dir=tmp_path)
    _, tokens = num_cached(core, "first")
    lose_the_cache(core)
    assert num_cached(core, "second") == (56, tokens)  # from the host
    core.shutdown()
    assert files(tmp_path) == []
    assert caplog.text.count("No space left on device") == 1


def test_two_engines_share_a_folder(start: Callable[..., EngineCore], tmp_path: Path) -> None:
    one, two = start(kv_offload_dir=tmp_path), start(kv_offload_dir=tmp_path)
    _, tokens = num_cached(one, "first")
    copies_of(one)._flush()
    assert num_cached(two, "second") == (56, tokens)


def test_tenants_do_not_see_each_other(start: Callable[..., EngineCore], tmp_path: Path) -> None:
    core = start(kv_offload_dir=tmp_path)
    for number, salt in enumerate(("a", "b", "a")):
        lose_the_cache(core)
        one = request(f"r{number}", prompt_of(3, 60))
        one.cache_salt = salt
        outputs = run_requests(core, [one])[one.request_id]
        assert outputs[0].num_cached_tokens == (56 if number == 2 else 0)


def test_a_reset_forgets_all_tiers(start: Callable[..., EngineCore], tmp_path: Path) -> None:
    core = start(kv_offload_dir=tmp_path)
    _, tokens = num_cached(core, "first")
    copies_of(core)._flush()
    core.utility("reset_prefix_cache")
    assert num_cached(core, "second") == (0, tokens)
    lose_the_cache(core)
    assert num_cached(core, "third") == (56, tokens)


def test_what_was_stored_outlives_sleep(start: Callable[..., EngineCore], tmp_path: Path) -> None:
    core = start(kv_offload_dir=tmp_path)
    _, tokens = num_cached(core, "before")
    core.sleep(1)
    core.wake_up()
    assert num_cached(core, "after") == (56, tokens)


def test_what_takes_longer_than_computing_is_not_loaded(start: Callable[..., EngineCore]) -> None:
    core = start(kv_offloading_size=0.01, num_kv_blocks=24, max_model_len=80)
    _, tokens = num_cached(core, "first")
    for number in range(4):
        run_requests(core, [request(f"other {number}", prompt_of(10 + number, 60))])
    index = index_of(core)
    index._counts["host"].keys_per_second, index._prompt_rate = 1.0, 1e6
    assert num_cached(core, "second") == (0, tokens)
    index._counts["host"].keys_per_second = 1e9
    for number in range(4):
        run_requests(core, [request(f"another {number}", prompt_of(20 + number, 60))])
    assert num_cached(core, "third")[0] > 0


def test_loads_side_by_side_count_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten loads of 100 keys that share one second: a thousand keys a second, not a hundred."""
    clock = [10.0]
    monkeypatch.setattr("compile_and_serve.runtime.connector.tiers.tier_index.time.monotonic", lambda: clock[0])
    index = TierIndex(HostPages(1000), None, 1)
    keys = [[bytes([number, place]) for place in range(100)] for number in range(10)]
    for group in keys:
        for key in group:
            index._host.allocate(key, 1)
            index._host.release(key, is_whole=True)
    for number, group in enumerate(keys):
        index.prepare(BlockTransfer(transfer_id=number, group=0, keys=group, block_ids=list(range(100))), is_load=True)
    for number in range(10):
        clock[0] += 0.1
        index.update(FinishedTransfers(finished=[number]))
    assert index._counts["host"].keys_per_second == pytest.approx(1000)


def test_the_folder_stays_below_its_limit(start: Callable[..., EngineCore], tmp_path: Path) -> None:
    core = start(kv_offload_dir=tmp_path, kv_offload_dir_size=200_000)
    for number in range(8):
        run_requests(core, [request(f"r{number}", prompt_of(number, 60))])
        copies_of(core)._flush()
    assert 0 < sum(path.stat().st_size for path in files(tmp_path)) <= 220_000


@pytest.mark.parametrize("kind", ["hybrid", pytest.param("ranks", marks=pytest.mark.slow)])
@pytest.mark.exhaustive_cases
def test_all_kinds_of_state_and_all_ranks(
    start: Callable[..., EngineCore], tmp_path: Path, shared_cache_dir: Path, model_dir: Path, kind: str
) -> None:
    options: dict[str, Any] = {"folder": model_dir, "tensor_parallel_size": 2, "cache_dir": shared_cache_dir}
    if kind == "hybrid":
        hybrid = write_recurrent(tmp_path / "hybrid", "Qwen3_5ForCausalLM")
        options = {"folder": hybrid, "load_format": "auto", "max_model_len": 256, "num_kv_blocks": 400}
    first = start(kv_offload_dir=tmp_path / "kept", **options)
    _, tokens = num_cached(first, "first", 100)
    first.shutdown()
    second = start(kv_offload_dir=tmp_path / "kept", **options)
    found, again = num_cached(second, "second", 100)
    assert found > 50
    assert again == tokens


def test_options_that_do_not_go_with_it_are_refused(model_dir: Path) -> None:
    for options, reason in (
        ({"kv_offloading_size": "much"}, "must be a number of GiB or auto"),
        ({"kv_offloading_size": -1}, "must be above 0"),
        ({"kv_offloading_size": 1, "enable_prefix_caching": False}, "keep cached prefixes"),
        ({"kv_offloading_size": 1, "kv_connector": "a:b"}, "takes the place of the tiers"),
        ({"kv_offload_dir": "x", "enable_lora": True}, "does not go with enable_lora"),
    ):
        with pytest.raises(ValueError, match=reason):
            make_engine_config(str(model_dir), load_format="dummy", **options)
    config = make_engine_config(str(model_dir), load_format="dummy", kv_offloading_size="auto")
    assert config.cache.offloading_bytes is not None
    assert config.cache.offloading_bytes > 1 << 20


WRITER = """
import sys
from pathlib import Path
from compile_and_serve.runtime.connector.tiers.disk_folder import DiskFolder
folder = DiskFolder(Path(sys.argv[1]), bytes(32), 0, 1 << 30)
start = int(sys.argv[2])
print("ready", flush=True)
for number in range(start, start + 100_000):
    folder.write(number.to_bytes(32), [memoryview(number.to_bytes(8) * 8192)])
"""


def kill_writers(folder: Path, turns: int) -> None:
    """A process without torch writes files until it is killed, each time a little later."""
    for turn in range(turns):
        command = [sys.executable, "-c", WRITER, str(folder), str(turn * 100_000)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as writer:
            assert writer.stdout is not None
            writer.stdout.readline()
            wanted = len(files(folder)) + turn % 7
            wait_until(lambda wanted=wanted: len(files(folder)) > wanted)  # type: ignore[misc]
            writer.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("turns", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_a_killed_writer_leaves_whole_files(tmp_path: Path, turns: int) -> None:
    kill_writers(tmp_path, turns)
    folder = DiskFolder(tmp_path, bytes(32), 0, 1 << 30)
    content = bytearray(8 * 8192)
    whole = [path for path in files(tmp_path) if path.suffix == ".0"]
    assert len(whole) >= turns
    for path in whole:
        number = int(path.stem, 16)
        folder.read(number.to_bytes(32), [memoryview(content)])
        assert content == number.to_bytes(8) * 8192
