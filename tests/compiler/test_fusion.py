"""In which pieces Inductor counts reads of symbolic length, and so fuses reductions with what reads them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.fx import symbolic_trace

from compile_and_serve.compiler.fusion import only_scales_vectors


def unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(torch.sum(x * x, -1, keepdim=True))


def test_reads_count_in_pieces_of_unit_vectors_and_not_beside_products() -> None:
    assert only_scales_vectors(symbolic_trace(unit))
    assert not only_scales_vectors(symbolic_trace(lambda x, weight: unit(F.linear(x, weight))))
    assert not only_scales_vectors(symbolic_trace(lambda x: torch.tanh(x)))
