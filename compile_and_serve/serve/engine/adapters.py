"""`ServedAdapters`: the LoRA adapters that requests may name in `model`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from compile_and_serve.runtime.lora.request import LoRARequest
from compile_and_serve.serve.engine.engine import EngineClient
from compile_and_serve.serve.errors import ApiError
from compile_and_serve.serve.processes.siblings import Siblings

MAX_SERVED = 10_000
_MAX_NAME = 256  # characters
_RESOLVE_SECONDS = 10.0  # a network file system can take any time


class ServedAdapters:
    """Adapters by name. Each load gets a number of its own, which keys the prefix cache; a name may be loaded again.

    models: names of the base model. folder: `load` takes adapters only from below it.
    """

    def __init__(
        self,
        client: EngineClient,
        models: Sequence[str],
        folder: Path | None = None,
        *,
        loaded: Sequence[LoRARequest] = (),
        siblings: Siblings | None = None,
    ) -> None:
        """loaded: adapters that the engine has already. siblings: the server's API processes; only the first of them loads adapters."""
        self._siblings = siblings
        self._client, self._models, self._folder = client, tuple(models), folder
        self._adapters = {adapter.lora_name: adapter for adapter in loaded}
        self.num_loads = max((adapter.lora_int_id for adapter in loaded), default=0)
        self._lock = asyncio.Lock()

    @property
    def names(self) -> list[str]:
        """In the order of loading."""
        return list(self._adapters)

    def get(self, name: str | None) -> LoRARequest | None:
        """The adapter that a request names; None for the base model."""
        return self._adapters.get(name or "")

    def check_model(self, name: str | None) -> tuple[str, LoRARequest | None]:
        """The model name for the answer, and its adapter. Raises a 404 for a model that is not served."""
        adapter = self.get(name)
        if name and adapter is None and name not in self._models:
            raise ApiError(404, f"The model '{name:.200}' does not exist: this server has {', '.join(self._models)}.", "model")
        return name or self._models[0], adapter

    def restore(self, adapters: Sequence[LoRARequest], num_loads: int) -> None:
        """Take the state of another API process."""
        self._adapters = {adapter.lora_name: adapter for adapter in adapters}
        self.num_loads = num_loads

    @property
    def all(self) -> list[LoRARequest]:
        """In the order of loading."""
        return list(self._adapters.values())

    def changed(self, adapter: LoRARequest, is_loaded: bool) -> None:
        """An adapter was loaded or unloaded."""
        self.num_loads = max(self.num_loads, adapter.lora_int_id)
        if is_loaded:
            self._adapters[adapter.lora_name] = adapter
        else:
            self._adapters.pop(adapter.lora_name, None)

    async def add(self, name: str, path: Path, *, pinned: bool = False) -> None:
        """Load the adapter in a folder. Raises `ValueError` with one sentence if it cannot be used or the name is taken."""
        if len(name) > _MAX_NAME or not name.isprintable():
            raise ValueError(f"An adapter's name has up to {_MAX_NAME} printable characters, got {name!r:.200}.")
        async with self._lock:
            if not name or name in self._models or name in self._adapters:
                raise ValueError(f"The name {name!r:.200} is taken or empty: give the adapter another one.")
            if len(self._adapters) >= MAX_SERVED:
                raise ValueError(f"The server has {MAX_SERVED} adapters already: unload some.")
            self.num_loads += 1
            adapter = LoRARequest(name, self.num_loads, str(path), pinned)
            await self._client.utility("load_adapter", adapter)
            await self._changed(adapter, True)

    async def load(self, name: str, path: str, *, pinned: bool = False) -> None:
        """`add` for a request: the folder, links resolved, must lie below the server's. Raises a 400."""
        assert self._folder is not None
        try:
            resolved = await asyncio.wait_for(asyncio.to_thread(_resolve_below, self._folder, path), _RESOLVE_SECONDS)
        except TimeoutError:
            raise ApiError(400, f"lora_path could not be found within {_RESOLVE_SECONDS:g} seconds.", "lora_path") from None
        if resolved is None:
            raise ApiError(400, "lora_path must be a folder below the server's --lora-dir.", "lora_path")
        try:
            await self.add(name, resolved, pinned=pinned)
        except ValueError as error:
            raise ApiError(400, str(error), "lora_path") from error

    async def unload(self, name: str) -> None:
        """Take no new requests for an adapter; those in progress finish. Raises a 404."""
        async with self._lock:
            adapter = self._adapters.pop(name, None)
            if adapter is None:
                raise ApiError(404, f"There is no adapter '{name:.200}'.", "lora_name")
            await self._client.utility("unload_adapter", adapter)
            await self._changed(adapter, False)

    async def _changed(self, adapter: LoRARequest, is_loaded: bool) -> None:
        if self._siblings is None:
            self.changed(adapter, is_loaded)
        else:
            await self._siblings.call("set_adapter", adapter, is_loaded)


def _resolve_below(folder: Path, path: str) -> Path | None:
    """The folder at `path` with links resolved; None if it is not below `folder`."""
    root = folder.resolve()
    try:
        resolved = (root / path).resolve()
    except (OSError, ValueError, RuntimeError):
        return None
    return resolved if root in resolved.parents else None
