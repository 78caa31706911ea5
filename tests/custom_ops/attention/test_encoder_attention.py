"""`cas::encoder_attention` beside softmax(q kᵀ) v in float64, one segment after another: the CPU's kernel and torch's attention."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from compile_and_serve.custom_ops.attention import encoder_attention as op
from compile_and_serve.custom_ops.state.metadata import StepLengths
from compile_and_serve.custom_ops.step import SEQUENCES, running
from tests.support.numbers import relative_error

LENGTHS = (1, 130, 7, 7, 64, 33, 300)
PADDING = 3


def metadata_of(lengths: tuple[int, ...]) -> dict[str, StepLengths]:
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    sizes = torch.tensor(lengths, dtype=torch.int32)
    lengths_of_step = StepLengths(
        query_start_loc=torch.from_numpy(starts),
        seq_lens=sizes,
        num_seqs=len(lengths),
        num_tokens=int(starts[-1]),
        max_query_len=max(lengths),
        max_seq_len=max(lengths),
        query_start_loc_cpu=starts,
    )
    return {SEQUENCES: lengths_of_step}


def expected(starts: list[int], rows: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, options: dict[str, Any]) -> Any:
    """In float64: [N, H, E]."""
    flat = [x.double().reshape(-1, *x.shape[-2:]) for x in (q, k, v)]
    q_NHE, k_NHE, v_NHE = flat[0], *(x.repeat_interleave(flat[0].shape[1] // x.shape[1], dim=1) for x in flat[1:])
    out_NHE = torch.zeros_like(q_NHE)
    for begin, end in pairwise(start * rows for start in starts):
        scores_HBB = torch.einsum("ihe,jhe->hij", q_NHE[begin:end], k_NHE[begin:end]) * scale
        places = torch.arange(end - begin)
        distance_BB = places - places[:, None]
        if (columns_F := options.get("columns_F")) is not None:
            middle = len(columns_F) // 2
            columns_BB = columns_F[(distance_BB + middle).clamp(0, 2 * middle)]
            heads = torch.arange(q.shape[-2])[:, None, None]
            scores_HBB += options["distance_bias_HR"].double()[:, columns_BB]
            if (places_RHE := options.get("key_places_RHE")) is not None:
                products_BHR = torch.einsum("ihe,rhe->ihr", q_NHE[begin:end], places_RHE.double()) * scale
                scores_HBB += products_BHR[places[:, None], heads, columns_BB]
            if (places_RHE := options.get("query_places_RHE")) is not None:
                products_BHR = torch.einsum("jhe,rhe->jhr", k_NHE[begin:end], places_RHE.double()) * scale
                scores_HBB += products_BHR[places, heads, columns_BB]
        if window := options.get("window"):
            scores_HBB.masked_fill_(distance_BB.abs() > window, float("-inf"))
        out_NHE[begin:end] = torch.einsum("hij,jhe->ihe", scores_HBB.softmax(2), v_NHE[begin:end])
    return out_NHE


def by_triton(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: list[int], scale: float, options: dict[str, Any]) -> Any:
    from compile_and_serve.custom_ops.attention.triton_encoder import triton_encoder_attention

    products = [
        None if options.get(name) is None else op._products(x, options[name], scale)
        for name, x in (("key_places_RHE", q), ("query_places_RHE", k))
    ]
    on_device = torch.tensor(starts, dtype=torch.int32)
    biases = options.get("columns_F"), options.get("distance_bias_HR"), *products
    return triton_encoder_attention(q, k, v, on_device, max(LENGTHS), scale, options.get("window", 0), *biases)


@pytest.mark.slow_cases
@pytest.mark.parametrize("case", ["plain", "window", "distances", "queries and keys", "rows and ends"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 32), (6, 2, 64), (2, 2, 24)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["C++", "torch", "Triton"])
def test_it_equals_softmax(
    kernel: str, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel == "Triton":
        pytest.importorskip("triton")
        if torch.cuda.is_available() or case == "rows and ends" or dtype == torch.bfloat16:
            pytest.skip("in Triton's interpreter, which has no products of bfloat16, for rows of sequences")
    if kernel == "torch":
        monkeypatch.setattr(op, "load_cpu_kernels", lambda: False)
    torch.manual_seed(head_dim)
    if case == "queries and keys":
        kv_heads = heads
    rows = 4 if case == "rows and ends" else 1
    num_tokens = sum(LENGTHS) + PADDING
    shape = (num_tokens, rows) if rows > 1 else (num_tokens,)
    qkv = torch.randn(*shape, (heads + 2 * kv_heads), head_dim).to(dtype)  # as a merged linear gives them
    q, k, v = qkv.split((heads, kv_heads, kv_heads), dim=-2)
    options: dict[str, Any] = {"window": 20} if case == "window" else {}
    starts = np.cumsum([0, *LENGTHS]).tolist()
    if case in ("distances", "queries and keys"):
        options = {"columns_F": torch.randint(0, 16, (41,)), "distance_bias_HR": torch.randn(heads, 16).to(dtype)}
    if case == "queries and keys":
        options |= {name: torch.randn(16, heads, head_dim).to(dtype) for name in ("key_places_RHE", "query_places_RHE")}
    if rows > 1:
        starts = [0, 3, 3, 17, 90]
        ends_T = torch.zeros(num_tokens, dtype=torch.int32)
        ends_T[:4] = torch.tensor(starts[1:])
        options = {"ends_T": ends_T, "max_segment": 73}
    if kernel == "Triton":
        out = by_triton(q, k, v, starts, 0.3, options)
    else:
        with running(metadata_of(LENGTHS)):
            out = op.encoder_attention(q, k, v, 0.3, **options)
    assert out.shape == q.shape
    assert out.isfinite().all()
    wanted = expected(starts, rows, q, k, v, 0.3, options)[: starts[-1] * rows]
    found = out.reshape(-1, heads, head_dim)[: starts[-1] * rows]
    assert relative_error(found, wanted) < (1e-5 if dtype == torch.float32 else 1e-2)
