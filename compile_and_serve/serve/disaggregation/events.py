"""Follows the KV events of a server: which blocks it has cached and forgotten."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec
import zmq
import zmq.asyncio

from compile_and_serve.runtime.kv_events.wire import AllBlocksCleared, EventBatch

if TYPE_CHECKING:
    from compile_and_serve.serve.disaggregation.pool import ServerPool

logger = logging.getLogger(__name__)


async def follow(pool: ServerPool, index: int, endpoint: str) -> None:
    """Tell the pool what server `index` publishes there, for ever. After a gap in the numbers, what was known is forgotten."""
    decode = msgspec.msgpack.Decoder(EventBatch).decode
    socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
    socket.connect(endpoint)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    expected: int | None = None
    try:
        while True:
            frames = await socket.recv_multipart()
            if len(frames) != 3:
                continue
            number = int.from_bytes(frames[1])
            try:
                batch = decode(frames[2])
            except msgspec.DecodeError as error:
                logger.warning("%s sends what is no batch of events: %s", endpoint, error)
                continue
            if expected is not None and number != expected:
                pool.observe_events(index, [AllBlocksCleared()])
            expected = number + 1
            pool.observe_events(index, batch.events)
    finally:
        socket.close(linger=0)
