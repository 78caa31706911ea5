"""`HandoverCopies`: the ranks' side of a handover. It lends this rank's blocks to other engines, and fetches theirs in threads."""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from compile_and_serve.custom_ops.platforms.protocol import TimedEvent
from compile_and_serve.runtime.connector.connector import WorkerConnector
from compile_and_serve.runtime.connector.handover.direct import DirectReaders, copies_of
from compile_and_serve.runtime.connector.handover.lender import Lender
from compile_and_serve.runtime.connector.handover.orders import FetchOrders, LendOrders, decode_orders
from compile_and_serve.runtime.connector.handover.pages import PageBytes, PullPlan, plan_pulls
from compile_and_serve.runtime.connector.handover.peers import Peers
from compile_and_serve.runtime.connector.handover.transports import direct_transports
from compile_and_serve.runtime.connector.handover.wire import Announce, Channel, Done, Granted, Pull, RankInfo, TransferError
from compile_and_serve.runtime.connector.messages import BlockTransfer, FinishedTransfers, StepTransfers
from compile_and_serve.runtime.connector.page_memory import PageMemory
from compile_and_serve.runtime.kv_config import KVTransferConfig

logger = logging.getLogger(__name__)

_FETCHERS = 4  # threads
_MAX_WAITERS = 64  # threads that fetch what other engines still compute
_ANNOUNCE_SECONDS = 0.05  # between tries


@dataclass(eq=False, slots=True)
class _Fetch:
    """before: marks the end of the steps that may still read the blocks. channel: that is in use."""

    transfer: BlockTransfer
    before: TimedEvent
    done: Future[None] = field(default_factory=Future)
    channel: Channel | None = None
    is_cancelled: bool = False


class HandoverCopies(WorkerConnector):
    """control: address of the own engine's control socket. rank: of `num_ranks`, along the tensor axis."""

    is_polled_often = True

    def __init__(self, config: KVTransferConfig, control: tuple[str, int], rank: int, num_ranks: int) -> None:
        self._config, self._control, self._rank, self._num_ranks = config, control, rank, num_ranks
        self._fetches: dict[int, _Fetch] = {}
        self._threads = ThreadPoolExecutor(_FETCHERS, thread_name_prefix="kv-fetch")
        self._waiters = ThreadPoolExecutor(_MAX_WAITERS, thread_name_prefix="kv-wait")
        self._streams = threading.local()
        self._is_closed = True

    def bind(self, memory: PageMemory) -> None:
        self._pages = PageBytes(memory)
        self._is_closed = False
        host = self._control[0]
        self._direct = DirectReaders(direct_transports(self._config, self._pages))
        self._lender = Lender(self._pages, host, self._config.load_seconds, tuple(self._direct.memory))
        self._peers = Peers(self._config)
        self.info = RankInfo(
            self._rank, self._num_ranks, host, self._lender.port, self._lender.local, self._pages.groups, self._direct.memory
        )
        threading.Thread(target=self._announce, args=(self.info,), name="kv-announce", daemon=True).start()

    def _announce(self, info: RankInfo) -> None:
        """In a thread: the engine's control socket is there once all ranks have started."""
        while not self._is_closed and info is self.info:
            try:
                channel = Channel.connect(*self._control, self._config.load_seconds)
                channel.ask(Announce(self._config.secret, info))
                channel.close()
                return
            except TransferError as error:
                logger.debug("The control socket does not answer yet: %s", error)
                threading.Event().wait(_ANNOUNCE_SECONDS)

    def start(self, transfers: StepTransfers) -> None:
        for transfer in transfers.stores:
            orders = decode_orders(transfer.meta)
            assert isinstance(orders, LendOrders)
            self._lender.lend(orders.lease, transfer)
        for transfer in transfers.loads:
            orders = decode_orders(transfer.meta)
            assert isinstance(orders, FetchOrders)
            fetch = self._fetches[transfer.transfer_id] = _Fetch(transfer, self._pages.platform.record_timed_event())
            fetch.done = (self._waiters if orders.waits else self._threads).submit(self._fetch, fetch, orders)
        # Last: a lease may have begun and ended between two steps.
        if transfers.cancelled:
            self._lender.end(transfers.cancelled)
            for transfer_id in transfers.cancelled:
                if (begun := self._fetches.get(transfer_id)) is not None:
                    begun.is_cancelled = True
                    if begun.channel is not None:
                        begun.channel.close()

    def poll(self) -> FinishedTransfers:
        ended = FinishedTransfers(finished=self._lender.take_ended())
        for transfer_id, fetch in list(self._fetches.items()):
            if not fetch.done.done():
                continue
            del self._fetches[transfer_id]
            error = fetch.done.exception()
            if error is None:
                ended.finished.append(transfer_id)
                continue
            if not isinstance(error, TransferError):
                logger.error("Blocks could not be fetched.", exc_info=error)
            ended.failed[transfer_id] = str(error)
        return ended

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for fetch in self._fetches.values():
            fetch.is_cancelled = True
            if fetch.channel is not None:
                fetch.channel.close()
        for fetch in self._fetches.values():
            fetch.done.exception()
        self._fetches.clear()
        self._lender.close()
        self._peers.close()
        self._direct.close()
        del self._pages

    def _fetch(self, fetch: _Fetch, orders: FetchOrders) -> None:
        """In a thread."""
        fetch.before.synchronize()
        ranks = self._peers.ranks(orders)
        transfer = fetch.transfer
        for plan in plan_pulls(transfer.group, self.info, ranks):
            self._pull(fetch, orders, plan)

    def _pull(self, fetch: _Fetch, orders: FetchOrders, plan: PullPlan) -> None:
        channel = self._peers.channel(plan.rank)
        fetch.channel = channel
        if fetch.is_cancelled:
            channel.close()
            raise TransferError("It was cancelled.")
        try:
            transfer = fetch.transfer
            direct = self._direct.reader_of(plan.rank.memory) if plan.theirs is None else None
            way = direct[0] if direct is not None else "memory" if channel.is_local else "socket"
            heads = None if plan.theirs is None else list(plan.theirs)
            group, keys, blocks = transfer.group, transfer.keys, transfer.block_ids
            last_grant = time.monotonic()
            while keys:
                granted = channel.ask(Pull(lease=orders.lease, group=group, keys=keys, heads=heads, way=way, waits=orders.waits))
                if not isinstance(granted, Granted) or granted.row_bytes != self._pages.row_bytes(group, plan.mine):
                    raise TransferError("The other engine's pages have another size.")
                mine = blocks[: granted.num_keys * transfer.blocks_per_key]
                if not mine:
                    if fetch.is_cancelled:
                        raise TransferError("It was cancelled.")
                    if time.monotonic() - last_grant > self._config.load_seconds:  # it may not even have got the request
                        raise TransferError(f"The other engine computed none of the blocks in {self._config.load_seconds:g} seconds.")
                    continue
                if direct is not None:
                    direct[1].read(copies_of(direct[1], self._pages, group, granted.pages, mine))
                    channel.send(Done())
                elif way == "memory":
                    self._take_from_memory(channel, group, mine, plan, granted)
                else:
                    self._take_from_socket(channel, group, mine, plan, granted)
                keys, blocks, last_grant = keys[granted.num_keys :], blocks[len(mine) :], time.monotonic()
        except BaseException:
            fetch.channel = None
            channel.close()
            raise
        fetch.channel = None
        self._peers.give_back(plan.rank, channel)

    def _take_from_socket(self, channel: Channel, group: int, pages: Sequence[int], plan: PullPlan, granted: Granted) -> None:
        buffer = np.empty((min(granted.rows, len(pages)), granted.row_bytes), dtype=np.uint8)
        for begin in range(0, len(pages), granted.rows):
            some = pages[begin : begin + granted.rows]
            content = buffer[: len(some)]
            channel.receive_into(content.reshape(-1).data)
            self._write(group, some, plan, content)

    def _take_from_memory(self, channel: Channel, group: int, pages: Sequence[int], plan: PullPlan, granted: Granted) -> None:
        num_bytes = len(pages) * granted.row_bytes
        descriptor = os.memfd_create("cas-kv")
        try:
            os.ftruncate(descriptor, num_bytes)
            channel.send_memory(descriptor)
            shared = mmap.mmap(descriptor, num_bytes)
        finally:
            os.close(descriptor)
        if not isinstance(channel.receive(), Done):
            raise TransferError("The other engine did not fill the memory.")
        content = np.frombuffer(shared, dtype=np.uint8).reshape(len(pages), granted.row_bytes)
        for begin in range(0, len(pages), granted.rows):
            self._write(group, pages[begin : begin + granted.rows], plan, content[begin : begin + granted.rows])

    def _write(self, group: int, pages: Sequence[int], plan: PullPlan, content: np.ndarray) -> None:
        if not hasattr(self._streams, "stream"):
            self._streams.stream = self._pages.stream()
        self._pages.write(group, pages, plan.mine, content, self._streams.stream)
