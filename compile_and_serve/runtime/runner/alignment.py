"""Cross-attention weights of the heads by which a transcript's tokens are aligned with what was heard.

Attention itself keeps no weights. So a request that asks for them brings its tokens as a prompt; the model gives the queries of these
heads, and the weights are computed of them and of the encoder's keys.

Shape legend: T tokens, A heads, R rows of the encoder, E head size, N pages, P rows per page, K heads of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.step import ALIGNMENT_QUERIES
from compile_and_serve.custom_ops.step_data import CROSS_ROWS_DATUM
from compile_and_serve.models.families.whisper import ALIGNMENT_HEADS
from compile_and_serve.models.spec import ModelSpec
from compile_and_serve.runtime.runner.base_batch import HeldRequest
from compile_and_serve.runtime.runner.block_tables import BlockTables


class AlignmentWeights:
    """Of one runner. state: its tensors by name. table: the pages of requests' rows."""

    def __init__(self, spec: ModelSpec, state: Mapping[str, torch.Tensor], table: BlockTables) -> None:
        group = spec.cross_group
        assert group is not None
        self._heads: list[list[int]] = spec.config[ALIGNMENT_HEADS]
        self._caches, self._table = [state[name] for name in group.tensor_names], table

    @classmethod
    def of(cls, spec: ModelSpec, state: Mapping[str, torch.Tensor], tables: Mapping[str, Any]) -> AlignmentWeights | None:
        """None for a model without such heads."""
        if all(one.name != ALIGNMENT_QUERIES for one in spec.outputs):
            return None
        assert spec.cross_group is not None
        return cls(spec, state, tables[spec.cross_group.name])

    def of_prompt(self, request: HeldRequest, outputs: Mapping[str, torch.Tensor], place: slice) -> torch.Tensor | None:
        """On the host, once the device is there: of the tokens of a prompt whose rows of output lie at `place`; None: it asks for none."""
        if not request.params.aligned_rows:
            return None
        num_rows = int(request.step_data[CROSS_ROWS_DATUM])
        weights_TAR = self.compute(outputs[ALIGNMENT_QUERIES][place], request.slot, num_rows, request.params.aligned_rows)
        return platform_of(weights_TAR.device).download(weights_TAR)

    def compute(self, queries_TF: torch.Tensor, slot: int, num_rows: int, wanted: int) -> torch.Tensor:
        """float32 [T, A, R]: softmax over `num_rows` rows, of which the first R = `wanted` are kept. queries_TF: [T, A · E]."""
        size = self._caches[0].shape[3]
        pages = platform_of(queries_TF.device).upload(self._table.slot_table[slot, : -(-num_rows // size)].astype(np.int64))
        found = []
        queries = queries_TF.float().unflatten(1, (len(self._heads), -1)).unbind(1)
        for (layer, head), q_TE in zip(self._heads, queries, strict=True):
            k_RE = self._caches[layer][pages, 0, head].flatten(0, 1)[:num_rows].float()
            found.append((q_TE @ k_RE.t() * q_TE.shape[1] ** -0.5).softmax(dim=1)[:, :wanted])
        return torch.stack(found, dim=1)
