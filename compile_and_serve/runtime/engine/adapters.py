"""`Adapters`: the LoRA adapters of an engine, in the order in which requests used them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from compile_and_serve.runtime.distributed.executor import Executor
from compile_and_serve.runtime.lora.peft_files import AdapterError, open_adapter
from compile_and_serve.runtime.lora.request import AdapterTarget, LoRARequest


class Adapters:
    """Keeps up to `max_on_host` adapters in the ranks' host memory, and all those that unfinished requests use.

    targets: what adapters may change; None: the engine takes no adapters. is_used: whether an unfinished request uses an adapter.
    """

    def __init__(
        self,
        executor: Executor,
        targets: Mapping[str, list[AdapterTarget]] | None,
        *,
        max_rank: int,
        max_on_host: int,
        is_used: Callable[[int], bool],
    ) -> None:
        self._executor, self.targets, self._is_used = executor, targets, is_used
        self._max_rank, self._max_on_host = max_rank, max_on_host
        self._known: dict[int, tuple[LoRARequest, tuple[int, int]]] = {}  # with the stamps of the files
        self._unloaded: set[int] = set()
        self._on_host: OrderedDict[int, Future[Any]] = OrderedDict()  # the least recently used first
        self.num_loads = 0  # into host memory, since the start

    def load(self, adapter: LoRARequest) -> Future[Any]:
        """Have every rank read the adapter, unless it has; done once this process's rank has read it.

        Raises `AdapterError` for an adapter that cannot be used. The result may raise it too.
        """
        if self.targets is None:
            raise AdapterError(f"The request wants the adapter {adapter.lora_name!r}, but the engine takes none: use --enable-lora.")
        adapter_id = adapter.lora_int_id
        if adapter_id < 1 or adapter_id in self._unloaded:
            raise AdapterError(f"lora_int_id {adapter_id} of {adapter.lora_name!r} is not a new positive number: give each load its own.")
        known = self._known.get(adapter_id)
        if known is not None and known[0].lora_path != adapter.lora_path:
            raise AdapterError(f"lora_int_id {adapter_id} is that of {known[0].lora_path}: give each load its own.")
        self.shrink(keep=adapter_id)
        found = self._on_host.get(adapter_id)
        if found is None:
            stamp = open_adapter(Path(adapter.lora_path), self.targets, self._max_rank).stamp
            if known is not None and known[1] != stamp:
                raise AdapterError(f"{adapter.lora_path} has changed since it was loaded as {adapter_id}: load it with a new lora_int_id.")
            self._known[adapter_id] = adapter, stamp
            found = self._on_host[adapter_id] = self._executor.load_adapter(adapter)
            self.num_loads += 1
        self._on_host.move_to_end(adapter_id)
        return found

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
            is_gone = adapter_id not in self._known or (loading.done() and loading.exception() is not None)
            is_over = len(self._on_host) > limit and adapter_id != keep
            if (is_gone or is_over) and loading.done() and not self._is_used(adapter_id):
                del self._on_host[adapter_id]
                self._executor.drop_adapter(adapter_id)
