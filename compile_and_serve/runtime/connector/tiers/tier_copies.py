"""`TierCopies`: the worker's side of the tiers. It copies pages between the device and the host on a stream beside the steps, and between
the host and files in threads.

A load reads files into the host's pages, then copies these to the device. A store is over once its pages are on the host; files are
written from there afterwards. A file is published only if nothing else was written to its pages meanwhile.

Copies are enqueued by `poll`, after the step, so that no step waits while the host does that, and for a share of the host's time only.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice

import msgspec
import torch

from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.platforms.protocol import TimedEvent
from compile_and_serve.runtime.connector.connector import ConnectorError, WorkerConnector
from compile_and_serve.runtime.connector.messages import BlockTransfer, FinishedTransfers, StepTransfers
from compile_and_serve.runtime.connector.page_memory import PageMemory, part_as_bytes
from compile_and_serve.runtime.connector.tiers.content_store import ContentStore
from compile_and_serve.runtime.connector.tiers.orders import TierOrders

logger = logging.getLogger(__name__)

_READERS, _WRITERS = 4, 1  # threads
_FLUSH_SECONDS = 10.0
# Enqueuing copies may take this share of the time between two polls, within these bounds. A full queue makes the host wait, too.
_HOST_SHARE, _MIN_HOST_SECONDS, _MAX_HOST_SECONDS = 0.25, 1e-3, 0.1
_COPIES_AT_A_TIME = 16  # between two looks at the clock
_CANCELLED = "It was cancelled."


@dataclass(eq=False, slots=True)
class _Running:
    """reading: of its files, before the copy. copies: not enqueued yet, each to and from where. copied: marks the end of the copy, once all
    are enqueued. error: why it fails.
    """

    transfer: BlockTransfer
    orders: TierOrders
    is_load: bool
    reading: list[Future[None]] = field(default_factory=list)
    copies: Iterator[tuple[torch.Tensor, torch.Tensor]] | None = None
    copied: TimedEvent | None = None
    error: str | None = None
    is_cancelled: bool = False


class TierCopies(WorkerConnector):
    """num_pages, page_bytes: of the host's memory, which is taken at the first `bind`. disk: of this rank; None: there is none."""

    def __init__(self, num_pages: int, page_bytes: int, disk: ContentStore | None) -> None:
        self._num_pages, self._page_bytes, self._disk = num_pages, page_bytes, disk
        self._host: torch.Tensor | None = None  # uint8 [pages, bytes]
        self._parts: list[list[torch.Tensor]] = []  # of each group, uint8 [N, bytes]
        self._running: dict[int, _Running] = {}
        self._to_enqueue: deque[_Running] = deque()
        self._polled_at = time.perf_counter()
        self._versions = [0] * num_pages  # of host pages: raised before something else is written there
        self._version_lock = threading.Lock()
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="kv-read")
        self._writers = ThreadPoolExecutor(_WRITERS, thread_name_prefix="kv-write")
        self._said: set[str] = set()

    def bind(self, memory: PageMemory) -> None:
        self._parts = [[part_as_bytes(part) for part in parts] for parts in memory.parts]
        device = next((part.device for parts in self._parts for part in parts), torch.device("cpu"))
        self._platform = platform_of(device)
        self._shares_memory = self._platform.shares_host_memory
        self._beside = self._platform.side_stream()
        if self._host is None:
            try:
                self._host = self._platform.host_pages(self._num_pages, self._page_bytes)
            except RuntimeError as error:
                size = self._num_pages * self._page_bytes / (1 << 30)
                raise ConnectorError(
                    f"{size:.1f} GiB of host memory cannot be page-locked: lower --kv-offloading-size ({error})."
                ) from error
            if self._disk is not None:
                self._writers.submit(self._disk.make_room)

    def start(self, transfers: StepTransfers) -> None:
        for transfer_id in transfers.cancelled:
            if (one := self._running.get(transfer_id)) is not None:
                one.is_cancelled = True
        new = [(one, False) for one in transfers.stores] + [(one, True) for one in transfers.loads]
        if new and self._beside is not None:
            self._beside.wait()
        for transfer, is_load in new:
            orders = msgspec.msgpack.decode(transfer.meta, type=TierOrders) if transfer.meta else TierOrders([])
            running = self._running[transfer.transfer_id] = _Running(transfer, orders, is_load)
            if not orders.host_pages:
                running.error = "There was no room on the host."
            elif not is_load:
                self._overwrite(orders.host_pages)
                self._copy(running)
            elif not any(orders.from_disk):
                self._copy(running)
            else:
                for key, pages, is_read in self._by_key(running):
                    if is_read:
                        self._overwrite(pages)
                        running.reading.append(self._readers.submit(self._read, key, pages, orders.epoch, running))

    def poll(self) -> FinishedTransfers:
        ended = FinishedTransfers()
        for one in self._running.values():
            if one.reading and all(reading.done() for reading in one.reading):
                errors = [error for reading in one.reading if (error := reading.exception()) is not None]
                if errors:
                    one.error = str(errors[0])
                    self._say(errors[0])
                elif not one.is_cancelled:
                    self._copy(one)
                else:
                    one.error = _CANCELLED
                one.reading = []
        self._enqueue()
        for transfer_id, one in list(self._running.items()):
            if one.reading or (one.copied is None and one.error is None) or (one.copied is not None and not one.copied.query()):
                continue
            del self._running[transfer_id]
            if one.error is not None:
                ended.failed[transfer_id] = one.error
                continue
            ended.finished.append(transfer_id)
            if one.orders.to_disk:
                self._write_later(one)
        return ended

    def close(self) -> None:
        for one in self._running.values():
            for reading in one.reading:
                reading.exception()
        if self._to_enqueue or any(one.copied is not None for one in self._running.values()):
            self._end_of_copies().synchronize()
        self._to_enqueue.clear()
        self._running.clear()
        self._parts = []
        self._flush()

    def _flush(self) -> None:
        """Wait for files that are being written, for some seconds at most."""
        try:
            self._writers.submit(lambda: None).result(_FLUSH_SECONDS)
        except TimeoutError:
            logger.warning("Some blocks of the KV cache were not written to disk within %g seconds.", _FLUSH_SECONDS)

    def _by_key(self, one: _Running) -> Iterator[tuple[bytes, list[int], bool]]:
        """Each key of a transfer with its host pages, and whether it is read from disk."""
        size = one.transfer.blocks_per_key
        for number, key in enumerate(one.transfer.keys):
            is_read = bool(one.orders.from_disk) and one.orders.from_disk[number]
            yield key, one.orders.host_pages[number * size : (number + 1) * size], is_read

    def _copy(self, one: _Running) -> None:
        """Between the device's blocks and the host's pages."""
        if self._shares_memory:
            self._copy_at_once(self._parts[one.transfer.group], one.transfer.block_ids, one.orders.host_pages, is_load=one.is_load)
            one.copied = self._platform.record_timed_event()
        else:
            one.copies = self._copies(one)
            self._to_enqueue.append(one)

    def _copies(self, one: _Running) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each to and from where."""
        assert self._host is not None
        begin = 0
        for part in self._parts[one.transfer.group]:
            host = self._host[:, begin : begin + part.shape[1]]
            for block, page in zip(one.transfer.block_ids, one.orders.host_pages, strict=True):
                yield (part[block], host[page]) if one.is_load else (host[page], part[block])
            begin += part.shape[1]

    def _enqueue(self) -> None:
        """Enqueue copies in their order, as many as there is time for. Their stream waits for the steps before them already."""
        now = time.perf_counter()
        last = now + min(max(_HOST_SHARE * (now - self._polled_at), _MIN_HOST_SECONDS), _MAX_HOST_SECONDS)
        self._polled_at = now
        if not self._to_enqueue:
            return
        with self._on_stream():
            while self._to_enqueue and time.perf_counter() < last:
                one = self._to_enqueue[0]
                assert one.copies is not None
                some = () if one.is_cancelled else tuple(islice(one.copies, _COPIES_AT_A_TIME))
                for target, source in some:
                    target.copy_(source, non_blocking=True)
                if len(some) < _COPIES_AT_A_TIME:
                    one.error = _CANCELLED if one.is_cancelled else None
                    one.copied = self._platform.record_timed_event()
                    self._to_enqueue.popleft()

    def _end_of_copies(self) -> TimedEvent:
        with self._on_stream():
            return self._platform.record_timed_event()

    def _on_stream(self) -> AbstractContextManager[None]:
        return nullcontext() if self._beside is None else self._beside.running(waits=False)

    def _copy_at_once(self, parts: Sequence[torch.Tensor], blocks: list[int], pages: list[int], *, is_load: bool) -> None:
        assert self._host is not None
        host = self._host.numpy()
        begin = 0
        for part in parts:
            end, rows = begin + part.shape[1], part.numpy()
            if is_load:
                rows[blocks] = host[pages, begin:end]
            else:
                host[pages, begin:end] = rows[blocks]
            begin = end

    def _buffers(self, pages: Sequence[int]) -> list[memoryview]:
        assert self._host is not None
        host = self._host.numpy()
        return [memoryview(host[page]) for page in pages]

    def _read(self, key: bytes, pages: list[int], epoch: bytes, one: _Running) -> None:
        """In a thread."""
        assert self._disk is not None
        if one.is_cancelled:
            raise OSError("It was cancelled.")
        self._disk.read(key + epoch, self._buffers(pages))

    def _write_later(self, one: _Running) -> None:
        for key, pages, _ in self._by_key(one):
            versions = [self._versions[page] for page in pages]
            self._writers.submit(self._write, key, pages, versions, one.orders.epoch)

    def _write(self, key: bytes, pages: list[int], versions: list[int], epoch: bytes) -> None:
        """In a thread. The host's pages may be overwritten meanwhile: then the file is not published."""
        assert self._disk is not None
        name = key + epoch
        try:
            if versions != [self._versions[page] for page in pages]:
                return
            temporary = self._disk.write_unpublished(name, self._buffers(pages))
            if temporary is None:
                return
            with self._version_lock:
                is_same = versions == [self._versions[page] for page in pages]
            if is_same:
                self._disk.publish(name, temporary)
            else:
                self._disk.discard(temporary)
        except OSError as error:
            self._say(error)

    def _overwrite(self, pages: Sequence[int]) -> None:
        with self._version_lock:
            for page in pages:
                self._versions[page] += 1

    def _say(self, error: BaseException) -> None:
        """Each kind of failure once."""
        kind = f"{type(error).__name__} {getattr(error, 'errno', None)}"
        if kind not in self._said:
            self._said.add(kind)
            logger.warning("Blocks of the KV cache could not be kept on disk or read from there, and are computed again: %s", error)
