"""Classes of the transformers package whose attention depends on the distance of two tokens: encoders of T5, DeBERTa-v2 and v3.

Shape legend: T tokens of the step, H heads, E head size, F distances, R columns of a bias (`encoder_attention`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutput

from compile_and_serve.models.transformers.attention import Mask, Unsupported, attention_forward

BOTH_WAYS = Mask(both_ways=True)


def columns_of(module: Any) -> torch.Tensor | None:
    """The column of the module's biases for each distance j - i of a key j from a query i: int64 [F], on the CPU; None: it has none."""
    if type(module).__name__ in _T5_ATTENTION:
        farthest = int(module.relative_attention_max_distance)
        distances = torch.arange(-farthest, farthest + 1)
        if type(module).__name__ == "UMT5Attention":
            return module._relative_position_bucket(distances)
        return module._relative_position_bucket(
            distances, not module.is_decoder, num_buckets=module.relative_attention_num_buckets, max_distance=farthest
        )
    if _is_deberta(module) and module.relative_attention:
        span, farthest = int(module.pos_ebd_size), int(module.max_relative_positions)
        distances = torch.arange(-2 * farthest, 2 * farthest + 1)
        return (span + _deberta_buckets(-distances, int(module.position_buckets), farthest)).clamp(0, 2 * span - 1)
    return None


def _deberta_buckets(places: torch.Tensor, num_buckets: int, farthest: int) -> torch.Tensor:
    """Places of a query behind its key: exact up to num_buckets // 2, then on a logarithmic scale (arXiv:2111.09543); < 1: exact."""
    if num_buckets < 1:
        return places
    middle = num_buckets // 2
    size = places.abs().clamp(min=middle)
    ratio = torch.log(size / middle) / torch.log(torch.tensor((farthest - 1) / middle)) * (middle - 1)
    return torch.where(places.abs() <= middle, places, ((torch.ceil(ratio) + middle) * places.sign()).long())


def _t5_bias(module: Any, *_: Any, **__: Any) -> torch.Tensor:
    """[H, R] in place of a bias for each pair of tokens: attention finds the column by their distance."""
    return module.relative_attention_bias.weight.t()


def _deberta(
    module: Any, hidden_states: torch.Tensor, *_: Any, rel_embeddings: torch.Tensor | None = None, **__: Any
) -> tuple[torch.Tensor, None]:
    """Content to content, content to position and position to content (arXiv:2006.03654)."""
    size = module.attention_head_size
    kinds = [kind for kind in ("c2p", "p2c") if kind in module.pos_att_type]
    scale = 1.0 / math.sqrt(size * (1 + len(kinds)))
    heads = [
        projection(hidden_states)[0].unflatten(-1, (-1, size)) for projection in (module.query_proj, module.key_proj, module.value_proj)
    ]
    biases: dict[str, torch.Tensor] = {}
    if module.relative_attention:
        assert rel_embeddings is not None
        places_RD = rel_embeddings[: 2 * module.pos_ebd_size]
        shared = module.share_att_key
        if "c2p" in kinds:
            keys_RHE = (module.key_proj if shared else module.pos_key_proj)(places_RD).unflatten(-1, (-1, size))
            biases["key_places_RHE"] = keys_RHE
        if "p2c" in kinds:
            queries_RHE = (module.query_proj if shared else module.pos_query_proj)(places_RD).unflatten(-1, (-1, size))
            biases["query_places_RHE"] = queries_RHE
    q, k, v = (x_THE.transpose(0, 1)[None] for x_THE in heads)
    return attention_forward(module, q, k, v, None, scale, own_mask=BOTH_WAYS, biases=biases)[0].flatten(2), None


def _deberta_encoder(module: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> BaseModelOutput:
    """The original makes tables of all pairs of tokens."""
    if module.conv is not None:
        raise Unsupported("its convolution mixes tokens outside of attention")
    places_RD = module.get_rel_embedding()
    for layer in module.layer:
        hidden_states = layer(hidden_states, None, rel_embeddings=places_RD)[0]
    return BaseModelOutput(last_hidden_state=hidden_states, hidden_states=(hidden_states,))


_T5_ATTENTION = ("T5Attention", "MT5Attention", "UMT5Attention")
_DEBERTA = "transformers.models.deberta_v2.modeling_deberta_v2.DisentangledSelfAttention"


def _is_deberta(module: Any) -> bool:
    return f"{type(module).__module__}.{type(module).__name__}" == _DEBERTA


METHODS: dict[str, tuple[str, Callable[..., Any]]] = {  # as `older` has them
    **dict.fromkeys(_T5_ATTENTION, ("compute_bias", _t5_bias)),
    _DEBERTA: ("forward", _deberta),
    "DebertaV2Encoder": ("forward", _deberta_encoder),
}
