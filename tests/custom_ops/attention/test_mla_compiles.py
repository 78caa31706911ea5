"""The kernels of latent attention compile for a Hopper GPU (none is needed), for DeepSeek-V2-Lite's heads and DeepSeek-V3's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.hopper import LARGEST_SHARED, run_script

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

SCRIPT = """
import json
from compile_and_serve.custom_ops.attention.triton_mla_decode import _mla_decode_kernel, _multiply_kernel, _write_kernel, decode_config
from compile_and_serve.custom_ops.attention.triton_mla_prefill import _gather_kernel, _join_kernel, _mla_prefill_kernel
from tests.support.hopper import compiled

INT32 = {"start_loc_ptr", "seq_lens_ptr", "block_table_ptr", "counter_ptr", "key_starts_ptr"}
FLOATS = {"cos_ptr", "sin_ptr", "partial_ptr", "sums_ptr", "softmax_ptr"}
SIZES = {"NOPE": 128, "ROPE": 64, "VALUE": 128, "LATENT": 512, "PAGE_SIZE": 16, "ENTRY": 576, "INTERLEAVED": True, "PDL": True,
         "BLOCK_HALF": 32, "BLOCK_L": 512, "BLOCK_R": 64, "BLOCK_N": 128, "BLOCK_V": 128, "BLOCK_E": 1024, "BLOCK_H": 16}

def facts(kernel, constants, num_warps, cache="*bf16"):
    def type_of(name):
        if name in ("eps", "scale_log2"):
            return "fp32"
        if not name.endswith("_ptr"):
            return "i32"
        return cache if name == "cache_ptr" else "*i32" if name in INT32 else "*fp32" if name in FLOATS else \\
            "*i64" if name == "slot_ptr" else "*bf16"
    kernel = compiled(kernel, SIZES | constants, type_of, num_warps)
    return {"shared": kernel.metadata.shared, "wgmma": "wgmma.mma_async" in kernel.asm["ptx"]}

found = {}
for cache in ("*bf16", "*fp8e4nv"):
    found[f"write {cache}"] = facts(_write_kernel, {"NUM_HEADS": 16}, 4, cache)
    found[f"gather {cache}"] = facts(_gather_kernel, {"BLOCK_K": 32}, 4, cache)
    cases = ((1, 16, 1), (64, 128, 1), (8, 16, 8), (64, 16, 1), (256, 16, 1))
    for seqs, heads, query in cases if cache == "*bf16" else cases[:2]:  # float8 takes less shared memory
        block_g, block_k, splits, stages, warps, min_split = decode_config(seqs, query, heads, 132)
        constants = {"NUM_HEADS": heads, "MAX_QUERY": query, "BLOCK_G": block_g, "BLOCK_K": block_k, "SPLITS": splits, "STAGES": stages,
                     "MIN_SPLIT": min_split}
        found[f"decode {seqs} {heads} {query} {cache}"] = facts(_mla_decode_kernel, constants, warps, cache)
for tokens in (16, 64):
    for inputs, outputs in ((128, 512), (512, 128)):
        constants = {"INPUTS": inputs, "OUTPUTS": outputs, "BLOCK_T": tokens, "BLOCK_I": inputs, "BLOCK_O": 8192 // inputs}
        strides = {"w_input_stride": 512, "w_output_stride": 1} if inputs == 128 else {"w_input_stride": 1, "w_output_stride": 512}
        found[f"multiply {tokens} {inputs}"] = facts(_multiply_kernel, constants | strides, 4)
found["join"] = facts(_join_kernel, {"NUM_HEADS": 16, "LEFT": 128, "RIGHT": 64, "BLOCK_H": 16, "BLOCK_L": 128, "BLOCK_R": 64}, 4)
for parts in (False, True):
    constants = {"NUM_HEADS": 16, "BLOCK_Q": 128, "BLOCK_K": 64, "STAGES": 3, "HAS_PARTS": parts}
    constants |= {} if parts else {"sums_ptr": None, "softmax_ptr": None}
    found[f"prefill {parts}"] = facts(_mla_prefill_kernel, constants, 8)
print(json.dumps(found))
"""


@pytest.mark.exhaustive
def test_kernels_compile_and_fit(tmp_path: Path) -> None:
    found = run_script(SCRIPT, tmp_path)
    assert max(one["shared"] for one in found.values()) <= LARGEST_SHARED
    assert all(one["wgmma"] for name, one in found.items() if name.startswith("prefill"))
