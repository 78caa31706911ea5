"""The all-reduces over symmetric memory compile for a Hopper GPU (none is needed), with the memory accesses that they rely on."""

from __future__ import annotations

import itertools

import pytest

from tests.support.hopper import run_script

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

SCRIPT = """
import json
from compile_and_serve.custom_ops.collectives.triton_allreduce import _one_shot_kernel, _pushed_kernel, _two_shot_kernel
from compile_and_serve.custom_ops.collectives.triton_allreduce_stores import _two_shot_stores_kernel
from tests.support.hopper import compiled

TYPES = {"addresses_ptr": "*i64", "launches_ptr": "*i32", "turns_ptr": "*i32", "steps_ptr": "*i32", "eps": "fp32",
         "quantized_ptr": "*fp8e4nv", "scale_ptr": "*fp32"}
CONSTANTS = {"RANK": 1, "SIZE": 2, "PADDED_SIZE": 2, "NUM_PROGRAMS": 128, "PUSHED_ROWS": 4, "BLOCK": 4096, "ROW_BLOCK": 4096,
             "ROW_VALUES": 4096, "EMPTY_BITS": -32768, "ROUNDS": 2, "MAX_CHUNKS": 8, "PDL": True}
QUANTIZATION = {False: {"QUANTIZE": False, "LARGEST_VALUE": None, "quantized_ptr": None, "scale_ptr": None},
            True: {"QUANTIZE": True, "LARGEST_VALUE": 448.0}}
found = {}
for kernel in (_pushed_kernel, _one_shot_kernel, _two_shot_kernel, _two_shot_stores_kernel):
    type_of = lambda n: TYPES.get(n, "*bf16" if n.endswith("_ptr") else "i32")
    for quantize, quantization in QUANTIZATION.items():
        made = compiled(kernel, CONSTANTS | quantization, type_of, num_warps=8)
        found[kernel.fn.__name__ + " quantize" * quantize] = made.asm["ptx"]
print(json.dumps(found))
"""


# The number of signals of each kernel to the other ranks, and of waits for them.
TOLD = {"_pushed_kernel": 0, "_one_shot_kernel": 1, "_two_shot_kernel": 2, "_two_shot_stores_kernel": 2}
WAITED = TOLD | {"_two_shot_stores_kernel": 1}  # its second signal is for later launches
READS = dict.fromkeys(TOLD, "ld.volatile.global") | {"_two_shot_stores_kernel": "ld.global.cg"}
NAMES = [name + quantize for name in TOLD for quantize in ("", " quantize")]


@pytest.fixture(scope="module")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_script(SCRIPT, tmp_path_factory.mktemp("triton"))


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_others_are_read_past_the_cache_16_bytes_at_a_time(ptx: dict[str, str], name: str) -> None:
    load = READS[name.removesuffix(" quantize")]
    reads = [line for line in ptx[name].splitlines() if load in line]
    assert reads
    assert all(f"{load}.v4.b32" in line for line in reads)
    assert "griddepcontrol.launch_dependents" in ptx[name]
    assert "griddepcontrol.wait" in ptx[name]


@pytest.mark.parametrize("name", NAMES)
def test_flags_are_set_and_read_in_order_with_the_rows_on_the_whole_system(ptx: dict[str, str], name: str) -> None:
    kernel = name.removesuffix(" quantize")
    told = [line for line in ptx[name].splitlines() if "exch" in line]
    waited = [line for line in ptx[name].splitlines() if ".acquire" in line]
    assert len(told) == TOLD[kernel]  # all others in one instruction
    assert len(waited) == WAITED[kernel]
    assert all(".sys" in line and ".release" in line for line in told)
    assert all(".sys" in line for line in waited)


@pytest.mark.parametrize("quantize", ["", " quantize"])
def test_rows_sent_by_stores_are_loaded_together_before_the_first_is_stored(ptx: dict[str, str], quantize: str) -> None:
    """Parts, sums and norms, each all loads and then all stores: a store that came between would hold the loads behind it back."""
    text = ptx[f"_two_shot_stores_kernel{quantize}"]
    assert "volatile.global" not in text
    wide = [line for line in text.splitlines() if ".v4.b32" in line and (" ld.global" in line or " st.global" in line)]
    kinds = [kind for kind, _ in itertools.groupby("store" if " st.global" in line else "load" for line in wide)]
    assert kinds == ["load", "store"] * 3
    assert not [line for line in text.splitlines() if "cp.async" in line]


@pytest.mark.parametrize("name", TOLD)
def test_rows_are_quantized_to_float8_if_asked(ptx: dict[str, str], name: str) -> None:
    """By the conversion instruction for two values, after an exact division."""
    assert "cvt.rn.satfinite.e4m3x2.f32" in ptx[f"{name} quantize"]
    assert "div.rn.f32" in ptx[f"{name} quantize"]
    assert "e4m3" not in ptx[name]
