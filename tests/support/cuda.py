"""Random tensors on a CUDA device, and how far its kernels in bfloat16 may be from an exact reference."""

from __future__ import annotations

import torch

CUDA = torch.device("cuda")
LIMIT = 1e-2  # relative error


def random(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*size, device=CUDA).to(dtype)
