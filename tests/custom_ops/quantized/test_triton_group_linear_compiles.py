"""The kernels of group-quantized linears compile for a Hopper GPU (none is needed), and several programs fit a multiprocessor."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.hopper import run_script

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

SCRIPT = """
import json
import triton.language as tl
from compile_and_serve.custom_ops.quantized.triton_group_matmul import _dequantize_kernel, _group_matmul_kernel, group_matmul_config
from tests.support.hopper import compiled

# The usual format, of few tokens and with the largest tiles, and a table of values.
SOME = (("zeros", 16, False), ("zeros", 64, True), ("nf4", 16, False))

found = {}
for name, dot, pointer, offset in (
    ("zeros", tl.bfloat16, "*bf16", "*u8"), ("half", tl.float16, "*fp16", "*u8"), ("symmetric", tl.bfloat16, "*bf16", None),
    ("minima", tl.bfloat16, "*bf16", "*fp16"), ("e2m1", tl.bfloat16, "*bf16", None), ("e2m1 halves", tl.bfloat16, "*bf16", None),
    ("nf4", tl.bfloat16, "*bf16", None),
):
    table, halves = name.split()[0] if name[:4] in ("e2m1", "nf4") else "", name == "e2m1 halves"
    per_group = 1 if table == "e2m1" else 4
    special = {"w_ptr": "*i16", "scale_ptr": "*fp16", "offset_ptr": offset, "counter_ptr": "*i32", "partial_ptr": "*fp32"}
    type_of = lambda n: special.get(n, pointer if n.endswith("_ptr") else "i32")
    for tokens in (16,) if table else (16, 64):
        for silu_mul in (False, True):
            if not EVERY and (name, tokens, silu_mul) not in SOME:
                continue
            rows, inner = (14336, 4096) if silu_mul else (4096, 14336)
            block_o, splits, stages, warps = group_matmul_config(tokens, rows, inner // 128, silu_mul, 132)
            constants = {
                "BITS": 4, "POWER": 128.0 if dot == tl.bfloat16 else 1024.0, "PARTS_PER_GROUP": per_group, "HAS_MINIMA": name == "minima",
                "TABLE": table, "HALF_PARTS": halves,
                "HAS_BIAS": False, "HAS_RESIDUAL": not silu_mul, "SILU_MUL": silu_mul, "DOT": dot, "BLOCK_T": tokens,
                "BLOCK_O": block_o, "SPLITS": splits, "STAGES": stages, "TILE_O": 64, "WORDS": 32, "PREFETCH_BLOCKS": 8, "PDL": True,
                "bias_ptr": None,
            } | ({"residual_ptr": None} if silu_mul else {}) | ({} if splits > 1 else {"partial_ptr": None, "counter_ptr": None})
            constants |= {} if offset else {"offset_ptr": None}
            kernel = compiled(_group_matmul_kernel, constants, type_of, warps)
            found[f"{name} {tokens} {silu_mul}"] = kernel.metadata.shared
    constants = {
        "BITS": 4, "PARTS_PER_GROUP": per_group, "TILE_O": 64, "WORDS": 32, "PDL": True, "TABLE": table, "HALF_PARTS": halves,
    } | ({} if offset else {"offset_ptr": None})
    if not EVERY and name not in [one[0] for one in SOME]:
        continue
    found[f"dequantize {name}"] = compiled(_dequantize_kernel, constants, type_of, 4).metadata.shared
print(json.dumps(found))
"""


@pytest.mark.parametrize(("every", "count"), [(False, 5), pytest.param(True, 29, marks=pytest.mark.exhaustive)])
def test_kernels_compile_and_several_programs_fit(every: bool, count: int, tmp_path: Path) -> None:
    """Two formats, or every one in every shape."""
    shared = run_script(f"EVERY = {every}\n{SCRIPT}", tmp_path)
    assert len(shared) == count
    for name, num_bytes in shared.items():
        assert num_bytes <= (48 << 10 if name.endswith("16 False") else 114 << 10), name
