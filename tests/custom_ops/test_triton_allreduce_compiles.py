"""The all-reduces over peer memory compile for a Hopper GPU (none is needed), with the memory accesses that they rely on."""

from __future__ import annotations

import pytest

from tests.support.hopper import run_script

pytest.importorskip("triton")

SCRIPT = """
import json
import custom_ops.triton_allreduce as kernels
from tests.support.hopper import compiled

TYPES = {"addresses_ptr": "*i64", "launches_ptr": "*i32", "turns_ptr": "*i32", "eps": "fp32",
         "quantized_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}
CONSTANTS = {"RANK": 1, "SIZE": 2, "PADDED_SIZE": 2, "NUM_PROGRAMS": 128, "PUSHED_ROWS": 4, "BLOCK": 4096, "ROW_BLOCK": 4096,
             "ROW_VALUES": 4096, "NOTHING": -32768, "PDL": True}
ROUNDING = {False: {"QUANTIZE": False, "LARGEST_VALUE": None, "quantized_ptr": None, "scale_ptr": None},
            True: {"QUANTIZE": True, "LARGEST_VALUE": 448.0}}
found = {}
for name in ("_pushed_kernel", "_one_shot_kernel", "_two_shot_kernel"):
    type_of = lambda n: TYPES.get(n, "*bf16" if n.endswith("_ptr") else "i32")
    for quantize, rounding in ROUNDING.items():
        kernel = compiled(getattr(kernels, name), CONSTANTS | rounding, type_of, num_warps=8)
        found[name + " quantize" * quantize] = kernel.asm["ptx"]
print(json.dumps(found))
"""


ROUNDS = {"_pushed_kernel": 0, "_one_shot_kernel": 1, "_two_shot_kernel": 2}
NAMES = [name + quantize for name in ROUNDS for quantize in ("", " quantize")]


@pytest.fixture(scope="module")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_script(SCRIPT, tmp_path_factory.mktemp("triton"))


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_others_are_read_past_the_cache_16_bytes_at_a_time(ptx: dict[str, str], name: str) -> None:
    reads = [line for line in ptx[name].splitlines() if "ld.volatile.global" in line]
    assert reads
    assert all("ld.volatile.global.v4.b32" in line for line in reads)
    assert "griddepcontrol.launch_dependents" in ptx[name]
    assert "griddepcontrol.wait" in ptx[name]


@pytest.mark.parametrize("name", NAMES)
def test_flags_are_set_and_read_in_order_with_the_rows_on_the_whole_system(ptx: dict[str, str], name: str) -> None:
    rounds = ROUNDS[name.removesuffix(" quantize")]
    told = [line for line in ptx[name].splitlines() if "exch" in line]
    waited = [line for line in ptx[name].splitlines() if ".acquire" in line]
    assert len(told) == rounds  # all others in one instruction
    assert len(waited) == rounds
    assert all(".sys" in line and ".release" in line for line in told)
    assert all(".sys" in line for line in waited)


@pytest.mark.parametrize("name", ROUNDS)
def test_rows_are_rounded_to_float8_where_that_is_wanted(ptx: dict[str, str], name: str) -> None:
    """By the device's own conversion, two values at a time, after an exact division."""
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx[f"{name} quantize"]
    assert "div.rn.f32" in ptx[f"{name} quantize"]
    assert "e4m3" not in ptx[name]
