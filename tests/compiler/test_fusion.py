"""In which pieces Inductor counts reads of symbolic length, and so fuses reductions with what reads them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.fx import symbolic_trace

from compile_and_serve.compiler.fusion import only_scales_vectors, writes_out_norms


def unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(torch.sum(x * x, -1, keepdim=True))


def test_reads_count_in_pieces_of_unit_vectors_and_not_beside_products() -> None:
    assert only_scales_vectors(symbolic_trace(unit))
    assert not only_scales_vectors(symbolic_trace(lambda x, weight: unit(F.linear(x, weight))))
    assert not only_scales_vectors(symbolic_trace(lambda x: torch.tanh(x)))


def test_norms_that_are_written_out_are_known() -> None:
    def norm(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(torch.mean(torch.square(x), -1, keepdim=True) + 1e-6)

    assert writes_out_norms(symbolic_trace(lambda x, weight: F.linear(norm(x), weight)))
    assert not writes_out_norms(symbolic_trace(lambda x: torch.mean(x, -1)))
