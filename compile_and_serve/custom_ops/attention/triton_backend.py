"""Attention backend `triton`: our own kernels for even head sizes up to 256, which need no build; they also run in Triton's interpreter.

Shape legend: T tokens of the step, S sequences, H query heads, K key/value heads, E head size, N cache blocks, P tokens per block.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from compile_and_serve.custom_ops.attention.attention import PLAIN_SCORES, AttentionBackend, Scores, cache_unsupported_reason
from compile_and_serve.custom_ops.attention.flash_attention3 import EXPANDED_BYTES, FlashAttention3Prompts
from compile_and_serve.custom_ops.attention.flash_mla import FlashMlaDecodes
from compile_and_serve.custom_ops.attention.mla import LatentOperands
from compile_and_serve.custom_ops.attention.mla_triton import (
    MAX_ABSORBED,
    StepParts,
    flash_attention3_reason,
    flash_mla_decodes,
    flash_mla_reason,
    triton_mla,
)
from compile_and_serve.custom_ops.jit.triton_launch import is_compiling_ahead
from compile_and_serve.custom_ops.platform import platform_of
from compile_and_serve.custom_ops.state.kind import AttentionFeature
from compile_and_serve.custom_ops.state.metadata import AttentionMetadata

logger = logging.getLogger(__name__)

MAX_HEAD_DIM = 256


def triton_unsupported_reason(device: torch.device) -> str | None:
    """None when Triton kernels run on the device, else the reason in one sentence."""
    try:
        import triton
    except ImportError:
        return "Triton is not installed"
    platform = platform_of(device)
    if platform.runs_triton_kernels:
        if platform.compute_capability < (8, 0):
            return f"the Triton kernels need compute capability 8.0 or newer, {platform.name} is older"
        return None
    if platform.shares_host_memory and triton.knobs.runtime.interpret:
        return None
    return f"Triton has no {device.type} target here (on the CPU it runs in the interpreter only: TRITON_INTERPRET=1)"


class TritonAttention(AttentionBackend):
    """A layer's decodes run in one kernel (norm, rope, KV write, attention), its prompts in two (norm, rope, KV write; attention)."""

    name = "triton"
    decode_capturable = True
    drafts_capturable = True
    fuses_rope = True

    def __init__(self) -> None:
        self._uses_modules = True
        self._expands = False  # a step had keys that are expanded for a library's kernels, or will have them
        self._parts: StepParts | None = None  # of the last step with latent caches
        self._latent_prompts: FlashAttention3Prompts | None = None  # of that step
        self._decoded: tuple[AttentionMetadata, int] | None = None  # a step with latent caches, and the address of its first layer's cache
        self._latent_decodes: FlashMlaDecodes | None = None  # of that step
        self._prompt_steps = Counter[str]()
        self._announced: set[str] = set()

    @property
    def pending_workspace_bytes(self) -> int:
        """As `AttentionBackend.pending_workspace_bytes`."""
        return EXPANDED_BYTES if self._expands else 0

    @property
    def prompt_steps(self) -> Mapping[str, int]:
        """As `AttentionBackend.prompt_steps`, of latent caches; of the layers of one kind."""
        return self._prompt_steps

    @contextmanager
    def without_modules(self) -> Iterator[None]:
        """Inside, Triton's kernels run all prompts, and no module is loaded."""
        self._uses_modules = False
        try:
            yield
        finally:
            self._uses_modules = True

    def _announce(self, what: str) -> None:
        """Once for what kernels run, whatever comes behind a semicolon."""
        kernels = what.partition(";")[0]
        if kernels not in self._announced:
            self._announced.add(kernels)
            logger.info("%s", what)

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
        if reason := triton_unsupported_reason(device):
            return reason
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"the Triton kernels compute in bfloat16, float16 or float32, not {dtype}"
        if reason := cache_unsupported_reason(dtype, kv_cache_dtype, head_dim, features):
            return reason
        platform = platform_of(device)
        is_float8 = kv_cache_dtype == torch.float8_e4m3fn
        if is_float8 and platform.runs_triton_kernels and not platform.computes_in(kv_cache_dtype):
            return f"Triton quantizes to float8_e4m3fn on compute capability 8.9 or newer only, {platform.name} is older"
        if "latent" in features:
            return None
        if head_dim % 2 or head_dim > MAX_HEAD_DIM:
            return f"the Triton kernels need an even head size of at most {MAX_HEAD_DIM}, not {head_dim}"
        if num_heads % num_kv_heads:
            return f"{num_heads} query heads are not a multiple of {num_kv_heads} key/value heads"
        return None

    def plan(self, metadata: AttentionMetadata) -> None:
        """Forgets the step before. The kernels read lengths and block tables from the device."""
        self._parts = self._decoded = self._latent_decodes = None

    def forward(
        self,
        q_THE: torch.Tensor,
        k_TKE: torch.Tensor,
        v_TKE: torch.Tensor,
        kv_cache: torch.Tensor,
        scale: float,
        metadata: AttentionMetadata,
        scores: Scores = PLAIN_SCORES,
    ) -> torch.Tensor:
        """Write k and v at slot_mapping, then attend. → [T, H, E]"""
        return self._run(q_THE, k_TKE, v_TKE, None, None, kv_cache, scale, None, None, 1e-6, metadata, scores)

    def rope_forward(
        self,
        qkv: torch.Tensor,
        cos_TE: torch.Tensor,
        sin_TE: torch.Tensor,
        kv_cache: torch.Tensor,
        num_heads: int,
        num_kv_heads: int,
        scale: float,
        q_norm_weight_E: torch.Tensor | None,
        k_norm_weight_E: torch.Tensor | None,
        eps: float,
        metadata: AttentionMetadata,
        scores: Scores = PLAIN_SCORES,
    ) -> torch.Tensor:
        """As `rope_attention`, with the metadata as an argument. → [T, H*E]"""
        from compile_and_serve.custom_ops.attention.triton_rope import split_qkv

        q_THE, k_TKE, v_TKE = split_qkv(qkv, num_heads, num_kv_heads)
        return self._run(
            q_THE, k_TKE, v_TKE, cos_TE, sin_TE, kv_cache, scale, q_norm_weight_E, k_norm_weight_E, eps, metadata, scores
        ).flatten(1)

    def mla_forward(self, operands: LatentOperands, metadata: AttentionMetadata) -> torch.Tensor:
        """As `LatentAttention.mla_forward`."""
        parts = None
        longest = metadata.max_query_len
        if longest > MAX_ABSORBED or (longest > 1 and metadata.num_tokens < metadata.num_seqs * longest):
            if self._parts is None or self._parts.metadata is not metadata:
                self._parts = StepParts.of_step(metadata)
                self._latent_prompts = self._plan_latent_prompts(operands, self._parts)
            parts = self._parts
        prompts = None if parts is None else self._latent_prompts
        return triton_mla(operands, metadata, parts, prompts, self._planned_latent_decodes(operands, metadata, parts))

    def _planned_latent_decodes(
        self, operands: LatentOperands, metadata: AttentionMetadata, parts: StepParts | None
    ) -> FlashMlaDecodes | None:
        """FlashMLA, planned for the step by its first layer; None: Triton's kernel runs its decodes.

        The same metadata come again with other lengths where a graph is captured, or holds several runs of a drafter.
        """
        address, planned = operands.cache.data_ptr(), self._decoded
        if planned is not None and planned[0] is metadata and planned[1] != address:
            return self._latent_decodes
        self._decoded, self._latent_decodes = (metadata, address), None
        if (reason := flash_mla_reason(operands)) is not None:
            self._announce(f"decodes of latent attention use Triton: {reason}")
        else:
            self._announce("decodes of latent attention use FlashMLA (sgl-flash-mla)")
            self._latent_decodes = flash_mla_decodes(operands, metadata, parts)
        return self._latent_decodes

    def _plan_latent_prompts(self, operands: LatentOperands, parts: StepParts) -> FlashAttention3Prompts | None:
        """FlashAttention-3, planned for the step's materialized prompts; None: Triton's kernel runs them."""
        from compile_and_serve.custom_ops.attention.triton_mla_prefill import expanded_bytes_per_key

        if not parts.num_keys:
            return None
        q_THE, prompts = operands.q_THE, None
        reason = flash_attention3_reason(operands)
        self._expands |= reason is None
        if not self._uses_modules:
            return None
        if reason is not None:
            self._announce(f"prompts of latent attention use Triton: {reason}")
        elif parts.num_keys * expanded_bytes_per_key(q_THE.shape[1], operands.sizes, q_THE.dtype) > EXPANDED_BYTES:
            self._announce(f"a step's prompts use Triton where their expanded latents would take more than {EXPANDED_BYTES >> 20} MiB")
        elif parts.is_worth_flash_attention3:
            self._announce("long prompts of latent attention use FlashAttention-3 (fa3-fwd)")
            prompts = FlashAttention3Prompts(q_THE.device, operands.scale, 0.0)
            prompts.plan(*parts.host_lengths)
        if not is_compiling_ahead():
            self._prompt_steps["triton" if prompts is None else prompts.kernels] += 1
        return prompts

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
        """Write the step's keys and values, then attend. → [T, H, E]"""
        from compile_and_serve.custom_ops.attention.triton_decode import decode_attention
        from compile_and_serve.custom_ops.attention.triton_prefill import prefill_attention
        from compile_and_serve.custom_ops.attention.triton_rope import rope_kv_write

        num_tokens, num_heads, head_dim = q_THE.shape
        out_THE = q_THE.new_empty(num_tokens, num_heads, head_dim)
        # Tokens of no sequence get zeros here. A decode step is padded with sequences of length 0, which get zeros in the decode kernel.
        num_covered = metadata.seq_lens.shape[0] if metadata.max_query_len == 1 else metadata.num_tokens
        if num_covered < num_tokens:
            out_THE[num_covered:].zero_()
        where = (metadata.query_start_loc, metadata.seq_lens, metadata.block_table)
        has_prompts = metadata.max_query_len > 1
        if has_prompts or metadata.num_seqs == 0 or not metadata.is_causal:
            # This also writes the keys and values of single-token sequences; the decode kernel writes the same values again.
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
                write_q=has_prompts
                and metadata.row_seq_lens is None
                and (cos_TE is not None or q_norm_weight_E is not None or not q_THE.is_contiguous()),
            )
        if metadata.num_seqs == 0:
            return out_THE.zero_()
        if has_prompts:
            if metadata.row_seq_lens is not None:
                assert metadata.row_starts is not None
                assert metadata.row_block_table is not None
                rows = (metadata.row_starts, metadata.row_seq_lens, metadata.row_block_table)
                decode_attention(
                    q_THE,
                    k_TKE,
                    v_TKE,
                    cos_TE,
                    sin_TE,
                    kv_cache,
                    scale,
                    *rows,
                    metadata.slot_mapping,
                    out_THE,
                    num_tokens,
                    q_norm_weight_E,
                    k_norm_weight_E,
                    eps,
                    metadata.window,
                    metadata.chunked,
                    scores,
                )
                return out_THE
            lengths_differ = metadata.num_tokens < metadata.num_seqs * metadata.max_query_len
            prefill_attention(
                rotated_THE, kv_cache, scale, *where, out_THE, metadata.num_seqs, lengths_differ, metadata.window, metadata.chunked, scores
            )
            if not lengths_differ:  # no sequence has a single token
                return out_THE
        num_rows = metadata.seq_lens.shape[0] if metadata.max_query_len == 1 else metadata.num_seqs
        decode_attention(
            q_THE,
            k_TKE,
            v_TKE,
            cos_TE,
            sin_TE,
            kv_cache,
            scale,
            *where,
            metadata.slot_mapping,
            out_THE,
            num_rows,
            q_norm_weight_E,
            k_norm_weight_E,
            eps,
            metadata.window,
            metadata.chunked,
            scores,
            is_causal=metadata.is_causal,
        )
        return out_THE
