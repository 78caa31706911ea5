"""Latent attention on a GPU: correctness against the torch reference first, then the time of its kernels. Prints JSON lines.

    python -m benchmarks.mla_gpu [--heads 16] [--work decode,prefill] [--out FILE]

decode: sequences of one token. `op`: the whole op as a CUDA graph replays it; `multiply in` and `multiply out` by our kernel and by
    torch.bmm; `attend` for several configurations (rows of a program, tile of tokens, splits, stages, warps, min. tokens per split), each
    checked against the default.
prefill: `op`: the whole op; `attend` for several configurations (query tile, key tile, stages, warps) and in FlashAttention-3, the
    expansion of latents included.
`tb_s`: bytes of the entries that are read over the time. `tflop_s`: of the attention of causal prompts alone, over the time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu_timing import capture, environment, event_seconds, relative_error, replay_ms
from compile_and_serve.custom_ops.attention.flash_attention3 import FlashAttention3Prompts
from compile_and_serve.custom_ops.attention.mla import LatentOperands
from compile_and_serve.custom_ops.attention.mla_torch import torch_mla
from compile_and_serve.custom_ops.attention.mla_triton import StepParts, flash_attention3_reason
from compile_and_serve.custom_ops.attention.triton_backend import TritonAttention
from compile_and_serve.custom_ops.attention.triton_mla_decode import absorbed_attention, decode_config, multiply_heads, write_latents
from compile_and_serve.custom_ops.attention.triton_mla_prefill import flash_materialized_attention, materialized_attention
from compile_and_serve.custom_ops.state.metadata import AttentionMetadata
from compile_and_serve.custom_ops.triton_common import num_sms

NOPE, ROPE, VALUE, LATENT, PAGE = 128, 64, 128, 512, 16
SCALE = (NOPE + ROPE) ** -0.5
DECODES = ((1, 256), (1, 8192), (8, 1024), (64, 256), (64, 4096), (128, 768), (256, 512))  # (sequences, tokens of each)
PROMPTS = (
    (1, 512, 512),
    (1, 1024, 1024),
    (4, 4096, 4096),
    (30, 544, 544),
    (32, 64, 64),
    (1, 2048, 32768),
)  # (prompts, their tokens, with the cached ones)
DECODE_CONFIGS = ((16, 32, 3, 4), (16, 32, 4, 4), (16, 64, 3, 8), (16, 64, 4, 8), (16, 64, 3, 4), (16, 128, 3, 8))  # without the splits
PREFILL_CONFIGS = ((128, 64, 2, 8), (128, 64, 3, 8), (128, 128, 2, 8), (64, 64, 3, 4), (64, 64, 2, 4), (128, 32, 4, 8))
TOLERANCE = 2e-2  # relative, of bfloat16 results


def make_metadata(query_len: int, seq_len: int, count: int) -> AttentionMetadata:
    columns = -(-seq_len // PAGE)
    table = torch.randperm(count * columns, device="cuda").int().view(count, columns)
    positions = torch.arange(seq_len - query_len, seq_len, device="cuda")
    slots = table[:, positions // PAGE].long() * PAGE + positions % PAGE
    starts = np.arange(count + 1, dtype=np.int32) * query_len
    seq_lens = np.full(count, seq_len, dtype=np.int32)
    return AttentionMetadata(
        backend=TritonAttention(),
        query_start_loc=torch.from_numpy(starts).cuda(),
        seq_lens=torch.from_numpy(seq_lens).cuda(),
        block_table=table,
        slot_mapping=slots.flatten(),
        num_seqs=count,
        num_tokens=count * query_len,
        max_query_len=query_len,
        max_seq_len=seq_len,
        query_start_loc_cpu=starts,
        seq_lens_cpu=seq_lens,
    )


def make_inputs(num_tokens: int, num_pages: int, heads: int) -> list[Any]:
    """The tensors of `mla_attention`."""

    def normal(*size: int, std: float = 1.0) -> torch.Tensor:
        return torch.empty(size, dtype=torch.bfloat16, device="cuda").normal_(0, std)

    merged = normal(num_tokens, heads * (NOPE + ROPE) + LATENT + ROPE)
    q_THE = merged[:, : heads * (NOPE + ROPE)].view(num_tokens, heads, NOPE + ROPE)
    angles = torch.rand(num_tokens, ROPE // 2, device="cuda").repeat(1, 2) * 6
    return [
        q_THE,
        merged[:, heads * (NOPE + ROPE) :],
        normal(LATENT),
        angles.cos().bfloat16(),
        angles.sin().bfloat16(),
        normal(heads * (NOPE + VALUE), LATENT, std=LATENT**-0.5),
        normal(num_pages, PAGE, LATENT + ROPE),
    ]


def operands_of(inputs: list[Any]) -> LatentOperands:
    q_THE, kv_a, norm, cos, sin, kv_b, cache = inputs
    return LatentOperands(q_THE, kv_a, norm, cos, sin, kv_b, cache, SCALE)


def check(inputs: list[Any], metadata: AttentionMetadata) -> float:
    """Relative error of the op in bfloat16 against the reference in float32."""
    backend: Any = metadata.backend
    found = backend.mla_forward(operands_of(inputs), metadata)
    expected = torch_mla(operands_of([tensor.float() for tensor in inputs]), metadata)
    error = ((found.float() - expected).norm() / expected.norm()).item()
    assert error < TOLERANCE, f"relative error {error}"
    return round(error, 5)


def decode(heads: int, emit: Callable[..., None]) -> None:
    for count, seq_len in DECODES:
        metadata = make_metadata(1, seq_len, count)
        inputs = make_inputs(count, metadata.block_table.numel(), heads)
        common = {"work": "decode", "heads": heads, "seqs": count, "seq_len": seq_len}

        def timed(what: str, work: Callable[[], object], common: dict[str, Any] = common, **row: Any) -> None:
            emit(**common, what=what, **row, us=round(replay_ms(capture(work)) * 1e3, 2))

        backend: Any = metadata.backend
        timed("op", lambda: backend.mla_forward(operands_of(inputs), metadata), relative_error=check(inputs, metadata))
        q_THE, kv_a, norm, cos, sin, kv_b, cache = inputs
        timed("write", lambda: write_latents(q_THE, kv_a, norm, cos, sin, cache, metadata.slot_mapping, 1e-6, True))
        by_head = kv_b.view(heads, NOPE + VALUE, LATENT)
        q_nope, w_key, w_value = (q_THE[:, :, :NOPE].transpose(0, 1), by_head[:, :NOPE], by_head[:, NOPE:].transpose(1, 2))
        q_latent, out = torch.bmm(q_nope, w_key), torch.empty(count, heads, VALUE, dtype=torch.bfloat16, device="cuda")
        timed("multiply in", lambda: multiply_heads(q_nope, w_key, q_latent))
        timed("multiply in, bmm", lambda: torch.bmm(q_nope, w_key, out=q_latent))
        timed("multiply out", lambda: multiply_heads(q_latent, w_value, out.transpose(0, 1)))
        timed("multiply out, bmm", lambda: torch.bmm(q_latent, w_value, out=out.transpose(0, 1)))
        q_rope, summed = q_THE[:, :, NOPE:].contiguous(), torch.empty_like(q_latent)
        num_bytes = count * seq_len * (LATENT + ROPE) * 2
        chosen = decode_config(count, 1, heads, num_sms(cache.device))
        expected: torch.Tensor | None = None  # what the default gives, which comes first
        for block_g, tile, stages, warps in dict.fromkeys([(chosen[0], chosen[1], *chosen[3:5]), *DECODE_CONFIGS]):
            for splits, min_split in dict.fromkeys([(chosen[2], chosen[5]), (16, 64), (8, 128), (4, 256), (1, 64)]):
                config = (block_g, tile, splits, stages, warps, min_split)
                where = metadata.query_start_loc, metadata.seq_lens, metadata.block_table
                arguments = (q_latent, q_rope, cache, SCALE, *where, summed, 0, count, 1, config)
                try:
                    ms = replay_ms(capture(partial(absorbed_attention, *arguments)))
                except RuntimeError as failure:  # too much shared memory
                    emit(**common, what="attend", config=config, error=str(failure)[:80])
                    continue
                expected = summed.clone() if expected is None else expected
                error = relative_error(summed, expected)
                assert error < TOLERANCE, f"{config}: relative error {error}"
                emit(
                    **common,
                    what="attend",
                    config=config,
                    is_default=config == chosen,
                    us=round(ms * 1e3, 2),
                    tb_s=round(num_bytes / ms / 1e9, 3),
                )


def prefill(heads: int, emit: Callable[..., None]) -> None:
    for count, query_len, seq_len in PROMPTS:
        metadata = make_metadata(query_len, seq_len, count)
        inputs = make_inputs(count * query_len, metadata.block_table.numel(), heads)
        common = {"work": "prefill", "heads": heads, "prompts": count, "tokens": query_len, "seq_len": seq_len}
        pairs = count * (query_len * seq_len - query_len * (query_len - 1) // 2)
        flop = 2 * pairs * heads * (NOPE + ROPE + VALUE)
        error = check(inputs, metadata) if count * query_len <= 4096 else None

        def timed(what: str, work: Callable[[], object], flop: int = flop, common: dict[str, Any] = common, **row: Any) -> None:
            work()
            seconds = min(event_seconds(work) for _ in range(5))
            emit(**common, what=what, **row, us=round(seconds * 1e6, 1), tflop_s=round(flop / seconds / 1e12, 1))

        backend: Any = metadata.backend
        timed("op", lambda: backend.mla_forward(operands_of(inputs), metadata), relative_error=error)
        q_THE, _, _, _, _, kv_b, cache = inputs
        q_rope = q_THE[:, :, NOPE:].contiguous()
        out = torch.empty(count * query_len, heads, VALUE, dtype=torch.bfloat16, device="cuda")
        parts = StepParts.of_step(metadata)
        for config in PREFILL_CONFIGS:
            where = metadata.query_start_loc, metadata.seq_lens, metadata.block_table
            attend = partial(
                materialized_attention, q_THE, q_rope, kv_b, cache, SCALE, *where, parts.key_starts, out, first_seq=0,
                num_queries=metadata.num_tokens, num_keys=parts.num_keys, max_seq_len=seq_len, config=config,
            )  # fmt: skip
            try:
                timed("attend", attend, config=config)
            except RuntimeError as failure:  # too much shared memory
                emit(**common, what="attend", config=config, error=str(failure)[:80])
        if reason := flash_attention3_reason(operands_of(inputs)):
            emit(**common, what="attend", config="fa3-fwd", error=reason)
            continue
        prompts, expected = FlashAttention3Prompts(q_THE.device, SCALE, 0.0), out.clone()
        prompts.plan(*parts.host_lengths)
        where = metadata.seq_lens, metadata.block_table, parts.key_starts
        attend = partial(
            flash_materialized_attention, q_THE, q_rope, kv_b, cache, prompts, *where, out, first_seq=0, num_keys=parts.num_keys,
            max_seq_len=seq_len,
        )  # fmt: skip
        timed("attend", attend, config="fa3-fwd")
        error = relative_error(out, expected)
        assert error < TOLERANCE, f"fa3-fwd: relative error {error}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--work", type=lambda text: text.split(","), default=["decode", "prefill"])
    parser.add_argument("--out", type=Path, help="also append the rows to this file")
    args = parser.parse_args()

    def emit(**row: Any) -> None:
        line = json.dumps({**row, **environment()})
        print(line, flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(line + "\n")

    torch.manual_seed(0)
    with torch.no_grad():
        for work in args.work:
            {"decode": decode, "prefill": prefill}[work](args.heads, emit)


if __name__ == "__main__":
    main()
