"""The engine process's sockets: `ControlServer`, where others learn of the ranks and end leases, and `Releases`, which ends theirs."""

from __future__ import annotations

import hmac
import logging
import queue
import threading
from collections import deque

from compile_and_serve.runtime.connector.handover.listener import Listener
from compile_and_serve.runtime.connector.handover.wire import Announce, Ask, Channel, Message, Ok, RankInfo, Ranks, Release, TransferError

logger = logging.getLogger(__name__)

_ANNOUNCE_SECONDS = 10.0  # that ranks may take to announce themselves
_SECONDS = 5.0  # of a message on its way


class ControlServer:
    """released: leases that other engines have ended, taken by the scheduler. Raises `ValueError` if the address cannot be used."""

    def __init__(self, host: str, port: int, *, engine_id: str, secret: str, num_ranks: int) -> None:
        self.released: deque[str] = deque()
        self._engine_id, self._secret, self._num_ranks = engine_id, secret, num_ranks
        self._ranks: dict[int, RankInfo] = {}
        self._changed = threading.Condition()
        self._listener = Listener(host, port, self._answer, seconds=_SECONDS)

    def close(self) -> None:
        self._listener.close()

    def _answer(self, channel: Channel, message: Message) -> Message:
        if isinstance(message, Announce):
            if not hmac.compare_digest(message.secret, self._secret):
                raise TransferError("The rank belongs to another engine.")
            with self._changed:
                self._ranks[message.rank.rank] = message.rank
                self._changed.notify_all()
            return Ok()
        if not isinstance(message, (Ask, Release)) or message.engine_id != self._engine_id:
            raise TransferError("The engine has been started again, so what was lent is gone.")
        if isinstance(message, Release):
            self.released.append(message.lease)
            return Ok()
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._ranks) == self._num_ranks, _ANNOUNCE_SECONDS):
                raise TransferError("Not all ranks of the engine are ready.")
            return Ranks([self._ranks[number] for number in range(self._num_ranks)])


class Releases:
    """Tells other engines, in a thread, that their leases may end. What does not arrive ends by itself later."""

    def __init__(self) -> None:
        self.num_failed = 0
        self._waiting: queue.Queue[tuple[str, int, Release] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="kv-release", daemon=True)
        self._thread.start()

    def end(self, host: str, port: int, engine_id: str, lease: str) -> None:
        """Does not wait."""
        self._waiting.put((host, port, Release(engine_id, lease)))

    def close(self) -> None:
        """Tell what is left, for a short time."""
        self._waiting.put(None)
        self._thread.join(1.0)

    def _run(self) -> None:
        channels: dict[tuple[str, int], Channel] = {}
        while (one := self._waiting.get()) is not None:
            host, port, message = one
            for is_last_try in (False, True):  # a connection that was kept may have been closed
                try:
                    channel = channels.get((host, port)) or channels.setdefault((host, port), Channel.connect(host, port, _SECONDS))
                    channel.ask(message)
                    break
                except TransferError as error:
                    if (broken := channels.pop((host, port), None)) is not None:
                        broken.close()
                    if is_last_try:
                        self.num_failed += 1
                        logger.debug("A lease at %s:%d was not ended: %s", host, port, error)
        for channel in channels.values():
            channel.close()
