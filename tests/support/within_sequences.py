"""Attention of each token to its whole sequence, as an op of the tests' own.

Shape legend: T tokens of the step, H heads, E head size.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as functional

from compile_and_serve.custom_ops.library import OpKind, Sharding, define
from compile_and_serve.custom_ops.step import SEQUENCES, current_metadata


def _both_ways(q_THE: torch.Tensor, k_THE: torch.Tensor, v_THE: torch.Tensor, scale: float) -> torch.Tensor:
    """softmax(q kᵀ · scale) v within each sequence."""
    out_THE = torch.zeros_like(q_THE)
    lengths = current_metadata(SEQUENCES)
    starts = lengths.query_start_loc.tolist()
    for begin, end in pairwise(starts[: lengths.num_seqs + 1]):
        q_HBE, k_HBE, v_HBE = (x_THE[begin:end].transpose(0, 1) for x_THE in (q_THE, k_THE, v_THE))
        out_THE[begin:end] = functional.scaled_dot_product_attention(q_HBE, k_HBE, v_HBE, scale=scale).transpose(0, 1)
    return out_THE


WITHIN_SEQUENCES = define(
    "test_within_sequences(Tensor q, Tensor k, Tensor v, float scale) -> Tensor",
    kind=OpKind.SPLIT_POINT,
    version=1,
    fake=lambda q, k, v, scale: torch.empty_like(q),
    sharding=Sharding(inputs={"q": 1, "k": 1, "v": 1}, output=1),
    CompositeExplicitAutograd=_both_ways,
)
