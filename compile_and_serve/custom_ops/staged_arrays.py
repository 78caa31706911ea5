"""Named arrays that the host fills and the device reads, moved with one copy a step."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from compile_and_serve.custom_ops.platform import platform_of

_ALIGNMENT = 64


class StagedArrays:
    """Arrays packed into one buffer. `rotate`, fill `host`, `upload`; the step then reads `device` (always the same
    memory).

    On the CPU host and device are one memory and nothing is copied. Elsewhere there are two pinned host copies in
    turn: the one of the step before may still be on its way while this one is filled. So a step may be filled once
    the step before the last has ended.
    """

    def __init__(self, fields: Mapping[str, tuple[type[np.generic], int]], device: torch.device) -> None:
        """fields: name → (element type, length)."""
        offsets, total = {}, 0
        for name, (dtype, length) in fields.items():
            offsets[name] = total
            total += -(-length * np.dtype(dtype).itemsize // _ALIGNMENT) * _ALIGNMENT
        self._parts = {name: (offsets[name], np.dtype(dtype).itemsize, length) for name, (dtype, length) in fields.items()}
        platform = platform_of(device)
        shares_memory = self._shares_memory = platform.shares_host_memory
        self._raw_host = [platform.host_zeros(total, torch.uint8) for _ in range(1 if shares_memory else 2)]
        self._raw_device = self._raw_host[0] if shares_memory else torch.zeros(total, dtype=torch.uint8, device=device)
        self._hosts = [
            {
                name: raw.numpy()[offsets[name] :][: length * np.dtype(dtype).itemsize].view(dtype)
                for name, (dtype, length) in fields.items()
            }
            for raw in self._raw_host
        ]
        self.device: dict[str, torch.Tensor] = {
            name: self._raw_device[offsets[name] :][: length * np.dtype(dtype).itemsize].view(_torch_dtype(dtype))
            for name, (dtype, length) in fields.items()
        }
        self._current = 0
        self._versions = [-1] * len(self._hosts)

    @property
    def host(self) -> dict[str, np.ndarray]:
        """The arrays to fill for the step at hand."""
        return self._hosts[self._current]

    def rotate(self) -> dict[str, np.ndarray]:
        """Begin a step: the arrays to fill. They hold what the step before the last (on the CPU: the last one) left
        in them.
        """
        self._current = (self._current + 1) % len(self._hosts)
        return self._hosts[self._current]

    def needs(self, version: int) -> bool:
        """Whether what changes only with `version` is yet to be written into `host`; True only once a version."""
        if self._versions[self._current] == version:
            return False
        self._versions[self._current] = version
        return True

    def upload(self) -> None:
        """Copy `host` to `device`, in stream order, without waiting."""
        if not self._shares_memory:
            self._raw_device.copy_(self._raw_host[self._current], non_blocking=True)

    def upload_parts(self, used: Mapping[str, int]) -> None:
        """As `upload`, but of each array only the first elements, as many as `used` says; where it says nothing, all. For large arrays."""
        if self._shares_memory:
            return
        for name, (begin, size, length) in self._parts.items():
            part = slice(begin, begin + size * min(used.get(name, length), length))
            self._raw_device[part].copy_(self._raw_host[self._current][part], non_blocking=True)


def _torch_dtype(dtype: type[np.generic]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype=dtype)).dtype
