"""`cas::lora_add`: adds to a linear's output what each token's LoRA adapter contributes (Hu et al., arXiv:2106.09685).

Adapters lie in slots of fixed shapes, so that loading one copies tensors and changes no address: CUDA graphs and compiled
pieces stay valid. The scale alpha / rank is folded into B when an adapter is loaded, and smaller ranks are padded with zeros.

Shape legend: T tokens, I and O input and output features, S adapter slots, R the largest rank.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from compile_and_serve.custom_ops.library import OpKind, define


def _lora_add(
    y_TO: torch.Tensor, x_TI: torch.Tensor, a_SRI: torch.Tensor, b_SOR: torch.Tensor, index_T: torch.Tensor
) -> torch.Tensor:
    out_TO = y_TO.clone(memory_format=torch.contiguous_format)
    for index, tokens in _groups(index_T.tolist()).items():
        a_RI, b_OR = a_SRI[index - 1].to(x_TI.dtype), b_SOR[index - 1].to(x_TI.dtype)
        if isinstance(tokens, slice):
            out_TO[tokens].addmm_(F.linear(x_TI[tokens], a_RI), b_OR.T)
        else:
            out_TO[tokens] += F.linear(F.linear(x_TI[tokens], a_RI), b_OR)
    return out_TO


def _groups(indices: list[int]) -> dict[int, slice | list[int]]:
    """Adapter → its tokens; as a slice where they are consecutive, which avoids copies."""
    if not indices or indices.count(indices[0]) == len(indices):
        return {indices[0]: slice(None)} if indices and indices[0] else {}
    groups: dict[int, list[int]] = {}
    for token, index in enumerate(indices):
        if index:
            groups.setdefault(index, []).append(token)
    return {
        index: slice(tokens[0], tokens[-1] + 1) if tokens[-1] - tokens[0] + 1 == len(tokens) else tokens
        for index, tokens in groups.items()
    }


def _lora_add_cuda(
    y_TO: torch.Tensor, x_TI: torch.Tensor, a_SRI: torch.Tensor, b_SOR: torch.Tensor, index_T: torch.Tensor
) -> torch.Tensor:
    from compile_and_serve.custom_ops.lora.triton_lora import lora_add as triton_lora_add  # Triton may be missing

    y_TO, x_TI = (value if value.stride(1) == 1 else value.contiguous() for value in (y_TO, x_TI))
    return triton_lora_add(y_TO, x_TI, a_SRI, b_SOR, index_T)


def _fake(
    y_TO: torch.Tensor, x_TI: torch.Tensor, a_SRI: torch.Tensor, b_SOR: torch.Tensor, index_T: torch.Tensor
) -> torch.Tensor:
    if y_TO.dim() != 2 or x_TI.dim() != 2:
        raise ValueError("cas::lora_add takes [tokens, features].")
    if a_SRI.shape[2] != x_TI.shape[1] or b_SOR.shape[1] != y_TO.shape[1] or a_SRI.shape[1] != b_SOR.shape[2]:
        raise ValueError(
            f"cas::lora_add: adapters {tuple(a_SRI.shape)} and {tuple(b_SOR.shape)} do not fit {tuple(x_TI.shape)} → "
            f"{tuple(y_TO.shape)}."
        )
    return y_TO.new_empty(y_TO.shape)


_op = define(
    "lora_add(Tensor y, Tensor x, Tensor a, Tensor b, Tensor adapter_index) -> Tensor",
    kind=OpKind.CAPTURABLE, version=1, fake=_fake, CompositeExplicitAutograd=_lora_add, CUDA=_lora_add_cuda,
)  # fmt: skip


def lora_add(
    y_TO: torch.Tensor, x_TI: torch.Tensor, a_SRI: torch.Tensor, b_SOR: torch.Tensor, index_T: torch.Tensor
) -> torch.Tensor:
    """out[t] = y[t] + B[s] (A[s] x[t]) with s = index[t] - 1; out[t] = y[t] where index[t] is 0.

    y_TO: [T, O]. x_TI: [T, I]. Rows of both may be strided. a_SRI: [S, R, I]; b_SOR: [S, O, R], scaled. index_T: int32 [T], 0 to S;
    0 means no adapter. → [T, O], contiguous, y's dtype.
    """
    return _op(y_TO, x_TI, a_SRI, b_SOR, index_T)
