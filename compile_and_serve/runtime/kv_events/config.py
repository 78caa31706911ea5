"""Reads the options of events, in the JSON of vLLM's `--kv-events-config`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from compile_and_serve.option_fields import json_object
from compile_and_serve.runtime.kv_config import KVEventsConfig

_NAME = "kv_events_config"


def parse_kv_events_config(given: Mapping[str, Any] | str | None) -> KVEventsConfig | None:
    """A JSON object, or what it says; None where no events are wanted. Raises `ValueError` with one sentence."""
    if given is None:
        return None
    found = json_object(_NAME)(given)
    known = [one.name for one in fields(KVEventsConfig)]
    if unknown := [str(key) for key in found if key not in known]:
        raise ValueError(f"{_NAME} has no key {', '.join(unknown):.200}: known are {', '.join(known)}.")
    is_on = found.get("enable_kv_cache_events", False)
    _require(isinstance(is_on, bool), "enable_kv_cache_events", "true or false", is_on)
    publisher = found.get("publisher") or ("zmq" if is_on else "null")
    _require(publisher in ("zmq", "null"), "publisher", "zmq or null", publisher)
    for name in ("buffer_steps", "hwm", "max_queue_size"):
        value = found.get(name, 1)
        _require(type(value) is int and value >= 0, name, "an integer of at least 0", value)
    _require(isinstance(found.get("topic", ""), str), "topic", "a text", found.get("topic"))
    for name in ("endpoint", "replay_endpoint"):
        value = found.get(name)
        if value is not None:
            _require(isinstance(value, str) and _is_endpoint(value), name, "like tcp://*:5557, tcp://HOST:PORT or ipc:///PATH", value)
    if not is_on or publisher == "null":
        return None
    return KVEventsConfig(**{name: value for name, value in found.items() if value is not None} | {"publisher": publisher})


def endpoint_of_replica(endpoint: str, rank: int) -> str:
    """Where replica `rank` publishes: at the port so many behind the given one, or under a name of its own. Port 0 stays."""
    base, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}" if rank else endpoint
    return f"{base}:{int(port) + rank}" if int(port) else endpoint


def is_bound(endpoint: str) -> bool:
    """Whether the publisher opens the endpoint, and does not connect to it. As in vLLM, wildcards and local sockets are opened."""
    return "*" in endpoint or "::" in endpoint or not endpoint.startswith("tcp://")


def _is_endpoint(text: str) -> bool:
    base, _, port = text.rpartition(":")
    if text.startswith("tcp://"):
        return len(base) > len("tcp://") and port.isascii() and port.isdecimal() and int(port) < 1 << 16
    return text.startswith(("ipc://", "inproc://")) and bool(text.partition("://")[2])


def _require(ok: bool, name: str, expected: str, value: object) -> None:
    if not ok:
        raise ValueError(f"{_NAME}: {name} must be {expected}, got {value!r:.200}.")
