"""`cas::sequence_mean`: each token gets the mean of its sequence's rows, for heads that read it; a graph is split at it.

Shape legend: T tokens of the step, D features, S sequences.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from compile_and_serve.custom_ops.library import OpKind, define
from compile_and_serve.custom_ops.state.metadata import StepLengths
from compile_and_serve.custom_ops.step import SEQUENCES, current_metadata


def _sequence_mean(x_TD: torch.Tensor) -> torch.Tensor:
    lengths: StepLengths = current_metadata(SEQUENCES)
    lengths_S = lengths.query_start_loc[: lengths.num_seqs + 1].diff().long()
    num_tokens = lengths.num_tokens
    # unsafe: the lengths are not checked, which would wait for the device.
    means_SD = torch.segment_reduce(x_TD[:num_tokens].float(), "mean", lengths=lengths_S, axis=0, unsafe=True)
    means_TD = means_SD.repeat_interleave(lengths_S, dim=0, output_size=num_tokens)
    return F.pad(means_TD, (0, 0, 0, x_TD.shape[0] - num_tokens)).to(x_TD.dtype)


_OP = define(
    "sequence_mean(Tensor x) -> Tensor",
    kind=OpKind.SPLIT_POINT,
    version=1,
    fake=lambda x_TD: x_TD.new_empty(x_TD.shape),
    CompositeExplicitAutograd=_sequence_mean,
)


def sequence_mean(x_TD: torch.Tensor) -> torch.Tensor:
    """The mean of the rows of each token's sequence, summed in float32. [T, D] → [T, D] in x's dtype; padding gets zeros."""
    return _OP(x_TD)
