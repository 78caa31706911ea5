"""An engine with a connector: what the device has lost comes back from the host, and the tokens do not change."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from compile_and_serve.runtime.connector.connector import ConnectorError, connector_of
from compile_and_serve.runtime.engine.core import EngineCore
from tests.support.drafters import check_every_draft
from tests.support.engines import mixed_requests, prompt_of, request, run_requests, tiny_config, tokens_of, write_tiny_model
from tests.support.recurrent_models import write_recurrent
from tests.support.toy_connector import FAIL, HANG, TOY, ToyStore

NAME = "tests.support.toy_connector:TOY"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("connector") / "tiny")


@pytest.fixture(scope="module")
def expected(model_dir: Path) -> dict[str, list[int]]:
    return tokens_of(run_requests(EngineCore(tiny_config(model_dir)), mixed_requests()))


@pytest.fixture(scope="module")
def two_ranks(model_dir: Path, shared_cache_dir: Path) -> Iterator[EngineCore]:
    core = EngineCore(tiny_config(model_dir, kv_connector=NAME, tensor_parallel_size=2, cache_dir=shared_cache_dir))
    yield core
    core.shutdown()


@pytest.fixture(params=["sync", "async", pytest.param("two ranks", marks=pytest.mark.slow)])
def core(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[EngineCore]:
    if request.param == "two ranks":
        core = request.getfixturevalue("two_ranks")
        core.utility("reset_prefix_cache")  # on the host too
        yield core
        return
    core = EngineCore(tiny_config(model_dir, kv_connector=NAME, async_scheduling=request.param == "async"))
    yield core
    core.shutdown()


def store_of(core: EngineCore) -> ToyStore:
    transfers = core._scheduler._transfers
    assert transfers is not None
    assert isinstance(transfers._connector, ToyStore)
    return transfers._connector


def lose_the_cache(core: EngineCore) -> None:
    assert core._scheduler.manager.reset_prefix_cache()


def num_cached(core: EngineCore, request_id: str, length: int = 60) -> tuple[int, list[int]]:
    outputs = run_requests(core, [request(request_id, prompt_of(3, length))])
    return outputs[request_id][0].num_cached_tokens, tokens_of(outputs)[request_id]


def test_what_was_stored_is_loaded(core: EngineCore, expected: dict[str, list[int]]) -> None:
    assert tokens_of(run_requests(core, mixed_requests())) == expected
    store = store_of(core)
    assert store.stored
    lose_the_cache(core)
    outputs = run_requests(core, mixed_requests())
    assert tokens_of(outputs) == expected
    assert store.num_loaded > 0
    assert sum(step.num_cached_tokens for steps in outputs.values() for step in steps) > 100
    pool = core._scheduler.manager.pool
    assert pool.num_free == pool.num_blocks


@pytest.mark.parametrize("core", ["sync", "async", pytest.param("two ranks", marks=pytest.mark.slow)], indirect=True)
def test_what_cannot_be_loaded_is_computed(core: EngineCore) -> None:
    store = store_of(core)
    assert num_cached(core, "first")[0] == 0
    _, tokens = num_cached(core, "on the device")
    for orders, reason in ((FAIL, "The host's memory is gone."), (HANG, "took more than 0.05 seconds")):
        lose_the_cache(core)
        store.orders, store.deadline_seconds = orders, 0.05 if orders == HANG else 30.0
        assert num_cached(core, "again") == (0, tokens)
        assert reason in store.failures[-1]
        assert not core.has_work()
    lose_the_cache(core)
    store.orders, store.deadline_seconds = b"", 30.0
    assert num_cached(core, "at last") == (56, tokens)


@pytest.mark.parametrize("core", ["sync", pytest.param("two ranks", marks=pytest.mark.slow)], indirect=True)
def test_what_was_stored_outlives_sleep(core: EngineCore) -> None:
    _, tokens = num_cached(core, "before")
    core.sleep(1)
    core.wake_up()
    assert num_cached(core, "after") == (56, tokens)
    core.utility("reset_prefix_cache")
    assert num_cached(core, "reset") == (0, tokens)


@pytest.mark.parametrize("core", ["sync", "async"], indirect=True)
def test_sleep_ends_transfers(core: EngineCore) -> None:
    num_cached(core, "before")
    lose_the_cache(core)
    store_of(core).orders = HANG
    core.add_request(request("loading", prompt_of(3, 60)))
    core.step()
    core.abort(["loading"])
    while core._in_flight:
        core.step()
    assert core._scheduler.manager.pool.num_pinned > 0
    core.sleep(1)
    assert store_of(core).failures == ["The engine went to sleep."]
    core.wake_up()
    store_of(core).orders = b""
    assert num_cached(core, "after")[0] == 56
    pool = core._scheduler.manager.pool
    assert pool.num_free == pool.num_blocks


def test_evicted_blocks_are_stored(model_dir: Path, expected: dict[str, list[int]]) -> None:
    core = EngineCore(tiny_config(model_dir, kv_connector=NAME, num_kv_blocks=30, max_model_len=120))
    store = store_of(core)
    store.finished = lambda *_: ()  # type: ignore[method-assign]
    for _ in range(2):
        assert tokens_of(run_requests(core, mixed_requests())) == expected
    assert core.stats().num_preemptions > 0
    assert store.stored


def test_a_connector_is_found_by_its_name() -> None:
    assert connector_of(NAME) is TOY
    with pytest.raises(ConnectorError, match="There is no connector 'none': expected package.module:attribute"):
        connector_of("none")
    with pytest.raises(ConnectorError, match="cannot be imported: AttributeError"):
        connector_of("tests.support.toy_connector:NONE")
    with pytest.raises(ConnectorError, match="is no connector: it must be an instance"):
        connector_of("tests.support.toy_connector:ToyStore")
    assert issubclass(ConnectorError, ValueError)


def test_what_a_drafter_keeps_comes_back_too(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model drafts for itself, so every draft is right as long as the drafter's cache holds what the model's holds."""
    check_every_draft(monkeypatch)
    speculation = {"method": "draft_model", "model": str(model_dir), "num_speculative_tokens": 4}
    core = EngineCore(tiny_config(model_dir, kv_connector=NAME, speculative_config=speculation))
    _, tokens = num_cached(core, "first")
    lose_the_cache(core)
    core._scheduler.manager.pool.allocate(20)  # other pages than before
    assert num_cached(core, "again") == (56, tokens)
    stats = core.stats()
    assert stats.spec_decode_num_accepted_tokens == stats.spec_decode_num_draft_tokens > 10


def test_recurrent_state_is_stored_and_loaded(tmp_path: Path) -> None:
    """Attention and recurrent layers: pages of one pool, and snapshots of several pages."""
    folder = write_recurrent(tmp_path / "hybrid", "Qwen3_5ForCausalLM")
    core = EngineCore(tiny_config(folder, load_format="auto", max_model_len=256, kv_connector=NAME, num_kv_blocks=400))
    assert {group.kind for group in core._scheduler.groups} == {"tokens", "slot"}
    found, tokens = num_cached(core, "first", 100)
    assert found == 0
    lose_the_cache(core)
    core._scheduler.manager.pool.allocate(20)
    found, again = num_cached(core, "again", 100)
    assert found > 50
    assert again == tokens
    assert store_of(core).num_loaded >= 2
