"""`EngineSocket`: the engine process's socket, to which any number of clients connect.

A client's name stands before each of its messages (ZMQ's ROUTER). The socket lies in a folder that only this user can enter.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator

import msgspec
import zmq

from compile_and_serve.runtime.child_process import LINGER_MS
from compile_and_serve.runtime.messages import AddRequest, FromEngine, RequestOutput, StepOutputs, ToEngine

logger = logging.getLogger(__name__)

RECEIVED_TOKENS = 1 << 16  # prompt tokens to receive between two steps: they take about 3 ms

Client = bytes  # a client's name


def engine_address(folder: str) -> str:
    """The ZMQ address at which an engine takes requests. folder: where its sockets lie."""
    return f"ipc://{folder}/engine"


class EngineSocket:
    """Receives the clients' messages, and sends each output to the client that sent its request."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: str) -> None:
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to a client that is gone raises an error
        self._socket.setsockopt(zmq.LINGER, LINGER_MS)
        self._socket.set_hwm(0)
        self._socket.bind(engine_address(folder))
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
        self._num_unfinished: dict[Client, int] = {}  # sequences of each connected client
        self._owners: dict[str, Client] = {}  # unfinished sequence → its client

    def wait(self, milliseconds: int | None = None) -> bool:
        """Wait for a message. → whether there is one"""
        return bool(self._socket.poll(milliseconds))

    def arrived(self) -> Iterator[tuple[Client, ToEngine]]:
        """The messages that have arrived, up to the one that fills RECEIVED_TOKENS."""
        num_tokens = 0
        while num_tokens < RECEIVED_TOKENS and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            client, content = self._socket.recv_multipart(zmq.NOBLOCK)
            message = self._decoder.decode(content)
            yield client, message
            if isinstance(message, AddRequest):
                num_tokens += len(message.request.prompt_token_ids)

    def connect(self, client: Client) -> None:
        """A client wants every step's stats from now on."""
        self._num_unfinished[client] = 0

    def is_connected(self, client: Client) -> bool:
        """Whether a client has connected and was not found gone."""
        return client in self._num_unfinished

    def own(self, client: Client, request_ids: list[str]) -> None:
        """Note whose these new sequences are."""
        self._owners.update(dict.fromkeys(request_ids, client))
        self._num_unfinished[client] += len(request_ids)

    def disown(self, client: Client, request_ids: list[str]) -> list[str]:
        """Forget sequences that end without an output. → those that are unfinished and the client's"""
        ended = [request_id for request_id in request_ids if self._owners.get(request_id) == client]
        for request_id in ended:
            del self._owners[request_id]
        self._num_unfinished[client] -= len(ended)
        return ended

    def send(self, client: Client, message: FromEngine) -> bool:
        """Send a message to one client. → false if it is gone"""
        try:
            self._socket.send_multipart([client, self._encoder.encode(message)])
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            return False
        return True

    def send_all(self, message: FromEngine) -> None:
        """Send a message to every client."""
        for client in self._num_unfinished:
            self.send(client, message)

    def send_step(self, step: StepOutputs) -> list[str]:
        """Send every client the stats and its own outputs. → unfinished sequences of clients that are gone, for the caller to abort"""
        parts: dict[Client, list[RequestOutput]] = {client: [] for client in self._num_unfinished}
        for output in step.outputs:
            owner = self._owners.get(output.request_id)
            if owner is None:
                continue  # aborted, while its step ran
            parts[owner].append(output)
            if output.finish_reason is not None:
                del self._owners[output.request_id]
                self._num_unfinished[owner] -= 1
        orphans: list[str] = []
        for client, outputs in parts.items():
            num_others = len(self._owners) - self._num_unfinished[client]
            if not self.send(client, StepOutputs(outputs=outputs, stats=step.stats, num_others=num_others)):
                if num_unfinished := self._num_unfinished[client]:
                    logger.warning("A client is gone, so its %d sequences are aborted.", num_unfinished)
                orphans += self.disown(client, [request_id for request_id, owner in self._owners.items() if owner == client])
                del self._num_unfinished[client]
        return orphans

    def close(self) -> None:
        """Close the socket. Queued messages have LINGER_MS to be sent."""
        self._socket.close()
