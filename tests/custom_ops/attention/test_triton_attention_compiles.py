"""Attention over float8, int8 and bfloat16 caches, sampling, and what a step of decodes begins and ends with compile for a Hopper GPU
(none is needed).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.hopper import LARGEST_SHARED, run_script

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

SCRIPT = """
import json
from compile_and_serve.custom_ops.sampling.triton_sampling import _draw_kernel, _filter_kernel
from compile_and_serve.custom_ops.attention.triton_decode import _decode_kernel, decode_config
from compile_and_serve.custom_ops.attention.triton_encoder import _encoder_kernel
from compile_and_serve.custom_ops.attention.triton_prefill import _prefill_kernel
from compile_and_serve.custom_ops.attention.triton_rope import _rope_kv_kernel
from compile_and_serve.custom_ops.sampling.decode_inputs import _begin_kernel, _end_kernel
from tests.support.hopper import compiled

INT32 = {"has_run_ptr", "start_loc_ptr", "seq_lens_ptr", "block_table_ptr", "counter_ptr", "top_k_ptr", "gathered_id_ptr"}
INT64 = {"slot_ptr", "seed_ptr", "position_ptr", "out_ptr"}
FLOAT = {"scale_log2", "cap_log2", "eps"}
FLOATS = {"cos_ptr", "sin_ptr", "partial_ptr", "temperature_ptr", "top_p_ptr", "min_p_ptr", "block_max_ptr", "gathered_ptr",
          "out_best_ptr"}
ATTENTION = {"NUM_HEADS": 32, "NUM_KV_HEADS": 8, "HEAD_DIM": 128, "BLOCK_SIZE": 16, "BLOCK_R": 64, "BLOCK_E": 128, "BLOCK_G": 16,
             "BLOCK_H": 32, "BLOCK_K": 8, "WRITE_Q": True, "WRITE_K": False, "HAS_Q_NORM": False, "HAS_K_NORM": False,
             "HAS_ROPE": True, "PDL": True, "q_norm_ptr": None, "k_norm_ptr": None, "k_out_ptr": None,
             "WINDOW": 0, "CHUNKED": False, "HAS_CAP": False, "HAS_SINKS": False, "HAS_ALIBI": False, "sinks_ptr": None,
             "slopes_ptr": None, "HAS_AHEAD": False, "ahead_ptr": None, "IS_CAUSAL": True, "RESIDENT": 1}
GEMMA = {"NUM_HEADS": 8, "NUM_KV_HEADS": 4, "HEAD_DIM": 256, "BLOCK_R": 128, "BLOCK_E": 256, "WINDOW": 1024, "HAS_CAP": True,
         "HAS_SINKS": True, "HAS_ALIBI": True, "sinks_ptr": "", "slopes_ptr": ""}
SAMPLING = {"CHUNK": 8192, "CHUNKS": 16, "STEP": 2048, "BLOCK": 128, "BLOCK_J": 16, "BLOCKS": 1024, "CANDIDATES": 1024, "KEY_BITS": 16,
            "GATHERED_K": 256, "PDL": True}

def shared(kernel, constants, num_warps, special):
    def type_of(name):
        if name in special:
            return special[name]
        if name in FLOAT:
            return "fp32"
        if not name.endswith("_ptr"):
            return "i32"
        return "*i32" if name in INT32 else "*fp32" if name in FLOATS else "*i64" if name in INT64 else "*bf16"
    return compiled(kernel, constants, type_of, num_warps).metadata.shared

cache = {"kv_ptr": "*fp8e4nv", "out_ptr": "*bf16"}
found = {"write": shared(_rope_kv_kernel, ATTENTION, 4, cache)}
for num_seqs in (1, 64, 256, 9000) if EVERY else (64,):  # 9000 are not split
    tile, splits, stages, warps, min_split = decode_config(num_seqs, 8, 132, itemsize=1)
    constants = {"BLOCK_C": tile, "SPLITS": splits, "MIN_SPLIT": min_split, "STAGES": stages}
    constants |= {} if splits > 1 else {"partial_ptr": None, "counter_ptr": None}
    found[f"decode {num_seqs}"] = shared(_decode_kernel, ATTENTION | constants, warps, cache)
prefill = {"BLOCK_Q": 64, "BLOCK_C": 64, "STAGES": 3, "SKIP_SINGLE": False}
found["prefill"] = shared(_prefill_kernel, ATTENTION | prefill, 4, cache)
if EVERY:
    tile, splits, stages, warps, min_split = decode_config(5, 8, 132)
    constants = {"BLOCK_C": tile, "SPLITS": splits, "MIN_SPLIT": min_split, "STAGES": stages, "IS_CAUSAL": False}
    found["block decode"] = shared(_decode_kernel, ATTENTION | constants, warps, {"out_ptr": "*bf16"})
    int8 = {"kv_ptr": "*i8", "out_ptr": "*bf16"}
    found["write int8"] = shared(_rope_kv_kernel, ATTENTION, 4, int8)
    found["prefill int8"] = shared(_prefill_kernel, ATTENTION | prefill, 4, int8)
    tile, splits, stages, warps, min_split = decode_config(64, 8, 132, itemsize=1)
    constants = {"BLOCK_C": tile, "SPLITS": splits, "MIN_SPLIT": min_split, "STAGES": stages}
    found["decode int8"] = shared(_decode_kernel, ATTENTION | constants, warps, int8)
every = {key: value for key, value in ATTENTION.items() if key not in ("sinks_ptr", "slopes_ptr")}
every |= {key: value for key, value in GEMMA.items() if value != ""}
bf16 = {"out_ptr": "*bf16", "slopes_ptr": "*fp32"}
for num_seqs in (1, 64, 256) if EVERY else (64,):
    tile, splits, stages, warps, min_split = decode_config(num_seqs, 4, 132, head_dim=256)
    constants = {"BLOCK_C": tile, "SPLITS": splits, "MIN_SPLIT": min_split, "STAGES": stages}
    found[f"window decode {num_seqs}"] = shared(_decode_kernel, every | constants, warps, bf16)
for chunked in (False, True) if EVERY else (True,):
    constants = {"BLOCK_Q": 64, "BLOCK_C": 32, "STAGES": 2, "SKIP_SINGLE": False, "CHUNKED": chunked}
    found[f"window prefill {chunked}"] = shared(_prefill_kernel, every | constants, 4, bf16)
ahead = {key: value for key, value in (every | constants).items() if key != "ahead_ptr"} | {"HAS_AHEAD": True}
if EVERY:
    found["ahead prefill"] = shared(_prefill_kernel, ahead, 4, bf16 | {"ahead_ptr": "*i32"})
nothing = {n: None for n in ("temperature_ptr", "top_k_ptr", "seed_ptr", "position_ptr", "block_max_ptr")}
found["greedy"] = shared(_draw_kernel, SAMPLING | nothing | {"GREEDY": True}, 8, {"rank_ptr": "*u64"})
found["draw"] = shared(_draw_kernel, SAMPLING | {"GREEDY": False}, 8, {"rank_ptr": "*u64"})
found["filter"] = shared(_filter_kernel, SAMPLING, 8, {})
tokens = {name: "*i64" for kernel in (_begin_kernel, _end_kernel) for name in kernel.arg_names
          if name.endswith("_ptr") and name not in INT32}
found["begin"] = shared(_begin_kernel, {"BLOCK_SIZE": 16, "ROWS": 128}, 4, tokens)
found["end"] = shared(_end_kernel, {"ROWS": 128, "PDL": True}, 4, tokens)
encoder = {"NUM_HEADS": 12, "GROUP": 1, "HEAD_DIM": 64, "COLUMNS": 512, "BLOCK_Q": 64, "BLOCK_C": 64, "BLOCK_E": 64, "LOG2": 1.44,
           "HAS_BIAS": True, "HAS_DISTANCE": True, "HAS_QUERY": True, "HAS_KEY": True}
types = {"starts_ptr": "*i32", "columns_ptr": "*i64", "scale": "fp32", "out_ptr": "*bf16"}
for window in (0, 64) if EVERY else (64,):
    found[f"encoder {window}"] = shared(_encoder_kernel, encoder | {"WINDOW": window}, 4, types)
print(json.dumps(found))
"""


@pytest.mark.parametrize(("every", "count"), [(False, 11), pytest.param(True, 23, marks=pytest.mark.exhaustive)])
def test_kernels_compile_and_fit(every: bool, count: int, tmp_path: Path) -> None:
    """With one number of sequences and one mask, float8 as the cache of 8 bits, or with all."""
    shared = run_script(f"EVERY = {every}\n{SCRIPT}", tmp_path)
    assert len(shared) == count
    assert max(shared.values()) <= LARGEST_SHARED
