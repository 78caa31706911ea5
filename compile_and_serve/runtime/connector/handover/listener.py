"""`Listener`: accepts connections of other engines and serves each in a thread."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable

from compile_and_serve.runtime.connector.handover.wire import Channel, Message, Refused, TransferError

logger = logging.getLogger(__name__)

_IDLE_SECONDS = 600.0  # after which a connection without messages is closed


class Listener:
    """answer: called for each message in the connection's thread. It may send and receive more on the channel, and returns the answer,
    if there is one. What it raises as `TransferError` is answered with `Refused`. local: also listen under this name of the host.
    seconds: that a send or a receive may take within an answer. Raises `ValueError` if the address cannot be used.
    """

    def __init__(
        self, host: str, port: int, answer: Callable[[Channel, Message], Message | None], *, seconds: float, local: str | None = None
    ) -> None:
        self._answer, self._seconds = answer, seconds
        self._lock = threading.Lock()
        self._channels: set[Channel] = set()
        self._is_closed = False
        try:
            self._sockets = [socket.create_server((host, port), backlog=128)]
        except OSError as error:
            raise ValueError(f"kv_transfer_config: {host}:{port} cannot be listened on: {error}.") from error
        self.port: int = self._sockets[0].getsockname()[1]
        if local is not None:
            one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            one.bind(b"\0" + local.encode())
            one.listen(128)
            self._sockets.append(one)
        self._threads = [threading.Thread(target=self._accept, args=(one,), name="kv-listen", daemon=True) for one in self._sockets]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Close all connections. Answers that are being written end with errors."""
        self._is_closed = True
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)  # or `accept` would go on
            one.close()
        with self._lock:
            channels = list(self._channels)
        for channel in channels:
            channel.close()

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                if self._is_closed:
                    return
                continue
            channel = Channel(connection, self._seconds)
            with self._lock:
                self._channels.add(channel)
            threading.Thread(target=self._serve, args=(channel,), name="kv-serve", daemon=True).start()

    def _serve(self, channel: Channel) -> None:
        try:
            while not self._is_closed:
                channel.wait(_IDLE_SECONDS)
                message = channel.receive()
                try:
                    answer = self._answer(channel, message)
                except TransferError as error:
                    answer = Refused(str(error))
                if answer is not None:
                    channel.send(answer)
        except TransferError:
            pass  # the other side is gone, or silent
        except Exception:
            logger.exception("A message of another engine was not answered.")
        finally:
            channel.close()
            with self._lock:
                self._channels.discard(channel)
