"""The kernels of recurrent ops compile for a Hopper GPU (none is needed), for the heads of Qwen3.5, Kimi-Linear and Nemotron-H,
and for the channels of Falcon-Mamba."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.hopper import LARGEST_SHARED, run_script

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

SCRIPT = """
import json
from compile_and_serve.custom_ops.recurrent.triton_linear_attention import _linear_attention_kernel
from compile_and_serve.custom_ops.recurrent.triton_selective_scan import _chunk_kernel, _scan_kernel
from compile_and_serve.custom_ops.recurrent.triton_short_convolution import _ring_kernel, _sums_kernel
from tests.support.hopper import compiled

INT32 = {"start_loc_ptr", "seq_lens_ptr", "read_ptr", "write_ptr"}
FLOATS = {"decay_ptr", "beta_ptr", "checkpoint_ptr", "values_ptr", "decays_ptr"}
FLOATS |= {"a_ptr", "local_ptr", "total_ptr", "states_ptr", "positions_ptr"}

def type_of(name):
    if not name.endswith("_ptr"):
        return "i32"
    return "*i32" if name in INT32 or name.endswith("columns_ptr") else "*fp32" if name in FLOATS else "*bf16"

found = {}
UNITS = {"CHECKPOINT_UNITS": 4, "KEY_UNITS": 8, "VALUE_UNITS": 8, "DECAY_UNITS": 32}
for name, sizes in {
    "delta": {"NUM_HEADS": 32, "GROUP": 2, "K": 128, "V": 128, "PER_CHANNEL": False, "HAS_BETA": True},
    "kda": {"NUM_HEADS": 32, "GROUP": 1, "K": 128, "V": 128, "PER_CHANNEL": True, "HAS_BETA": True},
    "ssd": {"NUM_HEADS": 128, "GROUP": 16, "K": 128, "V": 80, "PER_CHANNEL": False, "HAS_BETA": False},
}.items():
    for part, has_states in ((2, True), (0, False), (1, False), (2, False), (3, True))[: 5 if EVERY else 3 if name == "delta" else 1]:
        constants = UNITS | sizes | {"RING": 48, "BLOCK_K": 128, "BLOCK_C": 32, "PART": part}
        constants |= {} if has_states else {"states_ptr": None}
        constants |= {} if sizes["HAS_BETA"] else {"beta_ptr": None}
        constants |= {"out_ptr": None} if part == 3 else {}
        kernel = compiled(_linear_attention_kernel, constants, type_of, 4)
        found[f"{name} {part} {has_states}"] = {"shared": kernel.metadata.shared, "spills": ".local" in kernel.asm["ptx"]}
sizes = {"D": 8192, "RING": 18, "UNITS": 8, "CHANNELS": 128, "BLOCK_C": 256}
for tokens, strides in ((1, {"STRIDE_C": 4, "STRIDE_W": 1}), (16, {"STRIDE_C": 1, "STRIDE_W": 8192})):
    kernel = compiled(_sums_kernel, sizes | strides | {"W": 4, "HAS_BIAS": True, "TOKENS": tokens}, type_of, 4)
    found[f"sums {tokens}"] = {"shared": kernel.metadata.shared, "spills": ".local" in kernel.asm["ptx"]}
kernel = compiled(_ring_kernel, sizes | {"BLOCK_R": 32}, type_of, 4)
found["ring"] = {"shared": kernel.metadata.shared, "spills": ".local" in kernel.asm["ptx"]}
scan = {"CHANNELS": 8192, "C": 128, "N": 16, "RING": 32, "BLOCK_N": 16, "CHUNK": 64}
units = {"STATE_UNITS": 4, "INPUT_UNITS": 4, "KEY_UNITS": 32, "POSITION_UNITS": 64}
for part in range(3):
    kernel = compiled(_scan_kernel, scan | units | {"PART": part}, type_of, 4)
    found[f"scan {part}"] = {"shared": kernel.metadata.shared, "spills": ".local" in kernel.asm["ptx"]}
for gives_output in (False, True):
    kernel = compiled(_chunk_kernel, scan | {"GIVES_OUTPUT": gives_output}, type_of, 4)
    found[f"chunks {gives_output}"] = {"shared": kernel.metadata.shared, "spills": ".local" in kernel.asm["ptx"]}
print(json.dumps(found))
"""


@pytest.mark.parametrize(("every", "count"), [(False, 13), pytest.param(True, 23, marks=pytest.mark.exhaustive)])
def test_kernels_compile_and_fit(every: bool, count: int, tmp_path: Path) -> None:
    """Three parts of one kind of linear attention and one of the others, or all."""
    found = run_script(f"EVERY = {every}\n{SCRIPT}", tmp_path)
    assert len(found) == count
    for name, facts in found.items():
        assert facts["shared"] <= LARGEST_SHARED, name
        assert not facts["spills"], name
