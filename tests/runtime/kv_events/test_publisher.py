"""Events over ZMQ. The subscriber here is written from vLLM's format alone: three frames, msgpack, a replay socket."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from compile_and_serve.runtime.engine.core import EngineCore
from compile_and_serve.runtime.kv_config import KVEventsConfig
from compile_and_serve.runtime.kv_events.publisher import EventPublisher
from compile_and_serve.runtime.kv_events.wire import AllBlocksCleared, BlockRemoved, EventBatch
from compile_and_serve.runtime.scheduler.prefix_keys import extend_keys, root_key
from tests.support.engines import prompt_of, request, run_requests, tiny_config, write_tiny_model

WAIT_MS = 10_000


class Subscriber:
    def __init__(self, endpoint: str, topic: str = "") -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.socket.connect(endpoint)

    def receive(self) -> tuple[bytes, int, Any]:
        assert self.socket.poll(WAIT_MS), "no events came"
        topic, number, payload = self.socket.recv_multipart()
        return topic, int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)

    def is_quiet(self) -> bool:
        return not self.socket.poll(150)

    def sync(self, send: Callable[[], None]) -> None:
        """A subscription takes a while: send until something comes, and take all of it."""
        deadline = time.monotonic() + WAIT_MS / 1000
        while not self.socket.poll(50):
            assert time.monotonic() < deadline
            send()
        while not self.is_quiet():
            self.receive()


def replay(endpoint: str, first: int) -> list[tuple[int, Any]]:
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(endpoint)
    socket.send_multipart([b"", first.to_bytes(8, "big")])
    found: list[tuple[int, Any]] = []
    while True:
        assert socket.poll(WAIT_MS), "the replay did not end"
        empty, _topic, number, payload = socket.recv_multipart()
        assert empty == b""
        if number == b"\xff" * 8:
            context.destroy(linger=0)
            assert payload == b""
            return found
        found.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)))


@pytest.fixture
def endpoints(tmp_path: Path) -> dict[str, str]:
    return {"endpoint": f"ipc://{tmp_path}/events", "replay_endpoint": f"ipc://{tmp_path}/replay"}


@pytest.fixture
def publisher(endpoints: dict[str, str]) -> Iterator[EventPublisher]:
    config = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", topic="kv@here", buffer_steps=3, **endpoints)
    publisher = EventPublisher(config, 0)
    yield publisher
    publisher.close()


def test_batches_are_numbered_and_the_last_ones_come_again(publisher: EventPublisher, endpoints: dict[str, str]) -> None:
    subscriber = Subscriber(endpoints["endpoint"], "kv@")
    subscriber.sync(lambda: publisher.publish(EventBatch(ts=1.0, events=[AllBlocksCleared()])))
    for name in (b"a" * 32, b"b" * 32):
        publisher.publish(EventBatch(ts=2.5, events=[BlockRemoved(block_hashes=[name], medium="GPU", group_idx=1)]))
    topic, first, batch = subscriber.receive()
    assert topic == b"kv@here"
    assert batch == [2.5, [{"type": "BlockRemoved", "block_hashes": [b"a" * 32], "medium": "GPU", "group_idx": 1}], 0]
    assert subscriber.receive()[1] == first + 1
    assert replay(endpoints["replay_endpoint"], first) == [
        (first, batch),
        (first + 1, [2.5, [{"type": "BlockRemoved", "block_hashes": [b"b" * 32], "medium": "GPU", "group_idx": 1}], 0]),
    ]
    assert replay(endpoints["replay_endpoint"], first + 2) == []
    assert [number for number, _ in replay(endpoints["replay_endpoint"], 0)] == [first - 1, first, first + 1]
    publisher.publish(EventBatch(ts=3.0, events=[AllBlocksCleared()]))
    assert subscriber.receive()[2] == [3.0, [{"type": "AllBlocksCleared"}], 0]


def test_what_finds_no_room_leaves_a_gap_in_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=f"ipc://{tmp_path}/events", max_queue_size=2)
    with monkeypatch.context() as patched:
        patched.setattr(EventPublisher, "_run", lambda self: None)
        publisher = EventPublisher(config, 0)
        for _ in range(5):
            publisher.publish(EventBatch(ts=1.0, events=[]))
    assert [int.from_bytes(publisher._waiting.get_nowait()[0]) for _ in range(2)] == [0, 1]  # type: ignore[index]
    publisher.publish(EventBatch(ts=1.0, events=[]))
    assert int.from_bytes(publisher._waiting.get_nowait()[0]) == 5  # type: ignore[index]
    publisher.close()


def test_an_endpoint_that_is_taken_is_one_sentence(publisher: EventPublisher) -> None:
    config = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint="tcp://*:1", replay_endpoint="ipc:///no/such/folder/x")
    with pytest.raises(ValueError, match=r"kv_events_config: .* cannot be used"):
        EventPublisher(config, 0)


def test_an_engine_tells_what_it_caches(tmp_path: Path, endpoints: dict[str, str]) -> None:
    """Hashes are those of tokens and parents; a salt shows; a reset clears all."""
    config = tiny_config(write_tiny_model(tmp_path / "tiny"), kv_events_config={"enable_kv_cache_events": True} | endpoints)
    core = EngineCore(config)
    size = config.cache.tokens_per_block
    subscriber = Subscriber(endpoints["endpoint"])
    subscriber.sync(lambda: core.utility("reset_prefix_cache") and None)
    prompt = prompt_of(3, 3 * size + 1)
    run_requests(core, [request("a", prompt)])
    _, number, (seconds, events, replica) = subscriber.receive()
    assert seconds == pytest.approx(time.time(), abs=60)
    assert replica == 0
    keys: list[bytes] = []
    extend_keys(keys, root_key(None), prompt, size, 3)
    assert events == [
        {
            "type": "BlockStored",
            "block_hashes": keys,
            "parent_block_hash": None,
            "token_ids": prompt[: 3 * size],
            "block_size": size,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
    ]
    while not subscriber.is_quiet():  # what its output has filled
        _, following, (_, [stored], _) = subscriber.receive()
        assert following == number + 1
        assert stored["parent_block_hash"] in {*keys, *stored["block_hashes"]}
        number, keys = following, keys + stored["block_hashes"]
    run_requests(core, [msgspec.structs.replace(request("b", prompt), cache_salt="tenant")])
    _, _, (_, [stored, *_], _) = subscriber.receive()
    assert not set(stored["block_hashes"]) & set(keys)
    assert stored["extra_keys"] == [[root_key("tenant").hex()], None, None]
    while not subscriber.is_quiet():
        subscriber.receive()
    assert core.utility("reset_prefix_cache") == {"ok": True}
    assert subscriber.receive()[2][1] == [{"type": "AllBlocksCleared"}]
    core.shutdown()
