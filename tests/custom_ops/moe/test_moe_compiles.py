"""The kernels of routing and experts, compiled for a Hopper GPU (none is needed), with some tiles or with all that the tuner may choose."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.hopper import run_script

pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # 150 kernels with every tile

SCRIPT = """
import json
import re
import triton.language as tl
from compile_and_serve.custom_ops.moe import triton_experts as e
from compile_and_serve.custom_ops.moe import triton_expand_experts as x
from compile_and_serve.custom_ops.moe import triton_gemv_experts as v
from compile_and_serve.custom_ops.moe import triton_coded_experts as m
from compile_and_serve.custom_ops.moe import triton_coded_gemv as g
from compile_and_serve.custom_ops.moe import triton_placement as p
from compile_and_serve.custom_ops.moe.triton_order import _count_kernel, _order_kernel, _place_kernel
from compile_and_serve.custom_ops.moe.triton_route import _route_kernel
from tests.support.hopper import compiled

types = {}  # of codes' scales, offsets and factors
NO_CODES = {"offset_ptr": None, "factor_ptr": None, "MINIMA": False, "PER_FACTOR": 1, "FACTORS": 0}
MXFP4 = NO_CODES | {"BITS": 4, "GROUP_SIZE": 32, "TABLE": "mxfp4", "WHOLE": True, "ROW_WORDS": 32, "POWER": 0.0}

def codes(bits, group_size, offset, factors, table="", scale="*fp16"):
    # The constants of a format, with the types of its scales, offsets (or None) and factors in `types`.
    types.update(scale_ptr=scale, offset_ptr=offset, factor_ptr="*fp16")
    constants = {"BITS": bits, "GROUP_SIZE": group_size, "TABLE": table, "WHOLE": True, "FACTORS": factors, "PER_FACTOR": 8,
                 "MINIMA": factors == 2 or offset == "*fp16", "ROW_WORDS": 32 if bits == 8 else 32 + 8 * (bits - 4),
                 "POWER": 128.0 if bits == 4 else 0.0}
    return constants | ({} if offset else {"offset_ptr": None}) | ({} if factors else {"factor_ptr": None})

INT32 = {"placement_ptr", "slots_ptr", "ids_ptr", "counts_ptr", "order_ptr", "block_experts_ptr"}
FLOATS = {"weights_ptr", "limit", "eps", "scale", "smallest_sum"}
NOTHING = {"scale_ptr": None, "SCALES": 0, "bias_ptr": None, "HAS_BIAS": False, "HAS_RESIDUAL": True, "HAS_NORM": True,
           "x_scale_ptr": None, "h_scale_ptr": None, "HAS_X_SCALE": False, "ONE_SCALE": False}

def facts(kernel, constants, num_warps):
    is_8bit = bool(constants.get("SCALES"))
    has_h_out = "gate_up" in kernel.__name__
    is_coded = "coded" in kernel.__name__
    is_mxfp4 = constants.get("TABLE") == "mxfp4"
    def type_of(name):
        if is_8bit and name in ("w_ptr", "scale_ptr"):
            return "*fp8e4nv" if name == "w_ptr" else "*fp32"
        if constants.get("HAS_X_SCALE") and name in ("x_ptr", "x_scale_ptr", "h_scale_ptr") + (() if has_h_out else ("h_ptr",)):
            return "*fp32" if name.endswith("scale_ptr") else "*fp8e4nv"
        if is_coded and name in ("w_ptr", "experts_ptr"):
            return "*i16" if name == "w_ptr" and "gemv" not in kernel.__name__ else "*i32"
        if is_coded and name in ("scale_ptr", "offset_ptr", "factor_ptr"):
            return "*i32" if is_mxfp4 else types[name]
        if not name.endswith("_ptr"):
            return "fp32" if name in FLOATS else "i32"
        return "*i32" if name in INT32 else "*fp32" if name in FLOATS else "*bf16"
    made = compiled(kernel, constants | {"PDL": True}, type_of, num_warps)
    named = dict(re.findall(r"(#\\w+) = #ttg.blocked<[{](.*?)[}]>", made.asm["ttgir"]))
    used = set(re.findall(r"mma.sync.*-> tensor<.*?, (#\\w+)>", made.asm["ttgir"]))
    return {"ptx": made.asm["ptx"], "shared": made.metadata.shared, "layouts": [named[one] for one in used]}

# Down takes hardly more shared memory than gate and up with the same tiles, so it is compiled with these.
SOME = (e._MANY[-1], m._DIRECT[0], m._MANY[-1], e._FLOAT8_MANY[-1])
SOME += (e._FEW[0], m._FEW[0], e._FLOAT8_FEW[0]) if EVERY else ()

def chosen(tiles):
    return [one for one in {*tiles} if EVERY or one in SOME]

found = {}
found["route"] = facts(_route_kernel, NOTHING | dict(NUM_EXPERTS=128, BLOCK_X=128, TOP_K=8, BLOCK_K=8, SIGMOID=False, RENORMALIZE=True,
                                                     NUM_GROUPS=1, BLOCK_GROUPS=1, TOP_GROUPS=1, GROUP_BEST=2), 1)
found["count"] = facts(_count_kernel, dict(BINS=256, TILE=1024), 4)
found["order"] = facts(_order_kernel, dict(NUM_EXPERTS=128, BINS=256, BLOCK_SIZE=128, TILE=4096, HAS_COUNTS=True, COUNT_ROWS=16), 8)
found["place"] = facts(_place_kernel, dict(NUM_EXPERTS=128, BINS=256, BLOCK_SIZE=128, TILE=1024, COUNT_ROWS=16), 4)
found["gemv gate_up"] = facts(v._gemv_gate_up_kernel, NOTHING | dict(CLAMPED=False, BLOCK_F=4, BLOCK_D=1024, LANES=8), 4)
found["gemv down"] = facts(v._gemv_down_kernel, NOTHING | dict(BLOCK_K=8, BLOCK_O=4, BLOCK_F=256), 4)
for tiles in chosen(e._FEW + e._SOME + e._MORE + e._MANY):
    sizes = dict(BLOCK_P=tiles.block_p, STAGES=tiles.stages)
    found[f"gate_up {tiles.name}"] = facts(
        e._grouped_gate_up_kernel, NOTHING | sizes | dict(CLAMPED=False, BLOCK_F=tiles.block_f, BLOCK_D=tiles.depth, WHOLE_D=True),
        tiles.warps)
    if tiles in SOME:
        found[f"down {tiles.name}"] = facts(
            e._grouped_down_kernel, NOTHING | sizes | dict(BLOCK_O=tiles.block_o, BLOCK_F=tiles.depth, WHOLE_F=True), tiles.warps)
for direct, choices in ((True, m._DIRECT), (False, m._FEW + m._SOME + m._MORE + m._MANY)):
    for tiles in chosen(choices):
        sizes = dict(DIRECT=direct, BLOCK_P=tiles.block_p, STAGES=tiles.stages, ROWS_FIRST=tiles.rows_first, DOT=tl.bfloat16,
                     PTX=True, HAS_BIAS=True) | MXFP4 | ({"order_ptr": None} if direct else {})
        name = f"{'direct' if direct else 'mxfp4'} {tiles.name}"
        found[f"gate_up {name}"] = facts(
            m._coded_gate_up_kernel, sizes | dict(CLAMPED=True, BLOCK_F=tiles.block_f), tiles.warps)
        if tiles in SOME:
            found[f"down {name}"] = facts(m._coded_down_kernel, sizes | dict(BLOCK_O=tiles.block_o), tiles.warps)
for scales in (1, 2) if EVERY else (2,):
    quantized = {name: value for name, value in NOTHING.items() if name != "scale_ptr"} | dict(SCALES=scales)
    found[f"8-bit gemv gate_up {scales}"] = facts(
        v._gemv_gate_up_kernel, quantized | dict(CLAMPED=False, BLOCK_F=4, BLOCK_D=2048, LANES=16), 4)
    found[f"8-bit gemv down {scales}"] = facts(v._gemv_down_kernel, quantized | dict(BLOCK_K=8, BLOCK_O=4, BLOCK_F=256), 4)
    for tiles in (e._FEW[0], e._MORE[0])[: 1 + EVERY]:
        sizes = dict(BLOCK_P=tiles.block_p, STAGES=tiles.stages)
        found[f"8-bit gate_up {scales} {tiles.block_p}"] = facts(
            e._grouped_gate_up_kernel, quantized | sizes | dict(CLAMPED=False, BLOCK_F=tiles.block_f, BLOCK_D=tiles.depth, WHOLE_D=True),
            tiles.warps)
        found[f"8-bit down {scales} {tiles.block_p}"] = facts(
            e._grouped_down_kernel, quantized | sizes | dict(BLOCK_O=tiles.block_o, BLOCK_F=tiles.depth, WHOLE_F=True), tiles.warps)
    found[f"expand {scales}"] = facts(x._dequantize_experts_kernel, dict(SCALES=scales, BLOCK_O=32, BLOCK_I=128), 4)
    rounded = {n: c for n, c in quantized.items() if n not in ("x_scale_ptr", "h_scale_ptr")} | dict(HAS_X_SCALE=True, HAS_NORM=False)
    if EVERY:
        found[f"float8 gemv gate_up {scales}"] = facts(
            v._gemv_gate_up_kernel, rounded | dict(norm_ptr=None, CLAMPED=False, BLOCK_F=4, BLOCK_D=2048, LANES=16), 4)
        found[f"float8 gemv down {scales}"] = facts(v._gemv_down_kernel, rounded | dict(BLOCK_K=8, BLOCK_O=4, BLOCK_F=256), 4)
    for tiles in chosen(e._FLOAT8_FEW + e._FLOAT8_SOME + e._FLOAT8_MORE + e._FLOAT8_MANY):
        if scales == 2 and tiles.depth > 128 or scales == 1 and tiles.depth <= 128 and tiles not in SOME:  # each tile once
            continue
        sizes = dict(BLOCK_P=tiles.block_p, STAGES=tiles.stages, ONE_SCALE=e.is_in_one_block(tiles.block_o))
        found[f"float8 gate_up {scales} {tiles.name}"] = facts(
            e._grouped_gate_up_kernel, rounded | sizes | dict(CLAMPED=False, BLOCK_F=tiles.block_f, BLOCK_D=tiles.depth, WHOLE_D=True),
            tiles.warps)
        if tiles in SOME:
            found[f"float8 down {scales} {tiles.name}"] = facts(
                e._grouped_down_kernel, rounded | sizes | dict(BLOCK_O=tiles.block_o, BLOCK_F=tiles.depth, WHOLE_F=True), tiles.warps)
for tiles in g.GEMV_TILES if EVERY else g.GEMV_TILES[:1]:
    sizes = dict(HAS_BIAS=True, NUM_BLOCKS=23, PTX=True) | MXFP4
    found[f"pairs gate_up {tiles.gate_up}"] = facts(
        g._coded_gemv_gate_up_kernel, sizes | dict(CLAMPED=True, BLOCKS=tiles.gate_up), tiles.gate_up)
    for spread in (False, True)[: 1 + EVERY]:
        found[f"pairs down{' spread' * spread} {tiles.down}"] = facts(
            g._coded_gemv_down_kernel, sizes | dict(HAS_RESIDUAL=True, SPREAD=spread, TOP_K=4, BLOCKS=tiles.down), tiles.down)
found["dequantize"] = facts(m._dequantize_coded_kernel, MXFP4 | dict(BLOCK_O=64, DOT=tl.bfloat16, PTX=True), 4)
FORMS = {"awq": (4, 128, "*u8", 0), "q4_k": (4, 32, "*u8", 2, "", "*u8"), "q6_k": (6, 16, None, 1, "", "*i8"),
         "q8_0": (8, 32, None, 0), "nf4": (4, 64, None, 0, "nf4"), "nvfp4": (4, 16, None, 1, "e2m1", "*fp8e4nv")}
for form, facts_of_form in FORMS.items():
    made = codes(*facts_of_form)
    for direct, choices in ((True, m._DIRECT[:1]), (False, m._FEW[:1] + m._FEW[-1:] + m._MANY[-1:])):
        for tiles in choices if EVERY else choices[: form == "awq" and not direct]:
            sizes = dict(DIRECT=direct, BLOCK_P=tiles.block_p, STAGES=tiles.stages, ROWS_FIRST=tiles.rows_first, DOT=tl.bfloat16,
                         PTX=True, HAS_BIAS=False) | made | ({"order_ptr": None} if direct else {})
            name = f"{form} {'direct' if direct else 'codes'} {tiles.name}"
            found[f"gate_up {name}"] = facts(
                m._coded_gate_up_kernel, sizes | dict(CLAMPED=False, BLOCK_F=tiles.block_f), tiles.warps)
            found[f"down {name}"] = facts(m._coded_down_kernel, sizes | dict(BLOCK_O=tiles.block_o), tiles.warps)
    if EVERY or form == "awq":
        found[f"dequantize {form}"] = facts(m._dequantize_coded_kernel, made | dict(BLOCK_O=64, DOT=tl.bfloat16, PTX=True), 4)
    if form == "awq" or EVERY and form == "q4_k":
        for tiles in g.CODES_TILES if EVERY else g.CODES_TILES[:1]:
            sizes = dict(HAS_BIAS=False, HAS_RESIDUAL=True, SPREAD=False, TOP_K=8, PTX=True) | made
            found[f"codes {form} gate_up {tiles.gate_up}"] = facts(
                g._coded_gemv_gate_up_kernel, sizes | dict(CLAMPED=False, NUM_BLOCKS=16, BLOCKS=tiles.gate_up), tiles.gate_up)
            found[f"codes {form} down {tiles.down}"] = facts(
                g._coded_gemv_down_kernel, sizes | dict(NUM_BLOCKS=6, BLOCKS=tiles.down), tiles.down)
for spread in (False, True):
    found[f"add{' spread' * spread}"] = facts(e._add_pairs_kernel, dict(TOP_K=8, BLOCK_O=1024, HAS_RESIDUAL=True, SPREAD=spread), 4)
found["slots"] = facts(p._slots_kernel, dict(BLOCK_P=512), 4)
print(json.dumps(found))
"""

MAX_SHARED_BYTES = 227 * 1024
MORE_SHARED_BYTES = 8 * 1024  # that down takes at most beside gate and up with the same tiles


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["some tiles", "every tile"])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_script(f"EVERY = {request.param}\n{SCRIPT}", tmp_path_factory.mktemp("triton"))


def test_tiles_fit_a_multiprocessor(kernels: dict[str, Any]) -> None:
    shared = {name: kernel["shared"] for name, kernel in kernels.items()}
    assert {name: size for name, size in shared.items() if size > MAX_SHARED_BYTES - ("gate_up" in name) * MORE_SHARED_BYTES} == {}
    down = [name for name in kernels if name.startswith(("down ", "float8 down "))]
    assert down
    more = {name: shared[name] - shared[name.replace("down", "gate_up", 1)] for name in down}
    assert {name: size for name, size in more.items() if size > MORE_SHARED_BYTES} == {}


def test_kernels_wait_for_the_one_before(kernels: dict[str, Any]) -> None:
    """Without this instruction a kernel reads what is still being written, which a run may not show."""
    assert [name for name, kernel in kernels.items() if "griddepcontrol.wait" not in kernel["ptx"]] == []


def test_float8_activations_are_multiplied_by_float8_tensor_cores(kernels: dict[str, Any]) -> None:
    """Tiles of 64 rows and more by Hopper's instruction, which has one product of at most 128 inputs before a sum in float32."""
    ours = {name: kernel["ptx"] for name, kernel in kernels.items() if name.startswith("float8 ") and "grouped" in name}
    large = {name: ptx for name, ptx in ours.items() if int(name.split("grouped ")[1].split("x")[0]) >= 64}
    assert large
    for name, ptx in large.items():
        assert "wgmma.mma_async" in ptx, name
        assert ".f32.e4m3.e4m3" in ptx, name
        assert ".f32.bf16" not in ptx, name


def test_mxfp4_is_decoded_two_codes_at_a_time(kernels: dict[str, Any]) -> None:
    ours = [name for name in kernels if " mxfp4 " in name or name.split()[1:2] == ["direct"]]
    assert ours
    for name in (*ours, "dequantize"):
        assert "mul.rn.bf16x2" in kernels[name]["ptx"], name
        assert name == "dequantize" or "cp.async" in kernels[name]["ptx"], name


def test_products_of_few_pairs_have_the_layout_that_their_instructions_rely_on(kernels: dict[str, Any]) -> None:
    ours = {name: kernel["layouts"] for name, kernel in kernels.items() if name.startswith(("pairs ", "codes "))}
    assert len(ours) > 3
    for name, layouts in ours.items():
        warps = name.split()[-1]
        assert layouts == [f"sizePerThread = [1, 4], threadsPerWarp = [8, 4], warpsPerCTA = [{warps}, 1], order = [1, 0]"], name


def test_codes_are_decoded_two_at_a_time(kernels: dict[str, Any]) -> None:
    ours = [name for name in kernels if name.startswith(("gate_up awq", "codes awq", "codes q4_k"))]
    assert len(ours) > 2
    for name in ours:
        assert "sub.rn.bf16x2" in kernels[name]["ptx"], name
