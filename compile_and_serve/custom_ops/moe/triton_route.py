"""`cas::route` on CUDA: one kernel, one warp for each token.

Shape legend: T tokens, X experts, K experts of a token, G groups of experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from compile_and_serve.custom_ops.jit.triton_launch import launch
from compile_and_serve.custom_ops.triton_common import launch_options, let_next_start, next_power_of_2, supports_pdl, wait_for_previous


@triton.jit
def _only_best_groups(choice_X, BLOCK_X: tl.constexpr, BLOCK_GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, GROUP_BEST: tl.constexpr):
    """The choice scores, with -inf for experts outside the TOP_GROUPS groups whose GROUP_BEST best experts have the largest sum."""
    size: tl.constexpr = BLOCK_X // BLOCK_GROUPS
    grouped_GE = tl.reshape(choice_X, (BLOCK_GROUPS, size))
    experts_1E = tl.arange(0, size)[None, :]
    best_G = tl.max(grouped_GE, 1)
    at_G = tl.min(tl.where(grouped_GE == best_G[:, None], experts_1E, size), 1)
    left_G = best_G
    if GROUP_BEST > 1:
        left_G += tl.max(tl.where(experts_1E == at_G[:, None], -float("inf"), grouped_GE), 1)
    groups_G = tl.arange(0, BLOCK_GROUPS)
    is_kept_G = groups_G < 0
    for _ in tl.static_range(TOP_GROUPS):
        group = tl.min(tl.where(left_G == tl.max(left_G, 0), groups_G, BLOCK_GROUPS), 0)
        is_kept_G = is_kept_G | (groups_G == group)
        left_G = tl.where(groups_G == group, -float("inf"), left_G)
    return tl.reshape(tl.where(is_kept_G[:, None], grouped_GE, -float("inf")), (BLOCK_X,))


@triton.jit
def _route_kernel(
    logits_ptr,
    bias_ptr,
    weights_ptr,
    ids_ptr,
    logits_stride,
    scale,
    smallest_sum,
    NUM_EXPERTS: tl.constexpr,
    BLOCK_X: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    PDL: tl.constexpr,
):
    token = tl.program_id(0)
    # Groups are padded to a power of 2.
    GROUP: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    BLOCK_GROUP: tl.constexpr = BLOCK_X // BLOCK_GROUPS
    slots_X = tl.arange(0, BLOCK_X)
    in_group_X = slots_X % BLOCK_GROUP
    experts_X = slots_X // BLOCK_GROUP * GROUP + in_group_X
    ok_X = (in_group_X < GROUP) & (experts_X < NUM_EXPERTS)
    experts_X = tl.where(ok_X, experts_X, NUM_EXPERTS)
    let_next_start(PDL)
    wait_for_previous(PDL)
    at_X = logits_ptr + token.to(tl.int64) * logits_stride + experts_X
    logits_X = tl.load(at_X, mask=ok_X, other=-float("inf")).to(tl.float32)
    if SIGMOID:
        scores_X = 1.0 / (1.0 + tl.exp(-logits_X))
    else:
        exp_X = tl.exp(logits_X - tl.max(logits_X, 0))
        scores_X = exp_X / tl.sum(exp_X, 0)
    choice_X = scores_X
    if HAS_BIAS:
        choice_X += tl.load(bias_ptr + experts_X, mask=ok_X, other=0.0).to(tl.float32)
    choice_X = tl.where(ok_X, choice_X, -float("inf"))
    if NUM_GROUPS > 1:
        choice_X = _only_best_groups(choice_X, BLOCK_X, BLOCK_GROUPS, TOP_GROUPS, GROUP_BEST)
    slots_K = tl.arange(0, BLOCK_K)
    weights_K = tl.zeros((BLOCK_K,), dtype=tl.float32)
    ids_K = tl.zeros((BLOCK_K,), dtype=tl.int32)
    for k in tl.static_range(TOP_K):
        expert = tl.min(tl.where(choice_X == tl.max(choice_X, 0), experts_X, NUM_EXPERTS), 0)
        expert = tl.minimum(expert, NUM_EXPERTS - 1)  # with NaN logits no expert is found, but the id must be valid
        weight = tl.sum(tl.where(experts_X == expert, scores_X, 0.0), 0)
        weights_K = tl.where(slots_K == k, weight, weights_K)
        ids_K = tl.where(slots_K == k, expert, ids_K)
        choice_X = tl.where(experts_X == expert, -float("inf"), choice_X)
    if RENORMALIZE:
        weights_K /= tl.maximum(tl.sum(weights_K, 0), smallest_sum)
    out_K = token * TOP_K + slots_K
    tl.store(weights_ptr + out_K, weights_K * scale, mask=slots_K < TOP_K)
    tl.store(ids_ptr + out_K, ids_K, mask=slots_K < TOP_K)


def route(
    logits_TX: torch.Tensor,
    top_k: int,
    scoring: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    bias_X: torch.Tensor | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    group_best: int = 2,
    *,
    smallest_sum: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `cas::route`. smallest_sum: divisor of weights of 0."""
    if logits_TX.stride(1) != 1:
        logits_TX = logits_TX.contiguous()
    num_tokens, num_experts = logits_TX.shape
    group_size = num_experts // num_groups
    block_groups = next_power_of_2(num_groups)
    block_x = block_groups * next_power_of_2(group_size)
    weights_TK = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits_TX.device)
    ids_TK = torch.empty(num_tokens, top_k, dtype=torch.int32, device=logits_TX.device)
    pdl = supports_pdl(logits_TX.device)
    if num_tokens:
        launch(
            _route_kernel,
            (num_tokens,),
            logits_TX,
            bias_X,
            weights_TK,
            ids_TK,
            logits_TX.stride(0),
            float(scale),
            smallest_sum,
            NUM_EXPERTS=num_experts,
            BLOCK_X=block_x,
            TOP_K=top_k,
            BLOCK_K=next_power_of_2(top_k),
            SIGMOID=scoring == "sigmoid",
            RENORMALIZE=renormalize,
            HAS_BIAS=bias_X is not None,
            NUM_GROUPS=num_groups,
            BLOCK_GROUPS=block_groups,
            TOP_GROUPS=top_groups,
            GROUP_BEST=min(group_best, group_size),
            PDL=pdl,
            num_warps=1 if block_x <= 256 else 4,
            **launch_options(pdl),
        )
    return weights_TK, ids_TK
