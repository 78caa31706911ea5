"""`Peers`: other engines' ranks, and connections to them."""

from __future__ import annotations

import threading

from compile_and_serve.runtime.connector.handover.orders import FetchOrders
from compile_and_serve.runtime.connector.handover.wire import Ask, Channel, RankInfo, Ranks, TransferError
from compile_and_serve.runtime.kv_config import KVTransferConfig

_MAX_IDLE = 8  # connections to one rank


class Peers:
    """Safe to be called from several threads."""

    def __init__(self, config: KVTransferConfig) -> None:
        self._seconds = config.load_seconds
        self._lock = threading.Lock()
        self._ranks: dict[tuple[str, str, int], list[RankInfo]] = {}
        self._idle: dict[tuple[str, int], list[Channel]] = {}

    def ranks(self, orders: FetchOrders) -> list[RankInfo]:
        """The ranks of an engine. Raises `TransferError` if it is gone."""
        name = orders.engine_id, orders.host, orders.port
        with self._lock:
            if name in self._ranks:
                return self._ranks[name]
        channel = Channel.connect(orders.host, orders.port, self._seconds)
        try:
            answer = channel.ask(Ask(orders.engine_id))
        finally:
            channel.close()
        if not isinstance(answer, Ranks) or not answer.ranks:
            raise TransferError("The other engine did not say which ranks it has.")
        with self._lock:
            self._ranks[name] = answer.ranks
        return answer.ranks

    def channel(self, rank: RankInfo) -> Channel:
        """A connection to a rank: one that is idle and still open, or a new one. On the same host, memory can be passed along it."""
        with self._lock:
            idle = self._idle.get((rank.host, rank.port), [])
            while idle:
                found = idle.pop()
                if found.is_open:
                    return found
                found.close()
        try:
            return Channel.connect_local(rank.local, self._seconds) or Channel.connect(rank.host, rank.port, self._seconds)
        except TransferError:
            with self._lock:  # the rank may have another address by now
                self._ranks = {name: ranks for name, ranks in self._ranks.items() if rank not in ranks}
            raise

    def give_back(self, rank: RankInfo, channel: Channel) -> None:
        """The connection can be used again."""
        with self._lock:
            idle = self._idle.setdefault((rank.host, rank.port), [])
            if len(idle) < _MAX_IDLE:
                idle.append(channel)
                return
        channel.close()

    def close(self) -> None:
        with self._lock:
            for channels in self._idle.values():
                for channel in channels:
                    channel.close()
            self._idle.clear()
            self._ranks.clear()
