"""A Mooncake store as a tier: what one engine computed, another one loads. The store is a dictionary."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from compile_and_serve.runtime.connector.connector import ConnectorError
from compile_and_serve.runtime.connector.tiers import mooncake, mooncake_store
from compile_and_serve.runtime.connector.tiers.mooncake_store import MooncakeStore
from compile_and_serve.runtime.engine.core import EngineCore
from tests.support.engines import prompt_of, request, run_requests, tiny_config, tokens_of, write_tiny_model
from tests.support.recurrent_models import write_recurrent


class Objects:
    """fails: what look-ups answer instead; None: they are well."""

    def __init__(self) -> None:
        self.contents: dict[str, bytes] = {}
        self.fails: Exception | list[int] | None = None
        self.num_lookups = 0

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        self.num_lookups += 1
        if isinstance(self.fails, Exception):
            raise self.fails
        return [int(key in self.contents) for key in keys] if self.fails is None else self.fails

    def put_parts(self, key: str, *parts: Any) -> int:
        self.contents.setdefault(key, b"".join(bytes(part) for part in parts))
        return 0

    def get_buffer(self, key: str) -> Any:
        return self.contents.get(key)

    def remove(self, key: str) -> int:
        return 0 if self.contents.pop(key, None) is not None else -1


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> Objects:
    found = Objects()
    monkeypatch.setattr(mooncake, "_connect", lambda **_: found)
    return found


@pytest.fixture
def start() -> Iterator[Callable[..., EngineCore]]:
    cores: list[EngineCore] = []

    def make(folder: Path, **options: Any) -> EngineCore:
        cores.append(EngineCore(tiny_config(folder, kv_connector="mooncake", **options)))
        return cores[-1]

    yield make
    for core in cores:
        core.shutdown()


def answer(core: EngineCore, length: int = 60) -> tuple[list[int], int]:
    """→ tokens, how many of the prompt were cached"""
    outputs = run_requests(core, [request("r", prompt_of(3, length))])
    return tokens_of(outputs)["r"], outputs["r"][0].num_cached_tokens


@pytest.mark.parametrize("kind", ["one group", pytest.param("slots and tokens", marks=pytest.mark.slow)])
def test_another_engine_loads_what_was_computed(tmp_path: Path, start: Callable[..., EngineCore], objects: Objects, kind: str) -> None:
    folder, options = tmp_path / "m", dict[str, Any]()
    if kind == "one group":
        write_tiny_model(folder)
    else:
        write_recurrent(folder, "Qwen3_5ForCausalLM")
        options = {"load_format": "auto", "max_model_len": 256, "num_kv_blocks": 400}
    first, second = start(folder, **options), start(folder, **options)
    tokens, num_cached = answer(first, 100)
    assert num_cached == 0
    first.shutdown()  # which waits until all is written
    assert objects.contents
    before = objects.num_lookups
    found, num_cached = answer(second, 100)
    assert found == tokens
    assert num_cached > 50
    assert objects.num_lookups == before + 1  # for all keys of all groups
    second._scheduler._transfers._connector._quantiles_at = 0.0  # type: ignore[union-attr]  # they are computed once a second
    stats = second.stats().kv_tiers
    assert stats["disk_loaded_bytes"] > 0
    assert stats["disk_failures"] == 0
    assert stats["store_lookups"] == 1
    assert 0 < stats["store_lookup_seconds_p90"] < 1
    assert 0 < stats["disk_load_seconds_p90"] < 10


@pytest.mark.parametrize("what", ["an error", "an exception", "damaged", "lost"])
def test_a_store_that_fails_costs_no_answer(tmp_path: Path, start: Callable[..., EngineCore], objects: Objects, what: str) -> None:
    folder = write_tiny_model(tmp_path / "m")
    first, second = start(folder), start(folder)
    tokens, _ = answer(first)
    first.shutdown()
    if what == "an error":
        objects.fails = [-1]
    elif what == "an exception":
        objects.fails = RuntimeError("gone")
    elif what == "damaged":
        objects.contents = {name: content[:-1] + b"?" for name, content in objects.contents.items()}
    else:
        objects.get_buffer = lambda key: None  # type: ignore[method-assign]
    assert answer(second) == (tokens, 0)
    stats = second.stats().kv_tiers
    is_lookup = what.startswith("an ")
    assert (stats["store_lookup_errors"], stats["disk_failures"]) == ((1, 0) if is_lookup else (0, 1))
    if is_lookup:  # and it is not asked for a while
        objects.fails, before = None, objects.num_lookups
        answer(second, 50)
        assert objects.num_lookups == before


def test_a_content_is_there_once_all_ranks_have_stored_it() -> None:
    objects = Objects()
    stores = [MooncakeStore(objects, bytes(32), rank, 2) for rank in range(2)]
    content = memoryview(bytearray(b"abcd"))
    assert stores[0].write_unpublished(b"k", [content]) == f"cas-{'0' * 32}-0-6b"
    stores[0].look_up([b"k"])
    assert not stores[0].has(b"k")
    name = stores[1].write_unpublished(b"k", [content])
    assert name is not None
    stores[1].publish(b"k", name)
    stores[0].look_up([b"k", b"l"])
    assert (stores[0].has(b"k"), stores[0].has(b"l")) == (True, False)
    objects.contents.clear()  # it evicts
    for store in stores:
        name = store.write_unpublished(b"k", [content])
        assert name is not None
        assert store.publish(b"k", name)
    into = memoryview(bytearray(4))
    stores[1].read(b"k", [into[:1], into[1:]])
    assert into == content
    with pytest.raises(OSError, match="has 12 bytes, not 11"):
        stores[1].read(b"k", [into[:3]])


def test_a_slow_look_up_is_the_last_one_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_store, "_SLOW_SECONDS", 0.0)
    store = MooncakeStore(Objects(), bytes(32), 0, 1)
    for _ in range(3):
        store.look_up([b"k"])
    assert (store.stats()["store_lookups"], store.stats()["store_lookup_errors"]) == (1, 1)


def test_options_that_do_not_go_with_it(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    with pytest.raises(ValueError, match="does not go with enable_prefix_caching=False"):
        tiny_config(folder, kv_connector="mooncake", enable_prefix_caching=False)
    config = tiny_config(folder, kv_transfer_config='{"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}')
    assert (config.cache.connector, config.kv_transfer) == ("mooncake", None)
    with pytest.raises(ValueError, match="kv_connector must be left out beside kv_transfer_config"):
        tiny_config(folder, kv_transfer_config='{"kv_connector": "MooncakeStoreConnector"}', kv_connector="other")


def test_without_the_package_it_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake", None)
    with pytest.raises(ConnectorError, match="needs the package mooncake-transfer-engine"):
        EngineCore(tiny_config(write_tiny_model(tmp_path / "m"), kv_connector="mooncake"))
