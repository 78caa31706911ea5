"""`cas::route`: which experts each token goes to, and with which weights, from the router's logits.

Shape legend: T tokens, X experts, K experts of a token.
"""

from __future__ import annotations

from typing import Any

import torch

from compile_and_serve.custom_ops.library import define

SMALLEST_SUM = 1e-20  # divisor of weights that are all 0


def _route(
    logits_TX: torch.Tensor,
    top_k: int,
    scoring: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    bias_X: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    group_best: int = 2,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits_TX = logits_TX.to(torch.promote_types(logits_TX.dtype, torch.float32))
    scores_TX = logits_TX.softmax(-1) if scoring == "softmax" else logits_TX.sigmoid()
    choice_TX = scores_TX if bias_X is None else scores_TX + bias_X.to(scores_TX.dtype)
    if num_groups > 1:
        grouped = choice_TX.unflatten(1, (num_groups, -1))
        group_scores = grouped.topk(min(group_best, grouped.shape[2]), dim=-1).values.sum(-1)
        kept = torch.zeros_like(group_scores, dtype=torch.bool)
        kept.scatter_(1, group_scores.topk(top_groups, dim=-1).indices, True)
        choice_TX = grouped.masked_fill(~kept[:, :, None], float("-inf")).flatten(1)
    ids_TK = choice_TX.topk(top_k, dim=-1).indices
    weights_TK = scores_TX.gather(1, ids_TK)
    if renormalize:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True).clamp_min(SMALLEST_SUM)
    return weights_TK * scale, ids_TK.to(torch.int32)


def _route_fake(logits_TX: torch.Tensor, top_k: int, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    shape = logits_TX.shape[0], top_k
    weights_TK = logits_TX.new_empty(shape, dtype=torch.promote_types(logits_TX.dtype, torch.float32))
    return weights_TK, logits_TX.new_empty(shape, dtype=torch.int32)


def _route_cuda(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    # imported here, because Triton may be missing
    from compile_and_serve.custom_ops.moe.triton_route import route as triton_route

    return triton_route(*args, **kwargs, smallest_sum=SMALLEST_SUM)


ROUTE = define(
    'route(Tensor logits, int top_k, str scoring="softmax", bool renormalize=True, float scale=1.0, Tensor? bias=None, '
    "int num_groups=1, int top_groups=1, int group_best=2) -> (Tensor, Tensor)",
    version=2,
    fake=_route_fake,
    reference=_route,
    row_wise=True,
    CUDA=_route_cuda,
)


def route(
    logits_TX: torch.Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    bias_X: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    group_best: int = 2,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The top_k experts with the largest score + bias; weight = score [/ Σ scores of the chosen, if renormalize] · scale.

    logits_TX: [T, X], rows may be strided. scoring: "softmax" over all experts, or "sigmoid". A softmax over the chosen experts only is
    the renormalized softmax over all. bias_X: added for the choice, not for the weights (DeepSeek-V3, arXiv:2412.19437).
    num_groups: the experts are in equal groups, and only those of the top_groups groups with the largest sum of their group_best best (1 or
    2) can be chosen. → weights float32 [T, K], expert ids int32 [T, K], best first; of equal scores the kernels take the lower id.
    """
    assert scoring in ("softmax", "sigmoid"), scoring
    assert group_best in (1, 2), group_best
    return ROUTE(logits_TX, top_k, scoring, renormalize, scale, bias_X, num_groups, top_groups, group_best)
