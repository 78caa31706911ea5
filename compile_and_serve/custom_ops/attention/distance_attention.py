"""`cas::distance_attention`: causal attention over a paged KV cache with a bias for each distance (T5's decoder); a split point.

It is plain torch on every device. Each token is a sequence of its own, of which all pages are gathered, so that nothing waits for the
device and CUDA graphs of decodes serve any lengths.

Shape legend: T tokens of the step, H heads, E head size, N pages, P tokens per page, M block-table columns, C = M · P, F distances,
R columns of the bias.
"""

from __future__ import annotations

import torch

from compile_and_serve.custom_ops.attention.int8_cache import int8_parts
from compile_and_serve.custom_ops.attention.torch_backend import read_blocks
from compile_and_serve.custom_ops.library import OpKind, Sharding, define
from compile_and_serve.custom_ops.quantization import quantize_activations, round_to_cache
from compile_and_serve.custom_ops.state.metadata import AttentionMetadata
from compile_and_serve.custom_ops.state.tokens import KV_CACHES
from compile_and_serve.custom_ops.step import current_metadata

_TOKENS_AT_ONCE = 64  # whose pages are gathered together


def _distance_attention(
    q_THE: torch.Tensor,
    k_THE: torch.Tensor,
    v_THE: torch.Tensor,
    kv_cache: torch.Tensor,
    scale: float,
    columns_F: torch.Tensor,
    distance_bias_HR: torch.Tensor,
    group: str = KV_CACHES,
) -> torch.Tensor:
    metadata: AttentionMetadata = current_metadata(group)
    num_tokens, device, size = len(q_THE), q_THE.device, kv_cache.shape[3]
    _write(k_THE, v_THE, kv_cache, metadata.slot_mapping[:num_tokens])
    places_T = torch.arange(num_tokens, dtype=torch.int32, device=device)
    sequence_T = torch.searchsorted(metadata.query_start_loc[1:], places_T, right=True).clamp(max=metadata.block_table.shape[0] - 1)
    ends_T = metadata.query_start_loc[1:][sequence_T]
    lengths_T = metadata.seq_lens[sequence_T]
    position_T = torch.minimum(lengths_T - ends_T + places_T, lengths_T - 1).clamp(min=0)  # of padding: any that was written
    table_TM = metadata.block_table[sequence_T, : -(-metadata.max_seq_len // size)].long()
    math_dtype = torch.promote_types(q_THE.dtype, torch.float32)
    bias_HR, farthest = distance_bias_HR.to(math_dtype), len(columns_F) // 2
    key_C = torch.arange(table_TM.shape[1] * size, device=device)
    parts = []
    for begin in range(0, num_tokens, _TOKENS_AT_ONCE):
        part = slice(begin, begin + _TOKENS_AT_ONCE)
        kv = read_blocks(kv_cache, table_TM[part], math_dtype)  # [T, M, 2, H, P, E]
        k_THCE, v_THCE = kv.permute(2, 0, 3, 1, 4, 5).flatten(3, 4).unbind(0)
        distance_TC = key_C - position_T[part, None]
        hidden_T1C = (distance_TC > 0)[:, None]
        bias_THC = bias_HR[:, columns_F[distance_TC.clamp(-farthest, farthest) + farthest]].transpose(0, 1)
        scores_THC = torch.einsum("the,thce->thc", q_THE[part].to(math_dtype), k_THCE) * scale + bias_THC
        chances_THC = scores_THC.masked_fill(hidden_T1C, float("-inf")).softmax(-1)
        # What no token wrote may be anything, NaN too.
        parts.append(torch.einsum("thc,thce->the", chances_THC, v_THCE.masked_fill(hidden_T1C[..., None], 0.0)))
    return torch.cat(parts).to(q_THE.dtype)


def _write(k_THE: torch.Tensor, v_THE: torch.Tensor, kv_cache: torch.Tensor, slots_T: torch.Tensor) -> None:
    """As `write_kv_cache`, without waiting for the device: padding writes what the first token writes that is none, or what is there."""
    is_token_T = slots_T >= 0
    first, places_T = is_token_T.int().argmax(), torch.arange(len(slots_T), device=slots_T.device)
    source_T = torch.where(is_token_T, places_T, first)
    slots_T = slots_T[source_T].clamp(min=0)
    pages_T, offsets_T = slots_T // kv_cache.shape[3], slots_T % kv_cache.shape[3]
    for i, x_THE in enumerate((k_THE[source_T], v_THE[source_T])):
        if kv_cache.dtype == torch.int8:
            quantized, scale = quantize_activations(x_THE.flatten(0, 1), torch.int8)
            new = zip(int8_parts(kv_cache), (quantized.view_as(x_THE), scale.view(x_THE.shape[:2]).float()), strict=True)
        else:
            new = zip((kv_cache,), (round_to_cache(x_THE, kv_cache.dtype),), strict=True)
        for cache, values in new:
            cache[pages_T, i, :, offsets_T] = torch.where(is_token_T.any(), values, cache[pages_T, i, :, offsets_T])


DISTANCE_ATTENTION = define(
    "distance_attention(Tensor q, Tensor k, Tensor v, Tensor(a!) kv_cache, float scale, Tensor columns, Tensor distance_bias, "
    'str group="kv_caches") -> Tensor',
    kind=OpKind.SPLIT_POINT,
    version=1,
    fake=lambda q_THE, *_: torch.empty(q_THE.shape, dtype=q_THE.dtype, device=q_THE.device),
    sharding=Sharding(inputs={"q": 1, "k": 1, "v": 1}, output=1, state={"kv_cache": (2, "k")}, must_shard=True),
    CompositeExplicitAutograd=_distance_attention,
)


def distance_attention(
    q_THE: torch.Tensor,
    k_THE: torch.Tensor,
    v_THE: torch.Tensor,
    kv_cache: torch.Tensor,
    scale: float,
    columns_F: torch.Tensor,
    distance_bias_HR: torch.Tensor,
    group: str = KV_CACHES,
) -> torch.Tensor:
    """out = softmax(scale · q kᵀ + bias + mask) v over each sequence's cached tokens; k and v are written to the cache first.

    q_THE, k_THE, v_THE: [T, H, E]; kv_cache: [N, 2, H, P, E] (mutated). columns_F: int64, the column of the bias for each distance from
    -(F // 2) to F // 2 of a key from its query, F odd; farther ones have that of the last. distance_bias_HR: the bias of each column.
    group: the state group of the cache. → [T, H, E] in q's dtype
    """
    return DISTANCE_ATTENTION(q_THE, k_THE, v_THE, kv_cache, scale, columns_F, distance_bias_HR, group)
