"""`EventFollower`: tells the router of replicas what their prefix caches have, from the events that they publish (docs/kv-events.md)."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import zmq
import zmq.asyncio

from compile_and_serve.runtime.engine.router import Router
from compile_and_serve.runtime.kv_config import KVEventsConfig
from compile_and_serve.runtime.kv_events.config import endpoint_of_replica, is_bound
from compile_and_serve.runtime.kv_events.wire import EventBatch

logger = logging.getLogger(__name__)


class EventFollower:
    """Made in an event loop. Missed events do no harm: the router then knows less, or believes what was true before."""

    def __init__(self, config: KVEventsConfig, router: Router, num_replicas: int) -> None:
        self._context = zmq.asyncio.Context()
        self._tasks: list[asyncio.Task[None]] = []
        for replica in range(num_replicas):
            endpoint = endpoint_of_replica(config.endpoint, replica)
            socket = self._context.socket(zmq.SUB)
            socket.setsockopt_string(zmq.SUBSCRIBE, config.topic)
            socket.connect(endpoint.replace("*", "127.0.0.1").replace("[::]", "127.0.0.1"))
            self._tasks.append(asyncio.create_task(self._follow(socket, router, replica)))

    @staticmethod
    def can_follow(config: KVEventsConfig | None) -> bool:
        """Whether the replicas open endpoints that their router can connect to."""
        return (
            config is not None and is_bound(config.endpoint) and not config.endpoint.startswith("inproc:") and config.endpoint[-2:] != ":0"
        )

    async def close(self) -> None:
        """Stop following."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)

    async def _follow(self, socket: zmq.asyncio.Socket, router: Router, replica: int) -> None:
        decode = msgspec.msgpack.Decoder(EventBatch).decode
        while True:
            _, _, payload = await socket.recv_multipart()
            try:
                router.observe_events(replica, decode(payload).events)
            except msgspec.DecodeError as error:
                logger.warning("Events of replica %d cannot be read: %s", replica, error)
