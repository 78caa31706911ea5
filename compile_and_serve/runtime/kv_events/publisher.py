"""`EventPublisher`: sends batches of events over ZMQ from a thread of its own, and sends old ones again on request.

A message has three frames: topic, number of the batch (8 bytes, big-endian), batch. The numbers begin at 0 and leave none out, so a
subscriber sees when it missed one. It asks the replay socket with the number of the first batch that it wants. The answers have the same
three frames, and the last one has the number -1.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque

import msgspec
import zmq

from compile_and_serve.runtime.kv_config import KVEventsConfig
from compile_and_serve.runtime.kv_events.config import endpoint_of_replica, is_bound
from compile_and_serve.runtime.kv_events.wire import END_OF_REPLAY, EventBatch

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.05  # between looks at the replay socket
_SHUTDOWN_SECONDS = 1.0  # for batches that wait to be sent


class EventPublisher:
    """rank: of the replica. Raises `ValueError` with one sentence if an endpoint cannot be used."""

    def __init__(self, config: KVEventsConfig, rank: int) -> None:
        self._context = zmq.Context()
        self._topic = config.topic.encode()
        self._rank = rank
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._waiting: queue.Queue[tuple[bytes, EventBatch] | None] = queue.Queue(config.max_queue_size)
        self._num_batches = 0
        self._num_lost = 0
        try:
            self._events = self._socket(zmq.PUB, config.hwm, endpoint_of_replica(config.endpoint, rank), always_binds=False)
            self._replays = None
            if config.replay_endpoint is not None:
                # ZMQ frees room only once half of it was read: with twice as much, a whole replay and its end always fit.
                replay_endpoint = endpoint_of_replica(config.replay_endpoint, rank)
                self._replays = self._socket(zmq.ROUTER, 2 * (config.buffer_steps + 1), replay_endpoint, always_binds=True)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ValueError(f"kv_events_config: {config.endpoint} and {config.replay_endpoint} cannot be used: {error}.") from error
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    @property
    def endpoint(self) -> str:
        """Where the events come from; a port that the system chose is filled in."""
        return self._events.getsockopt_string(zmq.LAST_ENDPOINT)

    def publish(self, batch: EventBatch) -> None:
        """Send a batch soon. Does not wait: where too many wait already, it is left out, and the gap in the numbers shows it."""
        batch.data_parallel_rank = self._rank
        number = self._num_batches.to_bytes(8)
        self._num_batches += 1
        try:
            self._waiting.put_nowait((number, batch))
        except queue.Full:
            self._num_lost += 1
            if self._num_lost & (self._num_lost - 1) == 0:  # the first, and each time that they have doubled
                logger.warning("%d batches of KV events were left out, because more than max_queue_size wait.", self._num_lost)

    def close(self) -> None:
        """Send what waits, for a short time, and let go of the endpoints. May be called more than once."""
        if not self._thread.is_alive():
            return
        try:
            self._waiting.put(None, timeout=_SHUTDOWN_SECONDS)
        except queue.Full:
            logger.warning("KV events were not sent: the engine stops.")
        self._thread.join(_SHUTDOWN_SECONDS)
        self._context.destroy(linger=int(1000 * _SHUTDOWN_SECONDS))

    def _socket(self, kind: int, high_water_mark: int, endpoint: str, *, always_binds: bool) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, high_water_mark)
        if always_binds or is_bound(endpoint):
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
        return socket

    def _run(self) -> None:
        encode = msgspec.msgpack.Encoder().encode
        while True:
            try:
                if self._replays is not None and self._replays.poll(0):
                    self._replay()
                try:
                    waiting = self._waiting.get(timeout=_POLL_SECONDS)
                except queue.Empty:
                    continue
                if waiting is None:
                    return
                number, payload = waiting[0], encode(waiting[1])
                self._kept.append((number, payload))
                self._events.send_multipart((self._topic, number, payload))
            except zmq.ContextTerminated:
                return
            except zmq.ZMQError as error:
                logger.warning("KV events could not be sent: %s", error)

    def _replay(self) -> None:
        assert self._replays is not None
        client, *request = self._replays.recv_multipart()
        if len(request) != 2 or request[0] or len(request[1]) != 8:
            logger.warning("A replay of KV events needs one frame with the first number in 8 bytes, got %d frames.", len(request))
            return
        for number, payload in self._kept:
            if number >= request[1]:
                self._replays.send_multipart((client, b"", self._topic, number, payload))
        self._replays.send_multipart((client, b"", b"", END_OF_REPLAY, b""))
