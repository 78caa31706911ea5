"""Random weights from a config alone (`--load-format dummy`)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch

from compiler.weights import TensorSpec


def dummy_tensors(
    specs: Mapping[str, TensorSpec], *, device: torch.device, seed: int, std: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every spec, made on `device`: N(0, std²); norm weights are 1 and biases 0.

    A tensor depends on its name, the seed and the device's kind, not on which others are made.
    """
    for name, spec in specs.items():
        tensor = torch.empty(spec.shape, dtype=spec.dtype, device=device)
        if name.endswith("bias"):
            tensor.zero_()
        elif len(spec.shape) == 1:
            tensor.fill_(1.0)
        else:
            digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
            generator = torch.Generator(device).manual_seed(int.from_bytes(digest) >> 1)
            tensor.normal_(0.0, std, generator=generator)
        yield name, tensor
