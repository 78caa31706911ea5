"""`--kv-events-config`: vLLM's keys, and one sentence for whatever is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from compile_and_serve.runtime.kv_config import KVEventsConfig
from compile_and_serve.runtime.kv_events.config import endpoint_of_replica, is_bound, parse_kv_events_config


def test_what_is_left_out_has_vllms_defaults() -> None:
    found = parse_kv_events_config('{"enable_kv_cache_events": true, "topic": "kv@pod", "replay_endpoint": null}')
    assert found == KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", topic="kv@pod")
    assert found.endpoint == "tcp://*:5557"


@pytest.mark.parametrize("given", [None, "{}", {"endpoint": "tcp://*:1"}, {"enable_kv_cache_events": True, "publisher": "null"}])
def test_events_may_be_off(given: Any) -> None:
    assert parse_kv_events_config(given) is None


@pytest.mark.parametrize(
    "given, sentence",
    [
        ("[]", "kv_events_config must be a JSON object"),
        ({"port": 1}, "kv_events_config has no key port: known are enable_kv_cache_events, publisher"),
        ({"enable_kv_cache_events": "yes"}, "enable_kv_cache_events must be true or false, got 'yes'"),
        ({"publisher": "kafka"}, "publisher must be zmq or null, got 'kafka'"),
        ({"hwm": -1}, "hwm must be an integer of at least 0, got -1"),
        ({"topic": 1}, "topic must be a text, got 1"),
        ({"endpoint": "5557"}, "endpoint must be like tcp://"),
        ({"replay_endpoint": "tcp://*:x"}, "replay_endpoint must be like tcp://"),
    ],
)
def test_errors_are_one_sentence(given: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=r"kv_events_config") as raised:
        parse_kv_events_config(given)
    assert sentence in str(raised.value)


@pytest.mark.parametrize(
    "endpoint, replica, expected",
    [
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 3, "tcp://*:5560"),
        ("tcp://[::]:0", 2, "tcp://[::]:0"),
        ("ipc:///tmp/a", 1, "ipc:///tmp/a_dp1"),
    ],
)
def test_each_replica_has_an_endpoint(endpoint: str, replica: int, expected: str) -> None:
    assert endpoint_of_replica(endpoint, replica) == expected
    assert is_bound(endpoint)


def test_an_address_of_a_host_is_connected_to() -> None:
    assert not is_bound("tcp://10.0.0.1:5557")
