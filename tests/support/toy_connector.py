"""A connector that keeps pages in a dictionary on the host. Copies run in a thread, beside the steps."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from compile_and_serve.runtime.config import EngineConfig, Rank
from compile_and_serve.runtime.connector.connector import Connector, PrefixQuery, SchedulerConnector, WorkerConnector
from compile_and_serve.runtime.connector.messages import BlockTransfer, FinishedTransfers, StepTransfers
from compile_and_serve.runtime.connector.page_memory import PageMemory

FAIL, HANG = b"fail", b"hang"


class ToyStore(SchedulerConnector):
    """Stores all that it can. orders: what the worker's side shall do with each load: b"" as it should, FAIL or HANG."""

    def __init__(self, config: EngineConfig, page_bytes: int) -> None:
        self.stored: set[bytes] = set()
        self._keys: dict[int, list[bytes]] = {}  # of stores in flight
        self.orders = b""
        self.num_loaded = 0
        self.failures: list[str] = []

    def match(self, query: PrefixQuery) -> int:
        cached = {key for keys in query.keys_at(query.num_cached_tokens) for key in keys}
        for end in range(query.max_tokens, query.num_cached_tokens, -query.alignment):
            if all(key in cached or key in self.stored for keys in query.keys_at(end) for key in keys):
                return end - query.num_cached_tokens
        return 0

    def update(self, transfers: FinishedTransfers) -> None:
        for transfer_id in transfers.finished:
            keys = self._keys.pop(transfer_id, None)
            self.num_loaded += keys is None
            self.stored.update(keys or ())
        self.failures += transfers.failed.values()
        for transfer_id in transfers.failed:
            self._keys.pop(transfer_id, None)

    def evicted(self, key: bytes) -> bool:
        return key not in self.stored

    def finished(self, request_id: str, keys: Sequence[bytes], cached_share: float) -> Collection[bytes]:
        return [key for key in keys if key not in self.stored]

    def prepare(self, transfer: BlockTransfer, *, is_load: bool) -> bytes:
        if not is_load:
            self._keys[transfer.transfer_id] = transfer.keys
        return self.orders if is_load else b""

    def reset(self) -> None:
        self.stored.clear()
        self._keys.clear()


class ToyCopies(WorkerConnector):
    """One rank's pages."""

    def __init__(self, config: EngineConfig, rank: Rank, page_bytes: int) -> None:
        self._pages: dict[bytes, list[list[torch.Tensor]]] = {}
        self._threads = ThreadPoolExecutor(1)
        self._running: dict[int, Future[None]] = {}
        self._hanging: set[int] = set()
        self._memory: PageMemory | None = None

    def bind(self, memory: PageMemory) -> None:
        self._memory = memory

    def start(self, transfers: StepTransfers) -> None:
        for one in transfers.stores:
            self._running[one.transfer_id] = self._threads.submit(self._store, one)
        for one in transfers.loads:
            if one.meta == HANG:
                self._hanging.add(one.transfer_id)
            else:
                self._running[one.transfer_id] = self._threads.submit(self._load, one)
        for transfer_id in self._hanging.intersection(transfers.cancelled):
            self._hanging.remove(transfer_id)
            failed: Future[None] = Future()
            failed.set_exception(OSError("It was cancelled."))
            self._running[transfer_id] = failed

    def _store(self, transfer: BlockTransfer) -> None:
        assert self._memory is not None
        parts = self._memory.parts[transfer.group]
        for number, key in enumerate(transfer.keys):
            ids = transfer.block_ids[number * transfer.blocks_per_key : (number + 1) * transfer.blocks_per_key]
            self._pages[key] = [[part[page].clone() for part in parts] for page in ids]

    def _load(self, transfer: BlockTransfer) -> None:
        assert self._memory is not None
        parts = self._memory.parts[transfer.group]
        for number, key in enumerate(transfer.keys):
            ids = transfer.block_ids[number * transfer.blocks_per_key : (number + 1) * transfer.blocks_per_key]
            for page, stored in zip(ids, self._pages[key], strict=True):
                for part, content in zip(parts, stored, strict=True):
                    part[page].copy_(torch.full_like(content, 77) if transfer.meta == FAIL else content)
        if transfer.meta == FAIL:
            raise OSError("The host's memory is gone.")

    def poll(self) -> FinishedTransfers:
        ended = FinishedTransfers()
        for transfer_id, copying in list(self._running.items()):
            if copying.done():
                del self._running[transfer_id]
                if (error := copying.exception()) is None:
                    ended.finished.append(transfer_id)
                else:
                    ended.failed[transfer_id] = str(error)
        return ended

    def close(self) -> None:
        for copying in self._running.values():
            copying.exception()
        self._running.clear()
        self._hanging.clear()
        self._memory = None


TOY = Connector(scheduler_side=ToyStore, worker_side=ToyCopies)
