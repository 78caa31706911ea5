"""`ContentStore`: where contents of the KV cache stay beside the host's memory: a folder, or a store that several hosts share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

Buffer = memoryview


class ContentStore(Protocol):
    """Contents by key. What raises `OSError` says why in a sentence. Safe to be called from several threads."""

    def look_up(self, keys: Sequence[bytes]) -> None:
        """Learn at once which of these there are: `has` is asked about them next."""
        ...

    def has(self, key: bytes) -> bool:
        """Whether there is a content of that key, as far as is known without waiting for others."""
        ...

    def read(self, key: bytes, parts: Sequence[Buffer]) -> None:
        """Read a content into writable buffers. What they hold after an `OSError` is undefined."""
        ...

    def write_unpublished(self, key: bytes, parts: Sequence[Buffer]) -> str | None:
        """Write a content that is not relied on before `publish`; → its name until then. None: there is one of the key."""
        ...

    def publish(self, key: bytes, temporary: str) -> bool:
        """What was written is what the key says."""
        ...

    def discard(self, temporary: str) -> None:
        """What was written is not."""
        ...

    def make_room(self) -> None:
        """Once, at the start."""
        ...

    def stats(self) -> dict[str, float]:
        """For /metrics, by name."""
        ...
