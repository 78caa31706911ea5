"""The logits that tokens are drawn from, for `--logprobs-mode processed_…`.

Shape legend: L rows with log-probabilities, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.runtime.sampling_params import SamplingParams


def processed_logits(logits_LV: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """logits / temperature, and -inf for the tokens that min_p, top_k or top_p drop. Rows of greedy requests stay as they are.

    logits_LV: float32, after penalties and masks; not changed. The filters are those of `sample_top_k`, in its order.
    """
    upload = platform_of(logits_LV.device).upload
    vocab_size = logits_LV.shape[1]
    options = torch.tensor(
        [
            (1.0, 0.0, vocab_size, 1.0)
            if p.is_greedy
            else (p.temperature, p.min_p, p.top_k if 0 < p.top_k < vocab_size else vocab_size, p.top_p)
            for p in params
        ],
        dtype=torch.float64,
    )
    temperature_L1, min_p_L1, top_k_L1, top_p_L1 = upload(options.numpy()).split(1, dim=1)
    logits_LV = logits_LV / temperature_L1.float()
    sorted_LV, order_LV = logits_LV.sort(dim=-1, descending=True, stable=True)
    max_L1 = sorted_LV[:, :1]
    kth_L1 = sorted_LV.gather(1, top_k_L1.long() - 1)
    kept_LV = (sorted_LV >= kth_L1) & (sorted_LV - max_L1 >= min_p_L1.log())
    weights_LV = torch.where(kept_LV, (sorted_LV - max_L1).double().exp(), 0.0)
    cumulative_LV = weights_LV.cumsum(dim=-1)
    inside_LV = ((cumulative_LV - weights_LV) < top_p_L1 * cumulative_LV[:, -1:]) | (top_p_L1 >= 1.0)
    last_L1 = sorted_LV.gather(1, inside_LV.sum(dim=-1, keepdim=True).sub_(1).clamp_(min=0))
    kept_LV &= inside_LV | (sorted_LV >= last_L1)
    dropped_LV = torch.zeros_like(kept_LV).scatter_(1, order_LV, ~kept_LV)
    return logits_LV.masked_fill_(dropped_LV, float("-inf"))
