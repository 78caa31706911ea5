"""Random weights for a config without a checkpoint (`--load-format dummy`)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import torch

from compile_and_serve.custom_ops.stored_weight import StoredWeight
from compile_and_serve.custom_ops.weight_functions import TensorSpec


def dummy_tensors(
    specs: Mapping[str, TensorSpec], *, device: torch.device, seed: int, std: float, stored: Mapping[str, StoredWeight] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor on `device`) of every spec: N(0, std²), except that norm weights are 1 and biases 0.

    A tensor depends only on its name, its spec, the seed and the type of device. stored: weight name → how a checkpoint would hold it,
    whose tensors are examples of the format.
    """
    examples = {tensor.name: tensor for one in (stored or {}).values() if one.is_quantized for tensor in one.tensors}
    for name, spec in specs.items():
        if name in examples:
            yield name, examples[name].example(std, _generator(name, seed, device))
            continue
        tensor = torch.empty(spec.shape, dtype=spec.dtype, device=device)
        if name.endswith("bias"):
            tensor.zero_()
        elif len(spec.shape) == 1:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, std, generator=_generator(name, seed, device))
        yield name, tensor


def _generator(name: str, seed: int, device: torch.device) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest) >> 1)
