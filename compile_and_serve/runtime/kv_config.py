"""Options of what leaves an engine's KV cache: events, which `kv_events/config.py` reads, and blocks, `connector/handover/config.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class KVEventsConfig:
    """How events of the prefix cache are published. The names and defaults are vLLM's.

    endpoint: of a PUB socket. replay_endpoint: of a ROUTER socket; None: batches are sent once. Replica r uses the port r behind each.
    buffer_steps: batches that are kept for replays. hwm: batches that wait for a slow subscriber. max_queue_size: that wait to be sent.
    """

    enable_kv_cache_events: bool = False
    publisher: str = "null"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class KVTransferConfig:
    """How blocks of the KV cache go to other engines, or come from them (`runtime/connector/handover`).

    engine_id: unique. role: computes prompts for others, continues their requests, or both. transport: auto is the fastest that both sides
    have. host, port: where other engines ask for blocks; replica r has the port r behind it. peers: hosts from which blocks are taken,
    beside this one and `host`; "*": all. lease_seconds: how long blocks are kept for the other engine. load_seconds: after which a prompt
    whose blocks have not come is computed. secret: of the engine's own processes.
    """

    engine_id: str
    role: Literal["kv_producer", "kv_consumer", "kv_both"] = "kv_both"
    transport: Literal["auto", "socket", "cuda_ipc", "nixl"] = "auto"
    host: str = "127.0.0.1"
    port: int = 0
    peers: tuple[str, ...] = ()
    lease_seconds: float = 30.0
    load_seconds: float = 10.0
    secret: str = field(default="", repr=False)
