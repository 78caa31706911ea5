"""FlashInfer's prefill kernels: planned once for the prompts of a step, then run in every layer.

The functions of a built module are called directly. FlashInfer's own wrappers would call them with the same arguments, but importing the
wrappers takes a second of Python, for which the first requests would wait. The arguments are those of FlashInfer 0.6.11 to 0.7.4: see its
csrc/batch_prefill_jit_binding.cu and csrc/batch_prefill_sm90_jit_binding.cu, and gen_batch_prefill_module for the last ones.

Shape legend: T tokens of the prompts, S prompts, H query heads, K key/value heads, E head size, N cache blocks, P tokens per block, J pages
of the prompts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from compile_and_serve.custom_ops.attention.flashinfer_modules import Variant, flashinfer_version
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.platforms.protocol import Event

PLAN_BYTES = 8 << 20
_CAUSAL = 1  # FlashInfer's MaskMode
_TOKENS_FIRST, _HEADS_FIRST = 0, 1  # FlashInfer's TensorLayout: [T, K, E] and [N, K, P, E]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What a plan depends on beside the step."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    kv_cache_dtype: torch.dtype
    scale: float
    window: int | None = None
    soft_cap: float = 0.0


class FlashInferPrefill:
    """One plan at a time, and the runs that follow it."""

    def __init__(self, variant: Variant, workspace: torch.Tensor, *, is_ragged: bool) -> None:
        """workspace: uint8, on the device, for partial results; instances may share it. is_ragged: without pages."""
        self.variant = variant
        self.kernels = f"flashinfer {variant}"
        self.is_ragged = is_ragged
        self._platform = platform_of(workspace.device)
        self._overlaps_launches = self._platform.compute_capability >= (9, 0)
        self._memory = (workspace, torch.empty(PLAN_BYTES, dtype=torch.uint8, device=workspace.device))
        self._plan_on_host = self._platform.host_zeros(PLAN_BYTES, torch.uint8)
        self._copied: Event | None = None  # recorded after the device has read the last plan

    def plan(
        self,
        module: Any,
        shape: AttentionShape,
        query_start_loc: np.ndarray,
        seq_lens: np.ndarray,
        key_start_loc: np.ndarray,
        pages: tuple[torch.Tensor, np.ndarray] | None = None,
    ) -> None:
        """Plan the runs for the prompts of a step.

        query_start_loc: int32 [S + 1], from 0. seq_lens: int32 [S], of keys. key_start_loc: int32 [S + 1], where each prompt's keys begin,
        counted in pages if there are `pages`, else in tokens. pages: the block of each page, int32 [J], on the device, and the number of
        tokens in each prompt's last page, int32 [S].
        """
        if self._copied is not None:
            # Every plan is written to the same host memory, which the device may still be reading for the previous step.
            self._copied.synchronize()
        window_left = -1 if shape.window is None else shape.window - 1
        self._num_tokens = int(query_start_loc[-1])
        lengths = map(torch.from_numpy, (query_start_loc, key_start_loc, seq_lens))
        arguments = [
            *self._memory,
            self._plan_on_host,
            *lengths,
            self._num_tokens,
            len(seq_lens),
            shape.num_heads,
            shape.num_kv_heads,
            shape.block_size if pages else 1,
            False,
            shape.head_dim,
            shape.head_dim,
            True,
            window_left,
        ]
        if self.variant == "fa2":
            arguments += [-1, False, 0]  # splits of any size, and no other kernel beside
            if flashinfer_version() >= (0, 6, 16):
                arguments.append(0)  # prompts of any lengths
            if flashinfer_version() >= (0, 7, 4):
                arguments.append(False)  # nor are those of later plans alike
        plan_info = module.plan(*arguments)
        self._run = module.paged_run if pages else module.ragged_run
        self._memory_and_plan = (*self._memory, plan_info)
        upload = self._platform.upload
        starts = upload(query_start_loc)
        self._places: tuple[torch.Tensor, ...] = (starts, starts if key_start_loc is query_start_loc else upload(key_start_loc))
        if pages is not None:
            self._places += (pages[0], upload(pages[1]))
        layout = _HEADS_FIRST if pages else _TOKENS_FIRST
        self._options: tuple[Any, ...] = (None, _CAUSAL, layout, window_left, self._overlaps_launches)
        if self.variant == "fa2":
            # No mask, ALiBi, multi-item scoring or 4-bit scales; then the factors of a RoPE that does not run.
            self._options += (*[None] * 8, shape.soft_cap, shape.scale, 1.0, 1.0, 0)
        else:
            # No multi-item scoring, and no scale of the values.
            self._options += (*[None] * 4, shape.soft_cap, shape.scale, 1.0, 0)
        self._copied = self._platform.record_event()

    def run(self, q_THE: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out_THE: torch.Tensor) -> None:
        """Attend as planned. keys and values: [N, K, P, E] with pages, else [all keys, K, E]."""
        assert q_THE.shape[0] == self._num_tokens, "planned for another number of tokens"
        self._run(*self._memory_and_plan, q_THE, keys, values, *self._places, out_THE, *self._options)
