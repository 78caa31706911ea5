"""Attention backend `flashinfer`: libraries' kernels for prompts, our one-kernel decode for sequences with one query token.

Shape legend: T tokens of the step, S sequences, H query heads, K key/value heads, E head size, N cache blocks, P tokens per block,
M block-table columns.

Prompts without a cached prefix attend to the step's own keys and values, which FA3 reads faster than pages. FA3 does not multiply
bfloat16 queries by 8-bit pages: with a float8 or int8 cache, the keys and values of other prompts are first expanded to the model's
dtype. If that would take more than EXPANDED_BYTES in a step, Triton's kernel runs the step.
Windows and soft caps have modules of their own; sinks, ALiBi and chunks are left to the backend `triton`.
On Hopper, FA3 runs long prompts and large steps of prompts, and Triton's kernel the others (it was faster than FA2, but FA2's time
included its launches). On other GPUs FA2 runs all prompts.
FA3 is there from the first prompt on if the package `fa3-fwd` is installed (`flash_attention3.py`). It has no pages: the context of prompts
that continue is expanded, for any cache, within EXPANDED_BYTES. FlashInfer's module runs what it does not have; without FlashInfer,
Triton's kernel does.
Decode needs no plan, so a CUDA graph of it serves any length. Prompts are planned on the host once per step, at the first layer, when the
numbers of heads are known; all layers share the plan. Until the module that a step needs is built, which happens in the background,
Triton's kernel runs the step.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakValueDictionary

import numpy as np
import torch

from compile_and_serve.custom_ops.attention.attention import PLAIN_SCORES, Scores
from compile_and_serve.custom_ops.attention.flash_attention3 import (
    EXPANDED_BYTES,
    FA3_MIN_QUERY_LEN,
    FA3_MIN_TOKENS,
    FlashAttention3Prompts,
    flash_attention3_runs,
)
from compile_and_serve.custom_ops.attention.flashinfer_modules import FlashInferModules, Variant, flashinfer_unavailable_reason
from compile_and_serve.custom_ops.attention.flashinfer_prefill import AttentionShape, FlashInferPrefill
from compile_and_serve.custom_ops.attention.triton_backend import TritonAttention
from compile_and_serve.custom_ops.jit.triton_launch import is_compiling_ahead
from compile_and_serve.custom_ops.state.kind import AttentionFeature
from compile_and_serve.custom_ops.state.metadata import AttentionMetadata

logger = logging.getLogger(__name__)

Prefill = FlashInferPrefill | FlashAttention3Prompts

WORKSPACE_BYTES = 256 << 20
_HEAD_DIMS = (64, 128, 256)
_FEATURES: frozenset[AttentionFeature] = frozenset(["window", "soft_cap"])
# State groups, also of several engines, use one workspace after another on the device's stream; it is freed with the last backend that has
# used it.
_workspaces: WeakValueDictionary[torch.device, torch.Tensor] = WeakValueDictionary()


@dataclass(slots=True)
class StepPlan:
    """What the layers of a step share. Leading sequences with one query token are decodes; the others are prompts."""

    metadata: AttentionMetadata
    num_single: int  # decodes
    max_query_len: int
    query_start_loc: np.ndarray  # of the prompts, from 0
    seq_lens: np.ndarray  # of the prompts
    num_keys: int  # the sum of seq_lens
    is_fresh: bool  # no prompt has a cached prefix
    prefills: dict[AttentionShape, Prefill | None]  # None: Triton's kernels run them
    pages_3J: torch.Tensor | None = None  # of the prompts, where they are expanded: see `expand_pages`


class FlashInferAttention(TritonAttention):
    """Libraries' kernels for some prompts, Triton's for everything else. Each state group has an instance; all share a workspace."""

    name = "flashinfer"

    def __init__(self, module_dir: Path | None = None, *, build: bool = True) -> None:
        """module_dir: folder of the built modules; None: in the user's cache. build: build missing modules in the background."""
        super().__init__()
        self._module_dir = module_dir
        self._build = build
        self._modules: dict[tuple[torch.dtype, int, frozenset[AttentionFeature]], FlashInferModules] = {}
        self._prefills: dict[bool, FlashInferPrefill] = {}  # is ragged → its plan and runs
        self._workspace: torch.Tensor | None = None
        self.planned_step: StepPlan | None = None
        self._announced_large = False

    def unsupported_reason(
        self,
        *,
        device: torch.device,
        dtype: torch.dtype,
        kv_cache_dtype: torch.dtype,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        block_size: int,
        features: frozenset[AttentionFeature] = frozenset(),
    ) -> str | None:
        """As `AttentionBackend.unsupported_reason`."""
        reason = flashinfer_unavailable_reason(device)
        if reason and ("window" in features or not flash_attention3_runs(device, dtype, head_dim)):
            return reason
        if dtype not in (torch.bfloat16, torch.float16):
            return f"FlashInfer computes in bfloat16 or float16, not {dtype}"
        if head_dim not in _HEAD_DIMS and not flash_attention3_runs(device, dtype, head_dim):
            return f"FlashInfer's kernels are used for head sizes {_HEAD_DIMS}, not {head_dim}"
        if missing := features - _FEATURES:
            return f"FlashInfer's prefill kernels have no {', '.join(sorted(missing))}"
        return super().unsupported_reason(
            device=device,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            head_dim=head_dim,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            block_size=block_size,
            features=features,
        )

    @property
    def pending_workspace_bytes(self) -> int:
        """Bytes of device memory that long prompts will take beside a step's other tensors, for all instances."""
        return (WORKSPACE_BYTES if self._workspace is None else 0) + super().pending_workspace_bytes

    def modules(
        self, dtype: torch.dtype, head_dim: int, device: torch.device, features: frozenset[AttentionFeature] = frozenset()
    ) -> FlashInferModules:
        """The modules for a dtype and head size."""
        key = (dtype, head_dim, features)
        if key not in self._modules:
            self._modules[key] = FlashInferModules(
                dtype,
                head_dim,
                device,
                self._module_dir,
                has_window="window" in features,
                has_cap="soft_cap" in features,
                missing=flashinfer_unavailable_reason(device),
            )
        return self._modules[key]

    def module_status(self) -> dict[str, str]:
        """ "dtype head size features variant" → "built", "building", "not built", or the failure."""
        return {
            " ".join((str(dtype).removeprefix("torch."), str(head_dim), *sorted(features), variant)): state
            for (dtype, head_dim, features), modules in self._modules.items()
            for variant, state in modules.status().items()
        }

    def plan(self, metadata: AttentionMetadata) -> None:
        """Split the step into decodes and prompts. The prompts are planned at the first layer."""
        self.planned_step = None
        if metadata.max_query_len == 1:
            return
        starts, seq_lens = metadata.host_lengths()
        lengths = np.diff(starts)
        num_single = int(np.argmax(lengths != 1))
        self.planned_step = StepPlan(
            metadata=metadata,
            num_single=num_single,
            max_query_len=metadata.max_query_len,
            query_start_loc=(starts[num_single:] - num_single).astype(np.int32),
            seq_lens=seq_lens[num_single:].astype(np.int32),
            num_keys=int(seq_lens[num_single:].sum()),
            is_fresh=bool((seq_lens == lengths)[num_single:].all()),
            prefills={},
        )

    def _run(
        self,
        q_THE: torch.Tensor,
        k_TKE: torch.Tensor,
        v_TKE: torch.Tensor,
        cos_TE: torch.Tensor | None,
        sin_TE: torch.Tensor | None,
        kv_cache: torch.Tensor,
        scale: float,
        q_norm_weight_E: torch.Tensor | None,
        k_norm_weight_E: torch.Tensor | None,
        eps: float,
        metadata: AttentionMetadata,
        scores: Scores = PLAIN_SCORES,
    ) -> torch.Tensor:
        from compile_and_serve.custom_ops.attention.triton_decode import decode_attention
        from compile_and_serve.custom_ops.attention.triton_expand import expand_pages
        from compile_and_serve.custom_ops.attention.triton_rope import rope_kv_write

        num_tokens, num_heads, head_dim = q_THE.shape
        shape = AttentionShape(
            num_heads, k_TKE.shape[1], head_dim, kv_cache.shape[3], q_THE.dtype, kv_cache.dtype, scale, metadata.window, scores.soft_cap
        )
        prefill = self.planned_prefill(shape, q_THE.device, metadata)
        if self._expands and metadata.max_query_len > 1 and is_compiling_ahead():  # steps of these sizes may not expand pages
            expand_pages(kv_cache, torch.zeros(3, 1, dtype=torch.int64, device=q_THE.device), 1, q_THE.dtype)
        if prefill is None:
            return super()._run(
                q_THE, k_TKE, v_TKE, cos_TE, sin_TE, kv_cache, scale, q_norm_weight_E, k_norm_weight_E, eps, metadata, scores
            )
        step = self.planned_step
        assert step is not None
        num_single = step.num_single
        out_THE = q_THE.new_empty(num_tokens, num_heads, head_dim)
        if metadata.num_tokens < num_tokens:
            out_THE[metadata.num_tokens :].zero_()
        changes_q = cos_TE is not None or q_norm_weight_E is not None or not q_THE.is_contiguous()
        changes_k = cos_TE is not None or k_norm_weight_E is not None
        reads_step = prefill.is_ragged and step.is_fresh
        rotated_TKE = torch.empty_like(k_TKE, memory_format=torch.contiguous_format) if reads_step and changes_k else None
        rotated_THE = rope_kv_write(
            q_THE,
            k_TKE,
            v_TKE,
            cos_TE,
            sin_TE,
            kv_cache,
            metadata.slot_mapping,
            q_norm_weight_E,
            k_norm_weight_E,
            eps,
            write_q=changes_q,
            k_out_TKE=rotated_TKE,
        )
        if num_single:
            decode_attention(
                q_THE,
                k_TKE,
                v_TKE,
                cos_TE,
                sin_TE,
                kv_cache,
                scale,
                metadata.query_start_loc,
                metadata.seq_lens,
                metadata.block_table,
                metadata.slot_mapping,
                out_THE,
                num_single,
                q_norm_weight_E,
                k_norm_weight_E,
                eps,
                metadata.window,
                metadata.chunked,
                scores,
            )
        ours = slice(num_single, metadata.num_tokens)
        if reads_step:
            keys, values = (k_TKE if rotated_TKE is None else rotated_TKE)[ours], v_TKE[ours]
        elif prefill.is_ragged:
            assert step.pages_3J is not None
            keys, values = expand_pages(kv_cache, step.pages_3J, step.num_keys, q_THE.dtype)
        else:
            keys, values = kv_cache[:, 0], kv_cache[:, 1]
        prefill.run(rotated_THE[ours], keys, values, out_THE[ours])
        return out_THE

    def planned_prefill(self, shape: AttentionShape, device: torch.device, metadata: AttentionMetadata) -> Prefill | None:
        """A library's kernels, planned for this step and shape; None where Triton's run the step."""
        if metadata.max_query_len == 1 or metadata.row_seq_lens is not None:
            return None
        if self.planned_step is None or self.planned_step.metadata is not metadata:
            self.plan(metadata)
        step = self.planned_step
        assert step is not None
        if shape not in step.prefills:
            prefill = step.prefills[shape] = self._plan_prefill(shape, device, step)
            if len(step.prefills) == 1 and self._uses_modules and not is_compiling_ahead():
                self._prompt_steps["triton" if prefill is None else prefill.kernels] += 1
        return step.prefills[shape]

    def _choose(self, shape: AttentionShape, step: StepPlan, variants: tuple[Variant, ...]) -> Variant | None:
        """The variant that should run the step's prompts; None: Triton's kernels."""
        is_8_bit = shape.kv_cache_dtype != shape.dtype
        self._expands |= is_8_bit
        if not self._uses_modules:
            return None
        wanted: Variant = "fa3" if "fa3" in variants else "fa2"
        is_large = step.is_fresh and step.query_start_loc[-1] >= FA3_MIN_TOKENS
        if wanted == "fa3" and step.max_query_len < FA3_MIN_QUERY_LEN and not is_large:
            return None
        if is_8_bit and wanted != "fa3":
            if not self._announced_large:
                self._announced_large = True
                logger.info("prompts use Triton: FlashInfer %s does not read 8-bit pages here", wanted)
            return None
        if is_8_bit and not step.is_fresh and _expanded_bytes(shape, step) > EXPANDED_BYTES:
            if not self._announced_large:
                self._announced_large = True
                logger.info(
                    "a step's prompts use Triton where their 8-bit context, expanded for FlashInfer, would take more than %d MiB",
                    EXPANDED_BYTES >> 20,
                )
            return None
        return wanted

    def _plan_prefill(self, shape: AttentionShape, device: torch.device, step: StepPlan) -> Prefill | None:
        features: set[AttentionFeature] = set()
        if shape.window is not None:
            features.add("window")
        if shape.soft_cap > 0:
            features.add("soft_cap")
        modules = self.modules(shape.dtype, shape.head_dim, device, frozenset(features))
        has_built = shape.window is None and flash_attention3_runs(device, shape.dtype, shape.head_dim)
        self._expands |= has_built
        variant = self._choose(shape, step, modules.variants)
        if variant is None:
            return None
        if has_built and (step.is_fresh or _expanded_bytes(shape, step) <= EXPANDED_BYTES):
            self._announce("long prompts use FlashAttention-3 (fa3-fwd)")
            prompts = FlashAttention3Prompts(device, shape.scale, shape.soft_cap)
            self._plan(prompts, prompts.plan, shape, step)
            return prompts
        module = modules.load(variant) if shape.head_dim in _HEAD_DIMS else None
        if module is None:
            if self._build and shape.head_dim in _HEAD_DIMS:
                modules.build_in_background()
            self._announce(f"long prompts use Triton; modules: {modules.status()}")
            return None
        self._announce(f"long prompts use FlashInfer {variant}; modules: {modules.status()}")
        if self._workspace is None:
            self._workspace = _workspaces.get(device)
        if self._workspace is None:
            self._workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            _workspaces[device] = self._workspace
        is_ragged = variant == "fa3" and (step.is_fresh or shape.kv_cache_dtype != shape.dtype)
        if is_ragged not in self._prefills:
            self._prefills[is_ragged] = FlashInferPrefill(variant, self._workspace, is_ragged=is_ragged)
        prefill = self._prefills[is_ragged]
        assert prefill not in step.prefills.values(), "layers with different heads share one FlashInfer plan"
        self._plan(prefill, functools.partial(prefill.plan, module, shape), shape, step)
        return prefill

    def _plan(self, prefill: Prefill, plan: Callable[..., None], shape: AttentionShape, step: StepPlan) -> None:
        if prefill.is_ragged and step.is_fresh:
            plan(step.query_start_loc, step.seq_lens, step.query_start_loc)
            return
        blocks = -(-step.seq_lens // shape.block_size)
        first_pages = np.concatenate([[0], np.cumsum(blocks)]).astype(np.int32)
        table = step.metadata.block_table
        # The used entries of the block table, row by row. They are gathered on the device, at positions computed here.
        columns = table.stride(0)
        rows = np.repeat(np.arange(len(blocks), dtype=np.int64) + step.num_single, blocks)
        page_of_sequence = np.arange(first_pages[-1], dtype=np.int64) - np.repeat(first_pages[:-1], blocks)
        places = rows * columns + page_of_sequence
        flat_table = table.as_strided((table.shape[0] * columns,), (1,))
        if prefill.is_ragged:
            starts = np.concatenate([[0], np.cumsum(step.seq_lens)])
            first_tokens = page_of_sequence * shape.block_size
            counts = np.minimum(np.repeat(step.seq_lens, blocks) - first_tokens, shape.block_size)
            pages = torch.from_numpy(np.stack([places, np.repeat(starts[:-1], blocks) + first_tokens, counts]))
            step.pages_3J = pages.to(table.device, non_blocking=True)
            step.pages_3J[0] = flat_table[step.pages_3J[0]]
            plan(step.query_start_loc, step.seq_lens, starts.astype(np.int32))
            return
        blocks_J = flat_table[torch.from_numpy(places).to(table.device, non_blocking=True)]
        last_page_lens = (step.seq_lens - (blocks - 1) * shape.block_size).astype(np.int32)
        plan(step.query_start_loc, step.seq_lens, first_pages, pages=(blocks_J, last_page_lens))


def _expanded_bytes(shape: AttentionShape, step: StepPlan) -> int:
    """What the keys and values of the prompts' whole context take in the model's dtype."""
    return step.num_keys * 2 * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize
