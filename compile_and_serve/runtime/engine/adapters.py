"""`Adapters`: the LoRA adapters of an engine, in the order in which requests used them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from compile_and_serve.runtime.distributed.executor import Executor
from compile_and_serve.runtime.lora.errors import AdapterError
from compile_and_serve.runtime.lora.request import AdapterTarget, LoRARequest


class Adapters:
    """Keeps up to `max_on_host` adapters in the ranks' host memory, and all those that unfinished requests use.

    targets: what adapters may change; None: the engine takes no adapters. is_used: whether an unfinished request uses an adapter.
    """

    def __init__(
        self, executor: Executor, targets: Mapping[str, list[AdapterTarget]] | None, *, max_on_host: int, is_used: Callable[[int], bool]
    ) -> None:
        self._executor, self.targets, self._is_used = executor, targets, is_used
        self._max_on_host = max_on_host
        self._known: dict[int, LoRARequest] = {}
        self._unloaded: set[int] = set()
        self._on_host: OrderedDict[int, Future[None]] = OrderedDict()  # the least recently used first
        self._reading: list[tuple[Future[Any], Future[None]]] = []  # the executor's, and ours
        self.num_loads = 0  # into host memory, since the start

    def load(self, adapter: LoRARequest) -> Future[None]:
        """Have every rank read the adapter, unless it has. `poll` ends the future once all have; it may raise `AdapterError`.

        Raises `AdapterError` for a number that cannot be used. No file is touched here, where steps would wait.
        """
        if self.targets is None:
            raise AdapterError(f"The request wants the adapter {adapter.lora_name!r}, but the engine takes none: use --enable-lora.")
        adapter_id = adapter.lora_int_id
        if adapter_id < 1 or adapter_id in self._unloaded:
            raise AdapterError(f"lora_int_id {adapter_id} of {adapter.lora_name!r} is not a new positive number: give each load its own.")
        self.shrink(keep=adapter_id)
        known = self._known.get(adapter_id)
        if known is not None and known.lora_path != adapter.lora_path:
            raise AdapterError(f"lora_int_id {adapter_id} is that of {known.lora_path}: give each load its own.")
        found = self._on_host.get(adapter_id)
        if found is None:
            self._known[adapter_id] = adapter
            found = self._on_host[adapter_id] = Future()
            self._reading.append((self._executor.load_adapter(adapter), found))
            self.num_loads += 1
        self._on_host.move_to_end(adapter_id)
        return found

    @property
    def being_read(self) -> list[Future[Any]]:
        """What `poll` waits for."""
        return [reading for reading, _ in self._reading]

    def poll(self) -> None:
        """End the futures of adapters that have been read, or could not be. Only here, so that none ends while a step is made."""
        for reading, found in self._reading:
            if reading.done():
                if (error := reading.exception()) is None:
                    found.set_result(None)
                else:
                    found.set_exception(error)
        self._reading = [entry for entry in self._reading if not entry[1].done()]

    def unload(self, adapter_id: int) -> None:
        """Take no new requests for the adapter. Those that are running or waiting finish; then its memory is freed."""
        if self._known.pop(adapter_id, None) is None:
            raise AdapterError(f"There is no adapter {adapter_id}.")
        self._unloaded.add(adapter_id)
        self.shrink()

    def shrink(self, keep: int | None = None) -> None:
        """Free the host memory of unloaded adapters, of those that could not be read, and of the least recently used beyond the limit."""
        limit = self._max_on_host - (keep is not None and keep not in self._on_host)
        for adapter_id, loading in list(self._on_host.items()):
            has_failed = loading.done() and loading.exception() is not None
            is_gone = adapter_id not in self._known or has_failed
            is_over = len(self._on_host) > limit and adapter_id != keep
            if (is_gone or is_over) and loading.done() and not self._is_used(adapter_id):
                del self._on_host[adapter_id]
                self._executor.drop_adapter(adapter_id)
                if has_failed:
                    self._known.pop(adapter_id, None)
