"""`SleepingWeights`: frees the memory of a model's weights and fills it again. All tensors stay the same objects.

Their addresses may change, so CUDA graphs must be captured again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from compile_and_serve.compiler.weights.arena import advise_huge_pages
from compile_and_serve.custom_ops.platform import platform_of


class SleepingWeights:
    """tensors: those that hold the weights. load: fills them from the checkpoint."""

    def __init__(self, tensors: Iterable[torch.Tensor], load: Callable[[], object]) -> None:
        storages = (tensor.untyped_storage() for tensor in tensors)
        self._storages = list({storage.data_ptr(): storage for storage in storages if storage.nbytes()}.values())
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._load = load
        self._on_host: list[torch.Tensor] | None = None
        self.is_asleep = False

    def release(self, *, keep: bool) -> None:
        """Free the memory. keep: copy the weights to the host first; where the device uses the host's memory, they stay."""
        assert not self.is_asleep, "the weights are released already"
        self.is_asleep = True
        self._on_host = None
        if keep:
            platforms = [platform_of(storage.device) for storage in self._storages]
            if all(platform.shares_host_memory for platform in platforms):
                self._on_host = []
                return
            self._on_host = [platform.download(_bytes_of(storage)) for storage, platform in zip(self._storages, platforms, strict=True)]
            for platform in set(platforms):
                platform.synchronize()
        for storage in self._storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Allocate the memory again and fill it with the copy, or else from the checkpoint. Does nothing if it was not released."""
        if not self.is_asleep:
            return
        for storage, size in zip(self._storages, self._sizes, strict=True):
            if storage.nbytes() != size:
                storage.resize_(size)
                if platform_of(storage.device).shares_host_memory:
                    advise_huge_pages(_bytes_of(storage))
        if self._on_host is None:
            self._load()
        elif self._on_host:
            for storage, copy in zip(self._storages, self._on_host, strict=True):
                _bytes_of(storage).copy_(copy, non_blocking=True)
            for device in {storage.device for storage in self._storages}:
                platform_of(device).synchronize()  # before the copies are freed
        self._on_host = None
        self.is_asleep = False


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
