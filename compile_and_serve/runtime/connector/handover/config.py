"""Reads the options of a handover, in the JSON of vLLM's `--kv-transfer-config`."""

from __future__ import annotations

import logging
import secrets
import socket
from collections.abc import Mapping
from typing import Any

from compile_and_serve.option_fields import json_object
from compile_and_serve.runtime.kv_config import KVTransferConfig

logger = logging.getLogger(__name__)

_NAME = "kv_transfer_config"
_TRANSPORTS = {"auto": "auto", "socket": "socket", "cuda_ipc": "cuda_ipc", "nixl": "nixl", "NixlConnector": "auto"}
_ROLES = ("kv_producer", "kv_consumer", "kv_both")
_EXTRA = ("peers", "lease_seconds", "load_seconds")
_KNOWN = ("kv_connector", "kv_role", "engine_id", "kv_ip", "kv_port", "kv_connector_extra_config", "kv_load_failure_policy")
# vLLM's keys that say nothing here: buffers are as large as what is sent, and any number of engines can take part.
_WITHOUT_EFFECT = ("kv_buffer_device", "kv_buffer_size", "kv_parallel_size", "kv_rank", "enable_permute_local_kv")


def names_mooncake_store(given: Mapping[str, Any] | str | KVTransferConfig | None) -> bool:
    """Whether `kv_transfer_config` asks for vLLM's `MooncakeStoreConnector`: a store, and no handover. Logs other keys, which have no
    effect. Raises `ValueError`.
    """
    if given is None or isinstance(given, KVTransferConfig):
        return False
    found = json_object(_NAME)(given)
    if found.get("kv_connector") != "MooncakeStoreConnector":
        return False
    if others := [name for name, value in found.items() if name != "kv_connector" and (name, value) != ("kv_role", "kv_both")]:
        logger.warning("%s: MooncakeStoreConnector stores and loads in every engine; %s has no effect.", _NAME, ", ".join(others))
    return True


def parse_kv_transfer_config(given: Mapping[str, Any] | str | KVTransferConfig | None, *, num_replicas: int = 1) -> KVTransferConfig | None:
    """A JSON object, or what it says; None where no request goes to another engine. A port that is left out is chosen.

    Raises `ValueError` with one sentence.
    """
    if given is None or isinstance(given, KVTransferConfig):
        return given
    found = json_object(_NAME)(given)
    if unknown := [str(key) for key in found if key not in (*_KNOWN, *_WITHOUT_EFFECT)]:
        raise ValueError(f"{_NAME} has no key {', '.join(unknown):.200}: known are {', '.join(_KNOWN)}.")
    for name in _WITHOUT_EFFECT:
        if found.get(name) is not None:
            logger.info("%s: %s has no effect.", _NAME, name)
    connector = found.get("kv_connector", "auto")
    _require(connector in _TRANSPORTS, "kv_connector", f"one of {', '.join(_TRANSPORTS)}", connector)
    role = found.get("kv_role", "kv_both")
    _require(role in _ROLES, "kv_role", f"one of {', '.join(_ROLES)}", role)
    policy = found.get("kv_load_failure_policy", "recompute")
    _require(policy == "recompute", "kv_load_failure_policy", "recompute: a prompt whose blocks do not come is computed", policy)
    engine_id = found.get("engine_id") or secrets.token_hex(8)
    _require(isinstance(engine_id, str) and len(engine_id) <= 100, "engine_id", "a text of at most 100 characters", engine_id)
    host = found.get("kv_ip") or "127.0.0.1"
    is_address = isinstance(host, str) and host not in ("0.0.0.0", "::", "*")
    _require(is_address, "kv_ip", "the address under which other engines reach this one", host)
    port = found.get("kv_port")
    is_port = port is None or (type(port) is int and 0 < port <= 65536 - num_replicas)
    _require(is_port, "kv_port", f"an integer of 1 to {65536 - num_replicas}", port)
    extra = found.get("kv_connector_extra_config") or {}
    _require(isinstance(extra, Mapping), "kv_connector_extra_config", "an object", extra)
    if unknown := [str(key) for key in extra if key not in _EXTRA]:
        logger.warning("%s: kv_connector_extra_config has no effect in %s; known are %s.", _NAME, ", ".join(unknown), ", ".join(_EXTRA))
    peers = extra.get("peers") or []
    _require(isinstance(peers, list) and all(isinstance(one, str) for one in peers), "peers", 'a list of hosts, or of "*"', peers)
    seconds = {name: extra[name] for name in ("lease_seconds", "load_seconds") if name in extra}
    for name, value in seconds.items():
        _require(type(value) in (int, float) and 0 < value <= 86400, name, "seconds above 0", value)
    return KVTransferConfig(
        engine_id=engine_id,
        role=role,
        transport=_TRANSPORTS[connector],  # type: ignore[arg-type]
        host=host,
        port=_free_ports(num_replicas) if port is None else port,
        peers=tuple(peers),
        secret=secrets.token_hex(16),
        **{name: float(value) for name, value in seconds.items()},
    )


def of_replica(config: KVTransferConfig, rank: int) -> tuple[str, int]:
    """The engine id and the port of replica `rank`."""
    return f"{config.engine_id}_dp{rank}" if rank else config.engine_id, config.port + rank


def _free_ports(count: int) -> int:
    """The first of so many ports behind each other that are free on this host."""
    for _ in range(100):
        with socket.socket() as first:
            first.bind(("", 0))
            port: int = first.getsockname()[1]
        if port + count <= 65536 and all(_is_free(port + number) for number in range(1, count)):
            return port
    raise ValueError(f"{_NAME}: no {count} free ports were found: give kv_port.")


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        try:
            one.bind(("", port))
        except OSError:
            return False
    return True


def _require(ok: bool, name: str, expected: str, value: object) -> None:
    if not ok:
        raise ValueError(f"{_NAME}: {name} must be {expected}, got {value!r:.200}.")
