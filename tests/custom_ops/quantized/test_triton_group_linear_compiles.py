"""The kernels of group-quantized linears compile for a Hopper GPU (none is needed) to the instructions that they rely on."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.hopper import run_script

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

SCRIPT = """
import json
import triton.language as tl
from compile_and_serve.custom_ops.quantized.triton_group_matmul import _dequantize_kernel, _group_matmul_kernel, group_matmul_config
from tests.support.hopper import compiled

found = {}
for name, dot, pointer, offset in (
    ("zeros", tl.bfloat16, "*bf16", "*u8"), ("half", tl.float16, "*fp16", "*u8"), ("symmetric", tl.bfloat16, "*bf16", None),
    ("minima", tl.bfloat16, "*bf16", "*fp16"),
):
    special = {"w_ptr": "*i16", "scale_ptr": "*fp16", "offset_ptr": offset, "counter_ptr": "*i32", "partial_ptr": "*fp32"}
    type_of = lambda n: special.get(n, pointer if n.endswith("_ptr") else "i32")
    for tokens in (16, 64):
        for silu_mul in (False, True):
            rows, inner = (14336, 4096) if silu_mul else (4096, 14336)
            block_o, splits, stages, warps = group_matmul_config(tokens, rows, inner // 128, silu_mul, 132)
            constants = {
                "BITS": 4, "POWER": 128.0 if dot == tl.bfloat16 else 1024.0, "PARTS_PER_GROUP": 4, "HAS_MINIMA": name == "minima",
                "HAS_BIAS": False, "HAS_RESIDUAL": not silu_mul, "SILU_MUL": silu_mul, "DOT": dot, "BLOCK_T": tokens,
                "BLOCK_O": block_o, "SPLITS": splits, "STAGES": stages, "TILE_O": 64, "WORDS": 32, "PREFETCH_BLOCKS": 8, "PDL": True,
                "bias_ptr": None,
            } | ({"residual_ptr": None} if silu_mul else {}) | ({} if splits > 1 else {"partial_ptr": None, "counter_ptr": None})
            constants |= {} if offset else {"offset_ptr": None}
            kernel = compiled(_group_matmul_kernel, constants, type_of, warps)
            found[f"{name} {tokens} {silu_mul}"] = {"ptx": kernel.asm["ptx"], "shared": kernel.metadata.shared}
    constants = {"BITS": 4, "PARTS_PER_GROUP": 4, "TILE_O": 64, "WORDS": 32, "PDL": True} | ({} if offset else {"offset_ptr": None})
    found[f"dequantize {name}"] = {"ptx": compiled(_dequantize_kernel, constants, type_of, 4).asm["ptx"]}
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run_script(SCRIPT, tmp_path_factory.mktemp("triton"))


def lines(kernel: dict[str, Any], *words: str) -> list[str]:
    return [line for line in kernel["ptx"].splitlines() if all(word in line for word in words)]


@pytest.mark.parametrize("name", ["zeros", "half", "symmetric", "minima"])
@pytest.mark.parametrize("tokens", [16, 64])
@pytest.mark.parametrize("silu_mul", [False, True])
def test_codes_become_operands_in_registers(compiled, name: str, tokens: int, silu_mul: bool) -> None:
    kernel = compiled[f"{name} {tokens} {silu_mul}"]
    assert lines(kernel, "cp.async")
    assert kernel["shared"] <= (48 << 10 if tokens == 16 and not silu_mul else 114 << 10)  # several programs fit
    conversions = 32 * (2 if silu_mul else 1)
    assert len(lines(kernel, "lop3.b32", "0x000F000F")) == conversions
    assert len(lines(kernel, "sub.rn.f16x2" if name == "half" else "sub.rn.bf16x2")) == conversions
    multiplications = lines(kernel, "wgmma.mma_async")
    assert len(multiplications) == 8 * ((2 if silu_mul else 1) + (name == "minima"))
    assert lines(kernel, "cp.async.bulk.prefetch.L2")
    assert lines(kernel, "prefetch.global.L1")
    # No conversion of layouts through shared memory inside the loop: as many codes are read as a tile has.
    assert lines(kernel, "ldmatrix")


def test_dequantization_reads_16_bytes_at_a_time(compiled) -> None:
    for name in ("zeros", "half", "symmetric", "minima"):
        assert lines(compiled[f"dequantize {name}"], "ld.global", "v4.b32")
        assert lines(compiled[f"dequantize {name}"], "st.global", "v4.b32")
