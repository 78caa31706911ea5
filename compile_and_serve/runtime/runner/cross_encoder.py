"""`CrossEncoder`: a model beside the engine's, whose rows are the keys and values of the engine's model's cross-attention.

Shape legend: T rows of the items in a step, L layers, K key/value heads of all ranks, k those of this one, E head size, N pages, P rows
per page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

from compile_and_serve.compiler.cudagraphs.runner import CudaGraphRunner, PlainRunner
from compile_and_serve.custom_ops.attention.torch_backend import write_kv_cache
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.quantization import round_to_cache
from compile_and_serve.custom_ops.state.tokens import AttentionLayer
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.runtime.runner.media_encoder import PackedEncoder
from compile_and_serve.runtime.scheduler.step_messages import EncodeItem, EncoderInfo
from compile_and_serve.runtime.side_model import SideModel


class CrossCaches:
    """Where rows go. A row has the keys and values of layer 0, then those of layer 1, …: [L, 2, K, E]. A rank keeps its heads'."""

    def __init__(self, spec: ModelSpec, device: torch.device, *, tensor_rank: int, tensor_size: int) -> None:
        """spec: of the engine's model. tensor_rank, tensor_size: the place on the tensor axis, and its length."""
        group = spec.cross_group
        assert group is not None
        self._names, self._head_dim = group.tensor_names, cast(AttentionLayer, group.layers[0]).head_dim
        self._tensor_rank, self._tensor_size, self._platform = tensor_rank, tensor_size, platform_of(device)
        self._caches: list[torch.Tensor] = []

    def take(self, state: dict[str, torch.Tensor]) -> None:
        """Write to these tensors of the model's state from now on."""
        self._caches = [state[name] for name in self._names]

    def write(self, items: Sequence[EncodeItem], rows_TD: torch.Tensor) -> None:
        """Write the rows of items, which lie one behind the other, without waiting for the device."""
        size = self._caches[0].shape[3]
        numbers_T = np.concatenate([_places(one, size) for one in items])
        slots_T = self._platform.upload(numbers_T, through_pinned=True)
        rows_TL2KE = rows_TD.view(len(rows_TD), len(self._caches), 2, -1, self._head_dim)
        first = self._tensor_rank * rows_TL2KE.shape[3] // self._tensor_size
        for number, cache in enumerate(self._caches):
            k_TKE, v_TKE = rows_TL2KE[:, number, :, first : first + cache.shape[2]].unbind(1)
            write_rows(k_TKE, v_TKE, cache, slots_T)


class CrossEncoder(PackedEncoder):
    """Every rank computes all rows."""

    has_region = False

    def __init__(
        self,
        side: SideModel,
        steps: PlainRunner | CudaGraphRunner,
        spec: ModelSpec,
        info: EncoderInfo,
        device: torch.device,
        caches: CrossCaches,
    ) -> None:
        super().__init__(side, steps, spec, info, device)
        self._caches = caches

    def share(self, state: dict[str, torch.Tensor]) -> None:
        self._caches.take(state)

    def encode(self, items: Sequence[EncodeItem]) -> None:
        batch: list[EncodeItem] = []
        for one in items:
            if sum(other.length for other in batch) + one.length > self.max_tokens:
                self._caches.write(batch, self._rows_of(batch))
                batch = []
            batch.append(one)
        self._caches.write(batch, self._rows_of(batch))


def write_rows(k_TKE: torch.Tensor, v_TKE: torch.Tensor, cache: torch.Tensor, slots_T: torch.Tensor) -> None:
    """Write keys and values [T, K, E] to a cache [N, 2, K, P, E], without waiting for the device. slots_T: int64, page * P + place."""
    if cache.dtype == torch.int8:
        write_kv_cache(k_TKE, v_TKE, cache, slots_T)
        return
    pages_T, places_T = slots_T // cache.shape[3], slots_T % cache.shape[3]
    cache[pages_T, 0, :, places_T] = round_to_cache(k_TKE, cache.dtype)
    cache[pages_T, 1, :, places_T] = round_to_cache(v_TKE, cache.dtype)


def _places(item: EncodeItem, size: int) -> np.ndarray:
    """int64 [length]: the slots of an item's rows, `size` of which lie in each of its pages."""
    begins = np.array(item.page_ids, dtype=np.int64) * size
    return (begins[:, None] + np.arange(size)).reshape(-1)[: item.length]
