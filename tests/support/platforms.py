"""Platforms for tests."""

from __future__ import annotations

import numpy as np
import torch

from compile_and_serve.custom_ops.platforms.cpu import CpuPlatform


class OwnMemory(CpuPlatform):
    """The CPU with memory of its own, as a GPU's: what is uploaded is a copy, and the host's view of a tensor is one too."""

    is_asynchronous = True
    shares_host_memory = False

    def upload(self, array: np.ndarray, *, through_pinned: bool = False) -> torch.Tensor:
        return torch.from_numpy(array).clone()

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()
