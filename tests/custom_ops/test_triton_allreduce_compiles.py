"""The all-reduces over peer memory compile for a Hopper GPU (none is needed), with the memory accesses that they rely on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

# In a process of its own: where other tests run kernels in Triton's interpreter, there is nothing to compile.
SCRIPT = """
import json
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import custom_ops.triton_allreduce as kernels

TYPES = {"addresses_ptr": "*i64", "launches_ptr": "*i32", "turns_ptr": "*i32", "eps": "fp32"}
CONSTANTS = {"RANK": 1, "SIZE": 2, "PADDED_SIZE": 2, "NUM_PROGRAMS": 128, "PUSHED_ROWS": 4, "BLOCK": 4096, "ROW_BLOCK": 4096,
             "ROW_VALUES": 4096, "NOTHING": -32768, "PDL": True}
found = {}
for name in ("_pushed_kernel", "_one_shot_kernel", "_two_shot_kernel"):
    kernel = getattr(kernels, name)
    names = kernel.arg_names
    constants = {(i,): CONSTANTS[n] for i, n in enumerate(names) if n in CONSTANTS}
    types = {n: "constexpr" if n in CONSTANTS else TYPES.get(n, "*bf16" if n.endswith("_ptr") else "i32") for n in names}
    by_16 = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if types[n] not in ("constexpr", "fp32") and n != "num_rows"}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=by_16)
    made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8, "launch_pdl": True})
    found[name] = made.asm["ptx"]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def ptx(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = Path(__file__).parents[2]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(root), "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ["_pushed_kernel", "_one_shot_kernel", "_two_shot_kernel"])
def test_rows_of_others_are_read_past_the_cache_16_bytes_at_a_time(ptx: dict[str, str], name: str) -> None:
    reads = [line for line in ptx[name].splitlines() if "ld.volatile.global" in line]
    assert reads
    assert all("ld.volatile.global.v4.b32" in line for line in reads)
    assert "griddepcontrol.launch_dependents" in ptx[name]
    assert "griddepcontrol.wait" in ptx[name]


@pytest.mark.parametrize(("name", "rounds"), [("_pushed_kernel", 0), ("_one_shot_kernel", 1), ("_two_shot_kernel", 2)])
def test_flags_are_set_and_read_in_order_with_the_rows_on_the_whole_system(
    ptx: dict[str, str], name: str, rounds: int
) -> None:
    told = [line for line in ptx[name].splitlines() if "exch" in line]
    waited = [line for line in ptx[name].splitlines() if ".acquire" in line]
    assert len(told) == rounds  # all others in one instruction
    assert len(waited) == rounds
    assert all(".sys" in line and ".release" in line for line in told)
    assert all(".sys" in line for line in waited)
