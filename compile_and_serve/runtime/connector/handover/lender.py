"""`Lender`: a rank's socket, from which other engines' ranks fetch the blocks that are lent to them."""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from compile_and_serve.runtime.connector.handover.listener import Listener
from compile_and_serve.runtime.connector.handover.pages import PageBytes, rows_of_chunk
from compile_and_serve.runtime.connector.handover.wire import Channel, Done, Granted, Message, Pull, TransferError
from compile_and_serve.runtime.connector.messages import BlockTransfer

_LEND_SECONDS = 1.0  # at most, after the engine has told another one of a lease, until its ranks know of it
_KEPT_NAMES = 1000  # of leases that have ended


@dataclass(eq=False, slots=True)
class _Lent:
    """pages: by key. num_readers: that fetch them now. is_ending: nobody else may begin. transfer_ids: that lend them."""

    pages: dict[bytes, list[int]]
    num_readers: int = 0
    is_ending: bool = False
    transfer_ids: list[int] = field(default_factory=list)


class Lender:
    """seconds: that another rank may be silent while it fetches. direct: ways in which it may read the memory itself."""

    def __init__(self, pages: PageBytes, host: str, seconds: float, direct: Sequence[str] = ()) -> None:
        self._pages, self._direct = pages, direct
        self._lock = threading.Condition()  # notified of what is lent, and of what ends
        self._lend_seconds = min(_LEND_SECONDS, seconds / 2)
        self._lent: dict[tuple[str, int], _Lent] = {}
        self._ended: deque[tuple[str, int]] = deque(maxlen=_KEPT_NAMES)
        self.local = f"cas-kv-{secrets.token_hex(16)}"
        self._listener = Listener(host, 0, self._answer, seconds=seconds, local=self.local)
        self.port = self._listener.port

    def lend(self, lease: str, transfer: BlockTransfer) -> None:
        """Let the transfer's blocks be fetched under this name, with those that are already."""
        size, name = transfer.blocks_per_key, (lease, transfer.group)
        with self._lock:
            one = self._lent.setdefault(name, _Lent({}, is_ending=name in self._ended))
            one.pages |= {key: transfer.block_ids[number * size : (number + 1) * size] for number, key in enumerate(transfer.keys)}
            one.transfer_ids.append(transfer.transfer_id)
            self._lock.notify_all()

    def end(self, transfer_ids: Sequence[int]) -> None:
        """Let nobody else begin to fetch the blocks of these transfers."""
        with self._lock:
            for one in self._lent.values():
                if not one.is_ending and not set(one.transfer_ids).isdisjoint(transfer_ids):
                    one.is_ending = True
            self._lock.notify_all()

    def take_ended(self) -> list[int]:
        """Transfers that were ended, and whose blocks nobody reads any more."""
        ended: list[int] = []
        if not self._lent:
            return ended
        with self._lock:
            for name, one in list(self._lent.items()):
                if one.is_ending and not one.num_readers:
                    ended += one.transfer_ids
                    del self._lent[name]
                    self._ended.append(name)
        return ended

    def close(self) -> None:
        """End everything. Waits until nobody reads: connections are closed, so that is soon."""
        self._listener.close()
        with self._lock:
            left = list(self._lent.values())
            self._lent.clear()
        for one in left:
            while one.num_readers:
                threading.Event().wait(0.001)

    def _answer(self, channel: Channel, message: Message) -> Message | None:
        if not isinstance(message, Pull):
            raise TransferError("A rank takes no such message.")
        name, wanted = (message.lease, message.group), message.keys
        with self._lock:
            self._lock.wait_for(lambda: self._is_answerable(name, wanted[0] if message.waits else None), self._lend_seconds)
            one = self._lent.get(name)
            if message.waits and name not in self._ended and (one is None or not (one.is_ending or wanted[0] in one.pages)):
                return Granted(row_bytes=self._pages.row_bytes(message.group, message.heads), rows=1, num_keys=0)
            if one is None or one.is_ending:
                raise TransferError("The lease has ended.")
            there = list(takewhile(one.pages.__contains__, wanted))
            if len(there) < len(wanted) and not message.waits:
                missing = sum(key not in one.pages for key in wanted)
                raise TransferError(f"{missing} of {len(wanted)} blocks are not what was lent: another prompt, salt or adapter.")
            one.num_readers += 1
        try:
            self._send(channel, message, len(there), [page for key in there for page in one.pages[key]])
        finally:
            with self._lock:
                one.num_readers -= 1
        return None

    def _is_answerable(self, name: tuple[str, int], key: bytes | None) -> bool:
        """Whether something of a lease can be fetched, this key if it is not None, or nothing ever more."""
        one = self._lent.get(name)
        return name in self._ended or (one is not None and (one.is_ending or key is None or key in one.pages))

    def _send(self, channel: Channel, pull: Pull, num_keys: int, pages: Sequence[int]) -> None:
        row_bytes = self._pages.row_bytes(pull.group, pull.heads)
        rows = rows_of_chunk(row_bytes)
        if pull.way in self._direct:
            channel.send(Granted(row_bytes=row_bytes, rows=rows, num_keys=num_keys, pages=list(pages)))
            if not isinstance(channel.receive(), Done):  # or the other side is gone: it reads no more
                raise TransferError("A rank that reads memory itself says Done.")
            return
        channel.send(Granted(row_bytes=row_bytes, rows=rows, num_keys=num_keys))
        stream = self._pages.stream()
        shared = channel.receive_memory(len(pages) * row_bytes) if pull.way == "memory" else None
        for begin in range(0, len(pages), rows):
            content = self._pages.read(pull.group, pages[begin : begin + rows], pull.heads, stream)
            if shared is None:
                channel.send_bytes(content.reshape(-1).data)
            else:
                shared[begin * row_bytes : begin * row_bytes + content.nbytes] = content.reshape(-1).data
        if shared is not None:
            shared.close()
            channel.send(Done())
