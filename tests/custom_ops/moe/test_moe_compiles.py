"""The kernels of routing and experts, compiled for a Hopper GPU (none is needed), with every tile that the tuner may choose."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.hopper import run_script

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

SCRIPT = """
import json
from compile_and_serve.custom_ops.moe import triton_experts as e
from compile_and_serve.custom_ops.moe.triton_order import _count_kernel, _order_kernel, _place_kernel
from compile_and_serve.custom_ops.moe.triton_route import _route_kernel
from tests.support.hopper import compiled

INT32 = {"ids_ptr", "counts_ptr", "order_ptr", "block_experts_ptr"}
FLOATS = {"weights_ptr", "limit", "eps", "scale", "smallest_sum"}
NOTHING = {"bias_ptr": None, "HAS_BIAS": False, "HAS_RESIDUAL": True, "HAS_NORM": True}

def facts(kernel, constants, num_warps):
    def type_of(name):
        if not name.endswith("_ptr"):
            return "fp32" if name in FLOATS else "i32"
        return "*i32" if name in INT32 else "*fp32" if name in FLOATS else "*bf16"
    made = compiled(kernel, constants | {"PDL": True}, type_of, num_warps)
    return {"ptx": made.asm["ptx"], "shared": made.metadata.shared}

found = {}
found["route"] = facts(_route_kernel, NOTHING | dict(NUM_EXPERTS=128, BLOCK_X=128, TOP_K=8, BLOCK_K=8, SIGMOID=False, RENORMALIZE=True,
                                                     NUM_GROUPS=1, TOP_GROUPS=1), 1)
found["count"] = facts(_count_kernel, dict(BINS=256, TILE=1024), 4)
found["order"] = facts(_order_kernel, dict(NUM_EXPERTS=128, BINS=256, BLOCK_SIZE=128, TILE=4096, HAS_COUNTS=True, COUNT_ROWS=16), 8)
found["place"] = facts(_place_kernel, dict(NUM_EXPERTS=128, BINS=256, BLOCK_SIZE=128, TILE=1024, COUNT_ROWS=16), 4)
found["gemv gate_up"] = facts(e._gemv_gate_up_kernel, NOTHING | dict(CLAMPED=False, BLOCK_F=4, BLOCK_D=1024, LANES=8), 4)
found["gemv down"] = facts(e._gemv_down_kernel, NOTHING | dict(BLOCK_K=8, BLOCK_O=4, BLOCK_F=256), 4)
for tiles in {*e._FEW, *e._SOME, *e._MORE, *e._MANY}:
    sizes = dict(BLOCK_P=tiles.block_p, STAGES=tiles.stages)
    found[f"gate_up {tiles.name}"] = facts(
        e._grouped_gate_up_kernel, NOTHING | sizes | dict(CLAMPED=False, BLOCK_F=tiles.block_f, BLOCK_D=tiles.depth, WHOLE_D=True),
        tiles.warps)
    found[f"down {tiles.name}"] = facts(
        e._grouped_down_kernel, NOTHING | sizes | dict(BLOCK_O=tiles.block_o, BLOCK_F=tiles.depth, WHOLE_F=True), tiles.warps)
found["add"] = facts(e._add_pairs_kernel, dict(TOP_K=8, BLOCK_O=1024, HAS_RESIDUAL=True), 4)
print(json.dumps(found))
"""

MAX_SHARED_BYTES = 227 * 1024


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_script(SCRIPT, tmp_path_factory.mktemp("triton"))


def test_every_tile_fits_a_multiprocessor(kernels: dict[str, Any]) -> None:
    assert {name: kernel["shared"] for name, kernel in kernels.items() if kernel["shared"] > MAX_SHARED_BYTES} == {}


def test_kernels_wait_for_the_one_before(kernels: dict[str, Any]) -> None:
    assert [name for name, kernel in kernels.items() if "griddepcontrol.wait" not in kernel["ptx"]] == []


def test_products_of_many_pairs_are_of_warp_groups(kernels: dict[str, Any]) -> None:
    grouped = [name for name in kernels if "grouped" in name]
    assert grouped
    for name in grouped:
        pairs = int(name.split("grouped ")[1].split("x")[0])
        assert ("wgmma.mma_async" if pairs >= 64 else "mma.sync") in kernels[name]["ptx"], name
        assert "cp.async" in kernels[name]["ptx"], name


def test_few_pairs_read_16_bytes_at_a_time(kernels: dict[str, Any]) -> None:
    for name in ("gemv gate_up", "gemv down"):
        assert re.search(r"ld\.global\.\S*evict_first\S*\.v4\.b32", kernels[name]["ptx"]), name
