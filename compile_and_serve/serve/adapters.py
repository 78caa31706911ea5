"""`ServedAdapters`: the LoRA adapters that requests may name in `model`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from compile_and_serve.runtime.lora.request import LoRARequest
from compile_and_serve.serve.engine import EngineClient
from compile_and_serve.serve.errors import ApiError

MAX_SERVED = 10_000


class ServedAdapters:
    """Adapters by name. Each load gets a number of its own, which keys the prefix cache; a name may be loaded again.

    models: names of the base model. folder: `load` takes adapters only from below it.
    """

    def __init__(self, client: EngineClient, models: Sequence[str], folder: Path | None = None) -> None:
        self._client, self._models, self._folder = client, tuple(models), folder
        self._adapters: dict[str, LoRARequest] = {}
        self._num_loads = 0
        self._lock = asyncio.Lock()

    @property
    def names(self) -> list[str]:
        """In the order of loading."""
        return list(self._adapters)

    def get(self, name: str | None) -> LoRARequest | None:
        """The adapter that a request names; None for the base model."""
        return self._adapters.get(name or "")

    async def add(self, name: str, path: Path) -> None:
        """Load the adapter in a folder. Raises `ValueError` with one sentence if it cannot be used or the name is taken."""
        async with self._lock:
            if not name or name in self._models or name in self._adapters:
                raise ValueError(f"The name {name!r:.200} is taken or empty: give the adapter another one.")
            if len(self._adapters) >= MAX_SERVED:
                raise ValueError(f"The server has {MAX_SERVED} adapters already: unload some.")
            self._num_loads += 1
            adapter = LoRARequest(name, self._num_loads, str(path))
            await self._client.utility("load_adapter", adapter)
            self._adapters[name] = adapter

    async def load(self, name: str, path: str) -> None:
        """`add` for a request: the folder, links resolved, must lie below the server's. Raises a 400."""
        assert self._folder is not None
        root = self._folder.resolve()
        try:
            resolved = (root / path).resolve()
        except (OSError, ValueError, RuntimeError):  # refused below
            resolved = root
        if root not in resolved.parents:
            raise ApiError(400, "lora_path must be a folder below the server's --lora-dir.", "lora_path")
        try:
            await self.add(name, resolved)
        except ValueError as error:
            raise ApiError(400, str(error), "lora_path") from error

    async def unload(self, name: str) -> None:
        """Take no new requests for an adapter; those in progress finish. Raises a 404."""
        async with self._lock:
            adapter = self._adapters.pop(name, None)
            if adapter is None:
                raise ApiError(404, f"There is no adapter '{name:.200}'.", "lora_name")
            await self._client.utility("unload_adapter", adapter)
