"""`cas::lora_add`: adds to a linear's output what each token's LoRA adapter contributes (Hu et al., arXiv:2106.09685).

Adapters lie in slots of fixed shapes, so that loading one copies tensors and changes no address: CUDA graphs and compiled
pieces stay valid. The scale alpha / rank is folded into B when an adapter is loaded, and smaller ranks are padded with zeros.
A linear that was merged from P linears has the P matrices A one after another, and one B for each part of its outputs. B lies in blocks
of N = 16 outputs: kernels read it from one end to the other.

Shape legend: T tokens, I and O input and output features, S adapter slots, R the largest rank, P merged linears, Q = P · R,
C = ceil(O / N) blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from compile_and_serve.custom_ops.library import define
from compile_and_serve.custom_ops.lora.limits import COLUMNS, MAX_PARTS, TILE


def _lora_add(
    y_TO: torch.Tensor,
    x_TI: torch.Tensor,
    a_SQI: torch.Tensor,
    b_SCRN: torch.Tensor,
    index_T: torch.Tensor,
    ends: Sequence[int],
    groups_T4: torch.Tensor | None = None,
) -> torch.Tensor:
    out_TO = y_TO.clone(memory_format=torch.contiguous_format)
    rank = b_SCRN.shape[2]
    for index, tokens in _groups(index_T.tolist()).items():
        h_TQ = F.linear(x_TI[tokens], a_SQI[index - 1].to(x_TI.dtype))
        b_RO = unblocked(b_SCRN[index - 1]).to(x_TI.dtype)
        for part, (begin, end) in enumerate(pairwise((0, *ends))):
            out_TO[tokens, begin:end] += h_TQ[:, part * rank : (part + 1) * rank] @ b_RO[:, begin:end]
    return out_TO


def unblocked(b_CRN: torch.Tensor) -> torch.Tensor:
    """One slot's B as [R, C * N]."""
    return b_CRN.transpose(0, 1).flatten(1)


def _groups(indices: list[int]) -> dict[int, slice | list[int]]:
    """Adapter → its tokens; as a slice where they are consecutive, which avoids copies."""
    if not indices or indices.count(indices[0]) == len(indices):
        return {indices[0]: slice(None)} if indices and indices[0] else {}
    groups: dict[int, list[int]] = {}
    for token, index in enumerate(indices):
        if index:
            groups.setdefault(index, []).append(token)
    return {
        index: slice(tokens[0], tokens[-1] + 1) if tokens[-1] - tokens[0] + 1 == len(tokens) else tokens for index, tokens in groups.items()
    }


def _lora_add_cuda(*args: Any) -> torch.Tensor:
    from compile_and_serve.custom_ops.lora.triton_lora import lora_add as triton_lora_add  # Triton may be missing

    return triton_lora_add(*args)


def check_adapters(out_features: int, x_TI: torch.Tensor, a_SQI: torch.Tensor, b_SCRN: torch.Tensor, ends: Sequence[int]) -> None:
    """Raise `ValueError` for adapters that do not fit a linear of x with `out_features` outputs."""
    if x_TI.dim() != 2:
        raise ValueError("Adapters take [tokens, features].")
    rank = b_SCRN.shape[2]
    if not 0 < len(ends) <= MAX_PARTS:
        raise ValueError(f"Adapters take linears of 1 to {MAX_PARTS} parts, not {len(ends)}.")
    fits = b_SCRN.shape[1::2] == (-(-out_features // COLUMNS), COLUMNS) and ends[-1] == out_features
    if a_SQI.shape[1:] != (len(ends) * rank, x_TI.shape[1]) or not fits:
        raise ValueError(
            f"Adapters {tuple(a_SQI.shape)} and {tuple(b_SCRN.shape)} of {len(ends)} parts do not fit {tuple(x_TI.shape)} → "
            f"{out_features} features."
        )


def _fake(
    y_TO: torch.Tensor, x_TI: torch.Tensor, a_SQI: torch.Tensor, b_SCRN: torch.Tensor, index_T: Any, ends: Any, *_: Any
) -> torch.Tensor:
    check_adapters(y_TO.shape[1], x_TI, a_SQI, b_SCRN, ends)
    return y_TO.new_empty(y_TO.shape)


LORA_ADD = define(
    "lora_add(Tensor y, Tensor x, Tensor a, Tensor b, Tensor adapter_index, int[] ends, Tensor? groups=None) -> Tensor",
    version=2,
    fake=_fake,
    reference=_lora_add,
    row_wise=True,
    CUDA=_lora_add_cuda,
)


def lora_add(
    y_TO: torch.Tensor,
    x_TI: torch.Tensor,
    a_SQI: torch.Tensor,
    b_SCRN: torch.Tensor,
    index_T: torch.Tensor,
    ends: Sequence[int],
    groups_T4: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[t] = y[t] + B[s] (A[s] x[t]) with s = index[t] - 1, for each part of the outputs; out[t] = y[t] where index[t] is 0.

    y_TO: [T, O]. x_TI: [T, I]. Rows of both may be strided. a_SQI: [S, P * R, I]; b_SCRN: [S, ceil(O / 16), R, 16], scaled, padded
    with zeros. index_T: int32 [T], 0 to S; 0 means no adapter. ends: where the P parts of the outputs end. groups_T4:
    `lora_groups(index_T)`; None: computed where a kernel needs it. → [T, O], contiguous, y's dtype.
    """
    return LORA_ADD(y_TO, x_TI, a_SQI, b_SCRN, index_T, ends, groups_T4)


def _lora_groups(index_T: torch.Tensor) -> torch.Tensor:
    """The reference of the kernel's result; only GPUs use it."""
    keys_T = torch.where(index_T > 0, index_T, torch.iinfo(torch.int32).max)
    order_T = keys_T.argsort(stable=True)
    sorted_T = keys_T[order_T]
    earlier_TT = torch.ones(len(order_T), len(order_T), dtype=torch.bool, device=index_T.device).tril(-1)
    is_equal_TT = sorted_T[:, None] == sorted_T
    place_T, size_T = (is_equal_TT & earlier_TT).sum(1), is_equal_TT.sum(1)
    count_T = torch.where(place_T % TILE == 0, (size_T - place_T).clamp(max=TILE), 0)
    used = index_T[index_T > 0].unique()
    return torch.stack([order_T, index_T[order_T], count_T, F.pad(used, (0, len(order_T) - len(used)))], dim=1).to(torch.int32)


def _lora_groups_cuda(index_T: torch.Tensor) -> torch.Tensor:
    from compile_and_serve.custom_ops.lora.triton_lora import lora_groups as triton_lora_groups  # Triton may be missing

    return triton_lora_groups(index_T)


LORA_GROUPS = define(
    "lora_groups(Tensor adapter_index) -> Tensor",
    version=2,
    fake=lambda index_T: index_T.new_empty(index_T.shape[0], 4),
    reference=_lora_groups,
    CUDA=_lora_groups_cuda,
)


def lora_groups(index_T: torch.Tensor) -> torch.Tensor:
    """A step's tokens in the order of their adapters, those without one last; computed once for all layers.

    index_T: int32 [T]. → int32 [T, 4]: the token, its index, and how many tokens a tile has that begins here (1 to `TILE` tokens
    of one adapter), else 0. The last column lists the indices in use, each once, and then zeros. A GPU does not fill it for more than 64
    tokens, nor the others where T is so large that kernels take tokens in their own order.
    """
    return LORA_GROUPS(index_T)
