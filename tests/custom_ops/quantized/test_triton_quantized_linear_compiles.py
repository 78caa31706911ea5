"""The kernels of linears over 8-bit weights compile for a Hopper GPU (none is needed)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.hopper import LARGEST_SHARED, run_script

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

SCRIPT = """
import json
import triton.language as tl
from triton import next_power_of_2
from compile_and_serve.custom_ops.triton_quantize import _quantize_kernel
from compile_and_serve.custom_ops.quantized.triton_gemv import _gemv_kernel, gemv_config
from compile_and_serve.custom_ops.quantized.triton_matmul import _matmul_kernel, matmul_config
from tests.support.hopper import compiled

FLOATS = {"scale_ptr", "x_scale_ptr", "input_scale_ptr", "partial_ptr"}
TENSORS = {tl.float8e4nv: "*fp8e4nv", tl.int8: "*i8"}

def made(kernel, constants, num_warps, special, stages=3, **options):
    def type_of(name):
        if name in special:
            return special[name]
        return "fp32" if name == "eps" else "i32" if not name.endswith("_ptr") else "*fp32" if name in FLOATS else "*bf16"
    return compiled(kernel, constants, type_of, num_warps, num_stages=stages, **options).metadata.shared

found = {}
for dtype, largest in ((tl.float8e4nv, 448.0), (tl.int8, 127.0)):
    for name, inner, silu_mul in (("gate_up", 4096, True), ("down", 14336, False)):
        block_o, warps, per_sm, _ = gemv_config(14336 if silu_mul else 4096, inner, silu_mul, dtype == tl.float8e4nv, 132)
        constants = {
            "HAS_NORM": silu_mul, "QUANTIZES": True, "IS_STATIC": False, "DTYPE": dtype, "LARGEST_VALUE": largest, "HAS_BIAS": False,
            "HAS_RESIDUAL": not silu_mul, "SILU_MUL": silu_mul, "WIDTH": next_power_of_2(inner), "BLOCK_O": block_o,
            "BLOCK_I": 512 * warps, "THREADS": 32 * warps, "PDL": True, "bias_ptr": None, "input_scale_ptr": None,
        } | ({"residual_ptr": None} if silu_mul else {"norm_ptr": None})
        found[f"gemv {dtype} {name}"] = made(_gemv_kernel, constants, warps, {"w_ptr": "*i32"}, maxnreg=65536 // (per_sm * 32 * warps))
        for tokens in (16, 32, 64) if EVERY else (64,):
            rows = 14336 if silu_mul else 4096
            block_o, block_i, splits, stages, warps = matmul_config(tokens, rows, inner, silu_mul, 1, False, 132)
            constants = {
                "HAS_X_SCALE": True, "PER_BLOCK": False, "HAS_BIAS": False, "HAS_RESIDUAL": not silu_mul, "SILU_MUL": silu_mul,
                "DOT": dtype, "GROUP": 128, "BLOCK_T": tokens, "BLOCK_O": block_o, "BLOCK_I": block_i, "SPLITS": splits,
                "STAGES": stages, "PREFETCH_I": 1024, "PDL": True, "bias_ptr": None,
            } | ({"residual_ptr": None} if silu_mul else {}) | ({} if splits > 1 else {"partial_ptr": None, "counter_ptr": None})
            special = {"x_ptr": TENSORS[dtype], "w_ptr": TENSORS[dtype], "counter_ptr": "*i32"}
            found[f"matmul {dtype} {name} {tokens}"] = made(_matmul_kernel, constants, warps, special)
for name, group in (("row", 16384), ("group", 128)):
    constants = {
        "HAS_NORM": False, "IS_STATIC": False, "LARGEST_VALUE": 448.0, "GROUP": group, "BLOCK": 16384, "GROUP_MAJOR": name == "group",
        "PDL": True, "norm_ptr": None, "input_scale_ptr": None,
    }
    found[f"quantize by {name}"] = made(_quantize_kernel, constants, 16, {"out_ptr": "*fp8e4nv"})
print(json.dumps(found))
"""


@pytest.mark.parametrize(("every", "count"), [(False, 10), pytest.param(True, 18, marks=pytest.mark.exhaustive)])
@pytest.mark.exhaustive_cases
def test_kernels_compile_and_fit(every: bool, count: int, tmp_path: Path) -> None:
    """With the tiles of many tokens, or with all."""
    shared = run_script(f"EVERY = {every}\n{SCRIPT}", tmp_path)
    assert len(shared) == count
    assert max(shared.values()) <= LARGEST_SHARED
